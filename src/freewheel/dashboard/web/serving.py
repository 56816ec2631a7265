"""A server as a program: it listens, serves until it is told to stop or its parent is gone, and ends.

`freewheel dashboard` ─▶ listen ─▶ serve (until SIGINT or SIGTERM)
`beside` ─ listening socket, token ─▶ child ─▶ serve (until its stdin ends: with the run, however that ends)
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from freewheel.dashboard.web.child import PARENT_CHECK_S
from freewheel.dashboard.web.runs import Runs, RunView
from freewheel.dashboard.web.server import Server

log = logging.getLogger("freewheel.dashboard")


def serve(runs: Runs, listening: socket.socket, token: str, ready: Callable[[], None] = lambda: None) -> None:
    """Until SIGINT or SIGTERM. To be called in the main thread. The first run is read at once: who was told the address
    opens it about a second later."""
    threading.Thread(target=_read, args=(runs.all()[0],), daemon=True).start()
    asyncio.run(_serve(runs, listening, token, ready, parent=None))


def serve_beside(runs: Runs, listening: socket.socket, token: str, *, parent: int) -> None:
    """Until stdin ends, the parent is another than `parent`, or SIGTERM."""
    asyncio.run(_serve(runs, listening, token, lambda: None, parent=parent))


def _read(view: RunView) -> None:
    with view.reading():
        log.debug("%s is %s", view.folder, view.state)


async def _serve(
    runs: Runs, listening: socket.socket, token: str, ready: Callable[[], None], *, parent: int | None
) -> None:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told.set)
    if parent is None:
        loop.add_signal_handler(signal.SIGINT, told.set)
    else:
        os.set_blocking(0, False)
        loop.add_reader(0, _at_end, told)
    server = Server(runs, token=token)
    await server.start(listening)
    try:
        ready()
        while parent is None or os.getppid() == parent:
            try:
                await asyncio.wait_for(told.wait(), None if parent is None else PARENT_CHECK_S)
                return
            except TimeoutError:
                continue
    finally:
        if parent is not None:
            loop.remove_reader(0)
        await server.stop()


def _at_end(told: asyncio.Event) -> None:
    try:
        ended = not os.read(0, 1 << 10)
    except BlockingIOError:
        return
    except OSError:
        ended = True
    if ended:
        told.set()
