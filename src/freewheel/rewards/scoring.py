"""From rule scores and verdicts to rewards: the decisions of a reward manager, without tensors, HTTP or a clock.

    Sample ─▶ rule (apply_rule) ─▶ gate ─▶ JudgeRequest ─▶ Verdict ─▶ combine ─▶ Rewards

The managers of `freewheel.rewards` and of the integrations are shells around it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freewheel.errors import ConfigError
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Failed, JudgeError, Scored, Skipped, Verdict
from freewheel.rewards.compose import compose, fill_failed
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.rewards.length import group_index, median_penalty

log = logging.getLogger("freewheel.rewards")

Array = np.ndarray[Any, np.dtype[Any]]
ComputeScore = Callable[..., Any]
"""verl's: takes `data_source`, `solution_str`, `ground_truth`, `extra_info`; gives a number, or a dict with `score`."""

JUDGE_OFF = Skipped("the judge is off")
RULE_FAILED = Failed("compute_score", 0, "compute_score failed; the log says how")


class RewardFailed(JudgeError, RuntimeError):
    """A verdict failed and `on_failure` is `raise`."""


@dataclass(frozen=True)
class Sample:
    """One response, and what it takes to reward it."""

    response: str
    length: int
    """In tokens."""
    group: Hashable
    """Equal for the responses to one prompt (`uid`)."""
    data_source: str = ""
    ground_truth: Any = None
    question: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rewards:
    """One batch, each field in the order of its samples."""

    reward: Array
    """What is trained on: rule + quality − penalty; what `on_failure` says where the verdict failed. Never NaN."""
    raw: Array
    """Rule + quality, unshaped. NaN where the verdict failed."""
    rules: Sequence[Verdict]
    quality: Array
    """Coefficient × the judge's score; 0 where it was skipped, NaN where it failed."""
    penalty: Array
    lengths: Array
    medians: Array
    verdicts: Sequence[Verdict]

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def mask(self) -> Array:
        """0 where the verdict failed: such a row teaches nothing."""
        return np.array([int(not isinstance(verdict, Failed)) for verdict in self.verdicts])

    def extra_info(self) -> dict[str, list[Any]]:
        """Per sample what the reward was made of; every key has one value a row."""
        extra: dict[str, list[Any]] = {
            "original_score": [rule_value(rule) for rule in self.rules],
            "openai_quality_reward": self.quality.tolist(),
            "length_penalty": self.penalty.tolist(),
            "response_length": self.lengths.tolist(),
            "median_length": self.medians.tolist(),
            "raw_reward": self.raw.tolist(),
            "reward_mask": self.mask.tolist(),
            "judge_status": [verdict.status for verdict in self.verdicts],
            "judge_reason": ["" if isinstance(verdict, Scored) else verdict.reason for verdict in self.verdicts],
        }
        for name in dict.fromkeys(name for rule in self.rules for name in rule.parts):
            if name not in extra:
                extra[name] = [rule.parts.get(name) for rule in self.rules]
        return extra


def apply_rules(compute_score: ComputeScore, samples: Sequence[Sample]) -> list[Verdict]:
    """Each sample's rule score. One that raises is a failed row and not the end of the batch, unless all do."""
    scores: list[Verdict] = []
    errors: list[Exception] = []
    for row, sample in enumerate(samples):
        try:
            scores.append(apply_rule(compute_score, sample))
        except Exception as error:  # a user's function may raise anything
            scores.append(RULE_FAILED)
            if not errors:
                log.error("compute_score failed in row %d of %d: %s", row, len(samples), error, exc_info=error)
            errors.append(error)
    if errors and len(errors) == len(samples):
        raise errors[0]
    return scores


def apply_rule(compute_score: ComputeScore, sample: Sample) -> Scored:
    """The rule's score of one sample, whatever form `compute_score` gives it in."""
    found = compute_score(
        data_source=sample.data_source,
        solution_str=sample.response,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
    )
    return as_scored(found)


