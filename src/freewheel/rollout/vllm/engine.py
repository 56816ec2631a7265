"""`VllmEngine`: the engine protocol over vLLM's `AsyncLLM`.

    event loop                                              vLLM's engine core, a separate process
    generate ─ one request per sample ─▶ Llm.submit ──────▶ scheduler ─▶ step, step, …
    InFlightRequest.get ◀─ responses, with versions ◀─ Llm.versions ◀── batches of new tokens
    update_weights ─▶ pause ─▶ start, buckets, finish ─▶ resume ─▶ (verify)      requests are kept, with their KV

A sample waits for its output; its end, a caller that leaves, the watch or the core's death unblock it. An update
waits for the previous update and the core's answers; an answer or the core's death unblocks it.

An update that fails before the first bucket leaves the old version serving. One that fails later has overwritten some
weights: nothing is generated until another update succeeds. If the next one fails too, the engine counts as dead.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import numpy as np

from freewheel.data.group import Finish, Response
from freewheel.rollout.engine import (
    EngineDied,
    EngineError,
    EngineStats,
    GenerationAborted,
    GenerationRequest,
    InFlightRequest,
    RequestTracker,
    generated_response,
)
from freewheel.rollout.vllm.api import Output
from freewheel.rollout.vllm.transfer import whole_sum
from freewheel.sync.weights import AnyWeights
from freewheel.utils.waiting import Stopwatch

Connect = Callable[..., Any]
"""`Llm` or `RemoteLlm`, without `version` and `on_death`."""
Ship = Callable[[AnyWeights], AbstractContextManager[list[dict[str, Any]]]]
"""Turns weights into arguments of vLLM's `update_weights`, one per bucket."""

MOST_FAILED_UPDATES = 2
"""Consecutive failed updates of an engine with mixed weights: the second update may repair the first, and there is no
third."""
DEATH = "vLLM's engine core has died"
CONTENT_SUM = "freewheel_content_sum"
"""The worker's method that returns the checksum of its weights."""
FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length"}


