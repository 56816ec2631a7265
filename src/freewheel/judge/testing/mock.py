"""`MockJudge`: an OpenAI-compatible judge on loopback, on the current loop, in a thread or in a process of its own.

    async with MockJudge(profile) as judge:                 on the current loop
    with MockJudge(profile).in_thread() as judge:           for synchronous callers
    with MockJudge(profile).in_process() as judge:          its CPU is not the caller's

All three give a `RunningJudge`: `url`, `counts()`, `requests()`, `reset()`.
"""

from __future__ import annotations

import ssl
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.errors import JudgeError
from freewheel.judge.testing import elsewhere
from freewheel.judge.testing.counts import Counts, RecordedRequest
from freewheel.judge.testing.profile import JudgeProfile
from freewheel.judge.testing.server import CHAT_PATH, JudgeServer


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
        return elsewhere.base_url(self._host, self._port, tls=self._ssl_context is not None)

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
        return elsewhere.in_thread(self)

    def in_process(self) -> AbstractContextManager[RunningJudge]:
        """The same in a process of its own, which ends with the context or with this process, whichever is first."""
        if self._ssl_context is not None:
            raise ConfigError("ssl_context", "set", "a context cannot travel to another process; use in_thread()")
        return elsewhere.in_process(self._profile, self._host, self._port)

    def _running(self) -> JudgeServer:
        if self._server is None:
            raise JudgeError("this mock judge has not been started: use `async with`, in_thread() or in_process()")
        return self._server
