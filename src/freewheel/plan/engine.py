"""One engine's decoding under a virtual clock: slots, steps, who ends when. `simulation` has the events.

    add ─▶ waiting ─ free slots ─▶ running: ends at step now + its length ─▶ finish: all that end at this step
                                   a step takes `Generation.token_s` of how many run; pauses and prefills stop the steps

Sequences enter between two steps and have whole lengths, so that many end at once and one event serves them all.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator

from freewheel.plan.scene import Generation

SLACK = 1e-6
"""Of a step: what adding up fractions of steps may be off by."""


class Group:
    """One group on its way."""

    __slots__ = ("replica", "scored_at", "sequence", "tokens", "unmade", "unscored", "version")

    def __init__(self, sequence: int, n: int, replica: int) -> None:
        self.sequence = sequence
        self.replica = replica
        self.unmade = n
        """Responses that are not generated yet."""
        self.unscored = n
        self.scored_at = 0.0
        """When the last of those that have ended is scored, where that is known ahead."""
        self.tokens = 0
        self.version = -1
        """That the engine held when its first token was made."""


class Engine:
    """Every response that is added ends once, after as many steps as it has tokens."""

    __slots__ = (
        "_at", "_due", "_keys", "_lengths", "_model", "_samples_waiting", "_stall_s", "_steps", "_token_s", "_waiting",
        "busy_s", "paused", "running", "sequence_s", "slowed", "tokens", "version",
    )  # fmt: skip

    def __init__(self, model: Generation, lengths: Iterator[int]) -> None:
        self._model = model
        self._lengths = lengths
        self._at = 0.0
        self._steps = 0.0
        self._token_s = model.step_s
        self._stall_s = 0.0  # prompts that are still to be read before the next step
        self._due: dict[int, list[Group]] = {}
        self._keys: list[int] = []  # of `_due`, a heap
        self._waiting: deque[list[object]] = deque()  # [group, samples that have no slot]
        self._samples_waiting = 0
        self.running = 0
        self.version = 0
        self.paused = False
        self.slowed = 1.0
        """By what goes on beside it, as a factor."""
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """The same times the sequences that ran."""
        self.tokens = 0
        """Of what has a slot or had one."""

    def advance(self, now: float) -> None:
        elapsed = now - self._at
        self._at = now
        if not self.running or self.paused:
            return
        self.busy_s += elapsed
        self.sequence_s += elapsed * self.running
        if self._stall_s:
            if self._stall_s >= elapsed:
                self._stall_s -= elapsed
                return
            elapsed -= self._stall_s
            self._stall_s = 0.0
        self._steps += elapsed / self._token_s

    def due_at(self) -> float:
        """When the next response ends, if nothing changes before."""
        if not self.running or self.paused:
            return math.inf
        return self._at + self._stall_s + max(0.0, self._keys[0] - self._steps) * self._token_s

    def add(self, group: Group, samples: int) -> None:
        """After `advance`; `enter` then gives them slots."""
        self._waiting.append([group, samples])
        self._samples_waiting += samples

    def finish(self, now: float) -> list[Group]:
        """The step at `due_at` is done: the group of each response that ended with it. Others take their slots."""
        self.advance(now)
        step = heapq.heappop(self._keys)
        self._steps = float(step)
        ended = self._due.pop(step)
        self.running -= len(ended)
        self.enter()
        return ended

    def enter(self) -> None:
        """Free slots go to what waits, but not a few of them at a time."""
        model = self._model
        free = model.slots - self.running
        if self._waiting and free and (not self.running or free >= min(model.refill, self._samples_waiting)):
            start = math.ceil(self._steps - SLACK)
            if not self.running:
                self._steps = float(start)
            due, lengths, keys, waiting = self._due, self._lengths, self._keys, self._waiting
            apart = model.resolution
            while free and waiting:
                entry = waiting[0]
                group: Group = entry[0]  # type: ignore[assignment]
                samples: int = entry[1]  # type: ignore[assignment]
                count = free if free < samples else samples
                if group.version < 0:
                    group.version = self.version
                    self._stall_s += model.prefill_s * self.slowed
                for _ in range(count):
                    length = next(lengths)
                    group.tokens += length
                    self.tokens += length
                    step = start + length
                    if apart > 1:
                        step = max((step + apart // 2) // apart, start // apart + 1) * apart
                    there = due.get(step)
                    if there is None:
                        due[step] = [group]
                        heapq.heappush(keys, step)
                    else:
                        there.append(group)
                free -= count
                self.running += count
                self._samples_waiting -= count
                if count == samples:
                    waiting.popleft()
                else:
                    entry[1] = samples - count
        self._token_s = model.token_s(self.running) * self.slowed

    def slow(self, factor: float) -> None:
        """After `advance`."""
        self._stall_s *= factor / self.slowed
        self.slowed = factor
        self._token_s = self._model.token_s(self.running) * factor
