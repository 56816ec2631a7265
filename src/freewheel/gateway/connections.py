"""aiohttp's low-level server with books about its connections: how many, which are idle, which never said anything.

    accept ──▶ connection_made ──▶ room? ──▶ serving ──▶ idle ──▶ … ──▶ connection_lost
                                    └ no: the longest idle one makes way, else 503

Waits for: nothing. `none_busy` and `none_open` are what a drain waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from freewheel.gateway.counts import Counts
from freewheel.gateway.limits import Limits
from freewheel.gateway.problem import Problem
from freewheel.utils.http import server_log

log = logging.getLogger("freewheel.gateway")

SWEEP_S = 1.0
"""How often connections that say nothing are looked for; their time limit is ten times as long."""
EVICT_IDLE_S = 5.0
"""Idle for less, a connection may be about to be used: closing it would break a request on its way."""
LINGER_S = 5.0
"""A body that is refused unread is read away for this long: closed at once, the client would not see why."""

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection:
    """One connection's state."""

    __slots__ = ("busy", "idle_since", "served", "transport")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self.transport = transport
        self.busy = 0
        self.served = 0
        self.idle_since = now


class Connections(web.Server):
    """Accepts, counts and refuses connections; requests on them go to `handle`."""

    def __init__(self, handle: Handle, limits: Limits, counts: Counts, refusal: Problem) -> None:
        super().__init__(
            handle,
            request_factory=self._request,
            handler_cancellation=True,  # a client that hangs up gives its place in the queue free
            access_log=None,
            logger=server_log("freewheel.gateway.http"),
            keepalive_timeout=limits.keepalive_s,
            lingering_time=LINGER_S,
        )
        self._limits = limits
        self._counts = counts
        self._refusal = _raw(refusal)
        self._open: dict[RequestHandler, _Connection] = {}
        self._sweeper: asyncio.TimerHandle | None = None
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
        self._open[handler] = _Connection(transport, now)
        self.none_open.clear()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open.pop(handler, None)
        if not self._open:
            self.none_open.set()

    @contextlib.contextmanager
    def serving(self, handler: RequestHandler) -> Iterator[None]:
        """While a request of this connection is answered."""
        connection = self._open.get(handler)
        if connection is not None:
            connection.busy += 1
            connection.served += 1
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
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._open.values()):
            connection.transport.abort()

    def _make_way(self, now: float) -> bool:
        idle = [h for h, c in self._open.items() if not c.busy and now - c.idle_since >= EVICT_IDLE_S]
        if not idle:
            return False
        # Off the books at once: its loss is heard of later, and one more may come before that.
        self._open.pop(min(idle, key=lambda handler: self._open[handler].idle_since)).transport.abort()
        return True

    def _sweep(self) -> None:
        """Closes connections that never sent a whole request head: aiohttp gives those its keep-alive time."""
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._open else None
        since = time.monotonic() - self._limits.header_timeout_s
        for connection in [c for c in self._open.values() if not c.served and c.idle_since < since]:
            self._counts.rejected["header_timeout"] += 1
            connection.transport.abort()

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
    """A whole reply for a connection that gets no HTTP handler."""
    body = problem.body()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {problem.status.value} {problem.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **problem.headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
