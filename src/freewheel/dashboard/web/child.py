"""The server beside a run: `python -m freewheel.dashboard.web.child FD`, started by `beside` with the rest on stdin.

    asleep, with hardly anything imported ─ somebody connects ─▶ the server ─ the run ends ─▶ end

Most runs are never looked at, and those pay for a sleeping interpreter. Waits for: a connection, the end of stdin.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time

import msgspec

PARENT_CHECK_S = 1.0
"""A process that was forked from the parent may hold our stdin open; the changed parent gives it away."""
NICENESS = 10
"""A run's own processes come first."""


class Start(msgspec.Struct):
    """What is told on the first line of stdin: a token among arguments could be read by other users."""

    run: str
    token: str
    parent: int


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    start = msgspec.json.decode(_first_line(), type=Start)
    listening = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's affair
    if not _somebody_looks(listening, start.parent):
        return
    from freewheel.dashboard.web.runs import Runs
    from freewheel.dashboard.web.serving import serve_beside

    runs = Runs([start.run], clock=time.monotonic, must_exist=False)
    serve_beside(runs, listening, start.token, parent=start.parent)


def _somebody_looks(listening: socket.socket, parent: int) -> bool:
    """True when somebody connects; False when the run ends before."""
    while os.getppid() == parent:
        ready, _, _ = select.select([listening.fileno(), 0], [], [], PARENT_CHECK_S)
        if 0 in ready:  # all that was to be said has been: this is the end
            return False
        if ready:
            return True
    return False


def _first_line() -> bytes:
    """Byte by byte: what follows on stdin is its end, and somebody else waits for that."""
    found = bytearray()
    while (one := os.read(0, 1)) not in (b"", b"\n"):
        found += one
    return bytes(found)


if __name__ == "__main__":
    main()
