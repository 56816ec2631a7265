"""Server-sent events: what came to a run since a cursor, about once a second, while somebody listens.

    client (cursor, or Last-Event-ID after a break) ─▶ changes ─▶ `event: change`, id: the next cursor
                                                          ├─ nothing new for long ─▶ `event: alive`
                                                          └─ None ─▶ `event: reload`: fetch the whole, then come again

Nothing is kept for a client but its cursor, so one that comes back goes on where it was, on another server too. Waits
for: the clock. Unblocked by: the client's hanging up, `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from freewheel.dashboard.web.pages import changes
from freewheel.dashboard.web.runs import RunView

EVERY_S = 1.0
"""Between two looks: as often as a run writes a pulse."""
ALIVE_S = 15.0
"""Silence after which a word is sent, by which either side learns that the other has gone."""
RETRY_MS = 1000
MOST_STREAMS = 64


class Streams:
    """All clients that listen."""

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._open = 0

    @property
    def full(self) -> bool:
        return self._open >= MOST_STREAMS

    def stop(self) -> None:
        self._stopping.set()

    async def serve(
        self, request: web.Request, view: RunView, told: str, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Until the client hangs up, or has to begin anew."""
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        self._open += 1
        try:
            await response.prepare(request)
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            with contextlib.suppress(ConnectionError):
                await self._follow(response, view, told)
        finally:
            self._open -= 1
        return response

    async def _follow(self, response: web.StreamResponse, view: RunView, told: str) -> None:
        loop = asyncio.get_running_loop()
        before, sent_at = b"", loop.time()
        while not self._stopping.is_set():
            found = await asyncio.to_thread(_changes, view, told)
            if found is None:
                await response.write(b"event: reload\ndata: {}\n\n")
                return
            cursor = found.pop("cursor")
            data = msgspec.json.encode(found)
            if data != before:
                await response.write(b"event: change\nid: %s\ndata: %s\n\n" % (cursor.encode(), data))
                told, sent_at = cursor, loop.time()
                before = msgspec.json.encode(_without_rows(found))
            elif loop.time() - sent_at >= ALIVE_S:
                await response.write(b"event: alive\ndata: {}\n\n")
                sent_at = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), EVERY_S)


def _changes(view: RunView, told: str) -> dict[str, Any] | None:
    with view.reading():
        return changes(view, told)


def _without_rows(found: dict[str, Any]) -> dict[str, Any]:
    """As the same moment looks when nothing has come since."""
    empty = {"steps": {}, "evals": {}, "pulses": {}, "statistics": 0, "syncs": 0, "events": []}
    return {name: empty.get(name, value) for name, value in found.items()}
