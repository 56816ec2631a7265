"""A row on its way in and out: from verl's `DataProto` to a `Row`, and from a group's rewards to what verl collates.

DataProto (1 row) ─▶ Sample ─▶ compute_score ─▶ Row ─▶ table ─▶ {"reward_score", "reward_extra_info"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Failed, Scored, Verdict
from freewheel.rewards.scoring import Rewards, Sample, rule_value


@dataclass(frozen=True)
class Row:
    """One response as it goes to its table: decoded, scored by the rule, not yet judged."""

    id: str
    """Of this row alone: asked for twice, it is still one row."""
    sample: Sample
    """Without its text where no judge needs it."""
    sizes: tuple[int, ...]
    rule: Scored | None
    """None where `compute_score` raised."""
    request: JudgeRequest | None
    """None where the judge is off, or `compute_score` raised."""
    failure: str = ""
    """Why it will have no verdict, where that is known already."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The reported parts of `compute_score`'s dict, plain."""


def response_length(item: Any) -> int:
    """In tokens. The agent loop counts them; its mask is shifted where one trajectory has several sequences."""
    told = item.non_tensor_batch.get("response_len")
    if told is not None:
        return int(told)
    width = item.batch["responses"].shape[-1]
    return int(item.batch["attention_mask"][-width:].sum()) if width else 0


def question_of(item: Any) -> str:
    """What the response answers: the dataset's own wording, or the last thing that the user said."""
    info = item.get("extra_info")
    if isinstance(info, Mapping) and isinstance(info.get("question"), str):
        return str(info["question"])
    messages = item.get("raw_prompt")
    for message in reversed(list(messages) if messages is not None else []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return _text(message.get("content"))
    return ""


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple | np.ndarray) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)


def truth_of(item: Any) -> Any:
    told = item.get("reward_model")
    return told.get("ground_truth") if isinstance(told, Mapping) else None


def score_info(item: Any) -> dict[str, Any]:
    """`extra_info` as verl's own managers hand it to `compute_score`; a copy, since verl's rows share theirs."""
    info = dict(item.get("extra_info") or {})
    info.update(item.get("tool_extra_fields") or {})
    info["num_turns"] = item.get("__num_turns__")
    info["rollout_reward_scores"] = item.get("reward_scores", {})
    return info


def plain(value: Any) -> float | int | str | None:
    """One value that NumPy collates whatever the other rows hold: lists of unequal length would end verl's run."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return json.dumps(value, default=str)


def results(
    rows: Sequence[Row], verdicts: Sequence[Verdict], rewards: Rewards, accuracy: Sequence[float], *, whole: bool
) -> list[dict[str, Any]]:
    """What verl gets for each row of a group: the same keys with plain, finite values, whatever happened to it.

    A failed row's `openai_quality_reward` and `raw_reward` are the mean of its group's scored ones, as its reward is:
    verl averages these keys and may filter by them, and knows neither NaN nor None there.
    """
    quality = _filled(rewards.quality, otherwise=0.0)
    raw = _filled(rewards.raw, otherwise=[rule_value(rule) for rule in rewards.rules])
    told = []
    for index, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        info: dict[str, Any] = {
            "acc": float(accuracy[index]),
            "original_score": rule_value(rewards.rules[index]),
            "openai_quality_reward": float(quality[index]),
            "length_penalty": float(rewards.penalty[index]),
            "response_length": int(rewards.lengths[index]),
            "median_length": float(rewards.medians[index]),
            "raw_reward": float(raw[index]),
            "reward_mask": int(not isinstance(verdict, Failed)),
            "judge_status": verdict.status,
            "judge_reason": "" if isinstance(verdict, Scored) else verdict.reason,
            "group_complete": int(whole),
        }
        told.append({"reward_score": float(rewards.reward[index]), "reward_extra_info": {**row.extra, **info}})
    return told


def _filled(values: Any, *, otherwise: Any) -> Any:
    known = np.isfinite(values)
    return np.where(known, values, values[known].mean() if known.any() else otherwise)
