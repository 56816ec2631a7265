"""Errors for clients: an HTTP status and the OpenAI API's JSON shape. Pure.

    bad input, no token, too much at once ─▶ Problem ◀─ problem_of(Failed)
                                                │
                                       status, headers, body

The engine has already retried before anything ends as `Failed`. A permanent failure carries `x-should-retry: false`,
which the openai SDK respects; a temporary one carries `Retry-After`.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec

from freewheel.errors import VALUE_CHARS
from freewheel.judge.verdict import Failed, Reason

RETRY_AFTER_S: Final = 5
"""Long enough for a queue or an outage to change, short enough that an obedient worker loses little."""

STATUSES: Final[Mapping[str, HTTPStatus]] = {
    Reason.UNPARSEABLE: HTTPStatus.BAD_GATEWAY,
    Reason.DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
    Reason.THROTTLED: HTTPStatus.TOO_MANY_REQUESTS,
    Reason.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.REJECTED: HTTPStatus.BAD_REQUEST,
    # The key and the model's name upstream belong to the gateway: a 401 or 404 would blame the client.
    Reason.AUTH: HTTPStatus.BAD_GATEWAY,
    Reason.NOT_FOUND: HTTPStatus.BAD_GATEWAY,
    # Not 429, which means "later": these end when somebody pays.
    Reason.QUOTA: HTTPStatus.PAYMENT_REQUIRED,
    Reason.BUDGET: HTTPStatus.PAYMENT_REQUIRED,
    Reason.CANCELLED: HTTPStatus.SERVICE_UNAVAILABLE,
    Reason.ENGINE: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""HTTP statuses of failed verdicts."""

PASSING: Final = frozenset({Reason.THROTTLED, Reason.UNAVAILABLE, Reason.CANCELLED})
"""Failures that a later try may avoid."""

_TYPES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class Problem(Exception):
    """A request that gets an error, as its client sees it."""

    def __init__(
        self,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        param: str | None = None,
        passes: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        retry = {"Retry-After": str(RETRY_AFTER_S)} if passes else {"x-should-retry": "false"}
        self.headers = {**retry, **(headers or {})}

    def body(self) -> bytes:
        default = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return msgspec.json.encode(
            {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
        )


def bad_field(field: str, value: object, remedy: str) -> Problem:
    """Return the error for a JSON body with an invalid field."""
    shown = repr(value)
    if len(shown) > VALUE_CHARS:
        shown = shown[:VALUE_CHARS] + "…"
    # A lone surrogate in the value could not be encoded.
    message = f"{field} = {shown}: {remedy}".encode("utf-8", "replace").decode()
    return Problem(HTTPStatus.BAD_REQUEST, "invalid_value", message, param=field)


def problem_of(failed: Failed) -> Problem:
    """Return a failed verdict as an HTTP reply. Its detail may be shown: the engine removes keys from it."""
    status = STATUSES.get(failed.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    message = failed.detail or f"the judge's answer is missing ({failed.reason})"
    headers = {"x-freewheel-attempts": str(failed.attempts)}
    return Problem(status, failed.reason, message, passes=failed.reason in PASSING, headers=headers)


def draining() -> Problem:
    """Return the reply to everything that arrives during the shutdown."""
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE, "draining", "the gateway is shutting down; ask again later", passes=True
    )
