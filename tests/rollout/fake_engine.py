"""An engine without a model. A test decides what it generates, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from freewheel.data.group import Response
from freewheel.rollout.engine import EngineStats, GenerationRequest, generated_response
from freewheel.sync.weights import AnyWeights

Behave = Callable[[GenerationRequest, int], Any]
"""Called with a request and how often its prompt was asked for before; may be async, may raise."""


class FakeEngine:
    """Each response is `prompt's first token, index of the sample`, unless `behave` raises or gives other tokens."""

    def __init__(self, behave: Behave | None = None, *, version: int = 0) -> None:
        self.version = version
        self.loaded: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.running = 0
        self.most_running = 0
        self.closed_early = 0
        self.closed = False
        self.gate = asyncio.Event()
        """Between the first and the second half of each response; open unless a test closes it."""
        self.gate.set()
        self._behave = behave
        self._asked: dict[bytes, int] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        self.requests.append(request)
        key = np.asarray(request.prompt).tobytes()
        before = self._asked.get(key, 0)
        self._asked[key] = before + 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        left = len(request.samples)
        try:
            if self._behave is not None:
                found = self._behave(request, before)
                if asyncio.iscoroutine(found):
                    await found
            for index in range(len(request.samples)):
                first = self.version
                await self.gate.wait()
                left -= 1
                tokens, versions = [int(request.prompt[0]), index], [first, self.version]
                yield index, response_of(tokens, versions)
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            self.closed_early += left > 0

    async def update_weights(self, version: int, weights: AnyWeights, *, verify: bool) -> int | None:
        self.version = version
        self.loaded.append(version)
        return weights.checksum if verify else None

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version,
            running=self.running,
            waiting=0,
            slots=8,
            prompt_tokens=0,
            generated_tokens=0,
            busy_s=0.0,
        )

    async def close(self) -> None:
        self.closed = True


def response_of(tokens: list[int], versions: list[int]) -> Response:
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return generated_response(np.array(tokens, np.int32), logprobs, np.array(versions, np.int32), "stop")