def as_scored(found: Any) -> Scored:
    """Return a number, a `Scored`, or a dict with `score` (and `format`, and parts to report) as a `Scored`."""
    parts: dict[str, Any] = {}
    if isinstance(found, Scored):
        right_format, parts, found = found.format, found.parts, found.value
    elif isinstance(found, Mapping):
        if "score" not in found:
            raise ConfigError("compute_score", dict(found), "it returned a dict without 'score'")
        parts = {str(key): value for key, value in found.items() if key not in ("score", "format")}
        right_format, found = found.get("format", 1.0), found["score"]
    else:
        right_format = 1.0
    try:
        value, right_format = float(found), float(right_format)
    except (TypeError, ValueError):
        raise ConfigError("compute_score", found, "it must return a number, or a dict with 'score'") from None
    if not np.isfinite(value):
        raise ConfigError("compute_score", value, "it must return a finite number: NaN would spread through the batch")
    return Scored(value, parts=parts, format=right_format)


def judge_requests(
    samples: Sequence[Sample], rules: Sequence[Verdict], config: LengthPenaltyConfig
) -> list[JudgeRequest]:
    """One request a sample; those that the gate keeps from the judge carry the reason."""
    return [
        JudgeRequest(
            response=sample.response,
            prompt=sample.question,
            reference=sample.ground_truth if isinstance(sample.ground_truth, str) else "",
            skip=_gated(rule, config),
        )
        for sample, rule in zip(samples, rules, strict=True)
    ]


def rule_value(rule: Verdict) -> float:
    """Return the score, or NaN if there is none: NaN means "failed" wherever rewards are put together."""
    return rule.value if isinstance(rule, Scored) else np.nan


def _gated(rule: Verdict, config: LengthPenaltyConfig) -> str:
    if not isinstance(rule, Scored):
        return RULE_FAILED.detail
    if config.gate == "on" and rule.value == 0:
        return "judge_gate: the rule score is 0"
    if config.gate == "format" and rule.format == 0:
        return "judge_gate: the format is wrong"
    return ""


def combine(
    samples: Sequence[Sample], rules: Sequence[Verdict], verdicts: Sequence[Verdict], config: LengthPenaltyConfig
) -> Rewards:
    """The rewards of a batch that holds its groups whole."""
    verdicts = [given if isinstance(one, Scored) else one for one, given in zip(rules, verdicts, strict=True)]
    groups = group_index([sample.group for sample in samples])
    lengths = np.array([sample.length for sample in samples], dtype=np.int64)
    rule = np.array([rule_value(one) for one in rules], dtype=np.float64)
    judged = np.array([_judged(verdict) for verdict in verdicts], dtype=np.float64)
    penalty, medians = median_penalty(
        lengths,
        groups,
        penalty_scale=config.penalty_scale if config.enable else 0.0,
        max_penalty=config.max_penalty,
        peak_ratio=config.peak_ratio,
        outer_ratio=config.outer_ratio,
    )
    composed = compose(
        {"rule": rule, "quality": judged}, {"quality": config.reward_coefficient}, penalties={"length": penalty}
    )
    valid = ~np.isnan(composed.raw)
    policy = config.failure_policy
    reward = composed.shaped
    if not valid.all():
        if policy.kind == "raise":
            first = next(verdict for verdict in verdicts if isinstance(verdict, Failed))
            raise RewardFailed(
                f"{int((~valid).sum())} of {len(verdicts)} judgements failed, and on_failure is 'raise': "
                f"{first.reason}: {first.detail}"
            )
        if policy.kind == "group_mean":
            reward = fill_failed(reward, groups, valid, otherwise=_known(rule, reward, valid))
        else:
            alone = _known(rule - penalty, reward, valid)
            reward = np.where(valid, reward, policy.value if policy.kind == "fallback" else alone)
    return Rewards(
        reward=reward,
        raw=composed.raw,
        rules=rules,
        quality=composed.parts["quality"],
        penalty=penalty,
        lengths=lengths,
        medians=medians,
        verdicts=verdicts,
    )


def _known(rule: Array, reward: Array, valid: Array) -> Array:
    """`rule`, with the batch's mean reward where a row has not even that."""
    return np.where(np.isnan(rule), reward[valid].mean() if valid.any() else 0.0, rule)


def _judged(verdict: Verdict) -> float:
    if isinstance(verdict, Scored):
        return verdict.value
    return 0.0 if isinstance(verdict, Skipped) else np.nan
