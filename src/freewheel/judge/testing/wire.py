"""Replies as bytes on a connection: whole, cut or dripped. That is cheap, and breaking HTTP's rules needs no tricks."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from aiohttp import web

from freewheel.judge.testing.rates import Headers

JSON_TYPE: Final = "application/json"
HTML_TYPE: Final = "text/html; charset=utf-8"
EVENTS_TYPE: Final = "text/event-stream; charset=utf-8"

LAST_CHUNK: Final = b"0\r\n\r\n"


class Sent(web.StreamResponse):
    """Tells aiohttp that the reply is on the wire already, and whether the connection goes on."""

    def __init__(self, *, goes_on: bool) -> None:
        super().__init__()
        self._goes_on = goes_on

    @property
    def keep_alive(self) -> bool | None:
        return self._goes_on

    async def prepare(self, request: web.BaseRequest) -> None:
        """Nothing is left to do."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to do."""


GOES_ON: Final = Sent(goes_on=True)
ENDS: Final = Sent(goes_on=False)


def reason(status: int) -> str:
    """The status line's words; a number that HTTP does not name has none."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unnamed"


def head(request: web.BaseRequest, status: int, content_type: str, length: int | None, headers: Headers = ()) -> bytes:
    """The status line and headers. Without a length the body comes in chunks."""
    lines = [
        f"HTTP/1.1 {status} {reason(status)}",
        f"Content-Type: {content_type}",
        "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}",
    ]
    if not request.keep_alive:
        lines.append("Connection: close")
    lines.extend(f"{name}: {value}" for name, value in headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk of a body without a length."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def write(request: web.BaseRequest, data: bytes) -> None:
    """Put bytes on the connection, if it still is one."""
    transport = request.transport
    if transport is not None and not transport.is_closing():
        transport.write(data)


async def drip(request: web.BaseRequest, pieces: list[bytes], duration_s: float) -> None:
    """Write the pieces evenly over this time."""
    for piece in pieces:
        await asyncio.sleep(duration_s / len(pieces))
        write(request, piece)


def end(request: web.BaseRequest) -> web.StreamResponse:
    """The reply is written; the connection goes on if the client wants it to."""
    return GOES_ON if request.keep_alive else ENDS


def cut(request: web.BaseRequest, *, abort: bool = False) -> web.StreamResponse:
    """Close the connection after what was written so far; `abort` resets it and drops that too."""
    transport = request.transport
    if transport is not None:
        if abort:
            transport.abort()
        else:
            transport.close()
    return ENDS
