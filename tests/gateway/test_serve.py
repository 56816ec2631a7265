"""`freewheel serve` as a process: how it starts, what many workers get from it, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from freewheel.cli import app
from freewheel.gateway.limits import TOKEN_ENV, Limits
from freewheel.gateway.server import DEFAULT_PORT
from freewheel.utils.http import HOST

from .conftest import CHAT, TOKEN, WAIT_S, Mock, Program, chat

Begin = Callable[..., Program]


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """POST `body` as JSON, or GET without one. Returns status and JSON."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


# -- start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], f"set {TOKEN_ENV}"),
        (["--token-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--max-connections", 0], "max_connections"),
        (["--port", 8911, "--endpoint", "http://localhost:8911/v1"], "this gateway itself"),
        (["--port", "taken"], "it cannot listen there"),
    ],
    ids=lambda given: str(given[0]) if isinstance(given, list) else "",
)
def test_a_setting_that_cannot_work_ends_it_with_its_name(program: Begin, flags: list[Any], message: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [taken.getsockname()[1] if flag == "taken" else flag for flag in flags]
        code, said = program("http://127.0.0.1:9/v1", *flags).end()
    assert code == 2 and message in said and "Traceback" not in said


def test_the_token_is_required_and_shows_nowhere(mock: Mock, program: Begin):
    gateway = program(mock().url, env={TOKEN_ENV: TOKEN}).wait_ready()
    for header, status in (("", 401), ("Bearer wrong", 401), (f"Bearer {TOKEN}", 200)):
        assert ask(gateway.url + CHAT, chat("hi"), Authorization=header)[0] == status
    assert TOKEN not in json.dumps(gateway.ready)
    gateway.tell()
    code, said = gateway.end()
    assert code == 0 and TOKEN not in said


def test_the_help_and_the_docs_name_the_defaults_that_hold():
    limits, mib = Limits(), Limits().max_body_bytes >> 20
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    help_of = {option.name: option.help for option in serve.params}
    for flag, default in {
        "host": HOST, "port": DEFAULT_PORT, "drain_s": f"{limits.drain_s:g}", "max_body_bytes": f"{mib} MiB",
        "max_connections": limits.max_connections, "max_waiting": limits.max_waiting,
    }.items():  # fmt: skip
        assert f"({default})" in help_of[flag]
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    for line in (
        f"http://{HOST}:{DEFAULT_PORT}/v1",
        f"| {mib} MiB a body",
        f"| {limits.max_connections:,} connections |",
        f"| {limits.max_waiting:,} open judgements |",
        f"| {limits.max_waiting_bytes >> 20} MiB of bodies waiting |",
        f"| {limits.header_timeout_s:g} s for the first headers, {limits.body_timeout_s:g} s for a body |",
        f"| {limits.write_timeout_s:g} s without reading the reply |",
        f"`--drain-s` ({limits.drain_s:g} s)",
    ):
        assert line in page


# -- many workers ----------------------------------------------------------------------------------------------------


def test_many_workers_and_the_next_gateway_pay_once_for_equal_requests(mock: Mock, program: Begin):
    judge = mock(latency_s=0.2)
    for workers in (8, 1):
        gateway = program(judge.url).wait_ready()
        with ThreadPoolExecutor(60) as pool:
            bodies = [chat(f"question {number}") for number in range(30)] * workers
            replies = list(pool.map(lambda body, url=gateway.url + CHAT: ask(url, body), bodies))
        assert {status for status, _ in replies} == {200}
        assert [told for _, told in replies] == [told for _, told in replies[:30]] * workers
        assert judge.counts().received == 30
        gateway.tell()
        assert gateway.end()[0] == 0


# -- end --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asking(mock: Mock, program: Begin):
    """Starts a gateway and requests to it: `gateway, judge, replies = asking(10, latency_s=2.0)`."""
    with ThreadPoolExecutor(10) as pool:

        def begin(count: int, *flags: object, **profile: Any) -> tuple[Program, Any, list[Future[tuple[int, Any]]]]:
            judge = mock(**profile)
            gateway = program(judge.url, *flags).wait_ready()
            replies = [pool.submit(ask, gateway.url + CHAT, chat(f"question {number}")) for number in range(count)]
            until(lambda: judge.counts().in_flight == count)
            return gateway, judge, replies

        yield begin


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_finish_after_a_signal_and_new_ones_are_refused(asking: Any, number: int):
    gateway, judge, replies = asking(10, latency_s=2.0)
    gateway.tell(number)
    until(lambda: ask(gateway.url + "/healthz")[0] == 503)
    assert ask(gateway.url + "/healthz")[1]["status"] == "draining"
    status, told = ask(gateway.url + CHAT, chat("too late"))
    assert (status, told["error"]["code"]) == (503, "draining")
    assert [reply.result(WAIT_S)[0] for reply in replies] == [200] * 10
    code, said = gateway.end()
    assert code == 0 and "shutting down" in said and "10 calls" in said
    assert judge.counts().answered == 10


@pytest.mark.parametrize(("drain_s", "signals"), [(0.5, 1), (50, 2)], ids=["drain over", "second signal"])
def test_requests_that_outlast_the_drain_end_as_a_503(asking: Any, drain_s: float, signals: int):
    gateway, judge, replies = asking(3, "--drain-s", drain_s, latency_s=60.0)
    began = time.monotonic()
    gateway.tell()
    if signals == 2:
        until(lambda: ask(gateway.url + "/healthz")[0] == 503)
        gateway.tell()
    for reply in replies:
        status, told = reply.result(WAIT_S)
        assert (status, told["error"]["code"]) == (503, "draining")
    assert gateway.end()[0] == 0 and time.monotonic() - began < 10
    until(lambda: judge.counts().in_flight == 0)


def test_an_idle_gateway_ends_at_once(mock: Mock, program: Begin):
    gateway = program(mock().url).wait_ready()
    with socket.create_connection(("127.0.0.1", gateway.ready["port"])):
        began = time.monotonic()
        gateway.tell()
        assert gateway.end()[0] == 0
        assert time.monotonic() - began < 10
