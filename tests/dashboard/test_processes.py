"""`freewheel dashboard` and the page of a live run: real processes that end when they should and leave nothing."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.dashboard.terminal import LiveView, PlainView, panel
from freewheel.dashboard.web.child import page_for_run, serve_next_to_run
from freewheel.observe.snapshot import RunSnapshot
from freewheel.utils.http import listen

from .made_run import make_run

WAIT_S = 60.0


def get(url: str) -> tuple[int, str]:
    """Fetch a page with a cookie jar, as a browser does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
    try:
        with opener.open(url, timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def refuses(url: str) -> bool:
    port = int(url.partition("/?")[0].rpartition(":")[2])
    with contextlib.closing(socket.socket()) as asking:
        return asking.connect_ex(("127.0.0.1", port)) != 0


def page_of_process(parent: int) -> psutil.Process:
    """Return the child of a process that serves its page."""
    found: list[psutil.Process] = []

    def is_there() -> bool:  # a process that has just started has no command line yet
        children = psutil.Process(parent).children()
        found[:] = [child for child in children if "freewheel.dashboard.web.child" in child.cmdline()]
        return bool(found)

    wait_until(is_there)
    return found[0]


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    begun: list[subprocess.Popen[str]] = []

    def begin_one(*command: object) -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        begun.append(subprocess.Popen([sys.executable, *map(str, command)], **pipes))
        return begun[-1]

    yield begin_one
    for one in begun:
        if one.poll() is None:
            one.kill()
        one.communicate()


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_serves_until_ctrl_c(tmp_path, begin):
    make_run(tmp_path / "runs/one", steps=5)
    program = begin("-m", "freewheel", "dashboard", tmp_path / "runs")
    url = program.stdout.readline().split()[-1]
    assert url.startswith("http://127.0.0.1:") and "?token=" in url
    assert get(url)[0] == 200 and get(url.partition("?")[0])[0] == 403
    program.send_signal(signal.SIGINT)
    assert program.wait(WAIT_S) == 0
    assert program.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "words", "absent"),
    [
        (["{nowhere}"], "RUN = '{nowhere}': there is no such folder", "--"),
        (["{empty}"], "it contains no run: a run's folder has a config.yaml", "--"),
        (["{run}", "--port", "{taken}"], "--port", "--host"),
        (["{run}", "--host", "no.such.host.invalid"], "--host = 'no.such.host.invalid'", "--port"),
        (["{run}", "--host", "192.0.2.1"], "give an address of this machine", "--port"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(tmp_path, arguments, words, absent):
    make_run(tmp_path / "run", steps=1)
    (tmp_path / "empty").mkdir()
    with listen("127.0.0.1", 0) as taken:
        names = {name: str(tmp_path / name) for name in ("run", "empty", "nowhere")}
        names["taken"] = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["dashboard", *(one.format(**names) for one in arguments)])
    assert done.exit_code == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert words.format(**names) in done.stderr and absent not in done.stderr


def test_an_address_for_other_machines_gives_a_warning(tmp_path, begin):
    make_run(tmp_path, steps=1)
    program = begin("-m", "freewheel", "dashboard", tmp_path, "--host", "0.0.0.0")
    assert "?token=" in program.stdout.readline()
    program.terminate()
    assert "SSH tunnel" in program.communicate(timeout=WAIT_S)[1]


# -- next to a run ----------------------------------------------------------------------------------------------------


def test_a_run_has_a_page_from_before_its_first_line_until_its_end(tmp_path):
    folder = tmp_path / "run"
    with serve_next_to_run(folder) as url:
        assert get(url)[0] == 200
        make_run(folder, steps=3)
        child = page_of_process(os.getpid())
        assert child.nice() >= 10
        token = url.partition("token=")[2]
        assert token not in " ".join(child.cmdline()) and token not in str(child.environ())
        assert not any(token.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert not child.is_running() and refuses(url)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is read from /proc")
def test_the_page_sleeps_until_a_client_connects(tmp_path):
    with serve_next_to_run(tmp_path) as url:
        child = page_of_process(os.getpid())
        loaded = Path(f"/proc/{child.pid}/maps")
        wait_until(lambda: "msgspec" in loaded.read_text() and child.status() == psutil.STATUS_SLEEPING)
        assert "numpy" not in loaded.read_text()
        assert get(url)[0] == 200
        assert "numpy" in loaded.read_text()


OWNER = """
import sys, time
from freewheel.dashboard.web.child import serve_next_to_run
with serve_next_to_run(sys.argv[1]) as url:
    print(url, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_page_ends_with_its_run_however_that_ends(tmp_path, begin, how):
    owner = begin("-c", OWNER, tmp_path)
    url = owner.stdout.readline().strip()
    assert get(url)[0] == 200
    child = page_of_process(owner.pid)
    os.kill(owner.pid, how)
    owner.wait(WAIT_S)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: refuses(url))  # a process is a zombie before its last thread has let go of the socket


def test_a_page_that_dies_is_logged(tmp_path, caplog):
    with serve_next_to_run(tmp_path) as url:
        child = page_of_process(os.getpid())
        child.kill()
        child.wait(WAIT_S)
        assert refuses(url)
    assert "ended by itself" in caplog.text and f"freewheel dashboard {tmp_path}" in caplog.text


def test_a_taken_port_costs_a_run_only_its_page(tmp_path, caplog):
    with listen("127.0.0.1", 0) as taken, serve_next_to_run(tmp_path, port=taken.getsockname()[1]) as url:
        assert url == ""
    assert "The run has no page" in caplog.text and "observe.dashboard_port" in caplog.text


def test_the_address_is_shown_in_the_terminal_only(tmp_path):
    observe = SimpleNamespace(dashboard=True, dashboard_port=0)
    config: Any = SimpleNamespace(run_dir=str(tmp_path), observe=observe)
    file = io.StringIO()
    shown = PlainView(file)
    console = Console(file=io.StringIO(), width=200)
    with page_for_run(config, shown):
        assert shown.page in file.getvalue() and "Dashboard: http://127.0.0.1:" in file.getvalue()
        console.print(panel(RunSnapshot(mode="sync", step=1, total_steps=2), width=200, page=shown.page))
        assert shown.page in console.file.getvalue()
    assert shown.page == "" and LiveView(console).page == ""
    observe.dashboard = False
    quiet = PlainView(io.StringIO())
    with page_for_run(config, quiet):
        assert quiet.page == ""
