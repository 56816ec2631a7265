"""Connections, event streams and counters of the gateway.

    accept ──▶ connection_made ──▶ room? ──▶ serving ──▶ idle ──▶ … ──▶ connection_lost
                                    └ no: the longest idle one is closed, else 503

`Connections` is aiohttp's low-level server with a record of its connections. A drain waits for its events `none_busy`
and `none_open`. An `EventStream` sends its status with the first chunk from upstream, so that an earlier failure can
still get an error status. The engine calls `write` with each chunk and reads on when that returns, so a slow client
slows only its own stream. `Counts` holds the gateway's own counters for `/metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from freewheel.gateway.limits import Limits, Problem
from freewheel.judge.stats import Sample, exposition
from freewheel.utils.http import server_log

EVICT_IDLE_S = 5.0
"""A connection that has been idle for less may be about to be used: closing it would break a request on its way."""
_LINGER_S = 5.0
"""A refused body is read and discarded for this long; if the connection closed at once, the client would not see why.
"""
GONE = 499
"""The status that proxies log for a client that closed its connection. No client sees it."""
_EVENTS_TYPE = "text/event-stream; charset=utf-8"

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Counts:
    """Counters, which only grow."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By (route, status). A client that hung up before its reply counts as `GONE`."""
        self.rejected: Counter[str] = Counter()
        """By the limit that was reached: the error's `code`, or `connections`."""
        self.connections = 0

    def prometheus(self, **gauges: int) -> str:
        """Return Prometheus text; every name starts with `freewheel_gateway_`."""
        requests = sorted(self.requests.items())
        families: dict[str, list[Sample]] = {
            "requests_total": [({"route": route, "status": str(status)}, n) for (route, status), n in requests],
            "rejected_total": [({"limit": limit}, n) for limit, n in sorted(self.rejected.items())],
            "connections_total": [({}, self.connections)],
            **{name: [({}, value)] for name, value in gauges.items()},
        }
        return exposition("freewheel_gateway_", families)


@dataclass(slots=True)
class _Connection:
    transport: asyncio.Transport
    silence: asyncio.TimerHandle
    """Closes the connection if no request arrives."""
    idle_since: float
    busy: int = 0


class Connections(web.Server):
    """Accepts, counts and refuses connections; requests go to `handle`."""

    def __init__(self, handle: Handle, limits: Limits, counts: Counts, refusal: Problem) -> None:
        super().__init__(
            handle,
            request_factory=self._request,
            handler_cancellation=True,  # a client that hangs up frees its place in the queue
            access_log=None,
            logger=server_log("freewheel.gateway.http"),
            keepalive_timeout=limits.keepalive_s,
            lingering_time=_LINGER_S,
        )
        self._limits = limits
        self._counts = counts
        self._refusal = _raw(refusal)
        self._open: dict[RequestHandler, _Connection] = {}
        self.busy = 0
        self.none_busy = asyncio.Event()
        self.none_busy.set()
        self.none_open = asyncio.Event()
        self.none_open.set()

    def __len__(self) -> int:
        return len(self._open)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        now = time.monotonic()
        self._counts.connections += 1
        if len(self._open) >= self._limits.max_connections and not self._make_way(now):
            self._counts.rejected["connections"] += 1
            transport.write(self._refusal)
            transport.close()
            return
        silence = self._loop.call_later(self._limits.header_timeout_s, self._close_silent, transport)
        self._open[handler] = _Connection(transport, silence, now)
        self.none_open.clear()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        connection = self._open.pop(handler, None)
        if connection is not None:
            connection.silence.cancel()
        if not self._open:
            self.none_open.set()

    @contextlib.contextmanager
    def serving(self, handler: RequestHandler) -> Iterator[None]:
        """Mark the connection as busy while a request is answered."""
        connection = self._open.get(handler)
        if connection is not None:
            connection.busy += 1
            connection.silence.cancel()
        self.busy += 1
        self.none_busy.clear()
        try:
            yield
        finally:
            self.busy -= 1
            if not self.busy:
                self.none_busy.set()
            if connection is not None:
                connection.busy -= 1
                connection.idle_since = time.monotonic()

    def abort_all(self) -> None:
        for connection in list(self._open.values()):
            connection.transport.abort()

    def _make_way(self, now: float) -> bool:
        idle = [h for h, c in self._open.items() if not c.busy and now - c.idle_since >= EVICT_IDLE_S]
        if not idle:
            return False
        # Remove it from the record now: its loss is reported later, and another connection may arrive before that.
        longest = self._open.pop(min(idle, key=lambda handler: self._open[handler].idle_since))
        longest.silence.cancel()
        longest.transport.abort()
        return True

    def _close_silent(self, transport: asyncio.Transport) -> None:
        """Close a connection that never sent a complete request head. aiohttp would wait for the whole keep-alive
        time."""
        self._counts.rejected["header_timeout"] += 1
        transport.abort()

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        most = self._limits.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=most)


def _raw(problem: Problem) -> bytes:
    """Return a complete reply for a connection without an HTTP handler."""
    body = problem.body()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {problem.status.value} {problem.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **problem.headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


# -- event streams ----------------------------------------------------------------------------------------------------


class Ended(web.StreamResponse):
    """Tells aiohttp that nothing is left to send and that the connection ends."""

    @property
    def keep_alive(self) -> bool | None:
        return False

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing."""


class EventStream:
    """One streamed chat completion."""

    def __init__(self, request: web.BaseRequest, write_timeout_s: float, headers: Mapping[str, str]) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self._gone = False
        # Buffering proxies (nginx) would turn a stream into one late reply.
        own = {hdrs.CONTENT_TYPE: _EVENTS_TYPE, hdrs.CACHE_CONTROL: "no-cache", "X-Accel-Buffering": "no"}
        self.response = web.StreamResponse(headers={**own, **headers, "x-freewheel-cache": "miss"})

    async def write(self, chunk: bytes) -> None:
        """Write a chunk. Raises `OSError` if the client is gone or does not read for too long; the engine then frees
        its slot."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(chunk)
        except OSError:
            self._gone = True
            raise

    async def break_off(self, problem: Problem) -> web.StreamResponse:
        """End a stream whose upstream failed. OpenAI clients raise on this event; others see a closed connection."""
        if not self._gone:
            await self.write(b"data: " + problem.body() + b"\n\n")
        elif self._request.transport is not None:
            self._request.transport.abort()
        return Ended()  # without the final chunk, so that no client takes this for a complete reply
