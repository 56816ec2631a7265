"""Waiting on an event loop: with a time limit, or until a stop is requested."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event` for at most `timeout_s`. Returns whether it is set."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=timeout_s)
    finally:
        waiting.cancel()
    return event.is_set()


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`, or cancel it and return None when `stop` is set first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()


async def unless_failed(work: Coroutine[Any, Any, T], other: asyncio.Task[Any]) -> T:
    """Return the result of `work`. An exception of `other` cancels `work` and is raised at once."""
    working = asyncio.create_task(work)
    try:
        while not working.done():
            pending = {working} if other.done() else {working, other}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if other.done():
                other.result()
        return working.result()
    finally:
        working.cancel()
