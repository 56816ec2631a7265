"""What a request must look like before it may wait for a slot."""

from __future__ import annotations

import math

from freewheel.rollout.engine import GenerationRequest, PromptRefused, SamplingParams


def check_request(request: GenerationRequest, *, max_prompt_tokens: int, max_new_tokens: int, vocabulary: int) -> None:
    """`PromptRefused` for a prompt that can never be generated from, ValueError for parameters that cannot be right."""
    prompt = request.prompt
    if len(prompt) == 0:
        raise PromptRefused(f"request {request.id!r}: the prompt has no tokens; give at least 1")
    if len(prompt) > max_prompt_tokens:
        raise PromptRefused(
            f"request {request.id!r}: the prompt has {len(prompt)} tokens, max_prompt_tokens = {max_prompt_tokens}"
        )
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= vocabulary:
        raise PromptRefused(
            f"request {request.id!r}: the prompt has token {lowest if lowest < 0 else highest}, "
            f"the model knows 0 to {vocabulary - 1}"
        )
    if not request.timeout_s > 0:
        raise ValueError(f"request {request.id!r}: timeout_s = {request.timeout_s}: give a time over 0")
    for params in set(request.samples):
        _check_params(request.id, params, max_new_tokens)


def _check_params(request_id: str, params: SamplingParams, max_new_tokens: int) -> None:
    problem = None
    if not 1 <= params.max_new_tokens <= max_new_tokens:
        problem = f"max_new_tokens = {params.max_new_tokens}: the engine makes 1 to {max_new_tokens}"
    elif not (params.temperature >= 0 and math.isfinite(params.temperature)):
        problem = f"temperature = {params.temperature}: give 0 (greedy) or more"
    elif not 0 < params.top_p <= 1:
        problem = f"top_p = {params.top_p}: give a number over 0, 1 at most"
    elif params.top_k < 0:
        problem = f"top_k = {params.top_k}: give 0 (all tokens) or more"
    if problem:
        raise ValueError(f"request {request_id!r}: {problem}")
