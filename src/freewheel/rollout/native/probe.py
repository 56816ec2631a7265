"""Before an engine serves anything: do its decode step and the model's own forward pass say the same?

Architectures differ in what they pass on to their attention, and a new one may do something that no flag tells. One
short prompt, read by both, shows it at the start, by name, and not as a strange log-probability in the middle of a run.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from freewheel.data.group import Array
from freewheel.rollout.engine import SamplingParams
from freewheel.rollout.native.runner import Placing, Runner
from freewheel.rollout.native.support import UnsupportedModel, vocabulary_size

PROMPT_TOKENS = 12
"""A few: each is a chance for a wrong mask or position to show."""
FULL_PRECISION_GAP = 1e-3
HALF_PRECISION_GAP = 0.25
"""Far over rounding, far below what a wrong mask or position does."""


def own_logprobs(model: PreTrainedModel, max_prompt_tokens: int) -> tuple[Array, Tensor]:
    """A prompt, and the distribution over its next token by the model's own forward pass."""
    vocabulary = vocabulary_size(model)
    prompt = (np.arange(1, 1 + min(PROMPT_TOKENS, max_prompt_tokens)) * 7 % vocabulary).astype(np.int32)
    ids = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
    return prompt, torch.log_softmax(logits.float(), dim=-1)


def check_agreement(runner: Runner, prompt: Array, expected: Tensor) -> None:
    """Raises `UnsupportedModel`. Leaves every slot free."""
    (prefilled,) = runner.prefill([prompt])
    greedy = SamplingParams(max_new_tokens=1, seed=0, temperature=0.0)
    runner.place([Placing(0, prompt, prefilled, greedy)])
    runner.advance()
    runner.step()
    (found,) = runner.take([0])
    runner.free([0])
    gap = abs(float(found.logprobs[0]) - float(expected[int(found.tokens[0])]))
    full = runner.model.dtype in (torch.float32, torch.float64)
    if not gap <= (FULL_PRECISION_GAP if full else HALF_PRECISION_GAP):
        raise UnsupportedModel(runner.model, f"its log-probabilities there are {gap:.3g} away from its forward pass")
