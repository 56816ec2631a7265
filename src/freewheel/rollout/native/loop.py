"""Turn after turn of decoding: scheduler, prefills, steps, and what they mean for requests. Lives in the thread.

    turn(): admit ─▶ prefill what is missing (and what comes next, where a prefill has rows left) ─▶ place ─▶ step
            ─▶ responses of the samples that ended ─▶ one message to the event loop

It owns time: `timeout_s` counts from a request's last token, and pauses and weight updates stand outside of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from freewheel.data.group import Finish
from freewheel.rollout.engine import EngineError, EngineStats, GenerationTimeout, generated_response
from freewheel.rollout.native.flight import Event, Flight, send
from freewheel.rollout.native.runner import Placing, Prefilled, Runner
from freewheel.rollout.native.scheduler import Placement, Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")

REFILL_SHARE = 8
"""Slots are refilled an eighth of them at a time: entering costs half a step, for one sample as for thirty."""


class DecodeLoop:
    """All methods are called in the engine's thread, except `stats`, `version` and `idle_s`, which only read."""

    def __init__(self, runner: Runner, *, slots: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._scheduler: Scheduler[Flight] = Scheduler(slots=slots, refill=max(1, slots // REFILL_SHARE))
        self._clock = clock
        self._prefilled: dict[Flight, Prefilled] = {}
        self._paused = False
        self._progress_at = clock()
        self._standing = True  # paused, updating or idle: no token is due
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
        """Since when no token was made though one was due."""
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

    def add(self, flight: Flight) -> None:
        if flight.request.samples and not flight.over:
            self._scheduler.add(flight, len(flight.request.samples))

    def pause(self) -> None:
        self._paused = True
        self._standing = True

    def resume(self) -> None:
        self._paused = False
        self._progress_at = self._clock()

    def stop(self) -> None:
        self.stopped = True

    def update(self, version: int, load: Callable[[], T]) -> T:
        """Between two tokens. Prompts that were read ahead and have not begun are read again, by the new weights."""
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

    def forget(self, flight: Flight) -> None:
        """Nobody listens to it any more."""
        flight.holds_slot = False
        self._prefilled.pop(flight, None)
        self._runner.free(self._scheduler.drop(flight))

    def fail(self, flight: Flight, error: EngineError) -> None:
        self.forget(flight)
        send([(flight, error)])

    def fail_all(self, error: EngineError, flights: Sequence[Flight]) -> None:
        send([(flight, type(error)(*error.args)) for flight in flights])

    # -- a turn -------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One token for everything that holds a slot. A failure ends what is in flight, and no more than that."""
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
            events = self._late() + self._responses(ended)
        except Exception as error:  # out of memory, a broken kernel, a bug: the requests must hear of it
            log.exception("generation failed")
            events = self._collapse(error)
        self._standing = not self._scheduler.running
        self._busy_s += time.perf_counter() - began_s
        if events:
            send(events)

    def _enter(self, placements: Sequence[Placement[Flight]]) -> None:
        needed = dict.fromkeys(p.request for p in placements)
        for flight in needed:
            flight.holds_slot = True
        missing = [flight for flight in needed if flight not in self._prefilled]
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
                self._prefilled.pop(placement.request, None)  # all have entered

    def _prefill(self, missing: list[Flight]) -> list[Flight]:
        """One prefill: of the first one's bucket, filled up with requests that will need theirs soon. What is left."""
        bucket = self._bucket(missing[0])
        room = self._runner.prefill_rows(bucket)
        chosen = [flight for flight in missing if self._bucket(flight) == bucket][:room]
        taken = set(chosen)
        if len(chosen) < room:
            for flight in self._scheduler.upcoming():
                if self._bucket(flight) == bucket and flight not in taken and flight not in self._prefilled:
                    chosen.append(flight)
                    taken.add(flight)
                    if len(chosen) == room:
                        break
        prompts = [flight.request.prompt for flight in chosen]
        for flight, prefilled in zip(chosen, self._runner.prefill(prompts), strict=True):
            self._prefilled[flight] = prefilled
        self._prompt_tokens += sum(map(len, prompts))
        return [flight for flight in missing if flight not in taken]

    def _bucket(self, flight: Flight) -> int:
        return self._runner.bucket(flight.request.prompt)

    # -- what a step means --------------------------------------------------------------------------------------------

    def _late(self) -> list[tuple[Flight, Event]]:
        """Requests whose token took too long; and the clock starts again for the others."""
        now = self._clock()
        idle_s, self._progress_at = now - self._progress_at, now
        events: list[tuple[Flight, Event]] = []
        for flight in self._scheduler.started():
            if idle_s > flight.request.timeout_s:
                self.forget(flight)
                events.append((flight, GenerationTimeout(_late_message(flight, idle_s))))
        return events

    def _responses(self, ended: Sequence[tuple[int, Finish]]) -> list[tuple[Flight, Event]]:
        held = [(slot, finish, *self._scheduler.holder(slot)) for slot, finish in ended if self._scheduler.holds(slot)]
        slots = [slot for slot, _, _, _ in held]
        outputs = self._runner.take(slots)
        events: list[tuple[Flight, Event]] = []
        bad: set[Flight] = set()
        for (slot, finish, flight, index), out in zip(held, outputs, strict=True):
            self._scheduler.release(slot)
            response = generated_response(out.tokens, out.logprobs, out.versions, finish)
            events.append((flight, (index, response)))
            if not out.sound:
                bad.add(flight)
        self._runner.free(slots)
        return self._without(bad, events) if bad else events

    def _without(self, bad: set[Flight], events: list[tuple[Flight, Event]]) -> list[tuple[Flight, Event]]:
        """Numbers that are no numbers must not be trained on: such a request fails, and its slots are not trusted."""
        self._runner.distrust()
        for flight in bad:
            self.forget(flight)
        kept = [(flight, event) for flight, event in events if flight not in bad]
        return kept + [(flight, EngineError(_unsound_message(flight, self.version))) for flight in bad]

    def _collapse(self, error: Exception) -> list[tuple[Flight, Event]]:
        flights = self._scheduler.started()
        for flight in flights:
            self.forget(flight)
        self._prefilled.clear()
        self._runner.free(range(self._runner.rows))
        self._runner.distrust()
        return [(flight, EngineError(f"generation failed: {error!r}")) for flight in flights]


def _late_message(flight: Flight, idle_s: float) -> str:
    return f"request {flight.request.id!r}: no token for {idle_s:.3g} s, timeout_s = {flight.request.timeout_s:g}"


def _unsound_message(flight: Flight, version: int) -> str:
    return f"request {flight.request.id!r}: the model's log-probabilities are not finite (weight version {version})"
