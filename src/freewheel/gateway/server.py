"""The gateway's HTTP server: routes, access, bodies, replies.

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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import hdrs, web

from freewheel.errors import ConfigError
from freewheel.gateway import shapes
from freewheel.gateway.connections import GONE, Connections, Counts, Ended, EventStream
from freewheel.gateway.limits import Doorkeeper, Limits, Load, Problem, bad_field, draining, problem_of, too_large
from freewheel.judge.config import JudgeConfig
from freewheel.judge.engine import Request
from freewheel.judge.judge import InlineJudge
from freewheel.judge.request import ChatRequest, Relayed
from freewheel.judge.transport import run_loop, tune_process
from freewheel.judge.verdict import Failed, JudgeClosed, Reason, Verdict
from freewheel.utils.checks import check_number
from freewheel.utils.waiting import unless_stopped, wait_for_event

log = logging.getLogger("freewheel.gateway")

_BACKLOG = 4096
"""Connections that may wait to be accepted, for workers that start together."""
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
_SERVER_NAME = "freewheel"
_JSON_TYPE = "application/json"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Route = Callable[["Gateway", web.BaseRequest], Awaitable[web.StreamResponse]]


class Gateway:
    """One engine for all HTTP clients, on the loop that starts it, between `start` and `stop`."""

    def __init__(self, config: JudgeConfig, limits: Limits | None = None, *, shares_samples: bool = False) -> None:
        self.limits = limits or Limits()
        self.judge = InlineJudge(config)
        self.counts = Counts()
        self._config = config
        self._shares_samples = shares_samples
        self._load = Load(self.limits)
        self._draining = False

    async def start(self, host: str, port: int, door: Doorkeeper) -> int:
        """Listen and return the port; 0 takes a free one. Raises `OSError`."""
        self._door = door
        message = "the gateway has no connection to spare"
        busy = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "connections", message, temporary=True)
        self._connections = Connections(self.handle, self.limits, self.counts, busy)
        loop = asyncio.get_running_loop()
        # Bind first: if the port is taken, the cache of the other gateway must not be opened.
        self._server = await loop.create_server(self._connections, host, port, backlog=_BACKLOG, start_serving=False)
        try:
            await self.judge.start()
            await self._server.start_serving()
        except BaseException:
            self._server.close()
            raise
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

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
                return Ended()
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
        stream = EventStream(request, self.limits.write_timeout_s, {hdrs.SERVER: _SERVER_NAME})
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
        model = {"id": self._config.model, "object": "model", "created": 0, "owned_by": _SERVER_NAME}
        return _reply(msgspec.json.encode({"object": "list", "data": [model]}))

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer 200 while it accepts requests. The judge's state is only in the body, because a restart would not
        help."""
        endpoints = self.judge.stats().endpoints
        health: dict[str, Any] = {
            "status": "draining" if self._draining else "ok",
            "judge": "up" if any(one.up for one in endpoints) else "down",
        }
        if self._door.knows(request.headers):  # the judge's address and messages are not for strangers
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
        return _reply(text.encode(), headers={hdrs.CONTENT_TYPE: _METRICS_TYPE})


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
    own: dict[str, str] = {hdrs.CONTENT_TYPE: _JSON_TYPE, hdrs.SERVER: _SERVER_NAME}
    return web.Response(body=body, status=int(status), headers={**own, **(headers or {})})


def _deadline_s(text: str) -> float:
    try:
        check_number(_DEADLINE_HEADER, float(text), above=0)
    except ValueError:
        raise bad_field(_DEADLINE_HEADER, text, "give seconds, above 0") from None
    return float(text)


# -- the program ------------------------------------------------------------------------------------------------------


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8900
"""Not the default port of any inference server or of the mock judge."""


def serve(
    config: JudgeConfig,
    limits: Limits,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    *,
    door: Doorkeeper,
    shares_samples: bool = False,
    ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain and return. Call it in the main thread.

    `ready` receives host and port once requests are accepted. Raises `ConfigError` if it cannot listen.
    """
    gateway = Gateway(config, limits, shares_samples=shares_samples)

    async def run() -> None:
        signalled, signalled_again = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (signalled_again if signalled.is_set() else signalled).set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            bound = await gateway.start(host, port, door)
        except (OSError, OverflowError) as error:
            remedy = f"it cannot listen there: {error}; choose another --port"
            raise ConfigError("--host and --port", f"{host}:{port}", remedy) from None
        try:
            ready(host, bound)
            await signalled.wait()
            log.info("shutting down: open requests have %g s, a second signal ends them now", gateway.limits.drain_s)
        finally:
            await gateway.stop(gateway.limits.drain_s if signalled.is_set() else 0.0, signalled_again)
            log.info(gateway.judge.stats().line())

    tune_process()
    run_loop(run())
