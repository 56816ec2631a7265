"""A batch of rewards under way: `reward_manager.submit(batch)` returns one at once, `result()` gives the rewards."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from freewheel.judge import Handle, JudgeConfig, JudgeRequest, Verdict
from freewheel.judge.judge import InlineJudge
from freewheel.rewards.scoring import Sample

log = logging.getLogger("freewheel.rewards")

SAY_EVERY_S = 10.0
"""How often a log hears of a batch that is waited for."""
REDRAW_S = 0.25
"""How often a terminal's bar moves."""


class Prepared(NamedTuple):
    """A batch whose rules are applied and whose requests are ready."""

    samples: list[Sample]
    rules: list[Verdict]
    requests: list[JudgeRequest]
    since: float


class Beside(NamedTuple):
    """A batch that the judge has."""

    ready: Prepared
    handle: Handle | None
    """None: the judge could not take it, and `result()` judges it itself."""


class RewardHandle:
    """The rewards of one batch. `result()` may be called any number of times, from any thread."""

    def __init__(
        self,
        outcome: Callable[[], Any],
        beside: Future[Beside] | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._outcome = outcome
        self._beside = beside
        self._cancelled = cancelled or threading.Event()
        self._lock = threading.Lock()
        self._result: Any = None
        self._error: Exception | None = None
        self._settled = False

    def done(self) -> bool:
        """True if `result()` would not wait. On the synchronous path `result()` does the work itself."""
        if self._settled:
            return True
        if self._beside is None or not self._beside.done():
            return False
        if self._beside.exception() is not None:
            return True
        handle = self._beside.result().handle
        return handle is not None and handle.done()

    def __await__(self) -> Generator[Any, None, Any]:
        """`result()` without blocking the loop."""
        return asyncio.to_thread(self.result).__await__()

    def result(self, timeout_s: float | None = None) -> Any:
        """What calling the manager would have returned, or raised; waits for it.

        `timeout_s` bounds the waiting for what is done beside the caller; `TimeoutError` leaves the batch running.
        """
        if timeout_s is not None and self._beside is not None and not self._settled:
            until = time.monotonic() + timeout_s
            _, handle = self._beside.result(timeout_s)
            if handle is not None and not handle.wait(max(0.0, until - time.monotonic())):
                done = handle.progress()
                raise TimeoutError(f"{done.done} of {done.total} verdicts are in after {timeout_s:g} s")
        with self._lock:
            if not self._settled:
                try:
                    self._result = self._outcome()
                except Exception as error:  # noqa: BLE001  # raised below, each time it is asked for
                    self._error = error
                self._settled = True
            if self._error is not None:
                raise self._error
            return self._result

    def cancel(self) -> None:
        """Gives the judging up, at once: rows without a verdict are failed ones, and `result()` waits for none."""
        self._cancelled.set()  # for a batch that is still on its way to the judge
        if self._beside is not None and self._beside.done() and self._beside.exception() is None:
            handle = self._beside.result().handle
            if handle is not None:
                handle.cancel()


def wait_for(handle: Handle) -> list[Verdict]:
    """Waits for a batch's verdicts, and says how far it is: a bar in a terminal, a line now and then in a log."""
    if handle.wait(0):
        return handle.result()
    if sys.stderr.isatty():
        return _wait_with_bar(handle)
    while not handle.wait(SAY_EVERY_S):
        _say_waiting(handle.progress().share)
    return handle.result()


async def judge_inline(
    config: JudgeConfig, requests: Sequence[JudgeRequest], spent: float
) -> tuple[list[Verdict], float]:
    """Judges a batch on the running loop; gives what it cost too. A log hears how far it is, as above."""
    async with InlineJudge(config, spent=spent) as judge:
        judging = asyncio.ensure_future(judge.score(requests))
        try:
            while not (await asyncio.wait([judging], timeout=SAY_EVERY_S))[0]:
                _say_waiting(judge.share_done)
            return judging.result(), judge.engine.spent - spent
        finally:
            judging.cancel()


def _say_waiting(share: float) -> None:
    log.info("Waiting for OpenAI results... %.1f%% complete", 100 * share)


def _wait_with_bar(handle: Handle) -> list[Verdict]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("OpenAI results"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(handle))
        while not handle.wait(REDRAW_S):
            bar.update(task, completed=handle.progress().done)
    return handle.result()


def elapsed_s(handle: Handle, since: float) -> float:
    """From `since` to the batch's last verdict, however late somebody asked."""
    return (handle.finished_at or time.monotonic()) - since
