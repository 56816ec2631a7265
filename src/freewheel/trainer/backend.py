"""What `FullyAsyncTrainer` asks of whatever learns: `TorchBackend`, or several processes behind a `Leader`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from freewheel.data.group import PromptGroup

if TYPE_CHECKING:
    from torch import Tensor


class NonFiniteLoss(ArithmeticError):
    """Losses or gradients were not finite several times in a row. Nothing of them reached the weights."""


@dataclass(frozen=True, kw_only=True)
class BackendState:
    """All that a resumed run needs and its settings do not say: no pickle, for it is stored as safetensors and JSON."""

    tensors: Mapping[str, Tensor]
    """Name → CPU tensor, copied: training may go on while they are written."""
    values: Mapping[str, Any]
    """Plain JSON values."""
    write: Callable[[Path], None] | None = None
    """Where the tensors lie in shards on several ranks, and are not among `tensors`: puts them into a folder."""


class Backend(Protocol):
    """Holds the policy, and takes steps. An update is applied whole or not at all."""

    @property
    def updates_applied(self) -> int:
        """Ever. A step that failed may be tried again where this is as it was before it."""

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        """Trains on these groups, in the order of their ordinals whatever the order given.

        `version`: of the weights as they are now; None where they are between two. `step`: how many steps were taken
        before this one. Gives metrics by name. Raises `NonFiniteLoss`.
        """

    def weights(self) -> Mapping[str, Tensor]:
        """The policy as engines take it: complete, named as the plain HF model names it, tied parameters once."""

    def state(self) -> BackendState: ...

    def load_state(self, state: BackendState) -> None:
        """What `state` gave, in a backend with the same settings and model. One that does not fit is a ValueError."""

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        """An ordinary HF folder, which `AutoModelForCausalLM.from_pretrained` opens."""

    def describe(self) -> str:
        """What the settings do together, for the start of a run's log."""
