"""Samples and prompts: `DataProto` (tensors and plain values under one index), `PromptGroup`, `PromptStream`, tasks.

    from freewheel.data import DataProto

    data = DataProto.from_dict({"responses": responses}, {"uid": uids}, {"temperature": 1.0})
    for row in data:
        print(row.non_tensor_batch["uid"])

Names that need torch are imported on first use and need `freewheel[train]`. The others import without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freewheel.data.group import Prompt, PromptGroup, Response
from freewheel.data.prompts import PromptStream
from freewheel.errors import DataError
from freewheel.rewards.batch import RewardBatch

if TYPE_CHECKING:
    from freewheel.data.data_proto import DataProto, DataProtoItem, object_array

__all__ = [
    "DataError",
    "DataProto",
    "DataProtoItem",
    "Prompt",
    "PromptGroup",
    "PromptStream",
    "Response",
    "RewardBatch",
    "object_array",
]

_HEAVY = ("DataProto", "DataProtoItem", "object_array")
"""Names of `data_proto`, which imports torch."""


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module("freewheel.data.data_proto")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("freewheel"):
            raise
        message = f"freewheel.data.{name} needs {error.name}: pip install 'freewheel[train]'"
        raise ImportError(message, name=error.name) from error
    return getattr(module, name)
