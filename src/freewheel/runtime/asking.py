"""`Asking`: questions to the components, none of which waits for another's answer.

    round ─▶ a question to each who has none open ─▶ (waits a little) ─▶ the answers that are there
                                                          └─ late: heard in a later round; too late: counted as silence

Called by `FullyAsyncMain` at each look.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from freewheel.runtime.peers import PeerSilent

log = logging.getLogger("freewheel.runtime")

Question = Callable[[], Awaitable[Any]]


class Asking:
    """One open question to each peer; every answer is heard once."""

    def __init__(self) -> None:
        self.silent: Counter[str] = Counter()
        """By name: questions in a row that were never answered."""
        self._open: dict[str, asyncio.Future[Any]] = {}

    @property
    def pending(self) -> bool:
        return bool(self._open)

    async def round(self, questions: Mapping[str, Question], *, wait_s: float, late: bool = False) -> dict[str, Any]:
        """Answers by name. `late`: those who owe one since an earlier round are waited for too."""
        fresh = {name: asyncio.ensure_future(ask()) for name, ask in questions.items() if name not in self._open}
        self._open |= fresh
        waited_for = [*(self._open if late else fresh).values()]
        if waited_for:
            await asyncio.wait(waited_for, timeout=wait_s)
        done = {name: self._open.pop(name) for name in list(self._open) if self._open[name].done()}
        for name, asked in done.items():
            error = asked.exception()
            if error is None:
                del self.silent[name]
            elif isinstance(error, PeerSilent):
                self.silent[name] += 1
                log.warning("%s: %s", name, error)
            else:
                raise error
        return {name: asked.result() for name, asked in done.items() if asked.exception() is None}

    def forget(self, name: str) -> None:
        """What was asked of it no longer matters: another takes its place."""
        del self.silent[name]
        if name in self._open:
            self._open.pop(name).cancel()

    async def close(self) -> None:
        open_, self._open = self._open, {}
        for asked in open_.values():
            asked.cancel()
        await asyncio.gather(*open_.values(), return_exceptions=True)
