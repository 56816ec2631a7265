"""Batches of samples: `DataProto`, tensors and plain values under one index.

    from freewheel.data import DataProto

    data = DataProto.from_dict({"responses": responses}, {"uid": uids}, {"temperature": 1.0})
    for part in data.split(64):
        ...

`RewardBatch` and `DataError` import without torch. The rest is loaded when it is first named, and needs
`freewheel[train]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freewheel.data.errors import DataError
from freewheel.rewards.protocol import RewardBatch, TensorColumns

if TYPE_CHECKING:
    from freewheel.data.columns import object_array
    from freewheel.data.data_proto import DataProto, DataProtoItem

__all__ = ["DataError", "DataProto", "DataProtoItem", "RewardBatch", "TensorColumns", "object_array"]

HEAVY = {
    "DataProto": "freewheel.data.data_proto",
    "DataProtoItem": "freewheel.data.data_proto",
    "object_array": "freewheel.data.columns",
}
"""Names whose modules import torch, and where they are."""


def __getattr__(name: str) -> Any:
    if name not in HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(HEAVY[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("freewheel"):
            raise
        message = f"freewheel.data.{name} needs {error.name}: pip install 'freewheel[train]'"
        raise ImportError(message, name=error.name) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
