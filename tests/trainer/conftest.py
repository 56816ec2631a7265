"""What tests of the trainer share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from .scene import Build, Scene


@pytest.fixture
async def scene() -> AsyncIterator[Build]:
    made: list[Scene] = []

    def build(**settings: Any) -> Scene:
        made.append(Scene(**settings))
        return made[-1]

    yield build
    for one in made:
        await one.queue.close()
        one.trainer.close()
        if one.feeding is not None:
            one.feeding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one.feeding
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
