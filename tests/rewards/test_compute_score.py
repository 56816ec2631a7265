"""`compute_score` under each of its calling conventions, with and without a judge (SPEC 1.4)."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from freewheel.judge import ConfigError, EngineDied, Secret
from freewheel.judge.testing import RunningJudge
from freewheel.judge.verdict import Scored
from freewheel.rewards import RewardFailed, compute_score, compute_score_async, register_rule, rules, shutdown_judges
from freewheel.rewards import compute_score as compute_score_function
from freewheel.rewards.compute_score import _START, _judge_for

from .conftest import KEY, Mock

SOURCE = "openai/gsm8k"
RIGHT, WRONG = "good: #### 4", "bad: #### 5"
ROW_KEYS = {"score", "original_score", "judge_status", "judge_reason", "reward_mask"}
THREAD = {"judge": {"placement": "thread"}}

Monitored = Callable[..., RunningJudge]


@pytest.fixture
def monitored(mock: Mock, monkeypatch: pytest.MonkeyPatch, judges_ended: None) -> Monitored:
    """`monitored(scores=…)`: a judge, and the environment in which `compute_score` asks it."""

    def start(**profile: Any) -> RunningJudge:
        judge = mock(**profile)
        for name, value in (
            ("TRAIN_WITH_MONITOR", "true"),
            ("OPENAI_API_KEY", KEY),
            ("OPENAI_BASE_URL", judge.base_url),
            ("OPENAI_MODEL", "m"),
        ):
            monkeypatch.setenv(name, value)
        return judge

    return start


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`compute_score`, and `compute_score_async` on a loop: what holds for one holds for the other."""

    def awaited(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(compute_score_async(*args, **kwargs))  # type: ignore[arg-type]

    yield compute_score if request.param == "sync" else awaited


def batch(*responses: str, truth: Any = "4", **more: Any) -> dict[str, Any]:
    return {
        "data_sources": [SOURCE] * len(responses),
        "solution_strs": list(responses),
        "ground_truths": [truth] * len(responses),
        "extra_infos": [{"index": 0}] * len(responses),
        **more,
    }


def single(response: str, **more: Any) -> dict[str, Any]:
    return {"data_source": SOURCE, "solution_str": response, "ground_truth": "4", "extra_info": None, **more}


# -- without a judge --------------------------------------------------------------------------------------------------


def test_one_sample_gives_its_rule_score(call: Any) -> None:
    assert call(RIGHT, "4", SOURCE, {}) == 1.0 and call(WRONG, "4", SOURCE, {}) == 0.0
    assert call(RIGHT, "4", SOURCE) == 1.0
    assert call(response=RIGHT, ground_truth="4", dataset_name=SOURCE, extra_info={}) == 1.0
    assert type(call(RIGHT, "4", SOURCE, {})) is float


def test_a_batch_gives_a_list_in_its_order(call: Any) -> None:
    assert call(**batch(RIGHT, WRONG, RIGHT)) == [1.0, 0.0, 1.0]


def test_verls_single_call_gives_a_number(call: Any) -> None:
    assert call(**single(RIGHT)) == 1.0 and call(**single(WRONG)) == 0.0


def test_columns_may_be_numpy_arrays_and_extra_infos_may_be_left_out(call: Any) -> None:
    given = {key: np.array(column, dtype=object) for key, column in batch(RIGHT, WRONG).items()}
    assert call(**given) == [1.0, 0.0]
    given = batch(RIGHT, WRONG)
    assert call(**{**given, "extra_infos": None}) == [1.0, 0.0]
    del given["extra_infos"]
    assert call(**given) == [1.0, 0.0]
    assert call(**batch(RIGHT, extra_infos=[None])) == [1.0]


def test_an_empty_batch_gives_an_empty_list(call: Any) -> None:
    assert call(**batch()) == []


def test_it_is_found_by_its_name_and_its_async_twin_is_a_coroutine_function() -> None:
    assert callable(compute_score_function)
    assert inspect.iscoroutinefunction(compute_score_async) and not inspect.iscoroutinefunction(compute_score)


@pytest.mark.parametrize("column", ["data_sources", "ground_truths", "extra_infos"])
def test_columns_of_other_lengths_are_named(call: Any, column: str) -> None:
    given = batch(RIGHT, WRONG)
    given[column] = given[column][:1]
    with pytest.raises(ConfigError, match=rf"{column}\) = 1: give one for each of the 2"):
        call(**given)


@pytest.mark.parametrize("column", ["data_sources", "ground_truths"])
def test_a_column_that_is_missing_is_named(call: Any, column: str) -> None:
    given = batch(RIGHT)
    del given[column]
    with pytest.raises(ConfigError, match=column):
        call(**given)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_plain_call_that_lacks_an_argument_says_which(call: Any, count: int) -> None:
    names = ["response", "ground_truth", "dataset_name"]
    with pytest.raises(TypeError, match=names[count]):
        call(*[RIGHT, "4", SOURCE][:count])


def test_a_plain_call_with_too_many_arguments_says_what_it_takes(call: Any) -> None:
    with pytest.raises(TypeError, match="response, ground_truth, dataset_name, extra_info"):
        call(RIGHT, "4", SOURCE, {}, "more")


@pytest.mark.parametrize("missing", ["data_source", "ground_truth"])
def test_verls_single_call_that_lacks_an_argument_is_an_error_that_names_it(call: Any, missing: str) -> None:
    given = single(RIGHT)
    del given[missing]
    with pytest.raises((ConfigError, TypeError), match=missing):
        call(**given)


def test_a_response_that_is_no_text_is_refused(call: Any) -> None:
    with pytest.raises(ConfigError, match="text"):
        call(None, "4", SOURCE, {})
    with pytest.raises(ConfigError, match="text"):
        call(**batch(RIGHT, 7))  # type: ignore[arg-type]


def test_an_unknown_data_source_says_what_to_do(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"data_source = 'who/knows'.*register_rule"):
        call(RIGHT, "4", "who/knows", {})


def test_what_verl_adds_to_a_call_is_left_alone(call: Any) -> None:
    assert call(**single(RIGHT, reward_router_address="10.0.0.1", reward_model_tokenizer=object())) == 1.0


def test_an_own_rule_serves(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    register_rule("mine/", lambda response, truth, extra: Scored(len(response) + extra.get("bonus", 0)))
    assert call("abc", "4", "mine/set", {"bonus": 2}) == 5.0


# -- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["false", "0", "off", "no", "", "  ", "FALSE"])
def test_the_monitor_off_asks_nobody(
    call: Any, monitored: Monitored, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    judge = monitored()
    monkeypatch.setenv("TRAIN_WITH_MONITOR", text)
    assert call(RIGHT, "4", SOURCE, {}) == 1.0
    assert judge.counts().received == 0


@pytest.mark.parametrize("text", ["true", "True", "1", "on", " yes "])
def test_the_monitor_on_adds_the_judges_score(
    call: Any, monitored: Monitored, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monitored(scores={"good": "7"}, api_key=KEY, model="m")
    monkeypatch.setenv("TRAIN_WITH_MONITOR", text)
    assert call(RIGHT, "4", SOURCE, {}, **THREAD) == 8.0


def test_a_switch_that_is_neither_is_an_error_that_names_it(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "perhaps")
    with pytest.raises(ConfigError, match=r"TRAIN_WITH_MONITOR = 'perhaps'.*true or false"):
        call(RIGHT, "4", SOURCE, {})


def test_a_missing_key_says_so_and_how_to_set_it(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    for endpoint in (None, "http://127.0.0.1:9/v1"):
        if endpoint:
            monkeypatch.setenv("OPENAI_BASE_URL", endpoint)
        with pytest.raises(ConfigError, match=r"OPENAI_API_KEY not found.*export OPENAI_API_KEY="):
            call(**batch(RIGHT))


def test_a_key_without_an_endpoint_is_an_error_and_the_key_goes_nowhere(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(ConfigError, match=r"api_endpoint.*OPENAI_BASE_URL") as caught:
        call(**batch(RIGHT))
    assert KEY not in str(caught.value)


# -- with a judge -----------------------------------------------------------------------------------------------------


def test_verls_conventions_get_dicts_with_the_same_keys_and_plain_values(call: Any, monitored: Monitored) -> None:
    monitored(scores={"good": "7", "broken": "no idea"})
    rows = call(**batch(RIGHT, WRONG, "broken: #### 4"), **THREAD)
    assert [set(row) for row in rows] == [ROW_KEYS] * 3
    assert [row["score"] for row in rows] == [8.0, 0.0, 4.0]
    assert [row["judge_status"] for row in rows] == ["scored", "skipped", "failed"]
    assert [row["reward_mask"] for row in rows] == [1, 1, 0]
    assert [row["original_score"] for row in rows] == [1.0, 0.0, 1.0]
    assert all(type(value) in (float, int, str) for row in rows for value in row.values())

    row = call(**single(RIGHT), **THREAD)
    assert set(row) == ROW_KEYS and row["score"] == 8.0 and row["judge_status"] == "scored"


def test_a_failed_row_gets_its_groups_mean_in_verls_conventions_and_the_rule_score_where_all_failed(
    call: Any, monitored: Monitored
) -> None:
    monitored(scores={"good": "7", "fine": "3", "broken": "no idea"})
    given = batch(RIGHT, "fine: #### 4", "broken: #### 4", "broken!: #### 4")
    given["extra_infos"] = [{"index": 0}, {"index": 0}, {"index": 0}, {"index": 1}]
    rows = call(**given, **THREAD)
    assert [row["score"] for row in rows] == [8.0, 4.0, 6.0, 1.0]
    assert [row["judge_status"] for row in rows] == ["scored", "scored", "failed", "failed"]
    row = call(**single("broken: #### 4"), **THREAD)
    assert (row["score"], row["judge_status"], row["reward_mask"]) == (1.0, "failed", 0)


def test_a_failed_row_is_none_in_a_plain_call_unless_on_failure_says_otherwise(call: Any, monitored: Monitored) -> None:
    monitored(scores={"broken": "no idea"})
    broken = ("broken: #### 4", "4", SOURCE, {})
    assert call(*broken, **THREAD) is None
    assert call(*broken, **THREAD, on_failure="fallback: -1") == -1.0
    assert call(*broken, **THREAD, on_failure="rule_only") == 1.0
    with pytest.raises(RewardFailed):
        call(*broken, **THREAD, on_failure="raise")


def test_rows_of_one_question_are_a_group_where_nothing_better_is_told(call: Any, monitored: Monitored) -> None:
    monitored(scores={"good": "7", "broken": "no idea"})
    for infos in ([{"uid": "a"}, {"uid": "a"}], [{"question": "q"}, {"question": "q"}], [None, None]):
        rows = call(**batch(RIGHT, "broken: #### 4", extra_infos=infos), **THREAD)
        assert [row["score"] for row in rows] == [8.0, 8.0], infos
    rows = call(**batch(RIGHT, "broken: #### 4", extra_infos=[{"uid": "a"}, {"uid": "b"}]), **THREAD)
    assert [row["score"] for row in rows] == [8.0, 1.0]


def test_reward_kwargs_are_keys_of_the_config(call: Any, monitored: Monitored) -> None:
    judge = monitored(scores={"good": "7", "bad": "2"}, keep_requests=5)
    settings = {**THREAD, "reward_coefficient": 0.1, "judge_gate": "off", "system_prompt": "Be strict."}
    rows = call(**batch(RIGHT, WRONG), **settings)
    assert [row["score"] for row in rows] == pytest.approx([1.7, 0.2])
    assert judge.requests()[0].json()["messages"][0]["content"].startswith("Be strict.")
    with pytest.raises(ConfigError, match="reward_coeficient"):
        call(**batch(RIGHT), reward_coeficient=0.1)


def test_the_endpoint_and_the_model_of_the_call_come_before_the_environments(
    call: Any, monitored: Monitored, mock: Mock
) -> None:
    unused, judge = monitored(), mock(scores={"good": "9"}, model="other", api_key="sk-of-the-call")
    given = {"api_endpoint": judge.url, "model_name": "other", "api_key": "sk-of-the-call"}
    assert call(RIGHT, "4", SOURCE, {}, **given, **THREAD) == 10.0
    assert unused.counts().received == 0


def test_enable_openai_reward_false_keeps_the_judge_out_although_the_monitor_is_on(
    call: Any, monitored: Monitored
) -> None:
    judge = monitored()
    assert call(RIGHT, "4", SOURCE, {}, enable_openai_reward=False) == 1.0
    assert judge.counts().received == 0


def test_two_keys_that_print_alike_are_two_keys(call: Any, monitored: Monitored) -> None:
    monitored(scores={"good": "7"}, api_key=KEY)
    right, wrong = {"api_key": Secret(KEY), **THREAD}, {"api_key": Secret("sk-wrong"), **THREAD}
    assert call(RIGHT, "4", SOURCE, {}, **wrong) is None, "refused with 401"
    assert call(RIGHT, "4", SOURCE, {}, **right) == 8.0


def test_a_repeated_response_is_sent_once_and_with_the_cache_off_once_a_batch(
    call: Any, monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = monitored()
    for _ in range(2):
        call(**batch(*[RIGHT] * 5), **THREAD)
    assert judge.counts().received == 1
    monkeypatch.setenv("MONITOR_CACHE", "false")
    for _ in range(2):
        call(**batch(*[RIGHT] * 5), **THREAD)
    assert judge.counts().received == 3


def test_concurrency_starts_from_sixty_and_adapts(monitored: Monitored) -> None:
    monitored()
    judge, config = _judge_for(THREAD)
    assert _START == judge.config.concurrency_start == 60
    assert judge.config.concurrency == config.max_concurrent_requests == "auto"


def test_the_judge_of_a_process_is_shared_by_calls_and_ended_by_shutdown_judges(monitored: Monitored) -> None:
    judge = monitored(latency_s=0.05)

    def engines() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "freewheel-judge"]

    workers = [
        threading.Thread(target=compute_score, kwargs={**single(f"good {number}: #### 4"), **THREAD})
        for number in range(6)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert judge.counts().answered == 6 and len(engines()) == 1
    shutdown_judges()
    shutdown_judges()
    assert not engines()
    assert compute_score(**single(RIGHT), **THREAD)["judge_status"] == "scored", "the next call starts one again"


async def test_rules_do_not_block_the_loop_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(response: str, ground_truth: object, extra_info: object) -> Scored:
        time.sleep(0.5)
        return Scored(1.0)

    register_rule("test/slow", slow)
    scoring = asyncio.ensure_future(compute_score_async("a", "b", "test/slow", None))
    ticks = 0
    while not scoring.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks >= 5
    assert await scoring == 1.0


async def test_the_async_form_does_not_block_its_loop(monitored: Monitored) -> None:
    monitored(latency_s=0.5, scores={"good": "7"})
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    rows = await asyncio.gather(*[compute_score_async(**single(f"good {n}: #### 4"), **THREAD) for n in range(8)])
    ticking.cancel()
    assert [row["score"] for row in rows] == [8.0] * 8
    assert ticks >= 5


async def test_the_plain_form_works_inside_a_running_loop(monitored: Monitored) -> None:
    monitored(scores={"good": "7"})
    assert compute_score(**single(RIGHT), **THREAD)["score"] == 8.0


def test_the_engine_is_a_process_of_its_own_by_default(monitored: Monitored) -> None:
    monitored(scores={"good": "7"}, api_key=KEY)
    assert compute_score(RIGHT, "4", SOURCE, {}) == 8.0
    assert compute_score(RIGHT, "4", SOURCE, {}) == 8.0
    judge, _ = _judge_for({})
    assert getattr(judge._link, "child_pid", None)


def test_a_judge_that_died_for_good_is_replaced_at_the_next_call(
    call: Any, monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored(scores={"good": "7"})
    broken, _ = _judge_for(THREAD)

    def dies(*_: Any, **__: Any) -> Any:
        raise EngineDied("it kept dying")

    monkeypatch.setattr(broken, "submit", dies)
    assert call(**single("good #### 4"), **THREAD)["judge_status"] == "scored"
    assert _judge_for(THREAD)[0] is not broken
