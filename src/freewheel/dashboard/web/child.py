"""Serves the page of a live run in a separate process, which never fails or slows the run.

    the run: `serve_next_to_run` ─ listening socket, token ─▶ the address, at once
             └─ python -m freewheel.dashboard.web.child FD (nice 10), with the rest on stdin
                asleep, almost nothing imported ─ a client connects ─▶ the server ─ the run ends ─▶ exit

Nobody opens the page of most runs, and those runs pay only for a sleeping interpreter. The run ends the child with
SIGTERM; if the run is killed, the child ends itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from freewheel.utils.processes import end_with, start_child

if TYPE_CHECKING:
    from freewheel.dashboard.terminal import TerminalView
    from freewheel.runtime.config import TrainConfig

NICENESS = 10
"""The run's own processes come first."""


class Start(msgspec.Struct):
    """What the child reads from stdin. Other users could read a token among its arguments."""

    run: str
    token: str
    parent: int


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=Start)
    end_with(start.parent)  # a run that is killed cannot end its page
    listening = socket.socket(fileno=int(sys.argv[1]))
    select.select([listening], [], [])
    from freewheel.dashboard.web.runs import Runs
    from freewheel.dashboard.web.server import serve

    serve(Runs([start.run], clock=time.monotonic, must_exist=False), listening, start.token)


if __name__ == "__main__":
    main()


log = logging.getLogger("freewheel.dashboard")

END_S = 2.0
"""Longest time for the child to end; it has nothing to save."""


@contextmanager
def page_for_run(config: TrainConfig, shown: TerminalView) -> Iterator[None]:
    """Serve the page of the run that `freewheel train` starts, if its settings ask for one. The address is shown but
    not saved, because it grants access."""
    if not config.observe.dashboard or config.run_dir is None:
        yield
        return
    with serve_next_to_run(config.run_dir, port=config.observe.dashboard_port) as found:
        if found:
            shown.page = found
            shown.say(f"Dashboard: {found}")
        try:
            yield
        finally:
            shown.page = ""


@contextmanager
def serve_next_to_run(run_dir: str | os.PathLike[str], *, port: int = 0) -> Iterator[str]:
    """Yield the page's address while the block lasts; empty if the page cannot be served, which is logged."""
    folder = Path(run_dir).expanduser().absolute()
    child, found = None, ""
    try:
        child, found = _start(folder, port)
    except OSError as error:
        log.warning(
            "The run has no page (%s) and continues without one. `freewheel dashboard %s` shows it; "
            "observe.dashboard_port=0 takes any free port",
            *(error, folder),
        )
    try:
        yield found
    finally:
        if child is not None:
            _end(child, folder)


def _start(folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    from freewheel.dashboard.web.server import make_token
    from freewheel.utils.http import HOST, address, listen

    token = make_token()
    with listen(HOST, port) as listening:
        child = start_child(
            *("-m", "freewheel.dashboard.web.child", str(listening.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            process_group=0,  # Ctrl-C in the terminal is for the run
        )
        start = Start(run=str(folder), token=token, parent=os.getpid())
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:  # it died at once, which is reported at the end
            child.stdin.write(msgspec.json.encode(start))
        return child, address(listening, token)


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    if child.poll() is not None:
        log.warning(
            "The run's page ended by itself (exit code %d); `freewheel dashboard %s` shows the run",
            *(child.returncode, folder),
        )
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
