"""Who may look: whoever has the token, which is in the address that was printed, and nobody else. Pure.

    /?token=T ─▶ the page's address without it, and a cookie      cookie, or `Authorization: Bearer T` ─▶ in

No script can read the cookie, and of another site's requests only a link that leads here has it sent. It is named after
the port, so that two pages do not take each other's place; but to a browser a cookie belongs to a host, not to a port:
it is sent to every other server at this address, too, that is opened in the same browser.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

TOKEN_BYTES = 32
REFUSED = (
    "403: this page needs its token.\n\n"
    "Open the address as it was printed, with ?token=… at its end: by `freewheel train` at its start, or by\n"
    "`freewheel dashboard RUN`, which prints a fresh one. Programs send it as `Authorization: Bearer TOKEN`.\n"
)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every reply. What a model said is shown as text; even if it were not, no script but the page's own would run."""


def make_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


class Door:
    """Knows the token, by its digest."""

    def __init__(self, token: str, port: int) -> None:
        self.cookie = f"freewheel-{port}"
        self._digest = _digest(token)

    def knows(self, token: str | None) -> bool:
        """Digests of equal length, compared in constant time: neither content nor length shows in the time it takes."""
        return token is not None and hmac.compare_digest(_digest(token), self._digest)

    def lets_in(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        return self.knows(cookies.get(self.cookie)) or (scheme.lower() == "bearer" and self.knows(given.strip()))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
