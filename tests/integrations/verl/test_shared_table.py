"""The table that reward workers share, from the side of one worker: what it does when the actor is gone."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import ray

from freewheel.integrations.verl import owner
from freewheel.integrations.verl.owner import SharedTable, TableLost
from freewheel.integrations.verl.rows import Row
from freewheel.integrations.verl.settings import Settings
from freewheel.rewards import RewardFailed, RuleScore, Sample

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def settings(name: str, **more: Any) -> Settings:
    return Settings({"penalty_scale": 2.0, **more}, 2, 2, workers=2, extra_keys=(name,))


def row(number: int, uid: str, **more: Any) -> Row:
    return Row(f"{uid}-{number}", Sample("", 10, uid), (2,), **{"rule": RuleScore(1.0), "request": None, **more})


async def test_one_worker_after_another_batch(ray_session: None) -> None:
    table = SharedTable(settings("turns"))
    for turn in range(3):
        answers = await asyncio.gather(*(table.reward(row(number, f"turn {turn}")) for number in range(2)))
        assert [answer["reward_score"] for answer in answers] == [1.0, 1.0]


async def test_rows_that_wait_while_the_actor_dies_are_put_again(
    ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    table = SharedTable(settings("dies"))
    first = asyncio.ensure_future(table.reward(row(0, "u")))
    while table._actor is None:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    ray.kill(table._actor)
    second = await table.reward(row(1, "u"))
    assert (await first)["reward_score"] == second["reward_score"] == 1.0
    assert second["reward_extra_info"]["group_complete"] == 1
    assert "rows are put again" in caplog.text


async def test_a_table_that_cannot_be_kept_alive_is_given_up(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner, "FIRST_PAUSE_S", 0.001)

    class Dead:
        class Method:
            @staticmethod
            async def remote(*_: Any) -> None:
                raise ray.exceptions.RayActorError()

        put = take = Method()

    table = SharedTable(settings("dead"))
    monkeypatch.setattr(table, "_find", Dead)
    with caplog.at_level(logging.CRITICAL), pytest.raises(TableLost):
        await table.reward(row(0, "u"))


async def test_what_on_failure_raises_reaches_the_rows_caller(ray_session: None) -> None:
    table = SharedTable(settings("raises", on_failure="raise"))
    failed = [row(number, "u", rule=None, failure="it broke") for number in range(2)]
    with pytest.raises(RewardFailed, match="it broke"):
        await asyncio.gather(*map(table.reward, failed))
