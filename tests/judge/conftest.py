"""Judges to talk to: the package's own mock, and a server whose every byte the test chooses."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge import Judge, JudgeConfig, JudgeRequest, Verdict
from freewheel.judge.cache import CACHE_FILE, Store
from freewheel.judge.engine import JudgeEngine
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

from .helpers import MIB, WAIT_S, Clock, OpenStore

Answer = tuple[int, dict[str, str], bytes]
Play = Callable[[int, dict[str, str], bytes], Answer]


@pytest.fixture
def mock() -> Iterator[Callable[..., RunningJudge]]:
    """Starts mock judges: `mock(latency_s=0.1)`."""
    with ExitStack() as stack:
        yield lambda **profile: stack.enter_context(MockJudge(JudgeProfile(**profile)).in_thread())


@pytest.fixture(params=["process", "thread"])
def placement(request: pytest.FixtureRequest) -> str:
    """Where the engine lives: each test that asks for this runs in both places."""
    return str(request.param)


@pytest.fixture
def make_judge(placement: str) -> Iterator[Callable[..., Judge]]:
    """Makes judges in the current placement and closes them: `make_judge(mock.url, concurrency=4)`."""
    with ExitStack() as stack:

        def make(endpoint: Any, **settings: Any) -> Judge:
            settings = {"model": "m", "placement": placement, **settings}
            return stack.enter_context(Judge(JudgeConfig(endpoint=endpoint, **settings)))

        yield make


class Bench:
    """One engine on the running loop, without a tracker or a link, for tests of the engine itself."""

    def __init__(self, endpoint: Any, **settings: Any) -> None:
        self.verdicts: dict[tuple[int, int], Verdict] = {}
        self.engine = JudgeEngine(JudgeConfig(endpoint=endpoint, model="m", **settings), deliver=self._deliver)
        self._batches = 0
        self._changed = asyncio.Event()

    def _deliver(self, batch: int, index: int, verdict: Verdict) -> None:
        assert (batch, index) not in self.verdicts, "a request got two verdicts"
        self.verdicts[batch, index] = verdict
        self._changed.set()

    def submit(self, requests: Sequence[str | JudgeRequest], deadline_at: float | None = None) -> int:
        self._batches += 1
        batch = [JudgeRequest(one) if isinstance(one, str) else one for one in requests]
        self.engine.submit(self._batches, range(len(batch)), batch, deadline_at)
        return self._batches

    async def result(self, batch: int, count: int) -> list[Verdict]:
        async with asyncio.timeout(WAIT_S):
            while not all((batch, index) in self.verdicts for index in range(count)):
                await self._changed.wait()
                self._changed.clear()
        return [self.verdicts[batch, index] for index in range(count)]

    async def score(self, requests: Sequence[str | JudgeRequest], deadline_at: float | None = None) -> list[Verdict]:
        return await self.result(self.submit(requests, deadline_at), len(requests))

    async def __aenter__(self) -> Bench:
        await self.engine.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.close()


@pytest.fixture
def bench() -> type[Bench]:
    """`async with bench(mock.url, max_attempts=2) as engine: await engine.score([...])`."""
    return Bench


class Scripted:
    """A server whose replies a function returns. It keeps the requests."""

    def __init__(self, play: Play) -> None:
        self.seen: list[tuple[dict[str, str], bytes]] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:  # the library's name
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    outer.seen.append((dict(self.headers), body))
                    number = len(outer.seen)
                status, headers, reply = play(number, dict(self.headers), body)
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(reply)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/chat/completions"

    def use_tls(self, context: ssl.SSLContext) -> None:
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = self.url.replace("http:", "https:")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def scripted() -> Iterator[Callable[[Play], Scripted]]:
    """`scripted(lambda number, headers, body: (200, {}, completion("7")))`."""
    with ExitStack() as stack:

        def start(play: Play) -> Scripted:
            server = Scripted(play)
            stack.callback(server.close)
            return server

        yield start


def completion(text: str | None, finish_reason: str = "stop", **more: Any) -> bytes:
    """A chat completion's body."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 1}, **more}).encode()


@pytest.fixture
def replying() -> Callable[..., bytes]:
    """`replying("7")`: a chat completion's body."""
    return completion


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / CACHE_FILE


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(path: Path) -> Iterator[OpenStore]:
    """Opens stores on `path`, and closes them after the test."""
    stores: list[Store] = []

    def make(**options: object) -> Store:
        store = Store(**{"path": path, "max_bytes": 64 * MIB, "ttl_s": None, **options})  # type: ignore[arg-type]
        store.open()
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()
