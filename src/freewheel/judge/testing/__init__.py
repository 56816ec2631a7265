"""A judge to test against: an OpenAI-compatible server on loopback, as slow, crowded or broken as you configure it.

    with MockJudge(JudgeProfile(latency_s=0.2, knee=60, reject_above=80)).in_thread() as judge:
        ...                                                # send to judge.url
        assert judge.counts().most_received == 1

    with MockJudge(profile).in_process() as judge:         # when it must not use CPU time of the caller's process
    serve(profile)                                         # a separate program: `freewheel mock-judge`

A child process gets its profile as a line on stdin, prints its address on stdout, and ends with its parent. Its counts
are read over HTTP. `profile.py` decides; this module carries the decisions out:

    aiohttp's low-level server ──▶ _Epoch.decide ──▶ _Epoch.serve ──▶ the reply: whole, cut or dripped

Paths: POST .../chat/completions, GET /v1/models, /__counts and /__requests, POST /__reset (a profile in its
body replaces the current one).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from math import ceil, inf
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from freewheel.judge.config import COMPLETIONS_PATH
from freewheel.judge.testing.profile import (
    GARBAGE_BODY,
    HTML_BODY,
    UNPARSEABLE_REPLY,
    Ask,
    Behaviour,
    ContentCount,
    Counts,
    Fault,
    Headers,
    JudgeProfile,
    ProcessorSharing,
    Refusal,
    completion,
    expected_score,
    reply_text,
)
from freewheel.judge.transport import run_loop
from freewheel.judge.verdict import JudgeError
from freewheel.utils.http import BACKLOG, HOST, listen, listen_or_say, openai_error, server_log
from freewheel.utils.processes import end_with

__all__ = [
    "ContentCount",
    "Counts",
    "JudgeProfile",
    "MockJudge",
    "RecordedRequest",
    "RunningJudge",
    "expected_score",
    "serve",
]

DEFAULT_PORT = 8099
"""Not a default port of any inference server."""
_DEFAULT_MODEL = "mock-judge"

_PATIENCE_S = 30.0
"""Longest wait for the judge's thread, for its counts and for aborted connections to close. Each takes less than a
second, unless the machine is very busy."""
_DRIP_PIECES = 16
"""Most pieces into which a dripping body is split."""
_MILLISECOND_S = 0.001
"""uvloop rounds its timers to this. A timer that fires early would have to be set again."""


class RecordedRequest(msgspec.Struct, frozen=True):
    """A chat request as it arrived."""

    headers: dict[str, str]
    """Names in lower case."""
    body: str

    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)


# -- the server -------------------------------------------------------------------------------------------------------


class _Epoch(Behaviour):
    """The state that a reset replaces. A request belongs to the epoch in which it arrived, and counts there."""

    def __init__(self, profile: JudgeProfile) -> None:
        super().__init__(profile)
        self.recent: deque[RecordedRequest] = deque(maxlen=profile.keep_requests)
        self.requests: set[asyncio.Task[Any]] = set()
        """Admitted requests without a reply yet."""
        self.timers: list[asyncio.TimerHandle] = []
        """One for each outage, set at the first request."""
        self._sharing = ProcessorSharing(profile.knee)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """A future for each request in service, by its ticket."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    def now(self) -> float:
        """The judge's own time in seconds."""
        return time.monotonic() / self.profile.time_scale

    async def serve(self, service_s: float) -> None:
        """Wait until the request has had `service_s` of service. If it is cancelled, the others get its share."""
        ticket = self._sharing.join(self.now(), service_s)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._set_timer()
        try:
            await future
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._sharing.leave(self.now(), ticket)
                self._set_timer()

    def close(self) -> None:
        """End the requests in flight: they lose their connection without a reply."""
        for task in self.requests:
            task.cancel()
        for timer in self.timers:
            timer.cancel()

    def _set_timer(self) -> None:
        """Set the one timer, which fires when the next request ends."""
        at = self._sharing.next_finish()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, at
        if at < inf:
            left_s = ceil(max(0.0, at - self.now()) * self.profile.time_scale / _MILLISECOND_S) * _MILLISECOND_S
            self._timer = asyncio.get_running_loop().call_later(left_s, self._release)

    def _release(self) -> None:
        self._timer_at = inf
        for ticket in self._sharing.finished(self.now()):
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)
        self._set_timer()


