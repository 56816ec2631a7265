"""An event stream on its way to a client. It begins with the upstream's first chunk: a failure before has a status.

The engine calls `write` with each chunk and reads on upstream when that returns: a slow client slows its own stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import hdrs, web

from freewheel.gateway.problem import Problem

EVENTS_TYPE = "text/event-stream; charset=utf-8"


class Ended(web.StreamResponse):
    """Tells aiohttp that nothing is left to be sent, and that the connection does not go on."""

    @property
    def keep_alive(self) -> bool | None:
        return False

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to do."""


class EventStream:
    """One streamed chat completion."""

    def __init__(self, request: web.BaseRequest, write_timeout_s: float, headers: Mapping[str, str]) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self._gone = False
        # Proxies that buffer (nginx) would turn a stream into one late reply.
        said = {hdrs.CONTENT_TYPE: EVENTS_TYPE, hdrs.CACHE_CONTROL: "no-cache", "X-Accel-Buffering": "no"}
        self.response = web.StreamResponse(headers={**said, **headers, "x-freewheel-cache": "miss"})

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def write(self, chunk: bytes) -> None:
        """`OSError` where the client is gone, or takes nothing for too long: the engine gives its slot free then."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(chunk)
        except OSError:
            self._gone = True
            raise

    async def break_off(self, problem: Problem) -> web.StreamResponse:
        """The upstream failed in the middle. The OpenAI clients raise on such an event; others see a cut connection."""
        if not self._gone:
            await self.write(b"data: " + problem.body() + b"\n\n")
        elif self._request.transport is not None:
            self._request.transport.abort()
        return Ended()  # without the last chunk: nobody may take this for the end
