"""Gateways on the test's own loop, or as the program that users start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from freewheel.gateway.limits import TOKEN_ENV, Doorkeeper, Limits
from freewheel.gateway.server import Gateway
from freewheel.judge import JudgeConfig, Secret
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge
from freewheel.utils.http import listen

Mock = Callable[..., RunningJudge]
Start = Callable[..., Any]

CHAT = "/v1/chat/completions"
TOKEN = "the-gateways-own-token"
MODEL = "mock-judge"
WAIT_S = 60.0
"""Longer than anything here takes on a busy machine."""


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)


@pytest.fixture
def mock() -> Iterator[Callable[..., RunningJudge]]:
    """Starts mock judges: `mock(latency_s=0.1)`."""
    with contextlib.ExitStack() as stack:
        yield lambda **profile: stack.enter_context(MockJudge(JudgeProfile(**profile)).in_thread())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def chat(content: str, **fields: Any) -> dict[str, Any]:
    """Return a body as judge code sends it. With `temperature` 0, equal requests share one call."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


class Talk:
    """A gateway on the test's loop, and its client."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession, port: int) -> None:
        self.gateway = gateway
        self.session = session
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        plain = isinstance(body, dict | list | str)
        return await self._request("POST", path, data=json.dumps(body).encode() if plain else body, **options)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self._request("GET", path, **options)

    async def chat(self, content: str, *, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        return await self.post(CHAT, chat(content, **fields), headers=headers)

    async def _request(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.url + path, **options) as reply:
            return Reply(reply.status, reply.headers, await reply.read())


@dataclass
class Reply:
    status: int
    headers: Any
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


@pytest.fixture
async def talk() -> AsyncIterator[Callable[..., Any]]:
    """Starts gateways: `await talk(mock.url, limits={…}, token="…", max_attempts=1)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            endpoint: Any,
            *,
            limits: dict[str, Any] | None = None,
            token: str | None = None,
            shares_samples: bool = False,
            **settings: Any,
        ) -> Talk:
            config = JudgeConfig(endpoint=endpoint, **{"model": MODEL, **settings})
            gateway = Gateway(config, Limits(**(limits or {})), shares_samples=shares_samples)
            door = Doorkeeper("127.0.0.1", Secret(token) if token else None)
            listening = listen("127.0.0.1", 0)
            await gateway.start(listening, door)
            stack.push_async_callback(gateway.stop)
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            return Talk(gateway, session, listening.getsockname()[1])

        yield start


class Program:
    """`freewheel serve` in a separate process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.ready: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def wait_ready(self) -> Program:
        assert self.process.stdout is not None
        self.ready = json.loads(self.process.stdout.readline())
        return self

    def tell(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return the exit code and what was written to stderr."""
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said.decode()


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Starts the program: `program(mock.url, "--drain-s", 1)`."""
    begun: list[Program] = []

    def begin(endpoint: str, *flags: object, env: dict[str, str] | None = None) -> Program:
        command = [sys.executable, "-m", "freewheel", "serve", "--endpoint", endpoint, "--model", MODEL]
        command += ["--json", *([] if "--port" in flags else ["--port", "0"]), *map(str, flags)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        begun.append(Program(process))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
