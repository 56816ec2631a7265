"""Runs one engine for a caller. Also the program of the engine's process: `python -m freewheel.judge.service FD`.

    Link ── take(message), or frames on FD ──▶ Service ─▶ Engine
         ◀────── send(message), coalesced ────────┘

The process reads its config, including the key, from the socket. It exits when the socket closes. It also exits when
its parent ends, even if a fork of the parent still holds the socket open.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

from freewheel.judge.config import JudgeConfig
from freewheel.judge.engine import Engine
from freewheel.judge.transport import (
    ENGINE_DECODER,
    LENGTH,
    AskStats,
    Cancel,
    Close,
    Configure,
    EngineFailure,
    LogLine,
    Pipe,
    Results,
    Started,
    StatsReply,
    Submit,
    ToCaller,
    ToEngine,
    run_loop,
)
from freewheel.judge.verdict import JudgeError, Verdict
from freewheel.utils.processes import end_with

log = logging.getLogger("freewheel.judge")

_COALESCE_S = 0.020
"""When all batches are answered, results are sent at once, but not sooner than this after the previous message."""
LINGER_S = 0.050
"""While more verdicts are expected, results wait this long to be sent together: each message interrupts a busy
caller."""
_GC_THRESHOLD = 50_000
"""Python's default, a collection every 700 objects, would be wasted work: thousands of requests are alive at a time,
and they hold no cycles."""


class Service:
    """Runs one engine until it receives `Close`. `send` receives the messages for the caller."""

    def __init__(self, config: JudgeConfig, spent: float, send: Callable[[ToCaller], None]) -> None:
        self._engine = Engine(config, deliver=self._collect, answered_all=self._flush_soon, spent=spent)
        self._send = send
        self._items: list[tuple[int, int, Verdict]] = []
        self._flush_is_due = False
        self._flushed_at = 0.0
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Run until `Close`. Sends `Started` when `take` may be called."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._engine.start()
        except Exception as error:
            if not isinstance(error, JudgeError | OSError):
                log.exception("the judge's engine could not start")
            self._send(EngineFailure(f"{type(error).__name__}: {error}"))
            return
        self._send(Started())
        try:
            await self._closed.wait()
        finally:
            await self._engine.close()
            self._flush()
            stats = self._engine.stats()
            if stats.submitted:
                log.info(stats.line())
            self._send(StatsReply(stats))

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._engine.submit(message.batch, message.indexes, message.requests, message.deadline_at)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.batch)
        elif isinstance(message, AskStats):
            self._flush()
            self._send(StatsReply(self._engine.stats()))
        elif isinstance(message, Close):
            self._closed.set()

    def _collect(self, batch: int, index: int, verdict: Verdict) -> None:
        self._items.append((batch, index, verdict))
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_later(LINGER_S, self._flush)

    def _flush_soon(self) -> None:
        """Every batch is answered: send what has been collected without waiting for more."""
        self._loop.call_later(max(0.0, self._flushed_at + _COALESCE_S - time.monotonic()), self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._items:
            items, self._items = self._items, []
            self._flushed_at = time.monotonic()
            self._send(Results(items, self._engine.spent))


# -- the engine's process ---------------------------------------------------------------------------------------------


class _ForwardingHandler(logging.Handler):
    """Sends the engine's log records to the caller's process, which logs them."""

    def __init__(self, send: Callable[[ToCaller], None]) -> None:
        super().__init__()
        self._forward = send

    def emit(self, record: logging.LogRecord) -> None:
        self._forward(LogLine(record.levelno, self.format(record)))


def tune_process() -> None:
    """Set the garbage collector and the limit of open files for a process that does nothing but call the judge."""
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each call is a socket, and 1024 is a common limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group, and the parent closes the engine
    tune_process()
    sock = socket.socket(fileno=int(sys.argv[1]))
    head = sock.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        setup = ENGINE_DECODER.decode(sock.recv(length, socket.MSG_WAITALL))
        sock.setblocking(False)
        run_loop(_serve(sock, setup))


async def _serve(sock: socket.socket, setup: Configure) -> None:
    loop = asyncio.get_running_loop()
    pipe = Pipe(ENGINE_DECODER, lambda message: service.take(message))
    service = Service(setup.config, setup.spent, pipe.send)
    logger = logging.getLogger("freewheel")
    logger.addHandler(_ForwardingHandler(pipe.send))
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def close() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(service.take, Close())

    await loop.create_connection(lambda: pipe, sock=sock)
    ended = loop.create_task(pipe.ended.wait())
    ended.add_done_callback(lambda _: close())
    end_with(setup.parent_pid, on_end=close)
    await service.run()
    pipe.close()
    await ended


if __name__ == "__main__":
    main()
