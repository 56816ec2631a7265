"""The mock judge's HTTP server: reads a request, asks `Behaviour` for a decision, and carries it out.

    aiohttp's low-level server ──▶ Behaviour.decide ──▶ _SharedService ──▶ bytes on the connection
       parsing, keep-alive            pure                waits             whole, cut or dripped

Paths: POST .../chat/completions, GET /v1/models, GET /healthz, GET /__counts (`?contents=0` omits the counts by
content), GET /__requests, POST /__reset (a profile in its body replaces the current one). `MockJudge` runs it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from heapq import heappop, heappush
from http import HTTPStatus
from math import ceil
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from freewheel.judge.testing.profile import (
    GARBAGE_BODY,
    HTML_BODY,
    UNPARSEABLE_REPLY,
    Ask,
    Behaviour,
    Content,
    Fault,
    Headers,
    JudgeProfile,
    Outage,
    Refusal,
    completion,
    error_body,
    reply_text,
    stream_events,
    usage,
)
from freewheel.utils.http import server_log


class ContentCount(msgspec.Struct):
    """Counts of one content."""

    received: int = 0
    """Requests that carried it."""
    admitted: int = 0
    """Requests that were neither refused nor lost to an outage."""
    answered: int = 0
    """Whole chat completions sent for it, including replies without a score."""
    rejected: int = 0
    """Requests for it that got a 429."""
    faults: int = 0
    """Faults it met."""
    text: str = ""
    """The user message without its nonce (empty with `keep_texts=False`)."""


class Counts(msgspec.Struct):
    """Counts of chat requests since the start or the last reset. Other paths are not counted."""

    received: int = 0
    answered: int = 0
    rejected: int = 0
    gone: int = 0
    """Admitted requests whose client left before the reply."""
    by_status: dict[int, int] = {}
    """Replies by status, including cut and dripping bodies, but not closed connections."""
    faults: dict[str, int] = {}
    """Faults by kind, as the profile's shares name them (`error`, `hang`, …), and `outage`."""
    in_flight: int = 0
    max_in_flight: int = 0
    connections: int = 0
    """Connections that carried a chat request."""
    connections_refused: int = 0
    """Connections aborted on arrival, during an outage that refuses."""
    open_connections: int = 0
    """Connections open now, for any path."""
    bytes_received: int = 0
    """Bytes of request bodies."""
    bytes_sent: int = 0
    """Bytes of reply bodies."""
    contents: dict[str, ContentCount] = {}

    def of(self, user_content: str) -> ContentCount:
        """The counts of this user message; all zeros if it never arrived."""
        return self.contents.get(Content.of(user_content).key) or ContentCount()

    def containing(self, part: str) -> list[ContentCount]:
        """The contents whose text contains `part`, in the order of their first arrival."""
        return [count for count in self.contents.values() if part in count.text]

    @property
    def most_received(self) -> int:
        """How often the most frequent content was received. 1 proves that each content was sent once."""
        return max((count.received for count in self.contents.values()), default=0)


