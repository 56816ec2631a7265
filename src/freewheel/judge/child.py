"""The engine's process: `python -m freewheel.judge.child FD`, started by `process_link`.

It reads its config (and the key) from the socket, exits when the socket ends, and never outlives its parent: where a
fork holds the socket open, the changed parent pid gives it away.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any, cast

from freewheel.judge.service import ForwardingHandler, Service, run_loop
from freewheel.judge.wire import Close, Configure, FrameReader, Results, ToCaller, pack, pack_results

PARENT_CHECK_S = 1.0
GC_THRESHOLD = 50_000
"""Thousands of requests are alive at a time and hold no cycles: looking for some every 700 objects is wasted."""


class _Pipe(asyncio.Protocol):
    """Frames in, frames out. The first message must be `Configure`."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.configured: asyncio.Future[Configure] = asyncio.get_running_loop().create_future()
        self.service: Service | None = None
        self._reader = FrameReader.for_engine()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's own class, of the same interface

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, Configure):
                self.configured.set_result(message)
            elif self.service is not None:
                self.service.take(message)
            elif isinstance(message, Close):
                self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.ended.set()

    def send(self, message: ToCaller) -> None:
        if self._transport is not None:
            self._transport.write(pack_results(message) if isinstance(message, Results) else pack(message))


async def serve(fd: int) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    transport, pipe = await loop.create_connection(_Pipe, sock=sock)
    ended = loop.create_task(pipe.ended.wait())
    first: set[asyncio.Future[Any]] = {ended, pipe.configured}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if pipe.configured.done():
        setup = pipe.configured.result()
        logger = logging.getLogger("freewheel")
        logger.addHandler(ForwardingHandler(pipe.send))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        service = Service(setup.config, setup.spent, pipe.send)
        running = loop.create_task(service.run(lambda: setattr(pipe, "service", service)))
        orphaned = loop.create_task(_orphaned(setup.parent_pid))
        await asyncio.wait({ended, running, orphaned}, return_when=asyncio.FIRST_COMPLETED)
        orphaned.cancel()
        if not running.done():
            service.stop()
        await running
    transport.close()  # what is written goes out first
    await pipe.ended.wait()


async def _orphaned(parent_pid: int) -> None:
    """Returns when the parent has gone. No event tells: the system has one for children only."""
    while os.getppid() == parent_pid:  # noqa: ASYNC110
        await asyncio.sleep(PARENT_CHECK_S)


def main() -> None:
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group, they are the parent's affair: it closes us
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each call is a socket, and 1024 is a usual limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    run_loop(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
