"""The decoding loop in the native engine's thread, and the scheduler that gives samples their slots.

    turn(): admit ─▶ prefill what is missing (and what comes next, where a prefill has rows left) ─▶ place ─▶ step
            ─▶ responses of the samples that ended ─▶ one message to the event loop

    add(request, n) ─▶ waiting ──admit()──▶ slot ──release(slot)──▶ free again
                          └──────── drop(request) ────────▶ gone

Called by `NativeEngine`.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from freewheel.data.group import Finish
from freewheel.rollout.engine import EngineError, EngineStats, generated_response
from freewheel.rollout.engines import NativeFactory
from freewheel.rollout.native.runner import Placing, Prefilled, Runner
from freewheel.rollout.requests import Event, InFlightRequest, send

log = logging.getLogger(__name__)

T = TypeVar("T")


class DecodeLoop:
    """All methods run in the engine's thread, except `stats`, `version` and `idle_s`, which only read."""

    def __init__(self, runner: Runner, *, slots: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._scheduler: Scheduler[InFlightRequest] = Scheduler(slots=slots, refill=NativeFactory().refill_slots(slots))
        self._clock = clock
        self._prefilled: dict[InFlightRequest, Prefilled] = {}
        self._paused = False
        self._progress_at = clock()
        self._standing = True  # paused, updating or idle: no token is expected
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
        return not self._paused and bool(self._scheduler.running or self._scheduler.waiting)

    def idle_s(self) -> float:
        """How long no token was made although one was expected."""
        return 0.0 if self._standing else self._clock() - self._progress_at

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            slots=self._scheduler.slots,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            busy_s=self._busy_s,
            paused=self._paused,
        )

    # -- commands -----------------------------------------------------------------------------------------------------

    def add(self, entry: InFlightRequest) -> None:
        if entry.request.samples and not entry.over:
            self._scheduler.add(entry, len(entry.request.samples))

    def pause(self) -> None:
        self._paused = True
        self._standing = True

    def resume(self) -> None:
        self._paused = False
        self._progress_at = self._clock()

    def stop(self) -> None:
        self.stopped = True

    def update(self, version: int, load: Callable[[], T]) -> T:
        """Load weights between two tokens. Prompts that were prefilled and have not entered are prefilled again."""
        began, stood = self._clock(), self._standing
        self._standing = True
        try:
            held = load()
            self._runner.set_version(version)
            self._prefilled.clear()
        finally:
            self._progress_at += self._clock() - began
            self._standing = stood
        return held

    def forget(self, entry: InFlightRequest) -> None:
        """Drop a request whose caller is gone."""
        entry.holds_slot = False
        self._prefilled.pop(entry, None)
        self._runner.free(self._scheduler.drop(entry))

    # -- a turn -------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Make one token for every sample that holds a slot. A failure ends only the requests in flight."""
        began_s = time.perf_counter()
        if not self._scheduler.running:
            self._progress_at = self._clock()
        self._standing = False
        try:
            placements = self._scheduler.admit()
            if placements:
                self._enter(placements)
            self._runner.advance()
            ended = self._runner.step()
            self._generated_tokens += self._scheduler.running
            self._progress_at = self._clock()
            events = self._responses(ended)
        except Exception as error:  # out of memory, a broken kernel, a bug: the callers must get it
            log.exception("generation failed")
            events = self._collapse(error)
        self._standing = not self._scheduler.running
        self._busy_s += time.perf_counter() - began_s
        send(events)

    def _enter(self, placements: Sequence[Placement[InFlightRequest]]) -> None:
        needed = dict.fromkeys(p.request for p in placements)
        for entry in needed:
            entry.holds_slot = True
        missing = [entry for entry in needed if entry not in self._prefilled]
        while missing:
            missing = self._prefill(missing)
        self._runner.place(
            [
                Placing(
                    p.slot, p.request.request.prompt, self._prefilled[p.request], p.request.request.samples[p.index]
                )
                for p in placements
            ]
        )
        for placement in placements:
            if placement.index == len(placement.request.request.samples) - 1:
                self._prefilled.pop(placement.request, None)  # all its samples have entered

    def _prefill(self, missing: list[InFlightRequest]) -> list[InFlightRequest]:
        """Run one prefill of the first request's bucket, filled up with waiting requests of that bucket.

        Returns the missing requests that it did not cover.
        """
        bucket = self._bucket(missing[0])
        room = self._runner.prefill_rows(bucket)
        chosen = [entry for entry in missing if self._bucket(entry) == bucket][:room]
        taken = set(chosen)
        if len(chosen) < room:
            for entry in self._scheduler.upcoming():
                if self._bucket(entry) == bucket and entry not in taken and entry not in self._prefilled:
                    chosen.append(entry)
                    taken.add(entry)
                    if len(chosen) == room:
                        break
        prompts = [entry.request.prompt for entry in chosen]
        for entry, prefilled in zip(chosen, self._runner.prefill(prompts), strict=True):
            self._prefilled[entry] = prefilled
        self._prompt_tokens += sum(map(len, prompts))
        return [entry for entry in missing if entry not in taken]

    def _bucket(self, entry: InFlightRequest) -> int:
        return self._runner.bucket(entry.request.prompt)

    # -- results of a step --------------------------------------------------------------------------------------------

    def _responses(self, ended: Sequence[tuple[int, Finish]]) -> list[tuple[InFlightRequest, Event]]:
        slots = [slot for slot, _ in ended]
        outputs = self._runner.take(slots)
        events: list[tuple[InFlightRequest, Event]] = []
        bad: set[InFlightRequest] = set()
        for (slot, finish), out in zip(ended, outputs, strict=True):
            entry, index = self._scheduler.release(slot)
            response = generated_response(out.tokens, out.logprobs, out.versions, finish)
            events.append((entry, (index, response)))
            if not out.sound:
                bad.add(entry)
        self._runner.free(slots)
        return self._without(bad, events) if bad else events

    def _without(
        self, bad: set[InFlightRequest], events: list[tuple[InFlightRequest, Event]]
    ) -> list[tuple[InFlightRequest, Event]]:
        """NaN and infinity must not be trained on: fail such requests, and empty their slots before reuse."""
        self._runner.distrust()
        for entry in bad:
            self.forget(entry)
        kept = [(entry, event) for entry, event in events if entry not in bad]
        return kept + [(entry, EngineError(_unsound_message(entry, self.version))) for entry in bad]

    def _collapse(self, error: Exception) -> list[tuple[InFlightRequest, Event]]:
        entries = self._scheduler.started()
        for entry in entries:
            self.forget(entry)
        self._prefilled.clear()
        self._runner.free(range(self._runner.rows))
        self._runner.distrust()
        return [(entry, EngineError(f"generation failed: {error!r}")) for entry in entries]


def _unsound_message(entry: InFlightRequest, version: int) -> str:
    return f"request {entry.request.id!r}: the model's log-probabilities are not finite (weight version {version})"


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Placement(Generic[Key]):
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
        """By slot."""

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

    def admit(self) -> list[Placement[Key]]:
        """Fill free slots, unless only a few are free: a prefill has a fixed cost."""
        placed: list[Placement[Key]] = []
        if self._held and len(self._free) < min(self._refill, self.waiting):
            return placed
        while self._free and self._waiting:
            slot = heapq.heappop(self._free)
            request, index = self._held[slot] = self._waiting.popleft()
            placed.append(Placement(request, index, slot))
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
