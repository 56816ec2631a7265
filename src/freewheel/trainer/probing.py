"""What a model can do, tried out before anything relies on it: share prompts, take packed rows, do without its logits.

    two responses to one prompt ─▶ each alone ─────────▶ log π ┐
                                └▶ shared, or packed ──▶ log π ┴─▶ the same, or it cannot

A model with its own idea of positions, or of who sees whom, cannot. Called by `Policy`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from freewheel.trainer.batching import MAX_SHARED_TOKENS, MicroBatch, Sample, micro_batches
from freewheel.trainer.packing import packed_batches

ALWAYS_SHARE = 1e9
N_PROMPT = 4
N_RESPONSE = {"padded": 4, "packed": 37}
"""Odd: a packed probe ends within a tile."""
REFUSALS = (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError)
"""What a model or a kernel says to a mask, positions or heads that it does not take."""
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.2}
"""How far a log-probability may move when a token's company changes. Logits near 16 are steps of 0.06 apart in
bfloat16; a token that sees what it should not moves by whole units."""


def probes(vocabulary: int, n_tokens: int) -> list[Sample]:
    """Two responses to one prompt, the second the first one backwards."""
    ids, places = np.arange(n_tokens, dtype=np.int64) % vocabulary, np.arange(n_tokens)
    one = Sample(
        key=(0, 0),
        prompt=ids[:N_PROMPT],
        tokens=ids,
        made=places,
        behaviour=places,
        versions=places,
        reward=0.0,
        advantage=0.0,
        weight=0.0,
    )
    return [one, replace(one, key=(0, 1), tokens=ids[::-1])]


def probe_batch(vocabulary: int, *, packed: bool, share: bool = True) -> MicroBatch:
    samples = probes(vocabulary, N_RESPONSE["packed" if packed else "padded"])
    budget = 4 * (N_PROMPT + len(samples[0].tokens))
    if packed:
        return packed_batches(samples, budget, share=share)[0]
    return micro_batches(samples, budget, ALWAYS_SHARE if share else None)[0]


class Probe:
    """Asks the model's own forward pass, `within` the precision that its parameters are in."""

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype, within: AbstractContextManager[Any]):
        self._model, self._device, self._within = model, device, within
        self._tolerance = TOLERANCE[dtype]
        self._vocabulary = int(model.config.get_text_config().vocab_size)

    def can_share(self) -> bool:
        """A sliding window would show only in rows longer than it."""
        window = self._model.config.get_text_config().to_dict().get("sliding_window")
        if window is not None and window < MAX_SHARED_TOKENS:
            return False
        return self._agree(*(probe_batch(self._vocabulary, packed=False, share=share) for share in (False, True)))

    def can_pack(self) -> bool:
        samples = probes(self._vocabulary, N_RESPONSE["packed"])
        (alone,) = micro_batches(samples, 4 * (N_PROMPT + N_RESPONSE["packed"]))
        return self._agree(alone, probe_batch(self._vocabulary, packed=True))

    @torch.no_grad()
    def _agree(self, *batches: MicroBatch) -> bool:
        found = []
        try:
            for batch in batches:
                batch = batch.to(self._device)
                with self._within:
                    logits = self._model(**batch.decoder_inputs(), use_cache=False).logits
                log_p = logits.flatten(0, 1)[batch.positions].float().log_softmax(-1)
                found.append(log_p.gather(-1, batch.targets[:, None]))
        except REFUSALS:
            return False
        return bool((found[0] - found[1]).abs().max() <= self._tolerance)
