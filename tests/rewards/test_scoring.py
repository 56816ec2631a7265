"""`combine` and what is before it, against a slow reference, row by row: mask, group mean, gate and `on_failure`."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge import ConfigError, Failed, JudgeRequest, Scored, Skipped, Verdict
from freewheel.rewards import LengthPenaltyConfig, RewardFailed, soft_overlong
from freewheel.rewards.scoring import Rewards, Sample, as_scored, combine, group_index, judge_requests, median_penalty

NUMBERS = st.floats(-100, 100)
VERDICTS = st.one_of(
    st.builds(Scored, st.floats(1, 10)),
    st.builds(Failed, st.sampled_from(["deadline", "unparseable"])),
    st.builds(Skipped, st.just("gate")),
)
Row = tuple[str, int, float, Verdict]
ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50), NUMBERS, VERDICTS), max_size=30)
CONFIGS = st.builds(
    lambda enable, scale, most, peak, width, coefficient, on_failure: LengthPenaltyConfig(
        enable=enable,
        penalty_scale=scale,
        max_penalty=most,
        peak_ratio=peak,
        outer_ratio=peak + width,
        reward_coefficient=coefficient,
        on_failure=on_failure,
    ),
    st.booleans(),
    st.floats(0, 3),
    st.floats(0, 3),
    st.floats(0, 1),
    st.floats(0.01, 2),
    st.floats(-2, 2),
    st.sampled_from(["group_mean", "rule_only", "fallback: -1.5"]),
)


def combined(rows: list[Row], config: LengthPenaltyConfig) -> Rewards:
    samples = [Sample(response="", length=length, group=group) for group, length, _, _ in rows]
    return combine(samples, [Scored(rule) for _, _, rule, _ in rows], [verdict for *_, verdict in rows], config)


def penalty_of(length: int, middle: float, config: LengthPenaltyConfig) -> float:
    """SPEC 1.1, as it is written there."""
    if not config.enable or middle == 0:
        return 0.0
    distance = abs(length - middle) / middle
    if distance <= config.peak_ratio:
        return 0.0
    share = (distance - config.peak_ratio) / (config.outer_ratio - config.peak_ratio)
    return config.penalty_scale * config.max_penalty * min(1.0, share)


def expected(rows: list[Row], config: LengthPenaltyConfig) -> list[float]:
    """The rewards, computed the slow way."""
    shaped: list[float | None] = []
    penalties = []
    for group, length, rule, verdict in rows:
        middle = median([other[1] for other in rows if other[0] == group])
        penalties.append(penalty_of(length, middle, config))
        quality = {Scored: lambda v: config.reward_coefficient * v.value, Skipped: lambda v: 0.0}.get(type(verdict))
        shaped.append(None if quality is None else rule + quality(verdict) - penalties[-1])
    rewards: list[float] = []
    for (group, _, rule, _), own, penalty in zip(rows, shaped, penalties, strict=True):
        if own is not None:
            rewards.append(own)
            continue
        theirs = [value for (g, *_), value in zip(rows, shaped, strict=True) if g == group and value is not None]
        if config.failure_policy.kind == "group_mean":
            rewards.append(fmean(theirs) if theirs else rule)
        else:
            rewards.append(rule - penalty if config.failure_policy.kind == "rule_only" else -1.5)
    return rewards


@given(ROWS, CONFIGS)
def test_every_reward_and_the_extra_info_are_what_the_spec_says(rows: list[Row], config: LengthPenaltyConfig) -> None:
    rewards = combined(rows, config)
    np.testing.assert_allclose(rewards.reward, expected(rows, config), rtol=1e-9, atol=1e-9)  # a NaN is not close
    failed = [isinstance(verdict, Failed) for *_, verdict in rows]
    assert np.isnan(rewards.raw).tolist() == np.isnan(rewards.quality).tolist() == failed
    extra = rewards.extra_info()
    assert {len(column) for column in extra.values()} == {len(rows)}
    assert extra["reward_mask"] == [int(not one) for one in failed]
    assert extra["judge_status"] == [verdict.status for *_, verdict in rows]
    assert extra["original_score"] == [rule for _, _, rule, _ in rows]
    assert extra["response_length"] == [length for _, length, _, _ in rows]
    assert [not reason for reason in extra["judge_reason"]] == [isinstance(one, Scored) for *_, one in rows]


@given(ROWS.filter(bool))
def test_a_failed_row_has_no_advantage_and_does_not_change_the_others(rows: list[Row]) -> None:
    """Under a group mean as baseline, with the failed rows in it."""
    rewards = combined(rows, LengthPenaltyConfig(enable=False))
    for group in {row[0] for row in rows}:
        inside = [number for number, row in enumerate(rows) if row[0] == group]
        valid = [number for number in inside if rewards.mask[number]]
        if not valid:
            continue
        baseline = fmean(rewards.reward[inside])
        assert baseline == pytest.approx(fmean(rewards.reward[valid]), abs=1e-9)
        assert all(rewards.reward[n] == pytest.approx(baseline, abs=1e-9) for n in set(inside) - set(valid))


@given(ROWS)
def test_on_failure_raise_raises_exactly_where_a_verdict_failed(rows: list[Row]) -> None:
    config = LengthPenaltyConfig(on_failure="raise")
    failed = sum(isinstance(verdict, Failed) for *_, verdict in rows)
    if failed:
        with pytest.raises(RewardFailed, match=f"^{failed} of {len(rows)} judgements failed"):
            combined(rows, config)
    else:
        combined(rows, config)


def test_a_group_that_failed_as_a_whole_keeps_its_rule_scores_and_rule_only_subtracts_the_penalty() -> None:
    rows: list[Row] = [("a", 10, 0.7, Failed("deadline")), ("a", 10, 0.2, Failed("deadline"))]
    rows += [("a", 30, 0.4, Failed("deadline"))]
    assert combined(rows, LengthPenaltyConfig()).reward.tolist() == [0.7, 0.2, 0.4]
    rule_only = combined(rows, LengthPenaltyConfig(on_failure="rule_only"))
    assert rule_only.reward.tolist() == pytest.approx([0.7, 0.2, -0.6])


# -- lengths and groups -----------------------------------------------------------------------------------------------


def test_the_penalty_is_exact_at_the_edges_of_its_slope_and_zero_for_a_median_of_zero() -> None:
    usual = LengthPenaltyConfig()
    penalty, median = median_penalty([100, 70, 130, 60, 140, 50, 150, 49, 151, 0, 9999], np.zeros(11, int), usual)
    assert median.tolist() == [100.0] * 11
    assert penalty.tolist() == pytest.approx([0, 0, 0, 0.5, 0.5, 1, 1, 1, 1, 1, 1]) and penalty[:3].tolist() == [0] * 3
    assert median_penalty([0, 0, 900], np.zeros(3, int), usual)[0].tolist() == [0.0, 0.0, 0.0]
    off = LengthPenaltyConfig(enable=False)
    assert median_penalty([100, 100, 900], np.zeros(3, int), off)[0].tolist() == [0.0, 0.0, 0.0]


@given(st.lists(st.one_of(st.text(max_size=2), st.integers(0, 5), st.none(), st.tuples(st.integers(0, 1)))))
def test_groups_are_numbered_by_first_appearance_for_uids_of_any_type(uids: list[Any]) -> None:
    order = list(dict.fromkeys(uids))
    assert group_index(uids).tolist() == [order.index(uid) for uid in uids]
    assert group_index(np.array(list(map(repr, uids)))).tolist() == group_index(list(map(repr, uids))).tolist()


def test_the_soft_overlong_penalty_starts_at_the_buffer_and_is_bounded_beyond_the_maximum() -> None:
    settings = {"max_length": 100, "buffer_length": 20, "factor": 2.0}
    assert soft_overlong([0, 80, 85, 100, 101, 10_000], **settings).tolist() == pytest.approx([0, 0, 0.5, 2, 2, 2])
    for key, value in {"buffer_length": 0, "max_length": math.nan, "factor": -1.0}.items():
        with pytest.raises(ConfigError, match=f"^{key} = "):
            soft_overlong([1], **{**settings, key: value})
    with pytest.raises(ConfigError, match=r"^buffer_length = 101"):
        soft_overlong([1], **{**settings, "buffer_length": 101})


# -- the gate ---------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-9]),
    st.sampled_from([0.0, 1.0, 0.5]),
    st.sampled_from(["on", "format", "off"]),
)
def test_the_gate_skips_a_rule_score_of_zero_or_a_wrong_format_or_nothing(
    score: float, right_format: float, gate: str
) -> None:
    config = LengthPenaltyConfig(judge_gate=gate)  # type: ignore[arg-type]
    [request] = judge_requests([Sample("r", 1, "g")], [Scored(score, format=right_format)], config)
    gated = {"on": score == 0, "format": right_format == 0, "off": False}[gate]
    assert bool(request.skip) is gated
    assert not gated or "judge_gate" in request.skip


def test_a_request_carries_response_question_and_a_reference_that_is_text() -> None:
    samples = [Sample("r", 1, "g", ground_truth="42", question="q"), Sample("s", 1, "g", ground_truth=["42"])]
    requests = judge_requests(samples, [Scored(1.0)] * 2, LengthPenaltyConfig())
    assert requests == [JudgeRequest("r", "q", "42"), JudgeRequest("s")]


# -- what a rule gives ------------------------------------------------------------------------------------------------


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_finite_number_of_any_kind_is_a_score_and_no_other_is(value: float) -> None:
    tensor = torch.tensor(value, dtype=torch.float64)
    for form in (value, np.float64(value), tensor, {"score": value}, {"score": tensor}, Scored(value)):
        if math.isfinite(value):
            assert (as_scored(form).value, type(as_scored(form).value)) == (value, float)
        else:
            with pytest.raises(ConfigError, match="finite"):
                as_scored(form)


def test_a_dicts_format_is_the_format_and_its_other_keys_are_parts() -> None:
    assert as_scored(True) == as_scored(np.float32(1)) == Scored(1.0)
    assert as_scored({"score": 1, "format": False, "acc": 0.5}) == Scored(1.0, parts={"acc": 0.5}, format=0.0)
    assert as_scored({"score": 1}).format == 1.0
    assert as_scored(Scored(1.0, parts={"acc": 0.5}, format=0.0)) == Scored(1.0, parts={"acc": 0.5}, format=0.0)


@pytest.mark.parametrize("found", [None, "good", [1], {"acc": 1}, {"score": None}, object(), torch.ones(2)])
def test_a_result_that_is_not_a_score_is_refused_and_the_error_names_compute_score(found: Any) -> None:
    with pytest.raises(ConfigError, match=r"^compute_score"):
        as_scored(found)
