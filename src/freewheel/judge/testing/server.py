"""The mock judge's HTTP shell: reads a request, asks `Behaviour` what happens to it, and lets it happen.

    aiohttp's low-level server ──▶ Behaviour.decide ──▶ SharedService ──▶ wire
       parsing, keep-alive            pure                waits           bytes

Paths: POST .../chat/completions, GET /v1/models, GET /healthz, GET /__counts (`?contents=0` leaves the counts by
content out), GET /__requests, POST /__reset (if its body is a profile, that profile takes over).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from http import HTTPStatus
from math import ceil

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from freewheel.judge.testing import wire
from freewheel.judge.testing.behaviour import Behaviour, Fault, Outage, Refusal
from freewheel.judge.testing.counts import ContentCount, Counts, RecordedRequest
from freewheel.judge.testing.profile import JudgeProfile
from freewheel.judge.testing.rates import Headers
from freewheel.judge.testing.replies import (
    GARBAGE_BODY,
    HTML_BODY,
    UNPARSEABLE_REPLY,
    Ask,
    Content,
    completion,
    error_body,
    reply_text,
    stream_events,
    usage,
)
from freewheel.judge.testing.service import SharedService
from freewheel.utils.http import server_log

CHAT_PATH = "/chat/completions"
DEFAULT_MODEL = "mock-judge"

DRIP_PIECES = 16
"""A dripping body comes in at most this many pieces."""

CLOSE_GRACE_S = 5.0
"""How long a shutdown waits for aborted connections to be gone; they need a few turns of the loop."""

BACKLOG = 4096
"""Connections that may wait to be accepted: a client that opens a thousand at once must not see one fail by chance."""

ASK_DECODER = msgspec.json.Decoder(Ask)


class _Epoch:
    """All that a reset replaces. A request belongs to the epoch it arrived in, and counts there."""

    def __init__(self, profile: JudgeProfile) -> None:
        self.profile = profile
        self.counts = Counts()
        self.behaviour = Behaviour(profile)
        self.service = SharedService(profile.knee, profile.time_scale)
        self.recent: deque[RecordedRequest] = deque(maxlen=profile.keep_requests)
        self.outage_timers: list[asyncio.TimerHandle] = []
        self.carriers: set[RequestHandler] = set()

    def tally(self, content: Content) -> ContentCount:
        tally = self.counts.contents.get(content.key)
        if tally is None:
            tally = ContentCount(text=content.text if self.profile.keep_texts else "")
            self.counts.contents[content.key] = tally
        return tally

    def count_reply(self, status: int, body_bytes: int) -> None:
        self.counts.by_status[status] = self.counts.by_status.get(status, 0) + 1
        self.counts.bytes_sent += body_bytes

    def count_fault(self, kind: str) -> None:
        self.counts.faults[kind] = self.counts.faults.get(kind, 0) + 1

    def close(self) -> None:
        self.service.close()
        for timer in self.outage_timers:
            timer.cancel()


class _Connections(web.Server):
    """aiohttp's server, which also counts connections, refuses them in an outage and knows when all are gone."""

    def __init__(self, judge: JudgeServer) -> None:
        log = server_log("freewheel.judge.testing.http")
        super().__init__(judge.handle, handler_cancellation=True, access_log=None, logger=log)
        self._judge = judge
        self.open: dict[RequestHandler, asyncio.Transport] = {}
        self.none_open = asyncio.Event()
        self.none_open.set()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.open[handler] = transport
        self.none_open.clear()
        self._judge.meet_connection(transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.open.pop(handler, None)
        self._judge.forget_connection(handler)
        if not self.open:
            self.none_open.set()

    def abort_all(self) -> None:
        for transport in list(self.open.values()):
            transport.abort()


class JudgeServer:
    """One mock judge on the running loop, between `start` and `stop`."""

    def __init__(self, profile: JudgeProfile) -> None:
        self._epoch = _Epoch(profile)
        self._connections = _Connections(self)

    async def start(self, host: str, port: int, ssl_context: ssl.SSLContext | None = None) -> int:
        """Listen and return the port; 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connections, host, port, ssl=ssl_context, backlog=BACKLOG)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening, abort what is open and wait until it is gone."""
        self._server.close()
        self._epoch.close()
        self._connections.abort_all()
        async with asyncio.timeout(CLOSE_GRACE_S):
            await self._connections.none_open.wait()
        await self._connections.shutdown(CLOSE_GRACE_S)
        await self._server.wait_closed()

    def reset(self, profile: JudgeProfile | None = None) -> None:
        """Begin anew: counts, attempts, rates, schedule. What is in flight loses its connection without a reply."""
        self._epoch.close()
        self._epoch = _Epoch(profile or self._epoch.profile)

    def counts_json(self, *, contents: bool = True) -> bytes:
        """The counts as they are now, encoded; without those by content they stay small however long the run."""
        counts = self._epoch.counts
        counts.open_connections = len(self._connections.open)
        if not contents:
            counts = msgspec.structs.replace(counts, contents={})
        return msgspec.json.encode(counts)

    def requests_json(self) -> bytes:
        """The kept chat requests, encoded, oldest first."""
        return msgspec.json.encode(list(self._epoch.recent))

    def meet_connection(self, transport: asyncio.Transport) -> None:
        """A connection was opened; in an outage that refuses, it is aborted at once."""
        epoch = self._epoch
        if epoch.profile.outage_kind == "refuse" and epoch.behaviour.in_outage(epoch.service.now()):
            epoch.counts.connections_refused += 1
            transport.abort()

    def forget_connection(self, connection: RequestHandler) -> None:
        """A connection is gone."""
        self._epoch.carriers.discard(connection)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's entry: one request."""
        body = await request.content.read()
        if request.method == "POST" and request.path.endswith(CHAT_PATH):
            return await self._chat(request, body)
        return self._aside(request, body)

    async def _chat(self, request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        epoch = self._epoch
        profile, counts, now = epoch.profile, epoch.counts, epoch.service.now()
        counts.received += 1
        counts.bytes_received += len(raw)
        if request.protocol not in epoch.carriers:
            epoch.carriers.add(request.protocol)
            counts.connections += 1
        if profile.keep_requests:
            headers = {name.lower(): value for name, value in request.headers.items()}
            epoch.recent.append(RecordedRequest(request.method, request.path, headers, raw.decode("utf-8", "replace")))
        if epoch.behaviour.begin(now):
            self._schedule_outages(epoch)
        ask = _read(raw)
        content = Content.of(ask.user_content if ask else "")
        tally = epoch.tally(content) if ask else ContentCount()
        tally.received += 1
        text = reply_text(profile, content)
        decision = epoch.behaviour.decide(
            now,
            ask,
            content,
            authorization=request.headers.get("Authorization"),
            tokens=usage(ask, text)["total_tokens"] if ask else 0,
            in_flight=counts.in_flight,
            attempt=tally.admitted,
            faults_so_far=tally.faults,
            wall_time=time.time(),
        )
        if isinstance(decision, Outage):
            epoch.count_fault("outage")
            return wire.cut(request, abort=True)
        if isinstance(decision, Refusal):
            if decision.status == HTTPStatus.TOO_MANY_REQUESTS:
                counts.rejected += 1
                tally.rejected += 1
            return self._send(epoch, request, decision.status, decision.body, headers=decision.headers)
        assert ask is not None, "only a readable request is let in"
        tally.admitted += 1
        counts.in_flight += 1
        counts.max_in_flight = max(counts.max_in_flight, counts.in_flight)
        if decision.fault is not None:
            tally.faults += 1
            epoch.count_fault(decision.fault.value)
        try:
            if decision.fault is Fault.HANG:
                await epoch.service.hang()
            elif decision.service_s > 0.0:
                await epoch.service.serve(decision.service_s)
            return await self._answer(epoch, request, ask, content, text, decision.fault, tally)
        except asyncio.CancelledError:
            counts.gone += 1
            raise
        finally:
            counts.in_flight -= 1

    async def _answer(
        self,
        epoch: _Epoch,
        request: web.BaseRequest,
        ask: Ask,
        content: Content,
        text: str,
        fault: Fault | None,
        tally: ContentCount,
    ) -> web.StreamResponse:
        """The reply to a request that was let in and served, with its fault if it has one."""
        headers = epoch.behaviour.rate_headers(epoch.service.now())
        if fault is Fault.DISCONNECT:
            return wire.cut(request)
        if fault is Fault.ERROR:
            body = error_body("The judge had an error.", "server_error")
            return self._send(epoch, request, epoch.profile.error_status, body, headers=headers)
        if fault is Fault.GARBAGE:
            return self._send(epoch, request, 200, GARBAGE_BODY, headers=headers)
        if fault is Fault.WRONG_TYPE:
            return self._send(epoch, request, 200, HTML_BODY, content_type=wire.HTML_TYPE, headers=headers)
        said: str | None = UNPARSEABLE_REPLY if fault is Fault.UNPARSEABLE else text
        used, choices = usage(ask, said or ""), True
        if fault is Fault.EMPTY:
            said, choices = None, content.digest[-1] % 2 == 0
        model = ask.model or epoch.profile.model or DEFAULT_MODEL
        if ask.stream:
            events = stream_events(ask, content, said, model=model, used=used, choices=choices)
            pieces = [wire.chunk(event) for event in events] + [wire.LAST_CHUNK]
            start = wire.head(request, 200, wire.EVENTS_TYPE, None, headers)
        else:
            body = completion(ask, content, said, model=model, used=used, choices=choices)
            pieces = _pieces(body) if fault in (Fault.DRIP, Fault.TRUNCATE) else [body]
            start = wire.head(request, 200, wire.JSON_TYPE, len(body), headers)
        if fault is Fault.TRUNCATE:
            kept = b"".join(pieces[: len(pieces) // 2])
            epoch.count_reply(200, len(kept))
            wire.write(request, start + kept)
            return wire.cut(request)
        whole = b"".join(pieces)
        epoch.count_reply(200, len(whole))
        if fault is Fault.DRIP:
            wire.write(request, start)
            await wire.drip(request, pieces, epoch.profile.drip_s * epoch.profile.time_scale)
        else:
            wire.write(request, start + whole)
        epoch.counts.answered += 1
        tally.answered += 1
        return wire.end(request)

    def _send(
        self,
        epoch: _Epoch,
        request: web.BaseRequest,
        status: int,
        body: bytes,
        *,
        content_type: str = wire.JSON_TYPE,
        headers: Headers = (),
    ) -> web.StreamResponse:
        """A whole reply to a chat request, counted."""
        epoch.count_reply(status, len(body))
        wire.write(request, wire.head(request, status, content_type, len(body), headers) + body)
        return wire.end(request)

    def _aside(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """The paths that are no judgement; none of them is counted."""
        status, reply = 200, b'{"ok": true}'
        match request.method, request.path:
            case "GET", "/healthz":
                pass
            case "GET", "/v1/models":
                model = self._epoch.profile.model or DEFAULT_MODEL
                listed = {"id": model, "object": "model", "created": 0, "owned_by": "freewheel"}
                reply = msgspec.json.encode({"object": "list", "data": [listed]})
            case "GET", "/__counts":
                reply = self.counts_json(contents=request.query.get("contents") != "0")
            case "GET", "/__requests":
                reply = self.requests_json()
            case "POST", "/__reset":
                try:
                    self.reset(msgspec.json.decode(body, type=JudgeProfile) if body.strip() else None)
                except (msgspec.DecodeError, ValueError) as problem:  # ConfigError is a ValueError
                    status, reply = 400, error_body(str(problem), "invalid_request_error")
            case _:
                status, reply = 404, error_body(f"No such path: {request.path}", "invalid_request_error")
        wire.write(request, wire.head(request, status, wire.JSON_TYPE, len(reply)) + reply)
        return wire.end(request)

    def _schedule_outages(self, epoch: _Epoch) -> None:
        """An outage that refuses also ends what is open when it begins."""
        if epoch.profile.outage_kind == "refuse":
            loop = asyncio.get_running_loop()
            epoch.outage_timers = [
                loop.call_later(start_s * epoch.profile.time_scale, self._connections.abort_all)
                for start_s, _ in epoch.profile.outages
            ]


def _read(raw: bytes) -> Ask | None:
    try:
        return ASK_DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _pieces(body: bytes) -> list[bytes]:
    step = ceil(len(body) / DRIP_PIECES)
    return [body[at : at + step] for at in range(0, len(body), step)]
