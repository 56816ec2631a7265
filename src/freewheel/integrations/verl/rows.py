"""Rows from and to verl: a `DataProto` of one row becomes a `DecodedRow`, and rewards become what verl collates.

    DataProto (1 row) ─▶ Sample ─▶ compute_score ─▶ DecodedRow ─▶ GroupScorer ─▶ {"reward_score", "reward_extra_info"}

Also `LegacyRewardManager`: verl up to 0.6 takes whole batches and averages every column of the extra info.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Scored
from freewheel.rewards.manager import LengthPenaltyRewardManager
from freewheel.rewards.scoring import Rewards, Sample


@dataclass(frozen=True)
class DecodedRow:
    """One response, decoded and scored by the rule, not yet judged."""

    id: str
    """Unique per row. A row that is submitted twice is still one row."""
    sample: Sample
    """The sample, without its text if no judge needs it."""
    sizes: tuple[int, ...]
    rule: Scored | None
    """None if `compute_score` raised."""
    request: JudgeRequest | None
    """None if the judge is off or `compute_score` raised."""
    failure: str = ""
    """Why the row will have no verdict, if that is known already."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The reported parts of `compute_score`'s dict, plain."""


def response_length(item: Any) -> int:
    """Return the length in tokens, as the agent loop counted it. That mask shifts if a trajectory has several parts."""
    length = item.non_tensor_batch.get("response_len")
    if length is not None:
        return int(length)
    width = item.batch["responses"].shape[-1]
    return int(item.batch["attention_mask"][-width:].sum()) if width else 0


def question_of(item: Any) -> str:
    """Return the question: the dataset's own wording, or the last user message."""
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
    model = item.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def score_info(item: Any) -> dict[str, Any]:
    """Return `extra_info` as verl's own managers pass it to `compute_score`. A copy: verl's rows share one object."""
    info = dict(item.get("extra_info") or {})
    info.update(item.get("tool_extra_fields") or {})
    info["num_turns"] = item.get("__num_turns__")
    info["rollout_reward_scores"] = item.get("reward_scores", {})
    return info


def plain(value: Any) -> float | int | str | None:
    """Return a value that NumPy can collate with any other: lists of unequal length would end verl's run."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return json.dumps(value, default=str)


def results(
    rows: Sequence[DecodedRow], rewards: Rewards, accuracy: Sequence[float], *, whole: bool
) -> list[dict[str, Any]]:
    """Return verl's result for each row of a group: always the same keys, with plain, finite values.

    A failed row's `openai_quality_reward` and `raw_reward` are the means of its group's scored rows, like its reward:
    verl averages these keys and may filter by them, and cannot handle NaN or None.
    """
    given = rewards.extra_info() | {"acc": list(accuracy), "group_complete": [int(whole)] * len(rows)}
    columns = fill_columns(given, groups=[None] * len(rows))
    return [
        {"reward_score": reward, "reward_extra_info": {**row.extra, **dict(zip(columns, values, strict=True))}}
        for row, reward, values in zip(rows, rewards.reward.tolist(), zip(*columns.values(), strict=True), strict=True)
    ]


# -- verl up to 0.6 ---------------------------------------------------------------------------------------------------


class LegacyRewardManager(LengthPenaltyRewardManager):
    """Registered as `length_penalty`. Its extra info has one plain, finite value per row under every key."""

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        result = super().__call__(data, return_dict)
        if not return_dict:
            return result
        uids = data.non_tensor_batch.get("uid")
        # Without uids, rows with equal prompts are a group, as in `LengthPenaltyRewardManager`.
        prompts = data.batch["prompts"]
        groups = [str(uid) for uid in uids] if uids is not None else [tuple(row) for row in prompts.tolist()]
        return {**result, "reward_extra_info": fill_columns(result["reward_extra_info"], groups)}


def fill_columns(columns: Mapping[str, Sequence[Any]], groups: Sequence[Hashable]) -> dict[str, list[Any]]:
    """Fill each missing number with its group's mean, as `results` does. Columns with text hold only text.

    If a whole group has no number: the rule scores for `raw_reward`, 0 for `openai_quality_reward`, and the mean of all
    rows for the rest.
    """
    filled: dict[str, list[Any]] = {}
    for key, values in columns.items():
        found = [plain(value) for value in values]
        if any(isinstance(value, str) for value in found):
            filled[key] = ["" if value is None else str(value) for value in found]
            continue
        known: dict[Hashable, list[float]] = defaultdict(list)
        for group, value in zip(groups, found, strict=True):
            if value is not None:
                known[group].append(float(value))
        every = [value for some in known.values() for value in some]
        mean = statistics.fmean(every) if every and key != "openai_quality_reward" else 0.0
        otherwise = filled["original_score"] if key == "raw_reward" else [mean] * len(found)
        filled[key] = [
            value if value is not None else statistics.fmean(known[group]) if known[group] else otherwise[row]
            for row, (group, value) in enumerate(zip(groups, found, strict=True))
        ]
    return filled
