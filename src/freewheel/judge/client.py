"""One call to a chat-completions endpoint: bytes out, a `Reply` or a `CallFailure` back, never an exception.

One connection pool serves all endpoints of an engine. The limiter bounds the calls in flight, so the pool has no limit,
and connections live as long as the servers keep them.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import aiohttp
from yarl import URL

from freewheel.errors import ConfigError
from freewheel.judge.config import COMPLETIONS_PATH, Endpoint, JudgeConfig
from freewheel.judge.outcome import (
    SSE_TAIL_BYTES,
    CallFailure,
    FailureKind,
    HungUp,
    Reply,
    classify,
    read_completion,
    read_models,
    read_stream_usage,
    shorten,
)
from freewheel.judge.pacing import read_rate_headers
from freewheel.utils.http import is_loopback

log = logging.getLogger("freewheel.judge")

_KEEPIDLE_S = 30
"""Idle connections are probed this often. Load balancers silently forget them after a few minutes."""
_KEEPALIVE_S = 300.0
"""How long an idle connection is kept. A TLS handshake costs 1.1 ms of CPU on each side, so this is longer than the
pause between two training steps."""
_CONNECT_TIMEOUT_S = 10.0
"""A host that accepts no connection within this time is down. Waiting longer only delays the retry at another
endpoint."""
_WHOLE_BODY_BYTES = 1 << 20
"""A larger body is written in pieces. In one piece it would block the loop, and aiohttp warns about it."""
MAX_REPLY_BYTES = 16 << 20
"""Largest reply that is read. No verdict is longer, and a server that never stops sending must not fill the memory."""
_MODELS_PATH = "/models"
"""Where an endpoint lists its models, next to chat completions."""
_USER_AGENT = "freewheel-judge"
_LEAST_KEY_CHARS = 12
"""A shorter key is a local server's placeholder (`EMPTY`, `x`). Removing such a key from replies would change
scores."""

Read = Callable[[bytes], Reply | CallFailure]
"""Reads a body that came with status 200."""

_opened: ContextVar[list[bool]] = ContextVar("_opened")
"""Whether the current call opened a connection. It is a list with one element, so that the connector can change it."""


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Open a socket for the connector and note that in `_opened`. The system probes the socket while it is idle."""
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPIDLE_S)
    _opened.get([False])[0] = True
    return opened


def open_connector(config: JudgeConfig) -> aiohttp.TCPConnector:
    """Open the engine's connection pool. It must be closed on the loop that opened it."""
    context: ssl.SSLContext | bool = True
    if config.ca_file is not None:
        try:
            context = ssl.create_default_context(cafile=config.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("ca_file", config.ca_file, f"it cannot be read as a CA bundle: {error}") from None
    return aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=60, ssl=context, socket_factory=_open_socket
    )


