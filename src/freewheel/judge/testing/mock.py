"""Start a mock judge."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import IO, Protocol, Self, TypeVar

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.testing.profile import JudgeProfile
from freewheel.judge.testing.server import CHAT_PATH, Counts, JudgeServer, RecordedRequest
from freewheel.judge.verdict import JudgeError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8099
"""Where `serve` listens unless told otherwise: none of the ports that inference servers take by default."""

STDIN_READ_BYTES = 4096
"""What comes on stdin is thrown away; only its end matters."""


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(
    profile: JudgeProfile,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    ready: Callable[[str], None] | None = None,
    *,
    until_eof: int | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then close cleanly and return. To be called in the main thread.

    `ready` gets the address of chat completions once it is open. `until_eof` is a file descriptor whose end means
    "stop" too: a parent that dies closes its end of a pipe, whatever else it fails to do.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(profile, host, port, ready, until_eof))


async def _serve(
    profile: JudgeProfile, host: str, port: int, ready: Callable[[str], None] | None, until_eof: int | None
) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)

    def read() -> None:
        assert until_eof is not None
        if not os.read(until_eof, STDIN_READ_BYTES):
            loop.remove_reader(until_eof)
            stopped.set()

    if until_eof is not None:
        loop.add_reader(until_eof, read)
    server = JudgeServer(profile)
    bound = await server.start(host, port)
    try:
        if ready is not None:
            ready(f"http://{host}:{bound}/v1{CHAT_PATH}")
        await stopped.wait()
    finally:
        await server.stop()


T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""How long a start may take: imports on a busy machine are slow."""

STOP_TIMEOUT_S = 10.0
"""How long a child may take to end by itself before it is killed."""

CALL_TIMEOUT_S = 30.0
"""For reading counts from a judge that is busy answering."""


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """The address that OpenAI clients call `base_url`."""
    return f"{'https' if tls else 'http'}://{host}:{port}/v1"


class ThreadedJudge:
    """A `MockJudge` seen from another thread: every access happens on its own loop."""

    def __init__(self, judge: MockJudge, loop: asyncio.AbstractEventLoop) -> None:
        self._judge = judge
        self._loop = loop

    @property
    def profile(self) -> JudgeProfile:
        return self._judge.profile

    @property
    def port(self) -> int:
        return self._judge.port

    @property
    def base_url(self) -> str:
        return self._judge.base_url

    @property
    def url(self) -> str:
        return self._judge.url

    def counts(self) -> Counts:
        return self._on_loop(self._judge.counts)

    def requests(self) -> list[RecordedRequest]:
        return self._on_loop(self._judge.requests)

    def reset(self, profile: JudgeProfile | None = None) -> None:
        self._on_loop(lambda: self._judge.reset(profile))

    def _on_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(CALL_TIMEOUT_S)