class VllmEngine:
    """Continuous batching by vLLM. Called from one event loop.

    On a CPU a sample's draws follow from its seed; the batch may still change the last bit of a logit.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        ship: Ship,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        vocabulary: int,
        version: int = 0,
        initial: Callable[[], AnyWeights] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` returns a vLLM that belongs to this engine from now on. `initial`: the weights of `version`, if
        that vLLM may hold others; they are loaded before anything is generated."""
        self._llm = connect(version=version, on_death=self._core_died)
        self._initial = initial
        self._ship = ship
        self._slots = slots
        self._version = version
        self._name = secrets.token_hex(8)
        self._loads = 0
        """Number of successful updates."""
        self._requests = RequestTracker(
            slots=slots,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocabulary=vocabulary,
            idle_s=self._idle_s,
        )
        self._samples: dict[InFlightRequest, list[asyncio.Task[None]]] = {}
        self._live: set[str] = set()
        """Samples that are not done."""
        self._tasks: set[asyncio.Future[Any]] = set()
        """Background tasks that nobody awaits."""
        self._busy = Stopwatch(clock)
        """Time during which tokens may be expected."""
        self._progress: tuple[int | None, float] = 0, 0.0
        """Tokens made when a new one was last seen (None: not counted), and the busy time then."""
        self._is_paused = False
        self._free = asyncio.Event()
        """Set while no update runs: a request that starts now starts with the current version."""
        if initial is None:
            self._free.set()
        self._updating = asyncio.Lock()
        self._failed_updates = 0
        """Consecutive failures. Above 0 the weights are mixed."""
        self._prompt_tokens = 0
        self._ended_tokens = 0
        self._over: EngineError | None = None
        self._closing: asyncio.Future[None] | None = None
        self._priming: asyncio.Future[Any] | None = None
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="freewheel-vllm-aside")

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._version

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        return self._requests.serve(request, self._start, self._stop)

    def _start(self, entry: InFlightRequest) -> None:
        self._check_open()
        if self._initial is not None and self._priming is None:
            self._priming = self._run_task(self._prime())
        prompt = entry.request.prompt.tolist()
        self._prompt_tokens += len(prompt)
        self._samples[entry] = [
            asyncio.create_task(self._sample(entry, index, prompt)) for index in range(len(entry.request.samples))
        ]

    def _stop(self, entry: InFlightRequest) -> None:
        for sample in self._samples.pop(entry, ()):
            sample.cancel()

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        # A separate task: a cancelled caller must not leave half an update behind.
        return await asyncio.shield(self._run_task(self._take_over(version, weights, verify)))

    def stats(self) -> EngineStats:
        live = len(self._live)
        return EngineStats(
            version=self._version,
            running=min(live, self._slots),
            waiting=max(0, live - self._slots),
            slots=self._slots,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._count_tokens(),
            busy_s=self._busy.elapsed_s,
        )

    async def close(self) -> None:
        self._end(GenerationAborted("the engine was closed"))
        if self._closing is None:  # its end also ends pending requests and updates
            self._closing = asyncio.ensure_future(self._llm.shutdown())
        await asyncio.shield(self._closing)
        self._aside.shutdown(wait=False)

    # -- one sample ---------------------------------------------------------------------------------------------------

    async def _sample(self, entry: InFlightRequest, index: int, prompt: list[int]) -> None:
        """Put the response, or the error that ended it, into the request's inbox."""
        name = f"{entry.request.id}/{index}"
        self._live.add(name)
        self._busy.run(not self._is_paused)
        try:
            await self._free.wait()
            self._check_open()
            self._llm.versions.begin(name)
            output = await self._llm.output(name, prompt, entry.request.samples[index], salt=self._salt)
            response = self._response(name, output)
            self._forget(name, len(response.tokens))  # before `put`, so that the receiver finds it counted
            entry.put((index, response))
        except EngineError as error:
            entry.put(error)
        except Exception as error:  # noqa: BLE001  # whatever vLLM raises, the caller must get it
            died = self._llm.is_death(error)
            entry.put(EngineDied(DEATH) if died else EngineError(f"vLLM failed: {type(error).__name__}: {error}"))
        finally:
            if name in self._live:
                self._forget(name, self._llm.tokens().get(name, 0))
                if self._over is None:
                    self._run_task(self._llm.abort(name))

    @property
    def _salt(self) -> str:
        # Not the version: a server's cache outlives this engine, and a version number may return with other weights.
        return f"{self._name}-{self._loads}"

    def _forget(self, name: str, tokens: int) -> None:
        self._live.discard(name)
        self._ended_tokens += tokens
        self._llm.versions.end(name)
        self._progress = None, self._busy.elapsed_s  # an end is progress too
        self._busy.run(bool(self._live) and not self._is_paused)

    def _response(self, name: str, output: Output) -> Response:
        tokens = np.asarray(output.tokens, np.int32)
        logprobs = np.asarray(output.logprobs, np.float32)
        finish = FINISHES.get(output.finish)
        if finish is None:
            raise EngineError(f"vLLM ended {name!r} with {output.finish!r}")
        if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
            raise EngineError(f"vLLM gave {name!r} log-probabilities that are missing or not finite")
        return generated_response(tokens, logprobs, self._llm.versions.of(name, len(tokens)), finish)

    def _count_tokens(self) -> int:
        return self._ended_tokens + sum(int(count) for count in self._llm.tokens().values())

    def _idle_s(self) -> float:
        tokens, now_s = self._count_tokens(), self._busy.elapsed_s
        if tokens != self._progress[0]:
            self._progress = tokens, now_s
        return now_s - self._progress[1]

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _pause(self) -> None:
        """Return when no token is being made."""
        if not self._is_paused:
            await self._llm.pause()
        self._is_paused = True
        self._busy.run(False)

    async def _resume(self) -> None:
        self._is_paused = False
        await self._llm.resume()
        self._busy.run(bool(self._live))

    async def _take_over(self, version: int, weights: AnyWeights, verify: bool) -> int | None:
        async with self._updating:
            self._check_open()
            await self._replace(version, weights)
            # Runs while decoding continues: both only read the weights.
            return whole_sum(await self._llm.everywhere(CONTENT_SUM)) if verify else None

    async def _replace(self, version: int, weights: AnyWeights) -> None:
        async with self._prepare(weights) as buckets:
            self._free.clear()
            try:
                await self._pause()
                await self._load(version, buckets)
            finally:
                if not self._failed_updates and self._over is None:
                    await self._resume()
                    if self._initial is None:
                        self._free.set()

    async def _prime(self) -> None:
        """Load the weights of the initial version, unless a later one came first."""
        initial = self._initial
        if initial is None:
            return
        try:
            weights = await asyncio.get_running_loop().run_in_executor(self._aside, initial)
            async with self._updating:
                if self._initial is not None:
                    self._check_open()
                    await self._replace(self._version, weights)
        except Exception as error:  # noqa: BLE001  # whatever it was, nothing can be generated
            self._end(EngineDied(f"vLLM could not load its first weights: {error}"))

    async def _load(self, version: int, buckets: list[dict[str, Any]]) -> None:
        overwritten = self._failed_updates > 0
        try:
            await self._llm.start_update()
            for bucket in buckets:
                overwritten = True
                await self._llm.update(bucket)
            await self._llm.finish_update(version)
        except EngineDied:
            raise
        except Exception as error:
            what = f"vLLM did not take version {version}: {error}"
            if not overwritten:
                raise EngineError(f"{what}; version {self._version} continues to serve") from error
            self._failed_updates += 1
            if self._failed_updates >= MOST_FAILED_UPDATES:
                raise self._end(EngineDied(f"{what}; its weights are of several versions")) from error
            raise EngineError(f"{what}; nothing is generated until an update succeeds") from error
        self._failed_updates = 0
        self._version = version
        self._loads += 1
        self._initial = None

    @asynccontextmanager
    async def _prepare(self, weights: AnyWeights) -> AsyncIterator[list[dict[str, Any]]]:
        """Run `ship` in a thread, because it copies while generation continues."""

        def aside(what: Callable[..., Any], *args: Any) -> Awaitable[Any]:
            return asyncio.get_running_loop().run_in_executor(self._aside, what, *args)

        context = self._ship(weights)
        buckets = await aside(context.__enter__)
        try:
            yield buckets
        except BaseException as error:
            if not await aside(context.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await aside(context.__exit__, None, None, None)

    # -- life ---------------------------------------------------------------------------------------------------------

    def _run_task(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: its awaiter gets it too, and a failed abort concerns nobody

    def _check_open(self) -> None:
        if self._over is None and self._llm.is_dead:
            self._core_died()
        if isinstance(self._over, EngineDied):
            raise EngineDied(str(self._over))
        if self._over is not None:
            raise EngineError("the engine is closed")

    def _core_died(self) -> None:
        self._end(EngineDied(DEATH))

    def _end(self, reason: EngineError) -> EngineError:
        """End all waits. The first reason stays."""
        self._over = self._over or reason
        for entry in self._requests:
            entry.put(reason)
        self._free.set()
        return reason
