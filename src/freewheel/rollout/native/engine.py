"""`NativeEngine`: the engine protocol over a thread that decodes.

    event loop                                   thread
    generate ── InFlightGeneration ─▶ commands ─▶ DecodeLoop.add ─▶ Scheduler: waiting ─▶ slot ─▶ free again
                                    turn():      admit ─▶ prefill what is missing ─▶ place ─▶ step (one token a slot)
    InFlightGeneration.get ◀── one call a step ◀ responses of the samples that ended
    update_weights, a caller that left ──▶ between two steps; the answer comes back as a future

The thread waits for a command while it is idle. A caller waits for its request: for a response, an error, the
end of the thread, or the watch of `GenerationTracker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from freewheel.data.group import Finish, Response
from freewheel.rollout.engine import (
    EngineError,
    EngineStats,
    GenerationAborted,
    GenerationEvent,
    GenerationRequest,
    GenerationTracker,
    InFlightGeneration,
    generated_response,
)
from freewheel.rollout.engine_factories import NativeFactory
from freewheel.rollout.native.runner import (
    Placing,
    Prefilled,
    Runner,
    UnsupportedModel,
    check_agreement,
    check_supported,
    compute_logprobs,
    load_weights,
)
from freewheel.sync.weights import AnyWeights, content_sum

log = logging.getLogger(__name__)

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

CLOSE_PATIENCE_S = 30.0
"""Longer than a step. A step that hangs must not keep the program from ending."""

Command = tuple[Callable[[], Any], "Future[Any]"]


class NativeEngine:
    """Continuous batching over one model. Called from one event loop; the engine owns the model from now on.

    On a CPU, prompt, sampling parameters and weights determine tokens and log-probabilities bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_supported(model)
        prompt, expected = compute_logprobs(model.train(False), max_prompt_tokens)
        try:
            runner = Runner(
                model, slots=slots, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens, version=version
            )
            check_agreement(runner, prompt, expected)
        except NotImplementedError as error:  # a feature that only the model's own attention has
            raise UnsupportedModel(model, str(error)) from error
        self._model = model
        self._loop = DecodeLoop(runner, slots=slots, clock=clock)
        self._requests = GenerationTracker(
            slots=slots,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            vocabulary=runner.vocabulary,
            idle_s=self._loop.idle_s,
        )
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._open = True
        self._gate = threading.Lock()  # no command may be queued after the thread has answered the last one
        # A private pool: the event loop's may be full, and a new version must not wait for it.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="freewheel-native-aside")
        self._thread = threading.Thread(target=self._run, name="freewheel-native-engine", daemon=True)
        self._thread.start()

    # -- the protocol -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._loop.version

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        return self._requests.serve(request, self._start, self._stop)

    def _start(self, entry: InFlightGeneration) -> None:
        self._send(lambda: self._loop.add(entry))

    def _stop(self, entry: InFlightGeneration) -> None:
        if entry.missing and self._open:
            self._send(lambda: self._loop.forget(entry))

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        given = weights.tensors()
        loading = self._send(lambda: self._loop.update(version, lambda: load_weights(self._model, given)))
        held = await asyncio.wrap_future(loading)
        if not verify:
            return None
        # Runs while decoding continues: both only read the weights.
        return await asyncio.get_running_loop().run_in_executor(self._aside, content_sum, held.values())

    def stats(self) -> EngineStats:
        return self._loop.stats()

    async def close(self) -> None:
        with self._gate:
            if self._open:
                self._open = False
                self._commands.put((self._loop.stop, Future()))
        if self._thread.is_alive():  # not at a second `close`
            await asyncio.get_running_loop().run_in_executor(self._aside, self._thread.join, CLOSE_PATIENCE_S)
        self._aside.shutdown()
        if self._thread.is_alive():
            log.error("the native engine's thread did not end within %g s: a step hangs", CLOSE_PATIENCE_S)

    # -- commands -----------------------------------------------------------------------------------------------------

    def _send(self, what: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._gate:
            if not self._open:
                raise EngineError("the engine is closed")
            self._commands.put((what, answer))
        return answer

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason: EngineError = GenerationAborted("the engine was closed")
        try:
            with torch.inference_mode():
                while not self._loop.stopped:
                    self._run_commands()
                    if not self._loop.stopped:
                        self._loop.turn()
        except BaseException as error:  # no caller may wait for a thread that has ended
            log.exception("the native engine's thread failed")
            reason = EngineError(f"the engine failed: {error!r}")
        with self._gate:
            self._open = False
        while not self._commands.empty():
            _, answer = self._commands.get()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineError("the engine is closed"))
        _deliver([(entry, type(reason)(*reason.args)) for entry in self._requests])

    def _run_commands(self) -> None:
        """Run pending commands. Waits for one only while there is nothing to decode."""
        while not self._loop.stopped and (not self._loop.has_work or not self._commands.empty()):
            what, answer = self._commands.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(what())
            except Exception as error:  # noqa: BLE001  # raised where the command was sent
                answer.set_exception(error)