class _JudgeServer(web.Server):
    """One mock judge on the running loop, as long as `serving` lasts."""

    def __init__(self, profile: JudgeProfile) -> None:
        log = server_log("freewheel.judge.testing.http")
        super().__init__(self._handle, handler_cancellation=True, access_log=None, logger=log)
        self._epoch = _Epoch(profile)

    @asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve while the context lasts. At the end, open connections are aborted."""
        listener = await asyncio.get_running_loop().create_server(self, sock=listening, backlog=BACKLOG)
        try:
            yield
        finally:
            listener.close()
            self._epoch.close()
            self._abort_all()
            async with asyncio.timeout(_PATIENCE_S):
                while self.connections:  # noqa: ASYNC110  # they end within a few turns of the loop
                    await asyncio.sleep(0)
            await self.shutdown(_PATIENCE_S)
            await listener.wait_closed()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        epoch = self._epoch
        if epoch.profile.outage_kind == "refuse" and epoch.in_outage(epoch.now()):
            epoch.counts.connections_refused += 1
            transport.abort()

    def _abort_all(self) -> None:
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()
        if request.method == "POST" and request.path.endswith(COMPLETIONS_PATH):
            return await self._chat(request, body)
        return await self.control(request.method, request.path, body)

    async def _chat(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        epoch = self._epoch
        profile, counts = epoch.profile, epoch.counts
        if profile.keep_requests:
            headers = {name.lower(): value for name, value in request.headers.items()}
            epoch.recent.append(RecordedRequest(headers, body.decode("utf-8", "replace")))
        ask = _read(body)
        decision = epoch.decide(epoch.now(), ask, request.headers.get("Authorization"))
        if counts.received == 1 and profile.outage_kind == "refuse":
            later = asyncio.get_running_loop().call_later
            epoch.timers = [later(start_s * profile.time_scale, self._abort_all) for start_s, _ in profile.outages]
        if decision is None:
            return _hang_up(request, abort=True)
        if isinstance(decision, Refusal):
            return _whole(decision.body, decision.status, decision.headers)
        task = asyncio.current_task()
        assert ask is not None and task is not None, "only a readable request is admitted"
        epoch.requests.add(task)
        try:
            if decision.fault is Fault.HANG:
                await asyncio.get_running_loop().create_future()
            elif decision.service_s > 0.0:
                await epoch.serve(decision.service_s)
            return await _answer(epoch, request, ask, decision.fault)
        except asyncio.CancelledError:
            counts.gone += 1
            raise
        finally:
            counts.in_flight -= 1
            epoch.requests.discard(task)

    async def control(self, method: str, path: str, body: bytes) -> web.Response:
        """Handle the paths that are not chat completions. They are not counted."""
        epoch = self._epoch
        match method, path:
            case "GET", "/v1/models":
                model = {"id": epoch.profile.model or _DEFAULT_MODEL, "object": "model", "created": 0}
                return _whole(msgspec.json.encode({"object": "list", "data": [{**model, "owned_by": "freewheel"}]}))
            case "GET", "/__counts":
                epoch.counts.open_connections = len(self.connections)
                return _whole(msgspec.json.encode(epoch.counts))
            case "GET", "/__requests":
                return _whole(msgspec.json.encode(list(epoch.recent)))
            case "POST", "/__reset":
                try:
                    profile = msgspec.json.decode(body, type=JudgeProfile) if body.strip() else epoch.profile
                except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
                    return _whole(openai_error(str(error)), 400)
                epoch.close()
                self._epoch = _Epoch(profile)
                return _whole(b'{"ok": true}')
        return _whole(openai_error(f"No such path: {path}"), 404)


async def _answer(epoch: _Epoch, request: web.BaseRequest, ask: Ask, fault: Fault | None) -> web.StreamResponse:
    """The reply to a request that was admitted and served, with its fault if it has one."""
    if fault is Fault.DISCONNECT:
        return _hang_up(request)
    headers = epoch.rates.headers(epoch.now())
    status = epoch.profile.error_status if fault is Fault.ERROR else 200
    epoch.counts.by_status[status] += 1
    if fault is Fault.ERROR:
        return _whole(openai_error("The judge had an error.", "server_error"), status, headers)
    if fault is Fault.GARBAGE:
        return _whole(GARBAGE_BODY, headers=headers)
    if fault is Fault.WRONG_TYPE:
        return _whole(HTML_BODY, headers={**headers, "Content-Type": "text/html; charset=utf-8"})
    text: str | None = reply_text(epoch.profile, ask.content)
    if fault in (Fault.UNPARSEABLE, Fault.EMPTY):
        text = UNPARSEABLE_REPLY if fault is Fault.UNPARSEABLE else None
    has_choices = fault is not Fault.EMPTY or ask.content.digest[-1] % 2 == 0
    model = ask.model or epoch.profile.model or _DEFAULT_MODEL
    pieces = completion(ask, text, model=model, has_choices=has_choices)
    if fault not in (Fault.TRUNCATE, Fault.DRIP) and not ask.stream:
        _count_answer(epoch, ask)
        return _whole(pieces[0], headers=headers)
    reply = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
    if ask.stream:
        reply.headers["Content-Type"] = "text/event-stream; charset=utf-8"
    else:
        (body,) = pieces
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
    _count_answer(epoch, ask)
    return reply


def _count_answer(epoch: _Epoch, ask: Ask) -> None:
    epoch.counts.answered += 1
    epoch.counts.contents[ask.content.key].answered += 1


def _whole(body: bytes, status: int = 200, headers: Headers | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})})


def _hang_up(request: web.BaseRequest, *, abort: bool = False) -> web.Response:
    """Close the connection after the bytes written so far. `abort` resets it and drops those too."""
    transport = request.transport
    if transport is not None:
        (transport.abort if abort else transport.close)()
    return web.Response()  # aiohttp requires a response, and drops it if the connection is closed


def _read(body: bytes) -> Ask | None:
    try:
        return msgspec.json.decode(body, type=Ask)
    except (ValueError, RecursionError):  # no JSON, no chat request, or no UTF-8
        return None


# -- its places -------------------------------------------------------------------------------------------------------


Control = Callable[[str, str, bytes], bytes]
"""Returns the server's reply to a method, a path other than chat completions, and a body."""


