"""A reward that a model with random weights gets now and then. The processes of a run import it as `scores`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


async def even(response: str, row: Mapping[str, Any]) -> float:
    await asyncio.sleep(0.05)  # steps take long enough to be interrupted
    return float(len(response) % 2 == 0)
