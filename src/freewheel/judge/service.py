"""Runs one engine for a caller, and is the engine's process: `python -m freewheel.judge.service FD`.

    ThreadLink  ── take(message) ──────────▶ Service ─▶ Engine
    ProcessLink ── frames on FD ──▶ serve ─▶    │
                ◀── send(message), coalesced ───┘

The process reads its config, and with it the key, from the socket. It exits when the socket ends, and it never outlives
its parent, not even where a fork of the parent holds the socket open.
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
from collections.abc import Callable, Coroutine
from typing import Any

from freewheel.judge.config import JudgeConfig
from freewheel.judge.engine import Engine
from freewheel.judge.stats import JudgeStats
from freewheel.judge.transport import (
    ENGINE_DECODER,
    AskStats,
    Cancel,
    Close,
    Configure,
    LogLine,
    Pipe,
    Results,
    Started,
    StatsReply,
    Stopped,
    Submit,
    ToCaller,
    ToEngine,
)
from freewheel.judge.verdict import JudgeError, Verdict
from freewheel.utils.processes import end_with

log = logging.getLogger("freewheel.judge")

COALESCE_S = 0.020
"""At most one results message in this time, however quickly batches end."""
LINGER_S = 0.050
"""While more verdicts are to come, results wait this long for them: each message interrupts a busy caller."""
LAG_CHECK_S = 0.05
"""How often the delay of the event loop is measured."""
IDLE_CHECK_S = 1.0
"""The same while there is nothing to do."""
LAG_WARN_S = 0.05
"""A mean delay worth a warning: it is more than the network round trip to most judges."""
LAG_SMOOTHING = 1 / 64
"""Weight of one check: about three seconds of memory."""
LAG_WARN_EVERY_S = 60.0
STATS_EVERY_S = 60.0
"""How often a working engine logs its statistics."""
REMEMBER_EVERY_S = 5.0
"""How often the limiters' memory is written: a kill -9 loses at most this much of it."""
GC_THRESHOLD = 50_000
"""Thousands of requests are alive at a time and hold no cycles, so a collection every 700 objects is wasted."""


class Service:
    """Runs one engine until it receives `Close`. `send` receives the messages for the caller."""

    def __init__(self, config: JudgeConfig, spent: float, send: Callable[[ToCaller], None]) -> None:
        self._config = config
        self._send = send
        self._spent = spent
        self._engine: Engine
        self._items: list[tuple[int, int, Verdict]] = []
        self._flush_is_due = False
        self._flushed_at = 0.0
        self._lag_s = 0.0
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Run until `Close`. Sends `Started` when `take` may be called, and `Stopped` at the end."""
        try:
            self._engine = Engine(self._config, deliver=self._collect, answered_all=self._flush_soon, spent=self._spent)
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
            self._send(StatsReply(stats))
            self._send(Stopped())

    def take(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._engine.submit(message.batch, message.indexes, message.requests, message.deadline_at)
        elif isinstance(message, Cancel):
            self._engine.cancel(message.batch)
        elif isinstance(message, AskStats):
            self._flush()
            self._send(StatsReply(self.stats()))
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
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_later(LINGER_S, self._flush)

    def _flush_soon(self) -> None:
        """Every batch is answered: send what has been collected without waiting for more."""
        self._loop.call_later(max(0.0, self._flushed_at + COALESCE_S - time.monotonic()), self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._items:
            items, self._items = self._items, []
            self._flushed_at = time.monotonic()
            self._send(Results(items, self._engine.spent))

    async def _watch(self) -> None:
        """Measure the delay of this loop, log statistics, and keep the limiters' memory on disk."""
        warned_at, logged, remembered_at = -LAG_WARN_EVERY_S, 0, time.monotonic()
        log_at = remembered_at + STATS_EVERY_S
        while True:
            pause_s = LAG_CHECK_S if self._engine.is_busy() else IDLE_CHECK_S
            due = time.monotonic() + pause_s
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            self._lag_s += LAG_SMOOTHING * (max(0.0, now - due) - self._lag_s)
            if self._lag_s > LAG_WARN_S and now - warned_at > LAG_WARN_EVERY_S:
                warned_at = now
                if self._config.placement == "thread":
                    remedy = "this process's Python code starves its thread; use placement='process'"
                else:
                    remedy = "the machine has no core to spare for it"
                log.warning("the judge's event loop runs %.0f ms late on average: %s", self._lag_s * 1e3, remedy)
            if now >= log_at:
                stats, log_at = self.stats(), now + STATS_EVERY_S
                if stats.submitted > logged:
                    logged = stats.submitted
                    log.info(stats.line())
            if now - remembered_at > REMEMBER_EVERY_S:
                remembered_at = now
                self._engine.remember()


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on uvloop where it is installed."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


# -- the engine's process ---------------------------------------------------------------------------------------------


class _ForwardingHandler(logging.Handler):
    """Sends the engine's log records to the caller's process, which logs them."""

    def __init__(self, send: Callable[[ToCaller], None]) -> None:
        super().__init__()
        self._forward = send

    def emit(self, record: logging.LogRecord) -> None:
        self._forward(LogLine(record.levelno, self.format(record)))


async def serve(fd: int) -> None:
    loop = asyncio.get_running_loop()
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    configured: asyncio.Future[Configure] = loop.create_future()
    services: list[Service] = []

    def take(message: ToEngine) -> None:
        if isinstance(message, Configure):
            configured.set_result(message)
        else:
            services[0].take(message)

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(services[0].stop)

    pipe = Pipe(ENGINE_DECODER, take)
    await loop.create_connection(lambda: pipe, sock=sock)
    ended = loop.create_task(pipe.ended.wait())
    first: set[asyncio.Future[Any]] = {ended, configured}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if configured.done():
        setup = configured.result()
        logger = logging.getLogger("freewheel")
        logger.addHandler(_ForwardingHandler(pipe.send))
        logger.setLevel(logging.INFO)
        logger.propagate = False
        services.append(Service(setup.config, setup.spent, pipe.send))
        running = loop.create_task(services[0].run())
        end_with(setup.parent_pid, on_end=stop)
        await asyncio.wait({ended, running}, return_when=asyncio.FIRST_COMPLETED)
        services[0].stop()
        await running
    pipe.close()
    await pipe.ended.wait()


def main() -> None:
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group, and the parent closes the engine
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # each call is a socket, and 1024 is a common limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    run_loop(serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
