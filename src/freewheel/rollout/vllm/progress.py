"""Time that counts, and who waits too long for a token: pauses excluded, and waiting for a slot excluded.

    Stopwatch: runs while it is told to          Watch.look(now, tokens of each sample) ─▶ samples without a new one

Pure: clock and counts are given. Called by `VllmEngine`, which looks a few times within the shortest timeout: an engine
that sends a response when it is whole tells nobody of a single token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LOOKS = 4
"""Looks within a timeout: it is noticed at most a quarter late."""


class Stopwatch:
    """Adds up the time between `start` and `stop`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._since: float | None = None

    def run(self, running: bool) -> None:
        """Starts or stops it, where it is not so already."""
        now = self._clock()
        if self._since is not None:
            self._total_s += now - self._since
        self._since = now if running else None

    @property
    def elapsed_s(self) -> float:
        return self._total_s + (0.0 if self._since is None else self._clock() - self._since)


@dataclass
class _Sample:
    timeout_s: float
    since_s: float
    """Since when it has had no new token, as far as it holds a slot."""
    tokens: int = 0


class Watch:
    """Samples in the order in which they came, and how long each has had no new token."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._samples: dict[str, _Sample] = {}
        self._moved_s = 0.0
        """When any sample was last seen to get a token, or to end."""

    @property
    def look_every_s(self) -> float | None:
        """None: there is nothing to look at."""
        shortest = min((sample.timeout_s for sample in self._samples.values()), default=None)
        return None if shortest is None else shortest / LOOKS

    def begin(self, sample: str, timeout_s: float, now_s: float) -> None:
        self._samples[sample] = _Sample(timeout_s, now_s)

    def end(self, sample: str, now_s: float) -> None:
        if self._samples.pop(sample, None) is not None:
            self._moved_s = now_s

    def look(self, now_s: float, tokens: Mapping[str, int]) -> dict[str, float]:
        """Samples that are over their time, with how long they have waited.

        One that has tokens holds a slot. Of the others the first hold those that are left, and have waited since
        anybody got a token: memory for their keys and values may be what they wait for.
        """
        for name, sample in self._samples.items():
            made = tokens.get(name, 0)
            if made > sample.tokens:
                sample.tokens, sample.since_s = made, now_s
                self._moved_s = now_s
        free = self._slots - sum(sample.tokens > 0 for sample in self._samples.values())
        late: dict[str, float] = {}
        for name, sample in self._samples.items():
            since_s = sample.since_s
            if not sample.tokens:
                if free <= 0:
                    sample.since_s = now_s
                    continue
                free -= 1
                since_s = max(since_s, self._moved_s)
            if now_s - since_s > sample.timeout_s:
                late[name] = now_s - since_s
        return late
