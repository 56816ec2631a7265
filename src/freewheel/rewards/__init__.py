"""From a response to a reward: rules, length penalty, judge quality, composition, and the reward managers.

    from freewheel.rewards import LengthPenaltyRewardManager

    manager = LengthPenaltyRewardManager(tokenizer, num_examine=1, length_penalty_config={"use_async_io": True, …})
    handle = manager.submit(batch)      # returns at once
    …                                   # the GPU works on the next batch
    reward_tensor = handle.result()

Importing this package needs no torch, no ray and no transformers.
"""

from freewheel.rewards.compute_score import compute_score, compute_score_async, shutdown_judges
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.rewards.manager import LengthPenaltyRewardManager, RewardHandle
from freewheel.rewards.openai_manager import AsyncOpenAIManager, AsyncOpenAIWorker, get_request_hash
from freewheel.rewards.rules import (
    boxed_math,
    dapo_math,
    exact_match,
    format_tags,
    gsm8k,
    register_rule,
    rule_score,
    tool_call,
)
from freewheel.rewards.scoring import RewardFailed, soft_overlong

__all__ = [
    "AsyncOpenAIManager",
    "AsyncOpenAIWorker",
    "LengthPenaltyConfig",
    "LengthPenaltyRewardManager",
    "RewardFailed",
    "RewardHandle",
    "boxed_math",
    "compute_score",
    "compute_score_async",
    "dapo_math",
    "exact_match",
    "format_tags",
    "get_request_hash",
    "gsm8k",
    "register_rule",
    "rule_score",
    "shutdown_judges",
    "soft_overlong",
    "tool_call",
]
