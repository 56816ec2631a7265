"""Decides which requests the gateway accepts, and which error the others get. No I/O.

    Content-Length ─▶ Load.hold_bytes      body parsed ─▶ Load.hold_requests      answered ─▶ both released
    bad input, no token, too much at once, a failed verdict ─▶ Problem ─▶ status, headers, the OpenAI API's JSON

The token arrives as `Authorization: Bearer TOKEN` (the OpenAI clients' `api_key`) or as the password of `Authorization:
Basic`, as in `http://any:TOKEN@HOST:PORT/slime`. Without a token, the gateway serves only programs on this machine, and
no web page that is open there. Client headers are never sent upstream.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from http import HTTPStatus
from typing import Final

import msgspec

from freewheel.errors import ConfigError, format_value
from freewheel.judge.config import Secret
from freewheel.judge.verdict import Failed, Reason
from freewheel.utils.checks import Count, NotNegative, Positive, check_fields
from freewheel.utils.http import is_loopback, openai_error

# -- problems ---------------------------------------------------------------------------------------------------------

RETRY_AFTER_S: Final = 5
"""The `Retry-After` of temporary problems: long enough for a queue or an outage to change, short enough that a worker
that obeys it loses little time."""

STATUSES: Final[Mapping[str, HTTPStatus]] = {
    Reason.UNPARSEABLE: HTTPStatus.BAD_GATEWAY,
    Reason.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.THROTTLED: HTTPStatus.TOO_MANY_REQUESTS,
    Reason.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.REJECTED: HTTPStatus.BAD_REQUEST,
    # The key and the model's name upstream belong to the gateway: a 401 or 404 would blame the client.
    Reason.AUTH: HTTPStatus.BAD_GATEWAY,
    Reason.NOT_FOUND: HTTPStatus.BAD_GATEWAY,
    # Not 429, which means "try later": these errors last until somebody pays.
    Reason.QUOTA: HTTPStatus.PAYMENT_REQUIRED,
    Reason.BUDGET: HTTPStatus.PAYMENT_REQUIRED,
    Reason.CANCELLED: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.ENGINE: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""HTTP statuses of failed verdicts."""

TEMPORARY: Final = frozenset({Reason.THROTTLED, Reason.UNAVAILABLE, Reason.CANCELLED})
"""Failures that a later try may avoid."""

_TYPES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class Problem(Exception):
    """The error that a client gets for its request.

    The engine has already retried. A permanent problem carries `x-should-retry: false`, which the openai SDK respects;
    a temporary one carries `Retry-After`.
    """

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        param: str | None = None,
        temporary: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message.encode("utf-8", "replace").decode())  # a lone surrogate could not be sent
        self.status = status
        self.code = code
        self.param = param
        retry = {"Retry-After": str(RETRY_AFTER_S)} if temporary else {"x-should-retry": "false"}
        self.headers = {**retry, **(headers or {})}

    def body(self) -> bytes:
        default = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return openai_error(str(self), kind, self.code, self.param)


def bad_field(field: str, value: object, remedy: str) -> Problem:
    """Return the error for a JSON body with an invalid field."""
    return Problem(HTTPStatus.BAD_REQUEST, "invalid_value", f"{field} = {format_value(value)}: {remedy}", param=field)


def problem_of(failed: Failed) -> Problem:
    """Return a failed verdict as an HTTP reply. Its detail may be shown: the engine removes keys from it."""
    status = STATUSES.get(failed.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    message = failed.detail or f"the judge's answer is missing ({failed.reason})"
    headers = {"x-freewheel-attempts": str(failed.attempts)}
    return Problem(status, failed.reason, message, temporary=failed.reason in TEMPORARY, headers=headers)


def draining() -> Problem:
    """Return the reply to everything that arrives during the shutdown."""
    message = "the gateway is shutting down; ask again later"
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, "draining", message, temporary=True)


def too_large(what: str, most: int) -> Problem:
    message = f"{what} is more than max_body_bytes = {most}; send smaller batches, or raise --max-body-bytes"
    return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", message)


def _full(why: str) -> Problem:
    # 429 instead of 503: it asks the client to slow down and does not say that the gateway is broken.
    return Problem(HTTPStatus.TOO_MANY_REQUESTS, "queue_full", f"{why}; ask again later", temporary=True)


