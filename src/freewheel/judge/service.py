"""Runs one engine for a caller: in a thread, or as the process `python -m freewheel.judge.service FD`."""

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
import time
from collections.abc import Callable, Coroutine
from typing import Any, cast

from freewheel.judge.config import JudgeConfig
from freewheel.judge.engine import Engine
from freewheel.judge.stats import JudgeStats
from freewheel.judge.transport import (
    AskStats,
    Cancel,
    Close,
    Configure,
    FrameReader,
    LogLine,
    Results,
    Started,
    StatsReply,
    Stopped,
    Submit,
    ToCaller,
    ToEngine,
    pack,
    pack_results,
)
from freewheel.judge.verdict import JudgeError, Verdict

log = logging.getLogger("freewheel.judge")

COALESCE_S = 0.020
"""At most one results message in this time, however quickly batches end."""
LINGER_S = 0.050
"""While more is to come, results wait this long for company: each message takes the interpreter from a busy caller."""
LAG_CHECK_S = 0.05
"""How often the loop's lateness is measured."""
IDLE_CHECK_S = 1.0
"""The same while there is nothing to do."""
LAG_WARN_S = 0.05
"""Mean lateness that is worth a warning: the engine then reacts later than most judges' network round trip."""
LAG_SMOOTHING = 1 / 64
"""Weight of one check: about three seconds of memory."""
LAG_WARN_EVERY_S = 60.0
STATS_EVERY_S = 60.0
"""How often a working engine says in the log how far it is."""
REMEMBER_EVERY_S = 5.0
"""How much of what the limiters learnt a kill -9 may cost."""


class Service:
    """Runs one engine until told to close. `send` takes messages for the caller."""

    def __init__(self, config: JudgeConfig, spent: float, send: Callable[[ToCaller], None]) -> None:
        self._config = config
        self._send = send
        self._spent = spent
        self._engine: Engine
        self._items: list[tuple[int, int, Verdict]] = []
        self._flush_armed = False
        self._flushed_at = 0.0
        self._lag_s = 0.0
        self._closed = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Until `Close` comes. `ready` is called when messages may be handed in."""
        try:
            self._engine = Engine(
                self._config, deliver=self._collect, answered_all=self._answered_all, spent=self._spent
            )
            try:
                await self._engine.start()
            except BaseException:
                await self._engine.close()
                raise
        except Exception as error:
            if not isinstance(error, JudgeError | OSError):
                log.exception("the judge's engine could not start")
            self._send(Stopped(f"{type(error).__name__}: {error}"))
            return
        self._loop = asyncio.get_running_loop()
        self._send(Started())
        ready()
        watch = self._loop.create_task(self._watch())
        try:
            await self._closed.wait()
        finally:
            watch.cancel()
            await self._engine.close()
            self._flush()
            stats = self.stats()
            if stats.submitted:
                log.info(stats.line())
            self._send(StatsReply(0, stats))
            self._send(Stopped())

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._engine.submit(message.batch, message.indexes, message.requests, message.deadline_at)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.batch)
        elif isinstance(message, AskStats):
            self._flush()
            self._send(StatsReply(message.ticket, self.stats()))
        elif isinstance(message, Close):
            self.stop()

    def stop(self) -> None:
        self._closed.set()

    def stats(self) -> JudgeStats:
        stats = self._engine.stats()
        stats.loop_lag_s = round(self._lag_s, 4)
        return stats

    def _collect(self, batch: int, index: int, verdict: Verdict) -> None:
        self._items.append((batch, index, verdict))
        if not self._flush_armed:
            self._flush_armed = True
            self._loop.call_later(LINGER_S, self._flush)

    def _answered_all(self) -> None:
        """Nothing more is to come: what waits goes out now."""
        self._loop.call_later(max(0.0, self._flushed_at + COALESCE_S - time.monotonic()), self._flush)

    def _flush(self) -> None:
        self._flush_armed = False
        if self._items:
            items, self._items = self._items, []
            self._flushed_at = time.monotonic()
            self._send(Results(items, self._engine.spent))

    async def _watch(self) -> None:
        """Measures how late this loop runs, and keeps the limiters' memory on disk."""
        warned_at, said, remembered_at = -LAG_WARN_EVERY_S, 0, time.monotonic()
        say_at = remembered_at + STATS_EVERY_S
        while True:
            pause_s = LAG_CHECK_S if self._engine.busy else IDLE_CHECK_S
            due = time.monotonic() + pause_s
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            self._lag_s += LAG_SMOOTHING * (max(0.0, now - due) - self._lag_s)
            if self._lag_s > LAG_WARN_S and now - warned_at > LAG_WARN_EVERY_S:
                warned_at = now
                log.warning(
                    "the judge's event loop runs %.0f ms late on average: %s", self._lag_s * 1e3, self._remedy()
                )
            if now >= say_at:
                stats, say_at = self.stats(), now + STATS_EVERY_S
                if stats.submitted > said:
                    said = stats.submitted
                    log.info(stats.line())
            if now - remembered_at > REMEMBER_EVERY_S:
                remembered_at = now
                self._engine.remember()

    def _remedy(self) -> str:
        if self._config.placement == "thread":
            return "this process's Python code starves its thread; use placement='process'"
        return "the machine has no core to spare for it"


class ForwardingHandler(logging.Handler):
    """Sends the engine's log records to the caller's process, where they are logged again."""

    def __init__(self, send: Callable[[ToCaller], None]) -> None:
        super().__init__()
        self._forward = send

    def emit(self, record: logging.LogRecord) -> None:
        self._forward(LogLine(record.levelno, self.format(record)))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on uvloop where there is one."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


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
