"""Serves the page of a live run in a separate process, which never fails or slows the run.

    the run: `beside` ─ listening socket, token ─▶ the address, at once
             └─ python -m freewheel.dashboard.web.child FD (nice 10), with the rest on stdin
                asleep, almost nothing imported ─ a client connects ─▶ the server ─ the run ends ─▶ exit

Most runs are never looked at, and they pay only for a sleeping interpreter. The child ends with its parent, however
that ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from freewheel.dashboard.terminal import View
    from freewheel.runtime.config import TrainConfig

PARENT_CHECK_S = 1.0
"""A process forked from the parent may keep our stdin open; then the changed parent pid shows that the run ended."""
NICENESS = 10
"""The run's own processes come first."""


class Start(msgspec.Struct):
    """The first line of stdin. Other users could read a token among the arguments."""

    run: str
    token: str
    parent: int


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    start = msgspec.json.decode(_first_line(), type=Start)
    listening = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    if not _somebody_looks(listening, start.parent):
        return
    from freewheel.dashboard.web.runs import Runs
    from freewheel.dashboard.web.server import serve

    runs = Runs([start.run], clock=time.monotonic, must_exist=False)
    serve(runs, listening, start.token, parent=start.parent)


def _somebody_looks(listening: socket.socket, parent: int) -> bool:
    """Return True when a client connects, False when the run ends first."""
    while os.getppid() == parent:
        ready, _, _ = select.select([listening.fileno(), 0], [], [], PARENT_CHECK_S)
        if 0 in ready:  # stdin is at its end: the parent has nothing more to say
            return False
        if ready:
            return True
    return False


def _first_line() -> bytes:
    """Read one line byte by byte, because another reader waits for the end of stdin."""
    found = bytearray()
    while (one := os.read(0, 1)) not in (b"", b"\n"):
        found += one
    return bytes(found)


if __name__ == "__main__":
    main()


log = logging.getLogger("freewheel.dashboard")

END_S = 2.0
"""Longest time for the child to end; it has nothing to save."""


@contextmanager
def page_of(config: TrainConfig, shown: View) -> Iterator[None]:
    """Serve the page of the run that `freewheel train` starts, if its settings ask for one. The address is shown and
    goes into no file, because it grants access."""
    if not config.observe.dashboard or config.run_dir is None:
        yield
        return
    with beside(config.run_dir, port=config.observe.dashboard_port) as found:
        if found:
            shown.page = found
            shown.say(f"Dashboard: {found}")
        try:
            yield
        finally:
            shown.page = ""


@contextmanager
def beside(run_dir: str | os.PathLike[str], *, port: int = 0) -> Iterator[str]:
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
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "freewheel.dashboard.web.child", str(listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            process_group=0,  # Ctrl-C in the terminal is for the run
        )
        told = {"run": str(folder), "token": token, "parent": os.getpid()}
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once, which is reported at the end
            child.stdin.write(msgspec.json.encode(told) + b"\n")
            child.stdin.flush()
        return child, address(listening, token)


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    if child.poll() is not None:
        log.warning(
            "The run's page ended by itself (exit code %d); `freewheel dashboard %s` shows the run",
            *(child.returncode, folder),
        )
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
