"""Waiting for what has no future to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 30.0
"""Longer than anything here takes on a busy machine, shorter than pytest's own limit."""


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.002)
