"""From rule scores and verdicts to rewards: pure arithmetic and decisions, without tensors, HTTP or a clock.

    Sample ─▶ rule (apply_rules) ─▶ gate ─▶ JudgeRequest ─▶ Verdict ─▶ shape ─▶ combine ─▶ Rewards
                                                                       │ rule + weight · quality − length penalty
                                                                       └ NaN where scoring failed

`shape` leaves a failed row NaN; the reward stage of a run masks it. `combine` fills failed rows as `on_failure` says,
for trainers that cannot mask: the reward managers, `compute_score` and the integrations call it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from freewheel.errors import ConfigError
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Failed, JudgeError, Scored, Skipped, Verdict
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.utils.checks import check_number

log = logging.getLogger("freewheel.rewards")

Array = np.ndarray[Any, np.dtype[Any]]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ComputeScore = Callable[..., Any]
"""verl's: called with `data_source`, `solution_str`, `ground_truth`, `extra_info`; a number or a dict with `score`."""

JUDGE_OFF = Skipped("the judge is off")
RULE_FAILED = Failed("compute_score", 0, "compute_score failed; the log says how")
"""The verdict of a row whose `compute_score` raised."""


class RewardFailed(JudgeError, RuntimeError):
    """A verdict failed and `on_failure` is `raise`."""


@dataclass(frozen=True)
class Sample:
    """One response with everything that its reward needs."""

    response: str
    length: int
    """Length of the response in tokens."""
    group: Hashable
    """Equal for the responses to one prompt (`uid`)."""
    data_source: str = ""
    ground_truth: Any = None
    question: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewards:
    """The rewards of a batch. Each field is in the order of the samples."""

    reward: Array
    """What is trained on: rule + quality − penalty. For a failed row NaN, or what `on_failure` says after `combine`."""
    raw: Array
    """rule + quality. NaN where scoring failed."""
    rules: Sequence[Verdict]
    quality: Array
    """Coefficient × the judge's score; 0 if the row was skipped, NaN if it failed."""
    penalty: Array
    lengths: Array
    medians: Array
    """The median length of each sample's group."""
    verdicts: Sequence[Verdict]
    """The judge's verdicts. The rule's own for a row whose rule did not score."""

    @property
    def mask(self) -> Array:
        """0 where scoring failed: such a row must not be trained on."""
        return np.array([int(not isinstance(verdict, Failed)) for verdict in self.verdicts])

    def extra_info(self) -> dict[str, list[Any]]:
        """Return what each reward consists of. Every key has one value per sample."""
        extra: dict[str, list[Any]] = {
            "original_score": [rule_value(rule) for rule in self.rules],
            "openai_quality_reward": self.quality.tolist(),
            "length_penalty": self.penalty.tolist(),
            "response_length": self.lengths.tolist(),
            "median_length": self.medians.tolist(),
            "raw_reward": self.raw.tolist(),
            "reward_mask": self.mask.tolist(),
            "judge_status": [verdict.status for verdict in self.verdicts],
            "judge_reason": ["" if isinstance(one, Scored) else one.reason for one in self.verdicts],
        }
        for name in dict.fromkeys(name for rule in self.rules for name in rule.parts):
            extra.setdefault(name, [rule.parts.get(name) for rule in self.rules])
        return extra


def describe_failures(failed: Sequence[Failed], total: int) -> str:
    """Return how many of `total` judgements failed, why, and what the first one reported."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(one.reason for one in failed).most_common())
    return f"{len(failed)} of {total} judgements failed ({reasons}), the first with: {failed[0].detail}"


# -- rules ------------------------------------------------------------------------------------------------------------


def apply_rules(compute_score: ComputeScore, samples: Sequence[Sample]) -> list[Verdict]:
    """Return each sample's rule score. A row that raises has failed. Raises only if every row raises."""
    scores: list[Verdict] = []
    errors: list[Exception] = []
    for row, sample in enumerate(samples):
        try:
            found = compute_score(
                data_source=sample.data_source,
                solution_str=sample.response,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
            )
            scores.append(as_scored(found))
        except Exception as error:  # a user's function may raise anything
            scores.append(RULE_FAILED)
            if not errors:
                log.error("compute_score failed in row %d of %d: %s", row, len(samples), error, exc_info=error)
            errors.append(error)
    if errors and len(errors) == len(samples):
        raise errors[0]
    return scores


def as_scored(found: Any) -> Scored:
    """Return a number, a `Scored`, or a dict with `score` (and `format`, and parts to report) as a `Scored`."""
    parts: dict[str, Any] = {}
    right_format: Any = 1.0
    if isinstance(found, Scored):
        right_format, parts, found = found.format, found.parts, found.value
    elif isinstance(found, Mapping):
        if "score" not in found:
            raise ConfigError("compute_score", dict(found), "it returned a dict without 'score'")
        parts = {str(key): value for key, value in found.items() if key not in ("score", "format")}
        right_format, found = found.get("format", 1.0), found["score"]
    try:
        value, right_format = float(found), float(right_format)
    except (TypeError, ValueError):
        raise ConfigError("compute_score", found, "it must return a number, or a dict with 'score'") from None
    if not math.isfinite(value):
        raise ConfigError("compute_score", value, "it must return a finite number: NaN would spread through the batch")
    return Scored(value, parts=parts, format=right_format)


def rule_value(rule: Verdict) -> float:
    """Return the score, or NaN if there is none. NaN means "failed" in all arithmetic on rewards."""
    return rule.value if isinstance(rule, Scored) else math.nan


# -- the judge gate ---------------------------------------------------------------------------------------------------