def _deliver(events: Sequence[tuple[InFlightGeneration, GenerationEvent]]) -> None:
    """Put events into their requests from the engine's thread, with one call of the event loop."""

    def put_all() -> None:
        for entry, event in events:
            entry.put(event)

    if events:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the callers are gone
            events[0][0].loop.call_soon_threadsafe(put_all)


# -- the thread's side -------------------------------------------------------------------------------------------------


class DecodeLoop:
    """All methods run in the engine's thread, except `stats`, `version` and `idle_s`, which only read."""

    def __init__(self, runner: Runner, *, slots: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._scheduler: Scheduler[InFlightGeneration] = Scheduler(
            slots=slots, refill=NativeFactory().refill_slots(slots)
        )
        self._clock = clock
        self._prefilled: dict[InFlightGeneration, Prefilled] = {}
        self._progress_at: float | None = None
        """When the last token was made. None while no token is expected: when idle, and during an update."""
        self.stopped = False
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._busy_s = 0.0

    # -- what others read ---------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._runner.version

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def idle_s(self) -> float:
        """How long no token was made although one was expected."""
        progress_at = self._progress_at
        return 0.0 if progress_at is None else self._clock() - progress_at

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            slots=self._scheduler.slots,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            busy_s=self._busy_s,
        )

    # -- commands -----------------------------------------------------------------------------------------------------

    def add(self, entry: InFlightGeneration) -> None:
        self._scheduler.add(entry, len(entry.request.samples))

    def stop(self) -> None:
        self.stopped = True

    def update(self, version: int, load: Callable[[], T]) -> T:
        """Load weights between two tokens. Prompts that were prefilled and have not entered are prefilled again."""
        is_decoding, self._progress_at = self._progress_at is not None, None
        try:
            held = load()
            self._runner.set_version(version)
            self._prefilled.clear()
        finally:
            self._progress_at = self._clock() if is_decoding else None
        return held

    def forget(self, entry: InFlightGeneration) -> None:
        """Drop a request whose caller is gone."""
        self._prefilled.pop(entry, None)
        self._runner.free(self._scheduler.drop(entry))

    # -- a turn -------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Make one token for every sample that holds a slot. A failure ends only the requests in flight."""
        began_s = time.perf_counter()
        if self._progress_at is None:
            self._progress_at = self._clock()
        try:
            placements = self._scheduler.admit()
            if placements:
                self._enter(placements)
            self._runner.advance()
            ended = self._runner.step()
            self._generated_tokens += self._scheduler.running
            events = self._responses(ended)
        except Exception as error:  # out of memory, a broken kernel, a bug: the callers must get it
            log.exception("generation failed")
            events = self._collapse(error)
        self._progress_at = self._clock() if self._scheduler.running else None
        self._busy_s += time.perf_counter() - began_s
        _deliver(events)

    def _enter(self, placements: Sequence[SlotAssignment[InFlightGeneration]]) -> None:
        needed = dict.fromkeys(p.request for p in placements)
        missing = [entry for entry in needed if entry not in self._prefilled]
        while missing:
            missing = self._prefill(missing)
        entering = []
        for placement in placements:
            entry, request = placement.request, placement.request.request
            params = request.samples[placement.index]
            entering.append(Placing(placement.slot, request.prompt, self._prefilled[entry], params))
            if placement.index == len(request.samples) - 1:
                del self._prefilled[entry]  # all its samples have entered
        self._runner.place(entering)

    def _prefill(self, missing: list[InFlightGeneration]) -> list[InFlightGeneration]:
        """Run one prefill of the first request's bucket, filled up with waiting requests of that bucket.

        Returns the missing requests that it did not cover.
        """
        bucket = self._bucket(missing[0])
        unread = (entry for entry in (*missing, *self._scheduler.upcoming()) if entry not in self._prefilled)
        suitable = (entry for entry in dict.fromkeys(unread) if self._bucket(entry) == bucket)
        chosen = list(itertools.islice(suitable, self._runner.prefill_rows(bucket)))
        prompts = [entry.request.prompt for entry in chosen]
        self._prefilled |= zip(chosen, self._runner.prefill(prompts), strict=True)
        self._prompt_tokens += sum(map(len, prompts))
        return [entry for entry in missing if entry not in self._prefilled]

    def _bucket(self, entry: InFlightGeneration) -> int:
        return self._runner.bucket(entry.request.prompt)

    # -- results of a step --------------------------------------------------------------------------------------------

    def _responses(self, ended: Sequence[tuple[int, Finish]]) -> list[tuple[InFlightGeneration, GenerationEvent]]:
        slots = [slot for slot, _ in ended]
        events: list[tuple[InFlightGeneration, GenerationEvent]] = []
        bad: set[InFlightGeneration] = set()
        for (slot, finish), out in zip(ended, self._runner.take(slots), strict=True):
            entry, index = self._scheduler.release(slot)
            events.append((entry, (index, generated_response(out.tokens, out.logprobs, out.versions, finish))))
            if not out.sound:
                bad.add(entry)
        self._runner.free(slots)
        if bad:  # NaN and infinity must not be trained on
            self._runner.remove_non_finite()
            events = [(entry, event) for entry, event in events if entry not in bad]
        for entry in bad:
            self.forget(entry)
            message = f"the model's log-probabilities are not finite (weight version {self.version})"
            events.append((entry, EngineError(f"request {entry.request.id!r}: {message}")))
        return events

    def _collapse(self, error: Exception) -> list[tuple[InFlightGeneration, GenerationEvent]]:
        entries = self._scheduler.started()
        for entry in entries:
            self.forget(entry)
        self._prefilled.clear()
        self._runner.free(range(self._runner.rows))
        self._runner.remove_non_finite()
        return [(entry, EngineError(f"generation failed: {error!r}")) for entry in entries]