class RecordedRequest(msgspec.Struct, frozen=True):
    """A chat request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: str

    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)


class ProcessorSharing:
    """Exact processor sharing: what a batching inference server does to its latencies past its knee.

    With n requests in service, each progresses at the rate r = min(1, knee / n). Let virtual time V grow at the rate r.
    A request that joins at V0 and needs s seconds of service then ends at V = V0 + s, whoever joins or leaves before.
    A heap of those ends is all the state, and join, leave and finish cost O(log n). The caller supplies the time, which
    must not run backwards.
    """

    def __init__(self, knee: float | None) -> None:
        self._knee = knee
        self._virtual = 0.0
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []
        self._active: set[int] = set()
        self._finished: list[int] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._active)

    def join(self, now: float, service_s: float) -> int:
        """Start a request that needs `service_s` when alone. `finished` returns the ticket when it is done."""
        self._advance(now)
        ticket = self._tickets
        self._tickets += 1
        self._active.add(ticket)
        heappush(self._ends, (self._virtual + service_s, ticket))
        return ticket

    def leave(self, now: float, ticket: int) -> None:
        """Remove a request that nobody waits for any more. The others get its share from now on."""
        self._advance(now)
        self._active.discard(ticket)  # its entry in the heap is skipped when it comes up

    def finished(self, now: float) -> list[int]:
        """The tickets that ended since the last call, in the order in which they ended."""
        self._advance(now)
        done, self._finished = self._finished, []
        return done

    def next_finish(self) -> float | None:
        """When the next request ends if nobody joins or leaves before; None if none is in service."""
        if self._finished:
            return self._now
        self._skip_the_gone()
        if not self._ends:
            return None
        return self._now + (self._ends[0][0] - self._virtual) / self._rate()

    def _rate(self) -> float:
        return 1.0 if self._knee is None else min(1.0, self._knee / len(self._active))

    def _skip_the_gone(self) -> None:
        while self._ends and self._ends[0][1] not in self._active:
            heappop(self._ends)

    def _advance(self, now: float) -> None:
        """Move to `now` from end to end, because each end changes the rate. A late caller loses no precision."""
        while True:
            self._skip_the_gone()
            if not self._ends:
                break
            end, ticket = self._ends[0]
            rate = self._rate()
            ends_at = self._now + (end - self._virtual) / rate
            if ends_at > now:
                self._virtual += (now - self._now) * rate
                break
            heappop(self._ends)
            self._active.discard(ticket)
            self._finished.append(ticket)
            self._virtual, self._now = end, max(self._now, ends_at)
        if not self._ends:
            self._virtual = 0.0  # a new origin when idle keeps the floats small
        self._now = max(self._now, now)


NEVER = float("inf")

MILLISECOND_S = 0.001
"""uvloop rounds its timers to this. A timer that fires early would have to be set again."""


class _SharedService:
    """Makes requests wait for their share, with one timer for all. Belongs to the loop on which it is created."""

    def __init__(self, knee: float | None, time_scale: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._scale = time_scale
        self._sharing = ProcessorSharing(knee)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._stuck: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self._closed = False

    def now(self) -> float:
        """The judge's own time in seconds."""
        return time.monotonic() / self._scale

    async def serve(self, service_s: float) -> None:
        """Wait for `service_s` of service. Cancelling returns the share."""
        ticket = self._sharing.join(self.now(), service_s)
        future = self._waiting[ticket] = self._loop.create_future()
        self._arm()
        try:
            await future
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._sharing.leave(self.now(), ticket)
                self._arm()

    async def hang(self) -> None:
        """Wait until cancelled."""
        future = self._loop.create_future()
        self._stuck.add(future)
        try:
            await future
        finally:
            self._stuck.discard(future)

    def close(self) -> None:
        """Cancel all waiting requests."""
        self._closed = True
        self._disarm()
        for future in [*self._waiting.values(), *self._stuck]:
            future.cancel()

    def _arm(self) -> None:
        at = NEVER if self._closed else self._sharing.next_finish()
        if at == self._timer_at:
            return
        self._disarm()
        if at is None or at == NEVER:
            return
        delay_s = ceil(max(0.0, at - self.now()) * self._scale / MILLISECOND_S) * MILLISECOND_S
        self._timer_at = at
        self._timer = self._loop.call_later(delay_s, self._release)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, NEVER

    def _release(self) -> None:
        self._timer, self._timer_at = None, NEVER
        for ticket in self._sharing.finished(self.now()):
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)
        self._arm()


JSON_TYPE: Final = "application/json"
HTML_TYPE: Final = "text/html; charset=utf-8"
EVENTS_TYPE: Final = "text/event-stream; charset=utf-8"

LAST_CHUNK: Final = b"0\r\n\r\n"


