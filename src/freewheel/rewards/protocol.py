"""What a reward manager asks of a batch: verl's `DataProto` has it, ours has it, and neither is imported for it.

Reward managers take a `RewardBatch`. This module needs no torch, so that rewards import without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np


@runtime_checkable
class TensorColumns(Protocol):
    """Tensors by name, each with one row per sample: a `TensorDict`, or a dict.

    Go over `keys()`: iterating over a `TensorDict` itself gives its rows."""

    def __getitem__(self, key: str, /) -> Any: ...

    def keys(self) -> Iterable[Any]: ...


@runtime_checkable
class RewardBatch(Protocol):
    """A batch to be scored, read and never changed."""

    @property
    def batch(self) -> TensorColumns | None:
        """`prompts`, `responses`, `attention_mask` and so on; None where a batch carries no tensors."""

    @property
    def non_tensor_batch(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """`data_source`, `reward_model`, `uid` and so on: one entry per sample each."""

    @property
    def meta_info(self) -> Mapping[str, Any]:
        """What holds for the batch as a whole."""

    def __len__(self) -> int: ...
