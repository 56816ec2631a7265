"""The scorer that reward workers share, as one worker sees it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import ray

from freewheel.integrations.verl import group_scorer
from freewheel.integrations.verl.group_scorer import GroupScorerActor, ScorerLost, SharedGroupScorer
from freewheel.integrations.verl.rows import DecodedRow
from freewheel.integrations.verl.settings import Settings
from freewheel.judge.verdict import Scored
from freewheel.rewards import RewardFailed
from freewheel.rewards.config import as_config
from freewheel.rewards.scoring import Sample

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def settings(name: str, **more: Any) -> Settings:
    return Settings(as_config({"penalty_scale": 2.0, **more}), 2, 2, workers=2, extra_keys=(name,))


def row(number: int, uid: str, **more: Any) -> DecodedRow:
    given = {"id": f"{uid}-{number}", "sizes": (2,), "rule": Scored(1.0), "request": None, **more}
    return DecodedRow(sample=Sample("", 10, uid), **given)


async def test_an_actor_that_keeps_dying_is_given_up(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_scorer, "FIRST_PAUSE_S", 0.001)

    class Dead:
        class Method:
            @staticmethod
            async def remote(*_: Any) -> None:
                raise ray.exceptions.RayActorError()

        reward = Method()

    scorer = SharedGroupScorer(settings("dead"))
    monkeypatch.setattr(scorer, "_find", Dead)
    with caplog.at_level(logging.CRITICAL), pytest.raises(ScorerLost):
        await scorer.reward(row(0, "u"))


async def test_an_error_of_on_failure_raise_reaches_the_rows_caller(ray_session: None) -> None:
    scorer = SharedGroupScorer(settings("raises", on_failure="raise"))
    failed = [row(number, "u", rule=None, failure="it broke") for number in range(2)]
    with pytest.raises(RewardFailed, match="it broke"):
        await asyncio.gather(*map(scorer.reward, failed))


async def test_a_row_whose_reply_was_lost_is_sent_again_and_counts_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_scorer, "FIRST_PAUSE_S", 0.001)
    actor = GroupScorerActor(settings("lossy"))
    lost: list[str] = []

    class Lossy:
        """The way to an actor that lives. The first reply for each row is lost."""

        class reward:  # noqa: N801  # Ray's shape: actor.reward.remote(row)
            @staticmethod
            async def remote(one: DecodedRow) -> Any:
                found = await actor.reward(one)
                if one.id not in lost:
                    lost.append(one.id)
                    raise ray.exceptions.ActorUnavailableError("the reply is lost", None)
                return found

    scorer = SharedGroupScorer(settings("lossy"))
    monkeypatch.setattr(scorer, "_find", Lossy)
    for uid in "uv":
        rows = [DecodedRow(f"{uid}-{n}", Sample("", 10 + 10 * n, uid), (2,), Scored(1.0), None) for n in range(2)]
        answers = await asyncio.wait_for(asyncio.gather(*map(scorer.reward, rows)), 20)
        assert [answer["reward_extra_info"]["median_length"] for answer in answers] == [15.0, 15.0]
    assert sorted(lost) == ["u-0", "u-1", "v-0", "v-1"]
    assert "came after" not in caplog.text
