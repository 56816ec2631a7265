"""Who may ask. One token for all clients; without one, only this machine, and no web page that it has open.

A token comes as `Authorization: Bearer TOKEN` (the OpenAI clients' `api_key`) or as the password of
`Authorization: Basic`, which is what clients without a header of their own make of `http://any:TOKEN@HOST:PORT/slime`.
It is the gateway's alone: nothing of a client's headers goes upstream.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from http import HTTPStatus

from freewheel.errors import ConfigError
from freewheel.gateway.problem import Problem
from freewheel.judge.config import Secret
from freewheel.utils.http import is_loopback

TOKEN_ENV = "FREEWHEEL_GATEWAY_TOKEN"
LEAST_TOKEN_CHARS = 16
"""A shorter one could be guessed at the rate at which the gateway answers. `openssl rand -hex 32` makes a good one."""


class Doorkeeper:
    """Lets a request in or raises the `Problem` that it gets."""

    def __init__(self, host: str, token: Secret | None = None, token_env: str = TOKEN_ENV) -> None:
        self.open_here = is_loopback(host)
        """Whether only this machine can reach the gateway."""
        if token is None and not self.open_here:
            raise ConfigError(
                "--host", host, f"other machines could spend your judge's budget: set {token_env}, or use 127.0.0.1"
            )
        if token is not None and len(token.reveal()) < LEAST_TOKEN_CHARS:
            raise ConfigError(token_env, "<hidden>", f"give a token of at least {LEAST_TOKEN_CHARS} characters")
        self._digest = _digest(token.reveal().encode()) if token is not None else None

    def check(self, headers: Mapping[str, str]) -> None:
        if self._digest is None:
            # A page in this machine's browser may post to loopback without being asked; programs send no Origin.
            if "Origin" in headers:
                message = "a web page may not use a gateway without a token"
                raise Problem(HTTPStatus.FORBIDDEN, "origin_refused", message)
            return
        if not self.knows(headers):
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "invalid_token",
                "the gateway's token is missing or wrong; give it as the client's api_key (Authorization: Bearer …)",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def knows(self, headers: Mapping[str, str]) -> bool:
        """True where the request may see all: it has the token, or needs none."""
        if self._digest is None:
            return True
        # Digests of equal length, compared in constant time: neither content nor length shows in the time it takes.
        return hmac.compare_digest(_digest(_given(headers.get("Authorization", ""))), self._digest)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def _given(header: str) -> bytes:
    scheme, _, rest = header.partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest.encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
