"""The table that reward workers share, from the side of one worker: what it does when the actor is gone."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
import ray

from freewheel.integrations.verl import group_scorer
from freewheel.integrations.verl.group_scorer import GroupScorerActor, ScorerLost, SharedGroupScorer
from freewheel.integrations.verl.rows import Row
from freewheel.integrations.verl.settings import Settings
from freewheel.judge.verdict import Scored
from freewheel.rewards import RewardFailed, Sample
from freewheel.rewards.config import as_config

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def settings(name: str, **more: Any) -> Settings:
    return Settings(as_config({"penalty_scale": 2.0, **more}), 2, 2, workers=2, extra_keys=(name,))


def row(number: int, uid: str, **more: Any) -> Row:
    return Row(f"{uid}-{number}", Sample("", 10, uid), (2,), **{"rule": Scored(1.0), "request": None, **more})


async def test_one_worker_after_another_batch(ray_session: None) -> None:
    table = SharedGroupScorer(settings("turns"))
    for turn in range(3):
        answers = await asyncio.gather(*(table.reward(row(number, f"turn {turn}")) for number in range(2)))
        assert [answer["reward_score"] for answer in answers] == [1.0, 1.0]


async def test_rows_that_wait_while_the_actor_dies_are_put_again(
    ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    table = SharedGroupScorer(settings("dies"))
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
    monkeypatch.setattr(group_scorer, "FIRST_PAUSE_S", 0.001)

    class Dead:
        class Method:
            @staticmethod
            async def remote(*_: Any) -> None:
                raise ray.exceptions.RayActorError()

        put = take = Method()

    table = SharedGroupScorer(settings("dead"))
    monkeypatch.setattr(table, "_find", Dead)
    with caplog.at_level(logging.CRITICAL), pytest.raises(ScorerLost):
        await table.reward(row(0, "u"))


async def test_what_on_failure_raises_reaches_the_rows_caller(ray_session: None) -> None:
    table = SharedGroupScorer(settings("raises", on_failure="raise"))
    failed = [row(number, "u", rule=None, failure="it broke") for number in range(2)]
    with pytest.raises(RewardFailed, match="it broke"):
        await asyncio.gather(*map(table.reward, failed))


async def test_a_row_that_cannot_be_sent_fails_alone_and_meets_its_group(
    ray_session: None, caplog: pytest.LogCaptureFixture
) -> None:
    table = SharedGroupScorer(settings("pickles"))
    await asyncio.gather(*(table.reward(row(number, "first")) for number in range(2)))  # the actor is there
    bad = {"rule": Scored(5.0, parts={"acc": 0.5, "lock": threading.Lock()}), "extra": {"match": threading.Lock()}}
    rows = [row(0, "u"), row(1, "u", **bad), row(0, "v"), row(1, "v")]
    with caplog.at_level(logging.ERROR):
        answers = await asyncio.wait_for(asyncio.gather(*map(table.reward, rows)), 30)
    assert [answer["reward_extra_info"]["judge_status"] for answer in answers] == [
        "skipped",
        "failed",
        "skipped",
        "skipped",
    ]
    assert [answer["reward_score"] for answer in answers] == [1.0] * 4, "the group's mean, and not its own 5"
    assert answers[1]["reward_extra_info"]["acc"] == 0.5 and answers[1]["reward_extra_info"]["match"] is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["sending to the reward actor"]


async def test_a_row_that_cannot_be_sent_at_all_is_lost_by_itself(ray_session: None) -> None:
    table = SharedGroupScorer(settings("never"))
    await asyncio.gather(*(table.reward(row(number, "first")) for number in range(2)))
    bad = Row("bad", Sample("", 10, "u", extra_info={"lock": threading.Lock()}), (2,), Scored(1.0), None)
    good = asyncio.gather(*(table.reward(row(number, "v")) for number in range(2)))
    with pytest.raises(ScorerLost):
        await asyncio.wait_for(table.reward(bad), 30)
    assert len(await asyncio.wait_for(good, 30)) == 2


async def test_a_reply_that_is_lost_loses_no_row() -> None:
    """The actor survives an `ActorUnavailableError`, and so does the `take` whose caller has given it up."""
    actor = GroupScorerActor(settings("local"))
    gone = asyncio.ensure_future(actor.take("w", []))
    await asyncio.sleep(0)
    asked = asyncio.ensure_future(actor.take("w", []))
    await actor.put("w", [row(number, "u") for number in range(2)])
    assert sorted(dict(await asyncio.wait_for(asked, 10))) == ["u-0", "u-1"]
    await asyncio.wait_for(gone, 10)
    assert sorted(dict(await asyncio.wait_for(actor.take("w", []), 10))) == ["u-0", "u-1"], "kept until it was seen"

    await actor.put("w", [row(0, "u")])  # put again, since its worker had no answer
    rest = asyncio.ensure_future(actor.take("w", ["u-0", "u-1"]))
    await actor.put("w", [row(number, "v") for number in range(2)])
    assert sorted(dict(await asyncio.wait_for(rest, 10))) == ["v-0", "v-1"]


async def test_a_worker_gets_its_answers_though_a_reply_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_scorer, "FIRST_PAUSE_S", 0.001)
    actor = GroupScorerActor(settings("lossy"))
    lost: list[str] = []

    class Lossy:
        """The way to an actor that lives, with the first call of each kind carried out and its reply lost."""

        def __init__(self, name: str) -> None:
            self.name = name

        async def remote(self, *given: Any) -> Any:
            found = await getattr(actor, self.name)(*given)
            if self.name not in lost:
                lost.append(self.name)
                raise ray.exceptions.ActorUnavailableError("the reply is lost", None)
            return found

    class Way:
        put, take = Lossy("put"), Lossy("take")

    table = SharedGroupScorer(settings("lossy"))
    monkeypatch.setattr(table, "_find", Way)
    for uid in "uv":
        answers = await asyncio.wait_for(asyncio.gather(*(table.reward(row(n, uid)) for n in range(2))), 20)
        assert [answer["reward_extra_info"]["group_complete"] for answer in answers] == [1, 1]
    assert sorted(lost) == ["put", "take"]
    assert "came when" not in caplog.text, "a row that is put twice is one row"


async def test_an_answer_that_does_not_pickle_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(one + two)

    async def odd(row: Row) -> None:
        raise Odd("it ", "broke")

    actor = GroupScorerActor(settings("odd"))
    monkeypatch.setattr(actor._scorer, "reward", odd)
    await actor.put("w", [row(0, "u")])
    [(_, answer)] = await asyncio.wait_for(actor.take("w", []), 10)
    assert type(answer) is RuntimeError and str(answer) == "Odd: it broke"