def judge_requests(
    samples: Sequence[Sample], rules: Sequence[Verdict], config: LengthPenaltyConfig
) -> list[JudgeRequest]:
    """Return one request per sample. A request that the gate keeps from the judge carries the reason."""
    return [
        JudgeRequest(
            response=sample.response,
            prompt=sample.question,
            reference=sample.ground_truth if isinstance(sample.ground_truth, str) else "",
            skip=_skip_reason(rule, config),
        )
        for sample, rule in zip(samples, rules, strict=True)
    ]


def _skip_reason(rule: Verdict, config: LengthPenaltyConfig) -> str:
    if not isinstance(rule, Scored):
        return RULE_FAILED.detail
    if config.judge_gate == "on" and rule.value == 0:
        return "judge_gate: the rule score is 0"
    if config.judge_gate == "format" and rule.format == 0:
        return "judge_gate: the format is wrong"
    return ""


# -- length -----------------------------------------------------------------------------------------------------------


def group_index(uids: Sequence[Hashable] | npt.NDArray[Any]) -> Ints:
    """Return each sample's group as a number: 0 for the first uid, and so on by first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(uid, len(numbers)) for uid in uids), dtype=np.int64, count=len(uids))


def median_penalty(
    lengths: npt.ArrayLike, groups: npt.NDArray[np.integer[Any]], config: LengthPenaltyConfig
) -> tuple[Floats, Floats]:
    """Return each sample's penalty, and the median length m of its group (`groups` comes from `group_index`).

    With d = |length − m| / m:  penalty = scale · max · clip((d − peak) / (outer − peak), 0, 1);  none where m = 0, and
    none without `enable`. It is subtracted from the reward.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    median = _group_medians(tokens, groups)[groups]
    distance = np.divide(np.abs(tokens - median), median, out=np.zeros_like(median), where=median > 0)
    rise = np.clip((distance - config.peak_ratio) / (config.outer_ratio - config.peak_ratio), 0.0, 1.0)
    scale = config.penalty_scale if config.enable else 0.0
    return scale * config.max_penalty * rise, median


def _group_medians(tokens: Ints, groups: npt.NDArray[np.integer[Any]]) -> Floats:
    """Return each group's median, from one sort of group · stride + length: 3 times faster than a sort by two keys."""
    stride = tokens.max(initial=0) + 1
    in_order = np.sort(groups * stride + tokens) % stride
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    middles: Floats = (in_order[starts + (sizes - 1) // 2] + in_order[starts + sizes // 2]) / 2
    return middles


def soft_overlong(lengths: npt.ArrayLike, *, max_length: int, buffer_length: int, factor: float) -> Floats:
    """Return DAPO's soft overlong punishment (Yu et al. 2025) as a positive penalty.

    It is 0 up to max − buffer, rises linearly to `factor` at max, and stays there (verl's own lacks this bound).
    """
    check_number("max_length", max_length, low=0)
    check_number("factor", factor, low=0)
    if not 0 < buffer_length <= max_length:
        raise ConfigError("buffer_length", buffer_length, f"give 1 to max_length ({max_length})")
    over = np.asarray(lengths, dtype=np.float64) - (max_length - buffer_length)
    return factor * np.clip(over / buffer_length, 0.0, 1.0)


# -- composition ------------------------------------------------------------------------------------------------------


def shape(
    samples: Sequence[Sample], rules: Sequence[Verdict], verdicts: Sequence[Verdict], config: LengthPenaltyConfig
) -> Rewards:
    """Return the rewards of a batch that holds whole groups. A failed row is NaN."""
    verdicts = [judged if isinstance(rule, Scored) else rule for rule, judged in zip(rules, verdicts, strict=True)]
    lengths = np.array([sample.length for sample in samples], dtype=np.int64)
    groups = group_index([sample.group for sample in samples])
    penalty, medians = median_penalty(lengths, groups, config)
    judged = [0.0 if isinstance(verdict, Skipped) else rule_value(verdict) for verdict in verdicts]
    quality = config.reward_coefficient * np.array(judged, dtype=np.float64)
    raw = np.array([rule_value(rule) for rule in rules], dtype=np.float64) + quality
    return Rewards(raw - penalty, raw, rules, quality, penalty, lengths, medians, verdicts)


def combine(
    samples: Sequence[Sample], rules: Sequence[Verdict], verdicts: Sequence[Verdict], config: LengthPenaltyConfig
) -> Rewards:
    """Return the same as `shape`, with failed rows filled as `on_failure` says: `reward` is never NaN."""
    rewards = shape(samples, rules, verdicts, config)
    valid = ~np.isnan(rewards.reward)
    if valid.all():
        return rewards
    policy = config.failure_policy
    if policy.kind == "raise":
        first = next(verdict for verdict in rewards.verdicts if isinstance(verdict, Failed))
        raise RewardFailed(
            f"{int((~valid).sum())} of {len(valid)} judgements failed, and on_failure is 'raise': {first.summary}"
        )
    rule = np.array([rule_value(one) for one in rules], dtype=np.float64)
    batch_mean = rewards.reward[valid].mean() if valid.any() else 0.0  # for a row that has not even a rule score
    if policy.kind == "group_mean":  # so the row has no advantage over its group
        groups = group_index([sample.group for sample in samples])
        counts = np.bincount(groups[valid], minlength=len(groups))[groups]
        sums = np.bincount(groups[valid], weights=rewards.reward[valid], minlength=len(groups))[groups]
        otherwise = np.where(np.isnan(rule), batch_mean, rule)
        filled = np.where(counts > 0, sums / np.maximum(counts, 1), otherwise)
    elif policy.kind == "fallback":
        filled = np.full(len(rule), policy.value)
    else:
        filled = np.where(np.isnan(rule), batch_mean, rule - rewards.penalty)
    return dataclasses.replace(rewards, reward=np.where(valid, rewards.reward, filled))
