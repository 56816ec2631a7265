"""The gateway's HTTP server: connections, routes, access, bodies, replies.

    accept ──▶ connection_made ──▶ room? ──▶ serving ──▶ idle ──▶ … ──▶ connection_lost
                                    └ no: the longest idle one is closed, else 503

    POST /v1/chat/completions ─┐                                        ┌─▶ the upstream's JSON, or its event stream
    POST /score                ├─▶ token ─▶ body ─▶ shape ─▶ engine ────┼─▶ verdicts
    POST /openrlhf, /slime    ─┘   Doorkeeper  Load   shapes  InlineJudge └─▶ rewards, or an error
    GET  /v1/models, /healthz, /metrics

A request ends with the engine's verdicts, at a deadline, when its client disconnects, or at the end of a shutdown.

`serve` runs a gateway as a program:

    SIGTERM, SIGINT ─▶ drain: new requests get 503, open ones continue ─▶ the rest ends as 503 ─▶ return
    a second signal ─▶ the drain ends now
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from freewheel.gateway import shapes
from freewheel.gateway.limits import Doorkeeper, Limits, Load, Problem, bad_field, draining, problem_of, too_large
from freewheel.judge.config import JudgeConfig
from freewheel.judge.engine import Request
from freewheel.judge.judge import InlineJudge
from freewheel.judge.request import ChatRequest, Relayed
from freewheel.judge.stats import MetricSample, exposition
from freewheel.judge.transport import run_loop, tune_process
from freewheel.judge.verdict import Failed, JudgeClosed, Reason, Verdict
from freewheel.utils.checks import check_number
from freewheel.utils.http import BACKLOG, HOST, listen_or_say, server_log
from freewheel.utils.waiting import unless_stopped, wait_for_event

log = logging.getLogger("freewheel.gateway")

_CLOSE_GRACE_S = 5.0
"""How long a shutdown waits for finished replies to be sent."""
_OPENRLHF_DEADLINE_S = 170.0
"""OpenRLHF gives up after 180 s. An earlier answer gives it the reason, and its retry costs only the missing
verdicts."""
_SLIME_DEADLINE_S = 110.0
"""slime gives up after 120 s."""

_LIMIT_CODES = frozenset({"body_too_large", "batch_too_large", "body_timeout", "queue_full", "draining"})
"""Problems that count as a reached limit."""
_DEADLINE_HEADER = "x-freewheel-deadline-s"
_OUR_NAME = {"Server": "freewheel"}
_JSON_TYPE = "application/json"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

EVICT_IDLE_S = 5.0
"""A connection with a shorter idle time may be about to be used: closing it would break a request on its way."""
_LINGER_S = 5.0
"""A refused body is read and discarded for this long; if the connection closed immediately, the client would not see
the reason.
"""
GONE = 499
"""The status that proxies log for a client that closed its connection. No client sees it."""
_EVENTS_TYPE = "text/event-stream; charset=utf-8"

Route = Callable[["Gateway", web.BaseRequest], Awaitable[web.StreamResponse]]


# -- connections ------------------------------------------------------------------------------------------------------


class GatewayCounts:
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
        families: dict[str, list[MetricSample]] = {
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

    def __init__(
        self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: Limits, counts: GatewayCounts
    ) -> None:
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
            transport.write(_no_room())
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


def _no_room() -> bytes:
    """Return the complete reply to a connection that gets no HTTP handler."""
    message = "the gateway has no connection to spare"
    problem = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "connections", message, temporary=True)
    body = problem.body()
    headers = {"Content-Type": _JSON_TYPE, "Content-Length": str(len(body)), "Connection": "close", **problem.headers}
    lines = [f"HTTP/1.1 {problem.status.value} {problem.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class _Ended(web.StreamResponse):
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

    def __init__(self, request: web.BaseRequest, write_timeout_s: float) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self._gone = False
        # Buffering proxies (nginx) would turn a stream into one late reply.
        headers = {"Content-Type": _EVENTS_TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.response = web.StreamResponse(headers={**headers, **_OUR_NAME, "x-freewheel-cache": "miss"})

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
        return _Ended()  # without the final chunk, so that no client takes this for a complete reply


# -- requests ---------------------------------------------------------------------------------------------------------


class Gateway:
    """One engine for all HTTP clients, on the loop that starts it, between `start` and `stop`."""

    def __init__(self, config: JudgeConfig, limits: Limits | None = None, *, shares_samples: bool = False) -> None:
        self.limits = limits or Limits()
        self.judge = InlineJudge(config)
        self.counts = GatewayCounts()
        self._config = config
        self._shares_samples = shares_samples
        self._load = Load(self.limits)
        self._draining = False

    async def start(self, listening: socket.socket, door: Doorkeeper) -> None:
        """Serve the connections of a listening socket."""
        self._door = door
        self._connections = Connections(self.handle, self.limits, self.counts)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connections, sock=listening, backlog=BACKLOG, start_serving=False)
        try:
            await self.judge.start()
            await self._server.start_serving()
        except BaseException:
            self._server.close()
            raise

    async def stop(self, drain_s: float = 0.0, at_once: asyncio.Event | None = None) -> None:
        """Shut down in order. New requests get a 503 from now on. Open ones may continue for `drain_s`, or until
        `at_once` is set."""
        self._draining = True
        until_idle = wait_for_event(self._connections.none_busy, drain_s)
        await unless_stopped(until_idle, at_once or asyncio.Event())
        await self.judge.close()  # open requests end as cancelled, and their clients get a 503
        await wait_for_event(self._connections.none_busy, _CLOSE_GRACE_S)
        self._server.close()
        self._connections.abort_all()
        await wait_for_event(self._connections.none_open, _CLOSE_GRACE_S)
        await self._connections.shutdown(_CLOSE_GRACE_S)
        await self._server.wait_closed()

    # -- one request --------------------------------------------------------------------------------------------------

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. aiohttp calls this."""
        route = request.path if request.path in ROUTES else "other"
        status: int = GONE
        with self._connections.serving(request.protocol):
            try:
                try:
                    response = await self._route(request)
                except RecursionError:
                    response = self._report(shapes.not_json("nested too deep"))
                except Problem as problem:
                    response = self._report(problem)
                if self._draining:
                    response.force_close()
                await self._send(request, response)
                status = response.status
                return response
            except ConnectionError:  # the client is gone
                return _Ended()
            finally:
                self.counts.requests[route, status] += 1

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read its reply") from None

    def _report(self, problem: Problem) -> web.Response:
        if problem.code in _LIMIT_CODES:
            self.counts.rejected[problem.code] += 1
        return _reply(problem.body(), status=problem.status, headers=problem.headers)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in ROUTES:
            known = ", ".join(sorted(ROUTES))
            raise Problem(HTTPStatus.NOT_FOUND, "unknown_path", f"no such path: {request.path!r}; there are {known}")
        method, route = ROUTES[request.path]
        if request.method != method:
            message = f"{request.path} takes {method} and not {request.method!r}"
            raise Problem(HTTPStatus.METHOD_NOT_ALLOWED, "wrong_method", message, headers={"Allow": method})
        if not (request.path == "/healthz" or (request.path == "/metrics" and self._door.open_here)):
            self._door.check(request.headers)
        return await route(self, request)

    @contextlib.asynccontextmanager
    async def _body(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """Read the body. It counts against `max_waiting_bytes` until it is answered."""
        if self._draining:
            raise draining()
        length = None if hdrs.CONTENT_ENCODING in request.headers else request.content_length
        with self._load.hold_bytes(length) as correct:
            if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
                await request.writer.write(_CONTINUE)  # curl waits a second for it before it sends a large body
                request.writer.output_size = 0
            try:
                async with asyncio.timeout(self.limits.body_timeout_s):
                    body = await request.read()
            except TimeoutError:
                message = f"the body did not come within {self.limits.body_timeout_s:g} s"
                raise Problem(HTTPStatus.REQUEST_TIMEOUT, "body_timeout", message, temporary=True) from None
            except web.HTTPRequestEntityTooLarge:
                raise too_large("this body", self.limits.max_body_bytes) from None
            except web.RequestPayloadError as error:
                raise Problem(HTTPStatus.BAD_REQUEST, "broken_body", f"the body cannot be read: {error}") from None
            correct(len(body))
            yield body

    async def _ask(self, request: web.BaseRequest, batch: Sequence[Request], deadline_s: float | None) -> list[Any]:
        given = request.headers.get(_DEADLINE_HEADER)
        if given is not None:
            deadline_s = _deadline_s(given)
        deadline_at = time.monotonic() + deadline_s if deadline_s is not None else None
        with self._load.hold_requests(len(batch)):
            try:
                verdicts = await self.judge.ask(batch, deadline_at)
            except JudgeClosed:
                raise draining() from None
        if self._draining and any(isinstance(v, Failed) and v.reason == Reason.CANCELLED for v in verdicts):
            raise draining()  # the drain is over; everything scored is in the cache
        return verdicts

    async def _judge(
        self, request: web.BaseRequest, read: Callable[[bytes], Sequence[Request]], deadline_s: float | None
    ) -> tuple[Sequence[Any], list[Verdict]]:
        """Read the body with `read` and judge it."""
        async with self._body(request) as body:
            batch = read(body)
            return batch, await self._ask(request, batch, deadline_s)

    # -- routes -------------------------------------------------------------------------------------------------------

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        caching = request.headers.get(hdrs.CACHE_CONTROL, "").lower()
        is_fresh = "no-cache" in caching or "no-store" in caching
        async with self._body(request) as given:
            body, streams = shapes.read_chat(given, self._config.model)
            if streams:
                return await self._chat_stream(request, body)
            chat = ChatRequest(body, is_fresh, self._shares_samples)
            [verdict] = await self._ask(request, [chat], self._config.batch_deadline_s)
        if isinstance(verdict, Failed):
            raise problem_of(verdict)
        assert isinstance(verdict, Relayed)
        headers = {
            "x-freewheel-cache": "hit" if verdict.cached else "miss",
            "x-freewheel-attempts": str(verdict.attempts),
        }
        return _reply(verdict.content, headers=headers)

    async def _chat_stream(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        stream = EventStream(request, self.limits.write_timeout_s)
        try:
            # No deadline unless the client sets one: a stream that has started has no time limit.
            [verdict] = await self._ask(request, [ChatRequest(body, sink=stream.write)], None)
            if isinstance(verdict, Failed):
                raise problem_of(verdict)
        except Problem as problem:
            if not stream.response.prepared:
                raise
            return await stream.break_off(problem)
        return stream.response

    async def _score(self, request: web.BaseRequest) -> web.StreamResponse:
        batch, verdicts = await self._judge(request, shapes.read_score, self._config.batch_deadline_s)
        return _reply(shapes.write_score(batch, verdicts))

    async def _openrlhf(self, request: web.BaseRequest) -> web.StreamResponse:
        _, verdicts = await self._judge(request, shapes.read_openrlhf, _OPENRLHF_DEADLINE_S)
        return _reply(shapes.write_openrlhf(verdicts))

    async def _slime(self, request: web.BaseRequest) -> web.StreamResponse:
        _, verdicts = await self._judge(request, lambda body: [shapes.read_slime(body)], _SLIME_DEADLINE_S)
        return _reply(shapes.write_slime(verdicts[0], request.query.get("key")))

    async def _list_models(self, request: web.BaseRequest) -> web.StreamResponse:
        model = {"id": self._config.model, "object": "model", "created": 0, "owned_by": "freewheel"}
        return _reply(msgspec.json.encode({"object": "list", "data": [model]}))

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer 200 while it accepts requests. The judge's state is only in the body, because a restart would not
        help."""
        endpoints = self.judge.stats().endpoints
        health: dict[str, Any] = {
            "status": "draining" if self._draining else "ok",
            "judge": "up" if any(one.up for one in endpoints) else "down",
        }
        if self._door.knows(request.headers):  # only trusted clients may see the judge's address and messages
            names = ("up", "url", "model", "in_flight", "limit", "breaker", "halted")
            health["endpoints"] = [{name: getattr(one, name) for name in names} for one in endpoints]
        status = HTTPStatus.SERVICE_UNAVAILABLE if self._draining else HTTPStatus.OK
        return _reply(msgspec.json.encode(health), status=status)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        own = self.counts.prometheus(
            open_connections=len(self._connections),
            in_flight=self._connections.busy,
            waiting=self._load.requests,
            draining=int(self._draining),
        )
        text = self.judge.stats().prometheus() + own
        return _reply(text.encode(), headers={"Content-Type": _METRICS_TYPE})


ROUTES: dict[str, tuple[str, Route]] = {
    "/v1/chat/completions": (hdrs.METH_POST, Gateway._chat),
    "/v1/models": (hdrs.METH_GET, Gateway._list_models),
    "/score": (hdrs.METH_POST, Gateway._score),
    "/openrlhf": (hdrs.METH_POST, Gateway._openrlhf),
    "/slime": (hdrs.METH_POST, Gateway._slime),
    "/healthz": (hdrs.METH_GET, Gateway._health),
    "/metrics": (hdrs.METH_GET, Gateway._metrics),
}


def _reply(body: bytes, *, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> web.Response:
    headers = {"Content-Type": _JSON_TYPE, **_OUR_NAME, **(headers or {})}
    return web.Response(body=body, status=int(status), headers=headers)


def _deadline_s(text: str) -> float:
    try:
        check_number(_DEADLINE_HEADER, float(text), above=0)
    except ValueError:
        raise bad_field(_DEADLINE_HEADER, text, "give seconds, above 0") from None
    return float(text)


# -- the program ------------------------------------------------------------------------------------------------------


DEFAULT_PORT = 8900
"""Not the default port of any inference server or of the mock judge."""


def serve(
    config: JudgeConfig,
    limits: Limits,
    host: str = HOST,
    port: int = DEFAULT_PORT,
    *,
    door: Doorkeeper,
    shares_samples: bool = False,
    ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain and return. Call it in the main thread.

    `ready` receives host and port once requests are accepted. Raises `ConfigError` if it cannot listen.
    """
    # Bind first: if the port is taken, the cache of the other gateway must not be opened.
    listening = listen_or_say(host, port)
    gateway = Gateway(config, limits, shares_samples=shares_samples)

    async def run() -> None:
        signalled, signalled_again = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (signalled_again if signalled.is_set() else signalled).set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        await gateway.start(listening, door)
        try:
            ready(host, listening.getsockname()[1])
            await signalled.wait()
            log.info("shutting down: open requests have %g s, a second signal ends them now", gateway.limits.drain_s)
        finally:
            await gateway.stop(gateway.limits.drain_s if signalled.is_set() else 0.0, signalled_again)
            log.info(gateway.judge.stats().line())

    tune_process()
    run_loop(run())
