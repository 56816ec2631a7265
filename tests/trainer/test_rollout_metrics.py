"""Metrics about the rewards of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from freewheel.data.group import PromptGroup, Response
from freewheel.judge.verdict import Failed, Scored, Skipped
from freewheel.trainer.torch_backend import rollout_metrics

from .groups import make_group, make_response

NAN = float("nan")


def group_of(*responses: Response) -> PromptGroup:
    return make_group(0, responses)


def rewarded(value: float = 1.0, **parts: Any) -> Response:
    return replace(make_response([5], value=value), verdict=Scored(value, parts=parts))


def test_parts_of_rewards_are_averaged_separately():
    found = rollout_metrics([group_of(rewarded(1.2, correct=1, format=1), rewarded(0.2, correct=0, format=1))])
    assert (found["reward/correct"], found["reward/format"]) == (0.5, 1.0)
    assert found["rollout/reward_mean"] == pytest.approx(0.7)


def test_a_part_is_averaged_over_the_responses_that_have_it():
    failed = replace(make_response([5], value=NAN), verdict=Failed("timeout", parts={"rule": 1.0}))
    groups = [group_of(rewarded(steps=4.0, rule=0.0), rewarded(steps=NAN)), group_of(failed, rewarded())]
    found = rollout_metrics(groups)
    assert found["reward/steps"] == 4.0, "a NaN is no value"
    assert found["reward/rule"] == 0.5, "what is known of a response whose judge failed counts"


def test_rewards_without_parts_have_no_part_metrics():
    assert not any(name.startswith("reward/") for name in rollout_metrics([group_of(rewarded(), rewarded())]))


def test_failed_and_skipped_responses_are_counted_separately() -> None:
    failed = replace(rewarded(), verdict=Failed("timeout"), reward=NAN)
    skipped = replace(rewarded(), verdict=Skipped("none"), reward=NAN)
    found = rollout_metrics([group_of(failed, replace(failed, reward=-1.0), skipped, skipped, *[rewarded()] * 4)])
    assert (found["rollout/masked_ratio"], found["rollout/skipped_ratio"]) == (1 / 8, 2 / 8)
