"""PPO's critic: a copy of the policy's decoder with a scalar head, which says how much reward each state promises.

    MicroBatch ─▶ values [T] ─▶ token_advantages: GAE, returns ─▶ policy loss, value loss

The value beside a token is that of the state before it was chosen: the hidden state that predicts it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freewheel.data.group import Array
from freewheel.trainer.advantages import gae, whiten
from freewheel.trainer.batching import MicroBatch
from freewheel.trainer.compiling import compile_layers
from freewheel.trainer.master import ComputingCopy
from freewheel.trainer.options import AlgorithmConfig
from freewheel.trainer.policy import autocast, enable_checkpointing
from freewheel.trainer.tree import use_tree_attention


class Critic(nn.Module):
    """Starts from a copy of `decoder`; its head starts at 0, and so do its values."""

    def __init__(
        self,
        decoder: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        activation_checkpointing: bool,
        computing_copy: bool = False,
    ) -> None:
        """`computing_copy`: as for `Policy`."""
        super().__init__()
        self.decoder = copy.deepcopy(decoder).float().to(device).eval()
        self.head = nn.Linear(decoder.config.get_text_config().hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._device, self._dtype = device, dtype
        if activation_checkpointing:
            enable_checkpointing(self.decoder)
        copied = computing_copy and dtype is not torch.float32
        self._copy = ComputingCopy(self.decoder, dtype) if copied else None

    def follow(self, *, packed: bool, compiled: bool) -> None:
        """Computes as the policy does, whose decoder this one is a copy of."""
        if packed:
            use_tree_attention(self._runs())
        if compiled:
            compile_layers(self._runs())

    def _runs(self) -> Any:
        return self.decoder if self._copy is None else self._copy.model

    def forward(self, batch: MicroBatch) -> Tensor:
        if self._copy is not None:
            self._copy.refresh()
        with autocast(self._device, self._dtype) if self._copy is None else nullcontext():
            hidden = self._runs()(**batch.decoder_inputs(), use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[batch.positions].float()).squeeze(-1)
        return values


def token_advantages(
    batches: Sequence[MicroBatch], values: Sequence[Tensor], config: AlgorithmConfig
) -> list[tuple[Tensor, Tensor]]:
    """(advantages, returns) [T] of each micro-batch: GAE with the reward on each response's last own token.

    With `batch_std` advantages are normalised over all tokens of all batches.
    """
    found = [_gae(batch, one, config) for batch, one in zip(batches, values, strict=True)]
    advantages = [one for one, _ in found]
    if config.normalisation == "batch_std":
        ends = np.cumsum([len(one) for one in advantages])[:-1]
        advantages = np.split(whiten(np.concatenate(advantages)), ends)
    return [
        (torch.from_numpy(a.astype(np.float32)), torch.from_numpy(r.astype(np.float32)))
        for a, (_, r) in zip(advantages, found, strict=True)
    ]


def _gae(batch: MicroBatch, values: Tensor, config: AlgorithmConfig) -> tuple[Array, Array]:
    lengths = np.array(batch.lengths)
    there = np.arange(lengths.max())[None, :] < lengths[:, None]
    padded, rewards = np.zeros(there.shape), np.zeros(there.shape)
    padded[there] = values.double().cpu().numpy()
    rewards[np.arange(len(lengths)), lengths - 1] = batch.rewards
    advantages, returns = gae(rewards, padded, there, gamma=config.gamma, lam=config.lam)
    return advantages[there], returns[there]
