"""The judge under the names that reward code uses: `AsyncOpenAIManager` off the caller's thread, `AsyncOpenAIWorker` on
the running loop. Also how a reward manager waits for verdicts (`wait_for`, `judge_inline`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from freewheel.judge import Handle, Judge, JudgeConfig, JudgeRequest
from freewheel.judge.judge import InlineJudge, as_requests
from freewheel.judge.request import RequestHasher
from freewheel.judge.verdict import Scored, Verdict
from freewheel.rewards.config import LengthPenaltyConfig

log = logging.getLogger("freewheel.rewards")

T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 5.0
LOG_EVERY_S = 10.0
"""How often a waiting batch logs its progress."""
REDRAW_S = 0.25
"""How often a terminal's progress bar moves."""


def get_request_hash(request: JudgeRequest | str, config: JudgeConfig) -> str:
    """Return the SHA-256 (hex) of everything that decides the reply: endpoint, model, rubric, sampling and content.

    Requests with the same hash are sent once, both while one is in flight and after one has a usable answer.
    """
    [checked] = as_requests([request])
    return RequestHasher(config)(checked.encodable()).hex()


class _Named:
    """The constructor under the argument names that reward code uses."""

    def __init__(
        self,
        api_key: str | None,
        model_name: str,
        api_endpoint: str,
        system_prompt: str | None = None,
        reward_coefficient: float = 1.0,
        max_concurrent: int | str = 10,
    ) -> None:
        config = LengthPenaltyConfig(
            api_key=api_key,  # type: ignore[arg-type]  # the config makes a Secret of it
            model_name=model_name,
            api_endpoint=api_endpoint,
            system_prompt=system_prompt or None,
            reward_coefficient=reward_coefficient,
            max_concurrent_requests=max_concurrent,
        )
        super().__init__(config.judge_config())  # type: ignore[call-arg]  # Judge or InlineJudge
        self.reward_coefficient = reward_coefficient

    def reward(self, verdict: Verdict) -> float | None:
        """Return the verdict as a reward; None if there is no score."""
        return self.reward_coefficient * verdict.value if isinstance(verdict, Scored) else None


class AsyncOpenAIManager(_Named, Judge):
    """A `Judge`: it scores batches on an event loop off the caller's thread, and submitting never blocks."""

    @classmethod
    def of(cls, config: JudgeConfig, reward_coefficient: float) -> AsyncOpenAIManager:
        """Return a manager with any settings that the judge knows."""
        manager = cls.__new__(cls)
        Judge.__init__(manager, config)
        manager.reward_coefficient = reward_coefficient
        return manager

    def results(self, handle: Handle) -> list[Verdict]:
        """Wait for a batch and report progress: a bar in a terminal, a line every 10 s in a log."""
        return wait_for(handle)

    def get_request_hash(self, request: JudgeRequest | str) -> str:
        return get_request_hash(request, self.config)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """End the process, threads, sockets, tasks and files. Idempotent."""
        self.close(timeout_s=timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return AsyncOpenAIManager.of, (self.config, self.reward_coefficient)


class AsyncOpenAIWorker(_Named, InlineJudge):
    """Performs the calls on the running loop over one pooled HTTP client, with errors handled and retried.

    async with AsyncOpenAIWorker(key, "my-judge", "http://127.0.0.1:8000/v1") as worker:
        verdicts = await worker.score(["Paris."])
    """


# -- waiting for verdicts ---------------------------------------------------------------------------------------------


def wait_for(handle: Handle) -> list[Verdict]:
    """Wait for a batch's verdicts and report progress: a bar in a terminal, a line every 10 s in a log."""
    if handle.wait(0):
        return handle.result()
    if sys.stderr.isatty():
        return _wait_with_bar(handle)
    while not handle.wait(LOG_EVERY_S):
        _log_progress(handle.progress().share)
    return handle.result()


async def judge_inline(
    config: JudgeConfig, requests: Sequence[JudgeRequest], spent: float
) -> tuple[list[Verdict], float]:
    """Judge a batch on the running loop. Returns the verdicts and their cost, and logs progress like `wait_for`."""
    async with InlineJudge(config, spent=spent) as judge:
        judging = asyncio.ensure_future(judge.score(requests))
        try:
            while not (await asyncio.wait([judging], timeout=LOG_EVERY_S))[0]:
                _log_progress(judge.share_done)
            return judging.result(), judge.engine.spent - spent
        finally:
            judging.cancel()


def _log_progress(share: float) -> None:
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


def run_privately(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a new loop in this thread, or in a new thread if a loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # With a factory, the loop that this thread has set stays set. asyncio.run() would remove it.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(work)
    with ThreadPoolExecutor(1, "freewheel-rewards-sync") as pool:
        return pool.submit(asyncio.run, work).result()
