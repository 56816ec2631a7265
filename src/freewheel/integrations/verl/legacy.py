"""`LegacyRewardManager`: `LengthPenaltyRewardManager` as verl up to 0.6 takes it, whose trainer averages every column.

reward_extra_info: NaN where a row failed, None where it has no such part ─▶ filled ─▶ np.mean and np.array of verl
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from freewheel.integrations.verl.rows import plain
from freewheel.rewards.manager import LengthPenaltyRewardManager


class LegacyRewardManager(LengthPenaltyRewardManager):
    """Registered as `length_penalty`. Its extra info has one plain, finite value a row under every key."""

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        result = super().__call__(data, return_dict)
        if not return_dict:
            return result
        uids = data.non_tensor_batch.get("uid")
        # Without uids equal prompts are a group, as in `LengthPenaltyRewardManager`.
        groups = [str(uid) for uid in uids] if uids is not None else [tuple(row) for row in _prompts(data)]
        return {**result, "reward_extra_info": filled(result["reward_extra_info"], groups)}


def _prompts(data: Any) -> list[list[int]]:
    prompts: list[list[int]] = data.batch["prompts"].tolist()
    return prompts


def filled(columns: Mapping[str, Sequence[Any]], groups: Sequence[Hashable]) -> dict[str, list[Any]]:
    """Columns of numbers hold their group's mean where a row has none, as `rows.results` does it; others hold text.

    Where a whole group has none: its rows' rule scores for `raw_reward`, 0 for `openai_quality_reward`, and the mean of
    all rows for the rest.
    """
    told: dict[str, list[Any]] = {}
    for key, values in columns.items():
        found = [plain(value) for value in values]
        if any(isinstance(value, str) for value in found):
            told[key] = ["" if value is None else str(value) for value in found]
            continue
        known: dict[Hashable, list[float]] = defaultdict(list)
        for group, value in zip(groups, found, strict=True):
            if value is not None:
                known[group].append(float(value))
        every = [value for some in known.values() for value in some]
        mean = statistics.fmean(every) if every and key != "openai_quality_reward" else 0.0
        otherwise = told["original_score"] if key == "raw_reward" and "original_score" in told else [mean] * len(found)
        told[key] = [
            value if value is not None else statistics.fmean(known[group]) if known[group] else otherwise[row]
            for row, (group, value) in enumerate(zip(groups, found, strict=True))
        ]
    return told
