"""Which weights made which token, where an engine says it of a batch at best.

    batch of new tokens ─▶ its version ─────────▶ TokenVersions.batch ─▶ spans of each request ─▶ int32, one a token
                           │ by its label, or                │ counts tokens only where the version changes
                           └ Timeline: by when it was made   ▼
                                                     nothing is done for a token

Pure. A token is never taken for newer than the weights that made it: staleness must not be told smaller than it is.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from freewheel.data.group import Array


class Timeline:
    """From when on which version served. Times are those of one clock."""

    def __init__(self, version: int) -> None:
        self._since = [float("-inf")]
        self._versions = [version]

    def changed(self, since_s: float, version: int) -> None:
        """Nothing is being generated at `since_s`: what was made before is older, what is made after is `version`."""
        assert since_s >= self._since[-1], "time goes on"
        self._since.append(since_s)
        self._versions.append(version)

    def at(self, made_s: float) -> int:
        """The version that served at that time; at the very moment of a change, the older one."""
        place = bisect_right(self._since, made_s) - 1
        if place > 0 and self._since[place] == made_s:
            place -= 1
        return self._versions[place]


class TokenVersions:
    """Spans of versions over the tokens of all requests under way."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Of the batch that was seen last."""
        self._spans: dict[str, list[tuple[int, int]]] = {}
        """(first token, version), ascending."""

    def begin(self, request: str) -> None:
        """Before the engine hears of it. Until a batch says otherwise its tokens are of the version that was seen
        last."""
        self._spans[request] = [(0, self.version)]

    def batch(self, version: int, made: Mapping[str, int]) -> None:
        """The next tokens are of `version`; `made`: how many each unfinished request has by now. A request that is not
        among them has ended, or has not yet been heard of: nothing changes for it."""
        if version == self.version:
            return
        self.version = version
        for request, count in made.items():
            spans = self._spans.get(request)
            if spans is None:
                continue
            if spans[-1][0] == count:  # none of its tokens is of the version before
                spans.pop()
            spans.append((count, version))

    def of(self, request: str, tokens: int) -> Array:
        """The version of each of its first `tokens` tokens."""
        found = np.empty(tokens, np.int32)
        for first, version in self._spans[request]:
            found[first:] = version
        return found

    def end(self, request: str) -> None:
        self._spans.pop(request, None)


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
