"""The judge as reward managers know it: `AsyncOpenAIManager` beside the caller, `AsyncOpenAIWorker` on a loop.

Both are the one engine of `freewheel.judge` under the names and signatures that reward code uses.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from freewheel.judge import Handle, Judge, JudgeConfig, JudgeRequest, JudgeStats
from freewheel.judge.judge import FROM_CONFIG, InlineJudge, Requests, as_requests
from freewheel.judge.request import RequestHasher
from freewheel.judge.verdict import Scored, Verdict
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.rewards.handle import wait_for

T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 5.0


def get_request_hash(request: JudgeRequest | str, config: JudgeConfig) -> str:
    """SHA-256, in hex, of all that decides the reply: endpoint, model, rubric, sampling and content.

    Requests with one hash are sent once, while one is in flight and after one has a usable answer.
    """
    [checked] = as_requests([request])
    return RequestHasher(config)(checked.encodable()).hex()


class AsyncOpenAIManager:
    """Judges batches on an event loop off the caller's thread: submitting never blocks.

    Owns the concurrency, the cache and what is pending. It starts at the first use and stays for the next batch.
    """

    def __init__(
        self,
        api_key: str | None,
        model_name: str,
        api_endpoint: str,
        system_prompt: str | None = None,
        reward_coefficient: float = 1.0,
        max_concurrent: int | str = 10,
    ) -> None:
        config = _config(api_key, model_name, api_endpoint, system_prompt, reward_coefficient, max_concurrent)
        self._open(config.judge_config(), config.reward_coefficient)

    @classmethod
    def of(cls, config: JudgeConfig, reward_coefficient: float) -> AsyncOpenAIManager:
        """With all that an engine can be told."""
        manager = cls.__new__(cls)
        manager._open(config, reward_coefficient)
        return manager

    def _open(self, config: JudgeConfig, reward_coefficient: float) -> None:
        self.config = config
        self.reward_coefficient = reward_coefficient
        self.judge = Judge(config)

    def start(self) -> None:
        """Now instead of at the first batch. Does nothing if it runs."""
        self.judge.start()

    def submit(self, requests: Requests, *, timeout_s: float | None = FROM_CONFIG) -> Handle:
        """Hands a batch over and returns at once; what has no verdict after `timeout_s` is marked as failed."""
        return self.judge.submit(requests, deadline_s=timeout_s)

    async def score(self, requests: Requests, *, timeout_s: float | None = FROM_CONFIG) -> list[Verdict]:
        """Submit and wait, without blocking the loop."""
        return await self.judge.score(requests, deadline_s=timeout_s)

    def results(self, handle: Handle) -> list[Verdict]:
        """Waits for a batch, and says how far it is: a bar in a terminal, a line every 10 s in a log."""
        return wait_for(handle)

    def reward(self, verdict: Verdict) -> float | None:
        """The verdict as a reward; None where there is no score."""
        return self.reward_coefficient * verdict.value if isinstance(verdict, Scored) else None

    def get_request_hash(self, request: JudgeRequest | str) -> str:
        return get_request_hash(request, self.config)

    def stats(self) -> JudgeStats:
        return self.judge.stats()

    @property
    def pending(self) -> int:
        """Batches that have no verdict for each of their requests yet."""
        return self.judge.pending

    @property
    def running(self) -> bool:
        return self.judge.running

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Leaves no process, thread, socket, task or file behind. Idempotent."""
        self.judge.close(timeout_s=timeout_s)


class AsyncOpenAIWorker(InlineJudge):
    """Performs the calls on the running loop over one pooled HTTP client, with errors handled and retried.

    async with AsyncOpenAIWorker(key, "my-judge", "http://127.0.0.1:8000/v1") as worker:
        verdicts = await worker.score(["Paris."])
    """

    def __init__(
        self,
        api_key: str | None,
        model_name: str,
        api_endpoint: str,
        system_prompt: str | None = None,
        reward_coefficient: float = 1.0,
        max_concurrent: int | str = 10,
    ) -> None:
        config = _config(api_key, model_name, api_endpoint, system_prompt, reward_coefficient, max_concurrent)
        super().__init__(config.judge_config())
        self.reward_coefficient = config.reward_coefficient


def _config(
    api_key: str | None,
    model_name: str,
    api_endpoint: str,
    system_prompt: str | None,
    reward_coefficient: float,
    max_concurrent: int | str,
) -> LengthPenaltyConfig:
    return LengthPenaltyConfig(
        api_key=api_key,  # type: ignore[arg-type]  # text is made a Secret
        model_name=model_name,
        api_endpoint=api_endpoint,
        system_prompt=system_prompt or None,
        reward_coefficient=reward_coefficient,
        max_concurrent_requests=max_concurrent,
    )


def run_privately(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on a loop of its own, in this thread; in a short-lived one where a loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # With a factory the thread's own loop, where it has one, stays its own; asyncio.run() would take it away.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(work)
    outcome: list[T] = []
    broken: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            broken.append(error)

    thread = threading.Thread(target=run, name="freewheel-rewards-sync")
    thread.start()
    thread.join()
    if broken:
        raise broken[0]
    return outcome[0]
