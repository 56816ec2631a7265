"""What a trainer asks of the components around it, and the rows that it gives them: seams, without any behaviour."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from freewheel.queue.ledger import Frontier
from freewheel.sync.weights import AnyWeights
from freewheel.trainer.backend import BackendState


class Publisher(Protocol):
    """The synchronizer's end."""

    async def submit(self, version: int, weights: AnyWeights) -> None: ...

    async def prime(self, version: int, weights: AnyWeights) -> None:
        """Weights that engines should hold already: for those that do not."""

    async def wait_published(self, version: int, *, wait_s: float) -> bool: ...


class Saver(Protocol):
    """Where checkpoints go. Called in threads; raises `CheckpointFailed`."""

    def save(self, step: int, version: int, frontier: Frontier, state: BackendState, weights: AnyWeights) -> int:
        """Gives the step of the oldest checkpoint that a resume may fall back to."""

    def save_best(self, step: int, score: float, weights: AnyWeights, *, versions: tuple[int, int]) -> bool:
        """True: it was the best so far. `step` made these weights; `versions`: the first and the last that made the
        responses behind the score."""


Evaluate = Callable[[int], Awaitable[dict[str, float] | None]]
"""Scores held-out prompts with the engines as they are, for the record of a step. None: there are no such prompts."""


@dataclass
class Row:
    """One line of the metrics."""

    kind: Literal["step", "eval"]
    step: int
    values: dict[str, Any] = field(default_factory=dict)
