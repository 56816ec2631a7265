"""Python values as JSON, and back the same: what `storage` writes beside the tensors.

Text, integers, finite floats, true, false, None, lists and dicts with text keys are JSON as they are. The rest is a
dict with one key that starts with `$`:

    {"$float": "nan"}                 nan, inf, -inf: JSON has no such numbers
    {"$tuple": [...]}                 a tuple
    {"$dict": {...}}                  a dict that has a key starting with `$` itself
    {"$number": ["float32", 1.5]}     a numpy number or truth value
    {"$tensor": "nested/0"}           a tensor, under this name in the safetensors file
    {"$array": "nested/1"}            a numpy array of numbers, likewise
    {"$objects": [[2, 2], [...]]}     any other numpy array: shape, entries
    {"$text": ["<U5", [2], [...]]}    a numpy array of text: type, shape, entries

Anything else is refused by name and place, as is a dict whose keys are not text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch

from freewheel.data.columns import Array, object_array
from freewheel.errors import DataError, shown

EXACT_BYTES = 8
"""A Python float holds a numpy float of up to this size without loss."""


class Encoder:
    """Encodes values, and gathers in `tensors` what belongs into the safetensors file."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._storable: dict[torch.dtype, bool] = {}
        self._memory: set[int] = set()
        self._nested = 0

    def encode(self, value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._entries(value, place)
        if kind is tuple:
            return {"$tuple": self._entries(value, place)}
        if kind is dict:
            return self._dict(value, place)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self.store(self._next_name(), value, place)}
        if isinstance(value, np.ndarray):
            return self._array(value, place)
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= EXACT_BYTES:
            return {"$number": [value.dtype.name, self.encode(value.item(), place)]}
        raise DataError(
            f"{place} = {shown(value)} is a {kind.__name__}, which a file cannot hold: make it text, a number, "
            "a list, a dict or a tensor, or pop it before saving"
        )

    def store(self, name: str, tensor: torch.Tensor, place: str) -> str:
        tensor = tensor.detach()
        if tensor.is_nested or tensor.layout is not torch.strided or not self._is_storable(tensor.dtype):
            raise DataError(f"{place} is a tensor of {tensor.dtype}, {tensor.layout}: convert it before saving")
        tensor = tensor.cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in self._memory:
            tensor = tensor.clone()  # safetensors wants each tensor to have memory of its own
        self._memory.add(tensor.untyped_storage().data_ptr())
        self.tensors[name] = tensor
        return name

    def _is_storable(self, dtype: torch.dtype) -> bool:
        if dtype not in self._storable:
            try:
                safetensors.torch.save({"probe": torch.empty(0, dtype=dtype)})
                self._storable[dtype] = True
            except (KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError):
                self._storable[dtype] = False
        return self._storable[dtype]

    def _next_name(self) -> str:
        self._nested += 1
        return f"nested/{self._nested - 1}"

    def _entries(self, values: Any, place: str) -> list[Any]:
        return [self.encode(value, f"{place}[{index}]") for index, value in enumerate(values)]

    def _dict(self, value: Mapping[Any, Any], place: str) -> dict[str, Any]:
        if wrong := [key for key in value if type(key) is not str]:
            raise DataError(f"{place} has the key {shown(wrong[0])}: keys must be text to be saved, str(key) is")
        encoded = {key: self.encode(inner, f"{place}[{key!r}]") for key, inner in value.items()}
        return {"$dict": encoded} if any(key.startswith("$") for key in encoded) else encoded

    def _array(self, array: Array, place: str) -> dict[str, Any]:
        shape = list(array.shape)
        if array.dtype == object:
            return {"$objects": [shape, self._entries(array.flat, place)]}
        if array.dtype.kind == "U":
            return {"$text": [array.dtype.str, shape, array.ravel().tolist()]}
        try:
            tensor = torch.tensor(array)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{place} is an array of {array.dtype}, which a file cannot hold: make it numbers or text"
            ) from error
        return {"$array": self.store(self._next_name(), tensor, place)}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The reverse. What is not of the form above raises KeyError, TypeError or ValueError."""

    def entries(values: list[Any]) -> list[Any]:
        return [decode(inner, tensors) for inner in values]

    def objects(parts: list[Any]) -> Array:
        shape, values = parts
        return object_array(entries(values)).reshape(shape)

    def text(parts: list[Any]) -> Array:
        dtype, shape, values = parts
        return np.array(values, dtype=dtype).reshape(shape)

    def number(parts: list[Any]) -> Any:
        dtype, inner = parts
        return np.dtype(dtype).type(decode(inner, tensors))

    tags: dict[str, Callable[[Any], Any]] = {
        "$float": float,
        "$tuple": lambda values: tuple(entries(values)),
        "$dict": lambda inner: {key: decode(entry, tensors) for key, entry in inner.items()},
        "$number": number,
        "$tensor": lambda name: tensors[name],
        "$array": lambda name: tensors[name].numpy(),
        "$objects": objects,
        "$text": text,
    }
    if isinstance(value, list):
        return entries(value)
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag.startswith("$"):
        return tags[tag](value[tag])
    return {key: decode(inner, tensors) for key, inner in value.items()}
