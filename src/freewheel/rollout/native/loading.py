"""New weights for a model that is running: checked whole before the first one is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies `weights` into the model; gives the model's own tensors under the same names.

    Tied parameters may come under one of their names or under all of them. A ValueError leaves the model as it was.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    _check(own, weights)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in own.values()):
        torch.cuda.synchronize()  # the source may be freed or overwritten after this call
    return {name: own[name] for name in weights}


def _check(own: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise ValueError(f"weights: {_listed(unknown)} not in the model; send what its state_dict names")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != tuple(own[name].shape):
            raise ValueError(
                f"weights: {name} has the shape {tuple(tensor.shape)}, the model's has {tuple(own[name].shape)}"
            )
    given = {own[name].data_ptr(): name for name in weights}
    missing = sorted(name for name, tensor in own.items() if tensor.numel() and tensor.data_ptr() not in given)
    if missing:
        raise ValueError(f"weights: {_listed(missing)} missing; send all parameters (tied ones once)")
    for name, tensor in weights.items():
        twin = given[own[name].data_ptr()]
        if twin != name and not torch.equal(_bytes(tensor), _bytes(weights[twin])):
            raise ValueError(
                f"weights: {name} and {twin} are one tensor in the model, and differ here; send one of them"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)  # NaN equals NaN here


def _listed(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