class _Sent(web.StreamResponse):
    """Tells aiohttp that the reply was already written, and whether the connection stays open."""

    def __init__(self, *, stays_open: bool) -> None:
        super().__init__()
        self._stays_open = stays_open

    @property
    def keep_alive(self) -> bool | None:
        return self._stays_open

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to do."""


_STAYS_OPEN: Final = _Sent(stays_open=True)
_CLOSES: Final = _Sent(stays_open=False)


def _reason(status: int) -> str:
    """The reason phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unnamed"


def _head(request: web.BaseRequest, status: int, content_type: str, length: int | None, headers: Headers = ()) -> bytes:
    """The status line and headers. Without a length the body comes in chunks."""
    lines = [
        f"HTTP/1.1 {status} {_reason(status)}",
        f"Content-Type: {content_type}",
        "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}",
    ]
    if not request.keep_alive:
        lines.append("Connection: close")
    lines.extend(f"{name}: {value}" for name, value in headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _chunk(data: bytes) -> bytes:
    """One chunk of a body without a length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _write(request: web.BaseRequest, data: bytes) -> None:
    """Write bytes unless the connection is closed."""
    transport = request.transport
    if transport is not None and not transport.is_closing():
        transport.write(data)


async def _drip(request: web.BaseRequest, pieces: list[bytes], duration_s: float) -> None:
    """Write the pieces evenly over this time."""
    for piece in pieces:
        await asyncio.sleep(duration_s / len(pieces))
        _write(request, piece)


def _end(request: web.BaseRequest) -> web.StreamResponse:
    """The reply is written. The connection stays open if the client wants that."""
    return _STAYS_OPEN if request.keep_alive else _CLOSES


def _cut(request: web.BaseRequest, *, abort: bool = False) -> web.StreamResponse:
    """Close the connection after the bytes written so far. `abort` resets it and drops those too."""
    transport = request.transport
    if transport is not None:
        if abort:
            transport.abort()
        else:
            transport.close()
    return _CLOSES


CHAT_PATH = "/chat/completions"
DEFAULT_MODEL = "mock-judge"

DRIP_PIECES = 16
"""The most pieces of a dripping body."""

CLOSE_GRACE_S = 5.0
"""How long a shutdown waits for aborted connections, which need a few turns of the loop."""

BACKLOG = 4096
"""Connections that may wait to be accepted: a client that opens a thousand at once must not lose one by chance."""

ASK_DECODER = msgspec.json.Decoder(Ask)


class _Epoch:
    """The state that a reset replaces. A request belongs to the epoch in which it arrived, and counts there."""

    def __init__(self, profile: JudgeProfile) -> None:
        self.profile = profile
        self.counts = Counts()
        self.behaviour = Behaviour(profile)
        self.service = _SharedService(profile.knee, profile.time_scale)
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
    """aiohttp's server. It also counts connections, refuses them in an outage and knows when all are closed."""

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
        """Stop listening, abort the open connections and wait until they are closed."""
        self._server.close()
        self._epoch.close()
        self._connections.abort_all()
        async with asyncio.timeout(CLOSE_GRACE_S):
            await self._connections.none_open.wait()
        await self._connections.shutdown(CLOSE_GRACE_S)
        await self._server.wait_closed()

    def reset(self, profile: JudgeProfile | None = None) -> None:
        """Restart counts, attempts, rates and schedule. Requests in flight lose their connection without a reply."""
        self._epoch.close()
        self._epoch = _Epoch(profile or self._epoch.profile)

    def counts_json(self, *, contents: bool = True) -> bytes:
        """The current counts, encoded. Without those by content they stay small in a long run."""
        counts = self._epoch.counts
        counts.open_connections = len(self._connections.open)
        if not contents:
            counts = msgspec.structs.replace(counts, contents={})
        return msgspec.json.encode(counts)

    def requests_json(self) -> bytes:
        """The kept chat requests, encoded, oldest first."""
        return msgspec.json.encode(list(self._epoch.recent))

    def meet_connection(self, transport: asyncio.Transport) -> None:
        """Abort a new connection during an outage that refuses."""
        epoch = self._epoch
        if epoch.profile.outage_kind == "refuse" and epoch.behaviour.in_outage(epoch.service.now()):
            epoch.counts.connections_refused += 1
            transport.abort()

    def forget_connection(self, connection: RequestHandler) -> None:
        """A connection was closed."""
        self._epoch.carriers.discard(connection)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request; called by aiohttp."""
        body = await request.content.read()
        if request.method == "POST" and request.path.endswith(CHAT_PATH):
            return await self._chat(request, body)
        return self._other_path(request, body)

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
            return _cut(request, abort=True)
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
            return _cut(request)
        if fault is Fault.ERROR:
            body = error_body("The judge had an error.", "server_error")
            return self._send(epoch, request, epoch.profile.error_status, body, headers=headers)
        if fault is Fault.GARBAGE:
            return self._send(epoch, request, 200, GARBAGE_BODY, headers=headers)
        if fault is Fault.WRONG_TYPE:
            return self._send(epoch, request, 200, HTML_BODY, content_type=HTML_TYPE, headers=headers)
        said: str | None = UNPARSEABLE_REPLY if fault is Fault.UNPARSEABLE else text
        used, choices = usage(ask, said or ""), True
        if fault is Fault.EMPTY:
            said, choices = None, content.digest[-1] % 2 == 0
        model = ask.model or epoch.profile.model or DEFAULT_MODEL
        if ask.stream:
            events = stream_events(ask, content, said, model=model, used=used, choices=choices)
            pieces = [_chunk(event) for event in events] + [LAST_CHUNK]
            start = _head(request, 200, EVENTS_TYPE, None, headers)
        else:
            body = completion(ask, content, said, model=model, used=used, choices=choices)
            pieces = _pieces(body) if fault in (Fault.DRIP, Fault.TRUNCATE) else [body]
            start = _head(request, 200, JSON_TYPE, len(body), headers)
        if fault is Fault.TRUNCATE:
            kept = b"".join(pieces[: len(pieces) // 2])
            epoch.count_reply(200, len(kept))
            _write(request, start + kept)
            return _cut(request)
        whole = b"".join(pieces)
        epoch.count_reply(200, len(whole))
        if fault is Fault.DRIP:
            _write(request, start)
            await _drip(request, pieces, epoch.profile.drip_s * epoch.profile.time_scale)
        else:
            _write(request, start + whole)
        epoch.counts.answered += 1
        tally.answered += 1
        return _end(request)

    def _send(
        self,
        epoch: _Epoch,
        request: web.BaseRequest,
        status: int,
        body: bytes,
        *,
        content_type: str = JSON_TYPE,
        headers: Headers = (),
    ) -> web.StreamResponse:
        """Send and count a whole reply to a chat request."""
        epoch.count_reply(status, len(body))
        _write(request, _head(request, status, content_type, len(body), headers) + body)
        return _end(request)

    def _other_path(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        """Handle the paths that are not chat completions. They are not counted."""
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
                except (msgspec.DecodeError, ValueError, RecursionError) as problem:  # ConfigError is a ValueError
                    status, reply = 400, error_body(str(problem), "invalid_request_error")
            case _:
                status, reply = 404, error_body(f"No such path: {request.path}", "invalid_request_error")
        _write(request, _head(request, status, JSON_TYPE, len(reply)) + reply)
        return _end(request)

    def _schedule_outages(self, epoch: _Epoch) -> None:
        """At the start of an outage that refuses, close the open connections."""
        if epoch.profile.outage_kind == "refuse":
            loop = asyncio.get_running_loop()
            epoch.outage_timers = [
                loop.call_later(start_s * epoch.profile.time_scale, self._connections.abort_all)
                for start_s, _ in epoch.profile.outages
            ]


def _read(raw: bytes) -> Ask | None:
    try:
        return ASK_DECODER.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _pieces(body: bytes) -> list[bytes]:
    step = ceil(len(body) / DRIP_PIECES)
    return [body[at : at + step] for at in range(0, len(body), step)]
