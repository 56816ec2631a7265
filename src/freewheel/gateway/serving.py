"""`serve`: a gateway as a program of its own, until it is told to stop.

SIGTERM, SIGINT ─▶ drain: new requests get 503, open ones go on ─▶ the rest ends as 503 ─▶ return
a second one    ─▶ the drain is over now
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import time
from collections.abc import Callable

from freewheel.errors import ConfigError
from freewheel.gateway.auth import Doorkeeper
from freewheel.gateway.limits import Limits
from freewheel.gateway.server import Gateway
from freewheel.judge.config import JudgeConfig
from freewheel.judge.service import GC_THRESHOLD, REMEMBER_EVERY_S, STATS_EVERY_S, run_loop

log = logging.getLogger("freewheel.gateway")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8900
"""None of the ports that inference servers take by default, nor the mock judge's."""
TICK_S = 1.0
"""How often the loop's lateness is measured; a gateway that is idle for days should not wake more often."""
LAG_SMOOTHING = 1 / 4
"""Weight of one tick: about four seconds of memory."""
UPSTREAM_FILES = 1024
"""File descriptors kept for calls to the judge, the cache and the rest."""


def serve(
    config: JudgeConfig,
    limits: Limits,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    *,
    door: Doorkeeper,
    shares_samples: bool = False,
    ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains and returns. To be called in the main thread.

    `ready` gets host and port once requests are taken. `ConfigError` where it cannot listen there.
    """
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    _raise_file_limit(limits)
    run_loop(_serve(Gateway(config, limits, shares_samples=shares_samples), host, port, door, ready))


async def _serve(
    gateway: Gateway,
    host: str,
    port: int,
    door: Doorkeeper,
    ready: Callable[[str, int], None],
) -> None:
    loop = asyncio.get_running_loop()
    told, told_again = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (told_again if told.is_set() else told).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        bound = await gateway.start(host, port, door)
    except (OSError, OverflowError) as error:
        remedy = f"it cannot listen there: {error}; choose another --port"
        raise ConfigError("--host and --port", f"{host}:{port}", remedy) from None
    watch = loop.create_task(_watch(gateway))
    try:
        ready(host, bound)
        await told.wait()
        log.info("shutting down: open requests have %g s, a second signal ends them now", gateway.limits.drain_s)
    finally:
        watch.cancel()
        await gateway.stop(gateway.limits.drain_s if told.is_set() else 0.0, told_again)
        log.info(gateway.stats().line())


async def _watch(gateway: Gateway) -> None:
    """Keeps the limiters' memory on disk, says in the log how far it is, and measures how late the loop runs."""
    said, remembered_at = 0, time.monotonic()
    say_at = remembered_at + STATS_EVERY_S
    while True:
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        gateway.lag_s += LAG_SMOOTHING * (max(0.0, now - due) - gateway.lag_s)
        if now - remembered_at >= REMEMBER_EVERY_S:
            remembered_at = now
            gateway.judge.engine.remember()
        if now >= say_at:
            stats, say_at = gateway.stats(), now + STATS_EVERY_S
            if stats.submitted > said:
                said = stats.submitted
                log.info(stats.line())


def _raise_file_limit(limits: Limits) -> None:
    """Each connection is a file descriptor, and 1024 of them is a usual limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < limits.max_connections + UPSTREAM_FILES:
        log.warning(
            "this process may open %d files, too few for max_connections = %d; raise `ulimit -n`",
            soft,
            limits.max_connections,
        )
