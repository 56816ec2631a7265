"""Determines which weights made which token, from information per batch at best. Pure.

    batch of new tokens ─▶ its version ─────────▶ TokenVersions.batch ─▶ spans of each request ─▶ int32, one per token
                           │ from its label, or              │ counts tokens only where the version changes
                           └ Timeline: from its time         ▼
                                                     no work per token

A token is never labelled newer than the weights that made it: staleness must not be understated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from freewheel.data.group import Array


class Timeline:
    """Which version served from when on. All times are of one clock."""

    def __init__(self, version: int) -> None:
        self._since = [float("-inf")]
        self._versions = [version]

    def changed(self, since_s: float, version: int) -> None:
        """Record a change at `since_s`, while nothing is generated: earlier tokens are older, later tokens are of
        `version`."""
        assert since_s >= self._since[-1], "time goes on"
        self._since.append(since_s)
        self._versions.append(version)

    def at(self, made_s: float) -> int:
        """Return the version that served at that time; at the moment of a change, the older one."""
        place = bisect_right(self._since, made_s) - 1
        if place > 0 and self._since[place] == made_s:
            place -= 1
        return self._versions[place]


class TokenVersions:
    """Spans of versions over the tokens of all open requests."""

    def __init__(self, version: int) -> None:
        self.version = version
        """Version of the last batch."""
        self._spans: dict[str, list[tuple[int, int]]] = {}
        """(first token, version), ascending."""

    def begin(self, request: str) -> None:
        """Register a request before the engine knows it. Until a batch says otherwise, its tokens are of the last seen
        version."""
        self._spans[request] = [(0, self.version)]

    def batch(self, version: int, made: Mapping[str, int]) -> None:
        """Record that the next tokens are of `version`. `made`: tokens of each unfinished request so far. Other
        requests have ended or are not known yet, and do not change."""
        if version == self.version:
            return
        self.version = version
        for request, count in made.items():
            spans = self._spans.get(request)
            if spans is None:
                continue
            if spans[-1][0] == count:  # none of its tokens is of the earlier version
                spans.pop()
            spans.append((count, version))

    def of(self, request: str, tokens: int) -> Array:
        """Return the version of each of the first `tokens` tokens."""
        found = np.empty(tokens, np.int32)
        for first, version in self._spans[request]:
            found[first:] = version
        return found

    def end(self, request: str) -> None:
        self._spans.pop(request, None)


LOOKS = 4
"""Looks per timeout: a timeout is noticed at most a quarter late."""


@dataclass
class _Sample:
    timeout_s: float
    since_s: float
    """Since when it has had no new token while it holds a slot."""
    tokens: int = 0


class Watch:
    """Samples in order of arrival, and how long each has had no new token."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._samples: dict[str, _Sample] = {}
        self._moved_s = 0.0
        """When any sample last got a token or ended."""

    @property
    def look_every_s(self) -> float | None:
        """None: nothing to watch."""
        shortest = min((sample.timeout_s for sample in self._samples.values()), default=None)
        return None if shortest is None else shortest / LOOKS

    def begin(self, sample: str, timeout_s: float, now_s: float) -> None:
        self._samples[sample] = _Sample(timeout_s, now_s)

    def end(self, sample: str, now_s: float) -> None:
        if self._samples.pop(sample, None) is not None:
            self._moved_s = now_s

    def look(self, now_s: float, tokens: Mapping[str, int]) -> dict[str, float]:
        """Return samples over their time limit, with their waiting time.

        A sample with tokens holds a slot. The remaining slots belong to the first samples without tokens. Their wait
        counts from the last progress of any sample, because they may wait for KV memory.
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
