"""How much the gateway takes at once, and the books about it. No I/O: `server` asks before it reads or submits.

Content-Length ─▶ Load.hold_bytes      body parsed ─▶ Load.hold_requests      answered ─▶ both released
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from http import HTTPStatus

import msgspec

from freewheel.errors import ConfigError
from freewheel.gateway.problem import Problem
from freewheel.utils.checks import check_number


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that keep one client, broken or hostile, from taking the gateway from the others."""

    max_body_bytes: int = 8 << 20
    """Largest request body, decompressed. A thousand responses of 8 KB are one such body."""
    max_connections: int = 4096
    """Most connections. Beyond, the longest idle one makes way; where none is idle the new one gets a 503."""
    max_waiting: int = 32_768
    """Most judgements that are taken and not answered yet, all clients together. Beyond: 429."""
    max_waiting_bytes: int = 512 << 20
    """The same in bytes of their bodies: what bounds the gateway's memory."""
    header_timeout_s: float = 10.0
    """A new connection that has not sent its first request's headers by then is closed."""
    body_timeout_s: float = 60.0
    """A body that has not come by then: 408."""
    write_timeout_s: float = 60.0
    """A client that takes nothing of its reply for this long is cut off: it may hold one of the judge's slots."""
    keepalive_s: float = 300.0
    """Idle connections live this long: they outlast the pause between two training steps."""
    drain_s: float = 25.0
    """How long open requests may go on after SIGTERM: orchestrators kill after 30 s by default."""

    def __post_init__(self) -> None:
        for key in ("max_body_bytes", "max_connections", "max_waiting", "max_waiting_bytes"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(key, value, "give a whole number of at least 1")
        for key in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keepalive_s"):
            check_number(key, getattr(self, key), above=0)
        check_number("drain_s", self.drain_s, low=0)
        if self.max_waiting_bytes < self.max_body_bytes:
            raise ConfigError(
                "max_waiting_bytes", self.max_waiting_bytes, f"not one body of max_body_bytes = {self.max_body_bytes}"
            )


class Load:
    """What is open at this moment, against the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.bytes = 0

    @contextlib.contextmanager
    def hold_bytes(self, length: int | None) -> Iterator[Callable[[int], None]]:
        """Room for a body while it is read and judged. None: its length is not known, so it may be the largest.

        Yields a function that takes its true length, once that is known.
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
        """Room for judgements until they are answered."""
        most = self._limits.max_waiting
        if count > most:
            # Waiting would not help: it never fits.
            raise Problem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "batch_too_large",
                f"{count} judgements at once are more than max_waiting = {most}; send fewer, or raise --max-waiting",
            )
        if self.requests + count > most:
            raise _full(f"{self.requests} judgements wait for the judge already")
        self.requests += count
        try:
            yield
        finally:
            self.requests -= count


def too_large(what: str, most: int) -> Problem:
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_too_large",
        f"{what} is more than max_body_bytes = {most}; send smaller batches, or raise --max-body-bytes",
    )


def _full(why: str) -> Problem:
    # 429 and not 503: it asks the client to slow down and does not say that the gateway is unwell.
    return Problem(HTTPStatus.TOO_MANY_REQUESTS, "queue_full", f"{why}; ask again later", passes=True)
