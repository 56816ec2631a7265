"""`MockJudge`: an OpenAI-compatible judge on loopback, on the current loop, in a thread or in a child process.

    async with MockJudge(profile) as judge:                 on the current loop
    with MockJudge(profile).in_thread() as judge:           for synchronous callers
    with MockJudge(profile).in_process() as judge:          when its CPU time must not be the caller's
    serve(profile)                                          a program of its own: `freewheel mock-judge`

Each `judge` is a `RunningJudge`. A child process is read over HTTP (`/__counts`, `/__requests`, `/__reset`), gets its
profile as a line on stdin, answers with its port on stdout, and ends with its parent.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import IO, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.testing.profile import JudgeProfile
from freewheel.judge.testing.server import CHAT_PATH, Counts, JudgeServer, RecordedRequest
from freewheel.judge.verdict import JudgeError
from freewheel.utils.processes import end_with

T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8099
"""Not a default port of any inference server."""
_START_TIMEOUT_S = 60.0
"""Imports on a busy machine are slow."""
_STOP_TIMEOUT_S = 10.0
"""How long a child process may take to end before it is killed."""
_CALL_TIMEOUT_S = 30.0
"""For reading counts from a judge that is busy answering."""


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

    @abstractmethod
    def counts(self) -> Counts:
        """The counts as they are now."""

    @abstractmethod
    def requests(self) -> list[RecordedRequest]:
        """The kept chat requests, oldest first (see `keep_requests`)."""

    @abstractmethod
    def reset(self, profile: JudgeProfile | None = None) -> None:
        """Start over, with another profile if one is given. Requests in flight lose their connection."""


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
        self._server: JudgeServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the judge's own thread, if it has one."""

    async def start(self) -> None:
        """Listen on the current loop."""
        self._server = JudgeServer(self.profile)
        self.port = await self._server.start(self.host, self.port, self._ssl_context)

    async def stop(self) -> None:
        """Close every connection and stop listening. The counts stay readable."""
        if self._server is not None:
            await self._server.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def counts(self) -> Counts:
        return msgspec.json.decode(self._call(lambda server: server.counts_json()), type=Counts)

    def requests(self) -> list[RecordedRequest]:
        return msgspec.json.decode(self._call(lambda server: server.requests_json()), type=list[RecordedRequest])

    def reset(self, profile: JudgeProfile | None = None) -> None:
        self.profile = profile or self.profile
        self._call(lambda server: server.reset(profile))

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

        def run() -> None:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(live())

        thread = threading.Thread(target=run, name="freewheel-mock-judge", daemon=True)
        thread.start()
        done = started.result(_START_TIMEOUT_S)
        try:
            yield self
        finally:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(done.set)
            thread.join(_STOP_TIMEOUT_S)

    def in_process(self) -> AbstractContextManager[RunningJudge]:
        """Run in a child process, which ends with the context or with this process, whichever is first."""
        if self._ssl_context is not None:
            raise ConfigError("ssl_context", "set", "a context cannot travel to another process; use in_thread()")
        return _in_process(self.profile, self.host, self.port)

    def _call(self, work: Callable[[JudgeServer], T]) -> T:
        """Run `work` on the server's loop."""
        server, loop = self._server, self._loop
        if server is None:
            raise JudgeError("this mock judge has not been started: use `async with`, in_thread() or in_process()")
        if loop is None:
            return work(server)

        async def call() -> T:
            return work(server)

        return asyncio.run_coroutine_threadsafe(call(), loop).result(_CALL_TIMEOUT_S)


class RemoteJudge(RunningJudge):
    """A mock judge in another process, read over HTTP."""

    def __init__(self, profile: JudgeProfile, host: str, port: int, pid: int) -> None:
        super().__init__(profile, host, port)
        self.pid = pid
        # The proxies of the environment are not for loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def counts(self) -> Counts:
        return msgspec.json.decode(self._request("GET", "/__counts"), type=Counts)

    def requests(self) -> list[RecordedRequest]:
        return msgspec.json.decode(self._request("GET", "/__requests"), type=list[RecordedRequest])

    def reset(self, profile: JudgeProfile | None = None) -> None:
        self._request("POST", "/__reset", b"" if profile is None else msgspec.json.encode(profile))
        self.profile = profile or self.profile

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self._scheme}://{self.host}:{self.port}{path}", data=body, method=method)
        with self._opener.open(request, timeout=_CALL_TIMEOUT_S) as reply:
            read: bytes = reply.read()
        return read


class _ChildSettings(msgspec.Struct):
    """What a child process reads from stdin."""

    profile: JudgeProfile
    host: str
    port: int
    parent_pid: int


@contextmanager
def _in_process(profile: JudgeProfile, host: str, port: int) -> Iterator[RunningJudge]:
    command = [sys.executable, "-c", "from freewheel.judge.testing.mock import _run_child; _run_child()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            # By stdin, not by argument: a profile may hold a key, and arguments are public and limited in length.
            child.stdin.write(msgspec.json.encode(_ChildSettings(profile, host, port, os.getpid())) + b"\n")
            child.stdin.flush()
            url = _read_first_line(child.stdout).decode().strip()
            yield RemoteJudge(profile, host, urlsplit(url).port or 0, child.pid)
        finally:
            child.terminate()
            try:
                child.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _read_first_line(stream: IO[bytes]) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(_START_TIMEOUT_S):
            raise JudgeError(f"the mock judge's process was not ready within {_START_TIMEOUT_S:g} s")
    line = stream.readline()
    if not line:
        raise JudgeError("the mock judge's process ended before it was ready; its stderr says why")
    return line


def _run_child() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=_ChildSettings)
    end_with(settings.parent_pid)

    def announce(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()

    serve(settings.profile, settings.host, settings.port, announce)


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

    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(run())


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
