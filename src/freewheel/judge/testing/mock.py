"""`MockJudge`: an OpenAI-compatible judge on loopback, on the current loop, in a thread or in a child process.

    async with MockJudge(profile) as judge:                 on the current loop
    with MockJudge(profile).in_thread() as judge:           for synchronous callers
    with MockJudge(profile).in_process() as judge:          when its CPU time must not be the caller's
    serve(profile)                                          a separate program: `freewheel mock-judge`

Each `judge` is a `RunningJudge`. A child process is read over HTTP, gets its profile as a line on stdin, answers with
its address on stdout, and ends with its parent.

    aiohttp's low-level server ──▶ Behaviour.decide ──▶ _SharedService ──▶ the reply: whole, cut or dripped

Paths: POST .../chat/completions, GET /v1/models, /healthz, /__counts and /__requests, POST /__reset (a profile in its
body replaces the current one).
"""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from math import ceil
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from freewheel.errors import ConfigError
from freewheel.judge.testing.profile import (
    GARBAGE_BODY,
    HTML_BODY,
    UNPARSEABLE_REPLY,
    Ask,
    Behaviour,
    Content,
    Fault,
    JudgeProfile,
    Outage,
    ProcessorSharing,
    Refusal,
    completion,
    error_body,
    reply_text,
    usage,
)
from freewheel.judge.transport import run_loop
from freewheel.judge.verdict import JudgeError
from freewheel.utils.http import server_log
from freewheel.utils.processes import end_with

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8099
"""Not a default port of any inference server."""
DEFAULT_MODEL = "mock-judge"
CHAT_PATH = "/chat/completions"

_START_TIMEOUT_S = 60.0
"""Imports on a busy machine are slow."""
_STOP_TIMEOUT_S = 10.0
"""How long a child process may take to end before it is killed."""
_CALL_TIMEOUT_S = 30.0
"""For reading counts from a judge that is busy answering."""
_CLOSE_GRACE_S = 5.0
"""How long a shutdown waits for aborted connections, which need a few turns of the loop."""
_BACKLOG = 4096
"""Connections that may wait to be accepted: a client that opens a thousand at once must not lose one by chance."""
_DRIP_PIECES = 16
"""The most pieces of a dripping body."""
_MILLISECOND_S = 0.001
"""uvloop rounds its timers to this. A timer that fires early would have to be set again."""
_NEVER = float("inf")

JSON_TYPE: Final = "application/json"
HTML_TYPE: Final = "text/html; charset=utf-8"
EVENTS_TYPE: Final = "text/event-stream; charset=utf-8"

_ASK_DECODER = msgspec.json.Decoder(Ask)


# -- counts -----------------------------------------------------------------------------------------------------------


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
    """The user message without its nonce."""


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


# -- the server -------------------------------------------------------------------------------------------------------


class _Epoch:
    """The state that a reset replaces. A request belongs to the epoch in which it arrived, and counts there."""

    def __init__(self, profile: JudgeProfile) -> None:
        self.profile = profile
        self.counts = Counts()
        self.behaviour = Behaviour(profile)
        self.recent: deque[RecordedRequest] = deque(maxlen=profile.keep_requests)
        self.outage_timers: list[asyncio.TimerHandle] = []
        self.carriers: set[RequestHandler] = set()
        self._loop = asyncio.get_running_loop()
        self._sharing = ProcessorSharing(profile.knee)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """By the ticket of a request in service."""
        self._stuck: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER

    def now(self) -> float:
        """The judge's own time in seconds."""
        return time.monotonic() / self.profile.time_scale

    def count_content(self, content: Content) -> ContentCount:
        return self.counts.contents.setdefault(content.key, ContentCount(text=content.text))

    def count_status(self, status: int) -> None:
        self.counts.by_status[status] = self.counts.by_status.get(status, 0) + 1

    def count_fault(self, kind: str) -> None:
        self.counts.faults[kind] = self.counts.faults.get(kind, 0) + 1

    async def serve(self, service_s: float) -> None:
        """Wait for `service_s` of service. Cancelling returns the share."""
        ticket = self._sharing.join(self.now(), service_s)
        future = self._waiting[ticket] = self._loop.create_future()
        self._set_timer()
        try:
            await future
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._sharing.leave(self.now(), ticket)
                self._set_timer()

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
        waiting = [*self._waiting.values(), *self._stuck]
        self._waiting.clear()
        for future in waiting:
            future.cancel()
        for timer in (*self.outage_timers, self._timer):
            if timer is not None:
                timer.cancel()

    def _set_timer(self) -> None:
        """One timer for all: it runs when the next request ends."""
        at = self._sharing.next_finish()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, at
        if at < _NEVER:
            left_s = max(0.0, at - self.now()) * self.profile.time_scale
            self._timer = self._loop.call_later(ceil(left_s / _MILLISECOND_S) * _MILLISECOND_S, self._release)

    def _release(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        for ticket in self._sharing.finished(self.now()):
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)
        self._set_timer()