# -- limits -----------------------------------------------------------------------------------------------------------


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that keep one broken or hostile client from blocking the others."""

    max_body_bytes: Count = 8 << 20
    """Largest request body, decompressed. A thousand responses of 8 KB fit into one."""
    max_connections: Count = 4096
    """Most connections. Beyond this the longest idle one is closed; if none is idle, the new one gets a 503."""
    max_waiting: Count = 32_768
    """Most open judgements of all clients together. Beyond this: 429."""
    max_waiting_bytes: Count = 512 << 20
    """Most bytes of the bodies of open judgements. This bounds the gateway's memory."""
    header_timeout_s: Positive = 10.0
    """A new connection that has not sent its first headers by then is closed."""
    body_timeout_s: Positive = 60.0
    """A body that has not arrived by then: 408."""
    write_timeout_s: Positive = 60.0
    """A client that does not read its reply for this long is disconnected, because it may hold one of the judge's
    slots."""
    keepalive_s: Positive = 300.0
    """Lifetime of idle connections: longer than the pause between two training steps."""
    drain_s: NotNegative = 25.0
    """How long open requests may continue after SIGTERM: orchestrators kill after 30 s by default."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_waiting_bytes < self.max_body_bytes:
            raise ConfigError(
                "max_waiting_bytes", self.max_waiting_bytes, f"give at least max_body_bytes = {self.max_body_bytes}"
            )


class Load:
    """Counts the open judgements and their bytes, and refuses more than the limits allow."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.bytes = 0

    @contextlib.contextmanager
    def hold_bytes(self, length: int | None) -> Iterator[Callable[[int], None]]:
        """Reserve room for a body while it is read and judged. None: its length is unknown, so it may be the largest.

        Yields a function; call it with the true length once that is known.
        """
        most = self._limits.max_body_bytes
        if length is not None and length > most:
            raise too_large(f"a body of {length} bytes", most)
        held = most if length is None else length
        if self.bytes + held > self._limits.max_waiting_bytes:
            raise _full(f"bodies of {self.bytes} bytes wait for the judge already")
        self.bytes += held

        def correct(size: int) -> None:
            nonlocal held
            self.bytes += size - held
            held = size

        try:
            yield correct
        finally:
            self.bytes -= held

    @contextlib.contextmanager
    def hold_requests(self, count: int) -> Iterator[None]:
        """Reserve room for judgements until they are answered."""
        most = self._limits.max_waiting
        if count > most:  # waiting would not help: it never fits
            message = (
                f"{count} judgements at once are more than max_waiting = {most}; send fewer, or raise --max-waiting"
            )
            raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "batch_too_large", message)
        if self.requests + count > most:
            raise _full(f"{self.requests} judgements wait for the judge already")
        self.requests += count
        try:
            yield
        finally:
            self.requests -= count


# -- the token --------------------------------------------------------------------------------------------------------


TOKEN_ENV = "FREEWHEEL_GATEWAY_TOKEN"
_LEAST_TOKEN_CHARS = 16
"""A shorter token could be guessed at the rate at which the gateway answers. `openssl rand -hex 32` makes a good one.
"""


class Doorkeeper:
    """Accepts a request or raises its `Problem`."""

    def __init__(self, host: str, token: Secret | None = None, token_env: str = TOKEN_ENV) -> None:
        self.open_here = is_loopback(host)
        """Whether only this machine can reach the gateway."""
        if token is None and not self.open_here:
            raise ConfigError(
                "--host", host, f"other machines could spend your judge's budget: set {token_env}, or use 127.0.0.1"
            )
        if token is not None and len(token.reveal()) < _LEAST_TOKEN_CHARS:
            raise ConfigError(token_env, "<hidden>", f"give a token of at least {_LEAST_TOKEN_CHARS} characters")
        self._digest = sha256(token.reveal().encode()).digest() if token is not None else None

    def check(self, headers: Mapping[str, str]) -> None:
        # A web page in this machine's browser could post to loopback without the user's knowledge. Programs send no
        # Origin.
        if self._digest is None and "Origin" in headers:
            message = "a web page may not use a gateway without a token"
            raise Problem(HTTPStatus.FORBIDDEN, "origin_refused", message)
        if not self.knows(headers):
            message = (
                "the gateway's token is missing or wrong; give it as the client's api_key (Authorization: Bearer …)"
            )
            challenge = {"WWW-Authenticate": "Bearer"}
            raise Problem(HTTPStatus.UNAUTHORIZED, "invalid_token", message, headers=challenge)

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Return whether the request may see everything: it has the token, or needs none."""
        if self._digest is None:
            return True
        # Compare digests in constant time, so that time reveals neither content nor length.
        given = sha256(_given_token(headers.get("Authorization", "")))
        return hmac.compare_digest(given.digest(), self._digest)


def _given_token(header: str) -> bytes:
    scheme, _, rest = header.partition(" ")
    given = rest.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given, validate=True).partition(b":")[2]
    return b""
