"""Which weights made which token, where an engine says it of a batch at best.

    batch of new tokens ─▶ its version ─────────▶ TokenVersions.batch ─▶ spans of each request ─▶ int32, one a token
                           │ by its label, or                │ counts tokens only where the version changes
                           └ Timeline: by when it was made   ▼
                                                     nothing is done for a token

Pure. A token is never taken for newer than the weights that made it: staleness must not be told smaller than it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

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