class ChatClient:
    """Sends requests to one endpoint."""

    def __init__(self, connector: aiohttp.TCPConnector, config: JudgeConfig, endpoint: Endpoint) -> None:
        self._url = URL(endpoint.url)
        self._proxy = proxy_for(endpoint.url)
        self._stall_s = config.attempt_timeout_s
        self._warned_of_files = False
        self._key = config.key_for(endpoint)
        self._sent_with = (
            f"no key was sent: set {endpoint.api_key_env or config.api_key_env or 'api_key_env'}, or give api_key"
        )
        headers = {"Content-Type": "application/json", "User-Agent": _USER_AGENT}
        if self._key is not None:
            self._sent_with = f"sent with the key from {self._key.source}"
            name = endpoint.api_key_header
            prefix = "Bearer " if name.lower() == "authorization" else ""
            headers[name] = prefix + self._key.reveal()
            if self._url.scheme == "http" and not is_loopback(self._url.host or ""):
                log.warning("the key goes to %s unencrypted; use https", self._url)
        self._session = aiohttp.ClientSession(
            connector=connector,
            connector_owner=False,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    async def ask(self, body: bytes, read: Read = read_completion) -> Reply | CallFailure:
        """Make one HTTP exchange. The caller sets the time limit."""

        async def read_reply(response: aiohttp.ClientResponse) -> Reply | CallFailure:
            content = await _content(response)
            if len(content) > MAX_REPLY_BYTES:
                return CallFailure(FailureKind.GARBAGE, f"a reply of more than {MAX_REPLY_BYTES} bytes", billed=True)
            reply = read(content)
            if isinstance(reply, CallFailure):
                return reply._replace(detail=shorten(self._redact(reply.detail)))
            rate = read_rate_headers(response.headers, time.time())
            return reply._replace(text=self._redact_echo(reply.text), rate=rate)

        return await self._exchange(body, read_reply)

    async def stream(self, body: bytes, pass_on: Callable[[bytes], Awaitable[None]]) -> Reply | CallFailure:
        """Make one exchange and pass each chunk of the reply on as it arrives. An exception from `pass_on` ends the
        exchange."""

        async def read_stream(response: aiohttp.ClientResponse) -> Reply | CallFailure:
            tail = b""
            try:
                while True:
                    async with asyncio.timeout(self._stall_s):
                        chunk = await response.content.readany()
                    if not chunk:
                        return Reply("", read_stream_usage(tail))
                    await pass_on(chunk)
                    tail = (tail + chunk)[-SSE_TAIL_BYTES:]
            except TimeoutError:
                return CallFailure(
                    FailureKind.TIMEOUT, f"{self._url.host}: no chunk for {self._stall_s:g} s", billed=True
                )
            except HungUp as error:
                return CallFailure(FailureKind.REJECTED, f"the client hung up: {error}", billed=True)
            except (aiohttp.ClientError, OSError) as error:
                return self._broken(error)._replace(billed=True)

        return await self._exchange(body, read_stream)

    async def _exchange(
        self, body: bytes, use: Callable[[aiohttp.ClientResponse], Awaitable[Reply | CallFailure]]
    ) -> Reply | CallFailure:
        opened = [False]
        _opened.set(opened)
        response: aiohttp.ClientResponse | None = None
        try:
            data = body if len(body) <= _WHOLE_BODY_BYTES else io.BytesIO(body)
            response = await self._session.post(self._url, data=data, proxy=self._proxy, allow_redirects=False)
            if response.status == HTTPStatus.OK:
                return await use(response)
            return self._failed(response, await _content(response))
        except TimeoutError as error:
            return CallFailure(FailureKind.TIMEOUT, shorten(self._redact(f"{self._url.host}: {error or 'timed out'}")))
        except (aiohttp.ClientError, OSError) as error:
            never_answered = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            is_stale = response is None and never_answered and not opened[0]
            return self._broken(error, FailureKind.STALE if is_stale else FailureKind.BROKEN)
        finally:
            if response is not None:
                response.close()  # a connection with an unread body must not return to the pool

    async def models(self) -> list[str]:
        """Return the names of the models that the endpoint lists, or an empty list. The caller sets the time limit."""
        url = self._url.with_path(self._url.path.removesuffix(COMPLETIONS_PATH) + _MODELS_PATH)
        try:
            async with self._session.get(url, proxy=self._proxy, allow_redirects=False) as response:
                content = await _content(response) if response.status == HTTPStatus.OK else b""
        except (aiohttp.ClientError, OSError):
            return []
        return [shorten(self._redact(name)) for name in read_models(content)]

    async def close(self) -> None:
        await self._session.close()

    def _failed(self, response: aiohttp.ClientResponse, content: bytes) -> CallFailure:
        # Remove the key before the text is shortened: half a key would not be found.
        shown = self._redact(content.decode("utf-8", "replace")).encode()
        failure = classify(response.status, response.headers, shown, wall_now=time.time())
        detail = shorten(self._redact(failure.detail))
        if failure.kind in (FailureKind.AUTH, FailureKind.FORBIDDEN):
            detail = f"{detail} ({self._sent_with})"
        return failure._replace(detail=f"{self._url}: {detail}")

    def _broken(self, error: Exception, kind: FailureKind = FailureKind.BROKEN) -> CallFailure:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            kind = FailureKind.THROTTLED  # this process cannot open more connections, so lower the limit as after a 429
            if not self._warned_of_files:
                self._warned_of_files = True
                log.warning("too many open files: this limits the requests in flight; raise `ulimit -n`")
        return CallFailure(kind, shorten(self._redact(f"{self._url}: {type(error).__name__}: {error}")))

    def _redact(self, text: str) -> str:
        return self._key.redact(text) if self._key is not None else text

    def _redact_echo(self, reply: str) -> str:
        """Remove the key from a reply, because replies are cached and shown."""
        key = self._key.reveal() if self._key is not None else ""
        return self._redact(reply) if len(key) >= _LEAST_KEY_CHARS and key in reply else reply


async def _content(response: aiohttp.ClientResponse) -> bytes:
    """Read a body to its end, or to a little more than `MAX_REPLY_BYTES`."""
    chunks, size = [], 0
    while size <= MAX_REPLY_BYTES and (chunk := await response.content.readany()):
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for `url` (HTTPS_PROXY, NO_PROXY, …).

    Returns None for a loopback address, because a proxy cannot reach it.
    """
    parts = urlsplit(url)
    proxies = getproxies_environment()
    if is_loopback(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")
