"""`placement="thread"`: the engine on an event loop in a background thread of this process.

Lighter than a process and starved by one that is busy in Python: the service measures that and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

from freewheel.judge.config import JudgeConfig
from freewheel.judge.desk import Desk
from freewheel.judge.service import Service, run_loop
from freewheel.judge.wire import Stopped, ToCaller

log = logging.getLogger("freewheel.judge")


class ThreadLink:
    def __init__(self, config: JudgeConfig, desk: Desk) -> None:
        self._config = config
        self._desk = desk
        self._thread = threading.Thread(target=self._run, name="freewheel-judge", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Service | None = None
        self._abandoned = False
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._desk.attach(self.wake)
        self._thread.start()

    def wake(self) -> None:
        """From any thread, after the desk has something new."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(self._drain)

    def join(self, timeout_s: float) -> None:
        """After `Desk.close`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the judge's thread did not close within %.3g s", timeout_s)

    def abandon(self) -> None:
        """Nobody holds the judge any more. Called by the garbage collector, in any thread: it takes no lock of ours."""
        self._abandoned = True
        self.wake()

    def forget(self) -> None:
        """In a forked process: the thread is not here; there is nothing to close."""

    def _run(self) -> None:
        try:
            run_loop(self._main())
        except Exception as error:
            log.exception("the judge's thread broke")
            self._desk.break_down(f"the judge's thread broke: {type(error).__name__}: {error}")

    async def _main(self) -> None:
        self._service = Service(self._config, self._desk.spent, self._incoming)
        await self._service.run(self._ready)
        if self._expiry is not None:
            self._expiry.cancel()

    def _ready(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drain()

    def _drain(self) -> None:
        assert self._service is not None and self._loop is not None
        if self._abandoned:
            self._abandoned = False
            self._desk.close("the judge was let go of")
        while (message := self._desk.next()) is not None:
            self._service.take(message)
        if self._expiry is not None:
            self._expiry.cancel()
        deadline = self._desk.next_deadline()
        if deadline < float("inf"):
            left_s = max(0.0, deadline - time.monotonic())
            self._expiry = self._loop.call_later(left_s, self._expire)

    def _expire(self) -> None:
        self._desk.expire(time.monotonic())
        self._drain()

    def _incoming(self, message: ToCaller) -> None:
        if isinstance(message, Stopped):
            if message.error:
                self._desk.break_down(message.error)
            return
        self._desk.take(message)
        self.wake()