class RunningJudge:
    """A running mock judge."""

    def __init__(self, profile: JudgeProfile, host: str, port: int, control: Control | None = None) -> None:
        """`control`: how to ask the server for counts, if not over HTTP."""
        self.profile = profile
        """The current profile."""
        self.host = host
        self.port = port
        self._control = control or self._ask_over_http

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT/v1`, the `base_url` of OpenAI clients."""
        return f"http://{self.host}:{self.port}/v1"

    @property
    def url(self) -> str:
        """The full address of chat completions."""
        return self.base_url + COMPLETIONS_PATH

    def counts(self) -> Counts:
        """The counts as they are now."""
        return msgspec.json.decode(self._control("GET", "/__counts", b""), type=Counts)

    def requests(self) -> list[RecordedRequest]:
        """The kept chat requests, oldest first (see `keep_requests`)."""
        return msgspec.json.decode(self._control("GET", "/__requests", b""), type=list[RecordedRequest])

    def reset(self, profile: JudgeProfile | None = None) -> None:
        """Restart counts, attempts, rates and schedule, with another profile if one is given.

        Requests in flight lose their connection without a reply.
        """
        self._control("POST", "/__reset", b"" if profile is None else msgspec.json.encode(profile))
        self.profile = profile or self.profile

    def _ask_over_http(self, method: str, path: str, body: bytes) -> bytes:
        request = urllib.request.Request(f"http://{self.host}:{self.port}{path}", data=body or None, method=method)
        # Ignore the proxies of the environment: they cannot reach loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_PATIENCE_S) as reply:
            read: bytes = reply.read()
        return read


class MockJudge:
    """An OpenAI-compatible judge on loopback that behaves as its profile describes."""

    def __init__(self, profile: JudgeProfile | None = None, host: str = HOST, port: int = 0) -> None:
        self._profile = profile or JudgeProfile()
        self._host = host
        self._port = port

    @contextmanager
    def in_thread(self) -> Iterator[RunningJudge]:
        """Run on a loop in a background thread while the context lasts."""
        started: Future[tuple[_JudgeServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        listening = listen(self._host, self._port)

        async def live() -> None:
            server, stopped = _JudgeServer(self._profile), asyncio.Event()
            async with server.serving(listening):
                started.set_result((server, asyncio.get_running_loop(), stopped))
                await stopped.wait()

        def control(method: str, path: str, body: bytes) -> bytes:
            reply = asyncio.run_coroutine_threadsafe(server.control(method, path, body), loop)
            content = reply.result(_PATIENCE_S).body
            assert isinstance(content, bytes)
            return content

        thread = threading.Thread(target=lambda: run_loop(live()), name="freewheel-mock-judge", daemon=True)
        thread.start()
        server, loop, stopped = started.result(_PATIENCE_S)
        try:
            yield RunningJudge(self._profile, self._host, listening.getsockname()[1], control)
        finally:
            loop.call_soon_threadsafe(stopped.set)
            thread.join(_PATIENCE_S)

    @contextmanager
    def in_process(self) -> Iterator[RunningJudge]:
        """Run in a child process, which ends with the context or with this process, whichever is first."""
        command = [sys.executable, "-c", "from freewheel.judge.testing import _run_child; _run_child()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                # Send the profile by stdin: it may hold a key, and arguments are public and limited in length.
                child.stdin.write(msgspec.json.encode((self._profile, self._host, self._port, os.getpid())) + b"\n")
                child.stdin.flush()
                url = child.stdout.readline().decode().strip()
                if not url:
                    raise JudgeError("the mock judge's process ended before it was ready; its stderr says why")
                yield RunningJudge(self._profile, self._host, urlsplit(url).port or 0)
            finally:
                child.kill()  # it has nothing to save


def _run_child() -> None:
    profile, host, port, parent_pid = msgspec.json.decode(sys.stdin.readline(), type=tuple[JudgeProfile, str, int, int])
    end_with(parent_pid)
    serve(profile, host, port, lambda url: os.write(sys.stdout.fileno(), f"{url}\n".encode()))


def serve(
    profile: JudgeProfile,
    host: str = HOST,
    port: int = DEFAULT_PORT,
    ready: Callable[[str], object] = lambda url: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then close cleanly and return. Call it in the main thread.

    `ready` receives the address of chat completions once it is open. Raises `ConfigError` if it cannot listen.
    """
    listening = listen_or_say(host, port)

    async def run() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with _JudgeServer(profile).serving(listening):
            ready(RunningJudge(profile, host, listening.getsockname()[1]).url)
            await stopped.wait()

    run_loop(run())