@dataclass(frozen=True)
class SlotAssignment(Generic[Key]):
    """A sample that gets a slot."""

    request: Key
    index: int
    """Which of the request's samples."""
    slot: int


class Scheduler(Generic[Key]):
    """Requests are served in the order of arrival. No sample enters before all samples of earlier requests.

    A slot holds at most one sample, and a sample gets a slot once, unless its request is dropped first. Pure.
    """

    def __init__(self, *, slots: int, refill: int = 1) -> None:
        """`refill`: how many slots must be free before samples enter next to running ones."""
        assert slots > 0
        self.slots = slots
        self._refill = refill
        self._free = list(range(slots))  # a heap: low slots first keeps the ones in use together
        self._waiting: deque[tuple[Key, int]] = deque()
        """(request, index of the sample)"""
        self._held: dict[int, tuple[Key, int]] = {}
        """The request and the sample in each slot."""

    @property
    def running(self) -> int:
        """Samples that hold a slot."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Samples that wait for a slot."""
        return len(self._waiting)

    def add(self, request: Key, samples: int) -> None:
        self._waiting.extend((request, index) for index in range(samples))

    def admit(self) -> list[SlotAssignment[Key]]:
        """Fill free slots, unless only a few are free: a prefill has a fixed cost."""
        placed: list[SlotAssignment[Key]] = []
        if self._held and len(self._free) < min(self._refill, self.waiting):
            return placed
        while self._free and self._waiting:
            slot = heapq.heappop(self._free)
            request, index = self._held[slot] = self._waiting.popleft()
            placed.append(SlotAssignment(request, index, slot))
        return placed

    def upcoming(self) -> Iterable[Key]:
        """Requests with waiting samples, in order."""
        return dict.fromkeys(request for request, _ in self._waiting)

    def release(self, slot: int) -> tuple[Key, int]:
        """The slot's sample has ended. Returns (request, index of the sample)."""
        heapq.heappush(self._free, slot)
        return self._held.pop(slot)

    def drop(self, request: Key) -> list[int]:
        """Forget a request; returns the slots it held. Unknown requests hold none."""
        freed = sorted(slot for slot, (holder, _) in self._held.items() if holder == request)
        for slot in freed:
            self.release(slot)
        self._waiting = deque(sample for sample in self._waiting if sample[0] != request)
        return freed

    def started(self) -> list[Key]:
        """Requests that hold a slot."""
        return list(dict.fromkeys(request for request, _ in self._held.values()))