class _JudgeServer(web.Server):
    """One mock judge on the running loop, between `listen` and `stop`."""

    def __init__(self, profile: JudgeProfile) -> None:
        log = server_log("freewheel.judge.testing.http")
        super().__init__(self._handle, handler_cancellation=True, access_log=None, logger=log)
        self._epoch = _Epoch(profile)
        self._open: dict[RequestHandler, asyncio.Transport] = {}
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def listen(self, host: str, port: int, ssl_context: ssl.SSLContext | None) -> int:
        """Return the port; 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self, host, port, ssl=ssl_context, backlog=_BACKLOG)
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening, abort the open connections and wait until they are closed."""
        self._listener.close()
        self._epoch.close()
        self._abort_all()
        async with asyncio.timeout(_CLOSE_GRACE_S):
            await self._none_open.wait()
        await self.shutdown(_CLOSE_GRACE_S)
        await self._listener.wait_closed()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open[handler] = transport
        self._none_open.clear()
        epoch = self._epoch
        if epoch.profile.outage_kind == "refuse" and epoch.behaviour.in_outage(epoch.now()):
            epoch.counts.connections_refused += 1
            transport.abort()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open.pop(handler, None)
        self._epoch.carriers.discard(handler)
        if not self._open:
            self._none_open.set()

    def _abort_all(self) -> None:
        for transport in list(self._open.values()):
            transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        if request.method == "POST" and request.path.endswith(CHAT_PATH):
            return await self._chat(request, body)
        return self.other_path(request.method, request.path, body)

    async def _chat(self, request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        epoch = self._epoch
        profile, counts, now = epoch.profile, epoch.counts, epoch.now()
        counts.received += 1
        if request.protocol not in epoch.carriers:
            epoch.carriers.add(request.protocol)
            counts.connections += 1
        if profile.keep_requests:
            headers = {name.lower(): value for name, value in request.headers.items()}
            epoch.recent.append(RecordedRequest(request.method, request.path, headers, raw.decode("utf-8", "replace")))
        if epoch.behaviour.begin(now) and profile.outage_kind == "refuse":
            loop = asyncio.get_running_loop()
            epoch.outage_timers = [
                loop.call_later(start_s * profile.time_scale, self._abort_all) for start_s, _ in profile.outages
            ]
        ask = _read(raw)
        content = Content.of(ask.user_content if ask else "")
        count = epoch.count_content(content) if ask else ContentCount()
        count.received += 1
        text = reply_text(profile, content)
        decision = epoch.behaviour.decide(
            now,
            ask,
            content,
            authorization=request.headers.get("Authorization"),
            tokens=usage(ask, text)["total_tokens"] if ask else 0,
            in_flight=counts.in_flight,
            attempt=count.admitted,
            faults_so_far=count.faults,
        )
        if isinstance(decision, Outage):
            epoch.count_fault("outage")
            return _hang_up(request, abort=True)
        if isinstance(decision, Refusal):
            if decision.status == 429:
                counts.rejected += 1
                count.rejected += 1
            epoch.count_status(decision.status)
            return _whole(decision.status, decision.body, dict(decision.headers))
        assert ask is not None, "only a readable request is let in"
        count.admitted += 1
        counts.in_flight += 1
        counts.max_in_flight = max(counts.max_in_flight, counts.in_flight)
        if decision.fault is not None:
            count.faults += 1
            epoch.count_fault(decision.fault.value)
        try:
            if decision.fault is Fault.HANG:
                await epoch.hang()
            elif decision.service_s > 0.0:
                await epoch.serve(decision.service_s)
            return await self._answer(epoch, request, ask, content, text, decision.fault, count)
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
        count: ContentCount,
    ) -> web.StreamResponse:
        """The reply to a request that was let in and served, with its fault if it has one."""
        if fault is Fault.DISCONNECT:
            return _hang_up(request)
        headers = dict(epoch.behaviour.rates.headers(epoch.now()))
        status = epoch.profile.error_status if fault is Fault.ERROR else 200
        epoch.count_status(status)
        if fault is Fault.ERROR:
            return _whole(status, error_body("The judge had an error.", "server_error"), headers)
        if fault is Fault.GARBAGE:
            return _whole(200, GARBAGE_BODY, headers)
        if fault is Fault.WRONG_TYPE:
            return _whole(200, HTML_BODY, {**headers, "Content-Type": HTML_TYPE})
        replies: dict[Fault | None, str | None] = {Fault.UNPARSEABLE: UNPARSEABLE_REPLY, Fault.EMPTY: None}
        said = replies.get(fault, text)
        has_choices = fault is not Fault.EMPTY or content.digest[-1] % 2 == 0
        model = ask.model or epoch.profile.model or DEFAULT_MODEL
        pieces = completion(ask, content, said, model=model, has_choices=has_choices)
        if fault not in (Fault.TRUNCATE, Fault.DRIP) and not ask.stream:
            epoch.counts.answered += 1
            count.answered += 1
            return _whole(200, b"".join(pieces), headers)
        reply = web.StreamResponse(headers={**headers, "Content-Type": EVENTS_TYPE if ask.stream else JSON_TYPE})
        if not ask.stream:
            body = b"".join(pieces)
            reply.content_length = len(body)
            step = ceil(len(body) / _DRIP_PIECES)
            pieces = [body[at : at + step] for at in range(0, len(body), step)]
        await reply.prepare(request)
        if fault is Fault.TRUNCATE:
            await reply.write(b"".join(pieces[: len(pieces) // 2]))
            return _hang_up(request)
        for piece in pieces:
            if fault is Fault.DRIP:
                await asyncio.sleep(epoch.profile.drip_s * epoch.profile.time_scale / len(pieces))
            await reply.write(piece)
        epoch.counts.answered += 1
        count.answered += 1
        return reply

    def other_path(self, method: str, path: str, body: bytes) -> web.Response:
        """Handle the paths that are not chat completions. They are not counted."""
        match method, path:
            case "GET", "/healthz":
                return _whole(200, b'{"ok": true}')
            case "GET", "/v1/models":
                model = self._epoch.profile.model or DEFAULT_MODEL
                listed = {"id": model, "object": "model", "created": 0, "owned_by": "freewheel"}
                return _whole(200, msgspec.json.encode({"object": "list", "data": [listed]}))
            case "GET", "/__counts":
                self._epoch.counts.open_connections = len(self._open)
                return _whole(200, msgspec.json.encode(self._epoch.counts))
            case "GET", "/__requests":
                return _whole(200, msgspec.json.encode(list(self._epoch.recent)))
            case "POST", "/__reset":
                try:
                    profile = msgspec.json.decode(body, type=JudgeProfile) if body.strip() else self._epoch.profile
                except (ValueError, RecursionError) as problem:  # msgspec's errors are ValueErrors
                    return _whole(400, error_body(str(problem), "invalid_request_error"))
                self._epoch.close()  # requests in flight lose their connection without a reply
                self._epoch = _Epoch(profile)
                return _whole(200, b'{"ok": true}')
        return _whole(404, error_body(f"No such path: {path}", "invalid_request_error"))


def _whole(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": JSON_TYPE, **(headers or {})})


def _hang_up(request: web.BaseRequest, *, abort: bool = False) -> web.Response:
    """Close the connection after the bytes written so far. `abort` resets it and drops those too."""
    transport = request.transport
    if transport is not None:
        if abort:
            transport.abort()
        else:
            transport.close()
    return web.Response()  # aiohttp wants one, and drops it where the connection is closed


def _read(raw: bytes) -> Ask | None:
    try:
        return _ASK_DECODER.decode(raw)
    except (ValueError, RecursionError):  # no JSON, no chat request, or no UTF-8
        return None


# -- its places -------------------------------------------------------------------------------------------------------


class RunningJudge(ABC):
    """A mock judge that is up, wherever it runs."""

    def __init__(self, profile: JudgeProfile, host: str, port: int, *, scheme: str = "http") -> None:
        self.profile = profile
        """What it does now."""
        self.host = host
        self.port = port
        self._scheme = scheme

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT/v1`, the `base_url` of OpenAI clients."""
        return f"{self._scheme}://{self.host}:{self.port}/v1"

    @property
    def url(self) -> str:
        """The full address of chat completions."""
        return self.base_url + CHAT_PATH

    def counts(self) -> Counts:
        """The counts as they are now."""
        return msgspec.json.decode(self._ask("GET", "/__counts"), type=Counts)

    def requests(self) -> list[RecordedRequest]:
        """The kept chat requests, oldest first (see `keep_requests`)."""
        return msgspec.json.decode(self._ask("GET", "/__requests"), type=list[RecordedRequest])

    def reset(self, profile: JudgeProfile | None = None) -> None:
        """Restart counts, attempts, rates and schedule, with another profile if one is given.

        Requests in flight lose their connection without a reply.
        """
        self._ask("POST", "/__reset", b"" if profile is None else msgspec.json.encode(profile))
        self.profile = profile or self.profile

    @abstractmethod
    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the server's reply at a path that is not chat completions."""


class MockJudge(RunningJudge):
    """An OpenAI-compatible judge on loopback that behaves as its profile describes."""

    def __init__(
        self,
        profile: JudgeProfile | None = None,
        host: str = DEFAULT_HOST,
        port: int = 0,
        *,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(profile or JudgeProfile(), host, port, scheme="http" if ssl_context is None else "https")
        self._ssl_context = ssl_context
        self._server: _JudgeServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the judge's own thread, if it has one."""

    async def start(self) -> None:
        """Listen on the current loop."""
        self._server = _JudgeServer(self.profile)
        self.port = await self._server.listen(self.host, self.port, self._ssl_context)

    async def stop(self) -> None:
        """Close every connection and stop listening. The counts stay readable."""
        if self._server is not None:
            await self._server.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @contextmanager
    def in_thread(self) -> Iterator[RunningJudge]:
        """Run on a loop in a background thread while the context lasts."""
        started: Future[asyncio.Event] = Future()

        async def live() -> None:
            done = asyncio.Event()
            try:
                await self.start()
            except BaseException as problem:  # noqa: BLE001
                started.set_exception(problem)  # raised in the caller's thread
                return
            self._loop = asyncio.get_running_loop()
            started.set_result(done)
            await done.wait()
            await self.stop()
            self._loop = None

        thread = threading.Thread(target=lambda: run_loop(live()), name="freewheel-mock-judge", daemon=True)
        thread.start()
        done = started.result(_START_TIMEOUT_S)
        try:
            yield self
        finally:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(done.set)
            thread.join(_STOP_TIMEOUT_S)

    @contextmanager
    def in_process(self) -> Iterator[RunningJudge]:
        """Run in a child process, which ends with the context or with this process, whichever is first."""
        if self._ssl_context is not None:
            raise ConfigError("ssl_context", "set", "a context cannot travel to another process; use in_thread()")
        command = [sys.executable, "-c", "from freewheel.judge.testing.mock import _run_child; _run_child()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                # By stdin, not by argument: a profile may hold a key, and arguments are public and limited in length.
                child.stdin.write(msgspec.json.encode((self.profile, self.host, self.port, os.getpid())) + b"\n")
                child.stdin.flush()
                url = child.stdout.readline().decode().strip()
                if not url:
                    raise JudgeError("the mock judge's process ended before it was ready; its stderr says why")
                yield RemoteJudge(self.profile, self.host, urlsplit(url).port or 0, child.pid)
            finally:
                child.terminate()
                try:
                    child.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    child.kill()

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        server = self._server
        if server is None:
            raise JudgeError("this mock judge has not been started: use `async with`, in_thread() or in_process()")

        async def ask() -> web.Response:
            return server.other_path(method, path, body)

        if self._loop is None:
            reply = server.other_path(method, path, body)
        else:
            reply = asyncio.run_coroutine_threadsafe(ask(), self._loop).result(_CALL_TIMEOUT_S)
        assert isinstance(reply.body, bytes)
        return reply.body


class RemoteJudge(RunningJudge):
    """A mock judge in another process, read over HTTP."""

    def __init__(self, profile: JudgeProfile, host: str, port: int, pid: int) -> None:
        super().__init__(profile, host, port)
        self.pid = pid

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data=body or None, method=method)
        # The proxies of the environment are not for loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_CALL_TIMEOUT_S) as reply:
            read: bytes = reply.read()
        return read


def _run_child() -> None:
    profile, host, port, parent_pid = msgspec.json.decode(sys.stdin.readline(), type=tuple[JudgeProfile, str, int, int])
    end_with(parent_pid)

    def announce(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()

    serve(profile, host, port, announce)


def serve(
    profile: JudgeProfile,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then close cleanly and return. Call it in the main thread.

    `ready` receives the address of chat completions once it is open.
    """

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with MockJudge(profile, host, port) as judge:
            if ready is not None:
                ready(judge.url)
            await stopped.wait()

    run_loop(run())
