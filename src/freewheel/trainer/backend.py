"""The components that `FullyAsyncTrainer` works with, as protocols: what learns, publishes, saves and evaluates.

Backend    holds the policy and takes steps: `TorchBackend`, or several processes behind a `Leader`
Publisher  sends weights to the engines: the `ParameterSynchronizer`
Evaluate   scores held-out prompts: a function of the runtime
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from freewheel.data.group import PromptGroup
from freewheel.sync.weights import AnyWeights

if TYPE_CHECKING:
    from torch import Tensor


class NonFiniteLoss(ArithmeticError):
    """Losses or gradients were not finite several times in a row. The weights contain none of these updates."""


@dataclass(frozen=True, kw_only=True)
class BackendState:
    """Everything a resumed run needs besides its settings. A copy: training may continue while it is written."""

    values: Mapping[str, Any]
    """Plain JSON values."""
    write: Callable[[Path], str]
    """Writes the tensors to a safetensors file in a folder and returns its name, empty if there are none. Does not
    communicate with other ranks, except for the state of a `Leader`, which has all ranks write."""


class Backend(Protocol):
    """Holds the policy and takes steps. An update is applied whole or not at all."""

    @property
    def updates_applied(self) -> int:
        """Updates applied so far. A failed step can be retried if this number has not changed since it began."""

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        """Train on these groups, ordered by their ordinals, and return metrics by name. Raises `NonFiniteLoss`.

        `version`: the version of the current weights, None in the middle of a version. `step`: steps taken before.
        """

    def weights(self, stored: bool = False) -> Mapping[str, Tensor]:
        """Return the complete policy with the plain Hugging Face names, tied parameters once and adapters merged.

        In the type of the computation, as for engines. `stored`: in the type of the model's files.
        """

    def state(self) -> BackendState: ...

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        """Load a state from the files that one process or several wrote. Raises `DataError`, for example if it belongs
        to another model or other settings."""

    def describe(self) -> str:
        """Describe in words how the policy learns. Logged at the start of a run."""


class Publisher(Protocol):
    """Sends weights to the engines."""

    async def submit(self, version: int, weights: AnyWeights) -> None: ...

    async def prime(self, version: int, weights: AnyWeights) -> None:
        """Provide weights that engines should hold already, for engines that do not."""

    async def wait_published(self, version: int, *, wait_s: float) -> bool: ...


Evaluate = Callable[[int], Awaitable[dict[str, float] | None]]
"""Scores held-out prompts with the engines' current weights, for the record of a step. None: there are no prompts."""


@dataclass
class MetricsRow:
    """One line of the metrics."""

    kind: Literal["step", "eval"]
    step: int
    values: dict[str, Any] = field(default_factory=dict)
