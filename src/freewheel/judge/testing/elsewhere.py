"""A mock judge that runs beside its caller: on a thread's loop, or in a child process that ends with its parent.

this process ──stdin: profile as a line, then kept open──▶ python -m freewheel.judge.testing --profile - --until-eof
             ◀─stdout: {"url": ..., "port": ...} when it listens──
             ◀─HTTP: /__counts, /__requests, /__reset──▶
"""

from __future__ import annotations

import asyncio
import json
import selectors
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

from freewheel.judge.errors import JudgeError
from freewheel.judge.testing.counts import Counts, RecordedRequest
from freewheel.judge.testing.profile import JudgeProfile
from freewheel.judge.testing.server import CHAT_PATH
from freewheel.judge.testing.serving import new_loop

if TYPE_CHECKING:
    from freewheel.judge.testing.mock import MockJudge, RunningJudge

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