@contextmanager
def in_thread(judge: MockJudge) -> Iterator[RunningJudge]:
    """Run the judge on a loop in a thread of its own while the context lasts."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def live() -> None:
        done = asyncio.Event()
        try:
            await judge.start()
        except BaseException as problem:
            started.set_exception(problem)
            raise
        started.set_result((asyncio.get_running_loop(), done))
        await done.wait()
        await judge.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            try:
                runner.run(live())
            except BaseException:
                # A failed start is raised in the caller's thread, where `started` is read.
                if not started.done() or started.exception() is None:
                    raise

    thread = threading.Thread(target=run, name="freewheel-mock-judge", daemon=True)
    thread.start()
    loop, done = started.result(START_TIMEOUT_S)
    try:
        yield ThreadedJudge(judge, loop)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(STOP_TIMEOUT_S)


class RemoteJudge:
    """A mock judge in another process, read over HTTP."""

    def __init__(self, profile: JudgeProfile, host: str, port: int, pid: int) -> None:
        self.profile = profile
        self.port = port
        self.pid = pid
        self._root = f"http://{host}:{port}"
        # The environment's proxies are for the world outside, not for loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def base_url(self) -> str:
        return f"{self._root}/v1"

    @property
    def url(self) -> str:
        return self.base_url + CHAT_PATH

    def counts(self) -> Counts:
        return msgspec.json.decode(self._call("GET", "/__counts"), type=Counts)

    def requests(self) -> list[RecordedRequest]:
        return msgspec.json.decode(self._call("GET", "/__requests"), type=list[RecordedRequest])

    def reset(self, profile: JudgeProfile | None = None) -> None:
        self._call("POST", "/__reset", b"" if profile is None else msgspec.json.encode(profile))
        self.profile = profile or self.profile

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._root + path, data=body, method=method)
        with self._opener.open(request, timeout=CALL_TIMEOUT_S) as reply:
            read: bytes = reply.read()
        return read


@contextmanager
def in_process(profile: JudgeProfile, host: str, port: int) -> Iterator[RunningJudge]:
    """Run a judge in a child process while the context lasts. It ends when its stdin does, so never outlives us."""
    command = [sys.executable, "-m", "freewheel.judge.testing", "--profile", "-", "--until-eof"]
    command += ["--host", host, "--port", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            # By stdin, not by argument: a profile may hold a key, and arguments are public and limited in length.
            child.stdin.write(msgspec.json.encode(profile) + b"\n")
            child.stdin.flush()
            ready = json.loads(_first_line(child.stdout))
            yield RemoteJudge(profile, host, ready["port"], child.pid)
        finally:
            child.stdin.close()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _first_line(stream: IO[bytes]) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(START_TIMEOUT_S):
            raise JudgeError(f"the mock judge's process was not ready within {START_TIMEOUT_S:g} s")
    line = stream.readline()
    if not line:
        raise JudgeError("the mock judge's process ended before it was ready; its stderr says why")
    return line


class RunningJudge(Protocol):
    """A mock judge that is up, wherever it runs."""

    @property
    def profile(self) -> JudgeProfile:
        """What it does now."""

    @property
    def port(self) -> int:
        """Where it listens."""

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:PORT/v1`, as OpenAI clients want it."""

    @property
    def url(self) -> str:
        """The full address of chat completions."""

    def counts(self) -> Counts:
        """The counts as they are now."""

    def requests(self) -> list[RecordedRequest]:
        """The kept chat requests, oldest first (see `keep_requests`)."""

    def reset(self, profile: JudgeProfile | None = None) -> None:
        """Begin anew, with another profile if one is given. What is in flight loses its connection."""


class MockJudge:
    """An OpenAI-compatible judge on loopback that behaves as its profile says."""

    def __init__(
        self,
        profile: JudgeProfile | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._profile = profile or JudgeProfile()
        self._host = host
        self._port = port
        self._ssl_context = ssl_context
        self._server: JudgeServer | None = None

    async def start(self) -> None:
        """Listen, on the current loop."""
        self._server = JudgeServer(self._profile)
        self._port = await self._server.start(self._host, self._port, self._ssl_context)

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

    @property
    def profile(self) -> JudgeProfile:
        return self._profile

    @property
    def port(self) -> int:
        return self._port

    @property
    def base_url(self) -> str:
        return base_url(self._host, self._port, tls=self._ssl_context is not None)

    @property
    def url(self) -> str:
        return self.base_url + CHAT_PATH

    def counts(self) -> Counts:
        return msgspec.json.decode(self._running().counts_json(), type=Counts)

    def requests(self) -> list[RecordedRequest]:
        return msgspec.json.decode(self._running().requests_json(), type=list[RecordedRequest])

    def reset(self, profile: JudgeProfile | None = None) -> None:
        self._profile = profile or self._profile
        self._running().reset(profile)

    def in_thread(self) -> AbstractContextManager[RunningJudge]:
        """The same on a loop of its own in a background thread."""
        return in_thread(self)

    def in_process(self) -> AbstractContextManager[RunningJudge]:
        """The same in a process of its own, which ends with the context or with this process, whichever is first."""
        if self._ssl_context is not None:
            raise ConfigError("ssl_context", "set", "a context cannot travel to another process; use in_thread()")
        return in_process(self._profile, self._host, self._port)

    def _running(self) -> JudgeServer:
        if self._server is None:
            raise JudgeError("this mock judge has not been started: use `async with`, in_thread() or in_process()")
        return self._server
