"""`compute_score` under each of its calling conventions, with and without a judge (SPEC 1.4)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from freewheel.judge import ConfigError, JudgeDied, Secret
from freewheel.judge.testing import RunningJudge
from freewheel.judge.verdict import Scored
from freewheel.rewards import RewardFailed, compute_score, compute_score_async, register_rule, rules, shutdown_judges
from freewheel.rewards.compute_score import _judge_for

from .conftest import KEY, Mock, run_threads

SOURCE = "openai/gsm8k"
RIGHT, WRONG = "good: #### 4", "bad: #### 5"
ROW_KEYS = {"score", "original_score", "judge_status", "judge_reason", "reward_mask"}
THREAD = {"judge": {"placement": "thread"}}

Monitored = Callable[..., RunningJudge]


@pytest.fixture
def monitored(mock: Mock, monkeypatch: pytest.MonkeyPatch, judges_ended: None) -> Monitored:
    """`monitored(scores=…)`: starts a judge, and sets the environment in which `compute_score` uses it."""

    def start(**profile: Any) -> RunningJudge:
        judge = mock(**profile)
        named = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": judge.base_url, "OPENAI_MODEL": "m"}
        for name, value in {"TRAIN_WITH_MONITOR": "true", **named}.items():
            monkeypatch.setenv(name, value)
        return judge

    return start


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`compute_score`, and `compute_score_async` on a loop: both behave alike."""

    def awaited(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(compute_score_async(*args, **kwargs))  # type: ignore[arg-type]

    yield compute_score if request.param == "sync" else awaited


COLUMNS = ("data_sources", "ground_truths", "extra_infos")


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

OBJECTS = {key: np.array(column, dtype=object) for key, column in batch(RIGHT, WRONG).items()}


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((RIGHT, "4", SOURCE, {}), {}, 1.0),
        ((WRONG, "4", SOURCE, {}), {}, 0.0),
        ((RIGHT, "4", SOURCE), {}, 1.0),
        ((), {"response": RIGHT, "ground_truth": "4", "dataset_name": SOURCE, "extra_info": {}}, 1.0),
        (("abc", "4", "test/length", {"bonus": 2}), {}, 5.0),
        ((), single(RIGHT), 1.0),
        ((), single(WRONG), 0.0),
        ((), single(RIGHT, reward_router_address="10.0.0.1", reward_model_tokenizer=object()), 1.0),  # verl's own
        ((), batch(RIGHT, WRONG, RIGHT), [1.0, 0.0, 1.0]),
        ((), batch(), []),
        ((), OBJECTS, [1.0, 0.0]),
        ((), {**OBJECTS, "extra_infos": None}, [1.0, 0.0]),
        ((), batch(RIGHT, extra_infos=[None]), [1.0]),
    ],
)
def test_each_convention_gives_rule_scores(
    call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    register_rule("test/length", lambda response, truth, extra: Scored(len(response) + extra.get("bonus", 0)))
    scores = call(*args, **kwargs)
    assert scores == found and type(scores) is type(found)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        *(
            ((RIGHT, "4", SOURCE)[:count], {}, ("response", "ground_truth", "dataset_name")[count])
            for count in range(3)
        ),
        ((RIGHT, "4", SOURCE, {}, "more"), {}, "response, ground_truth, dataset_name, extra_info"),
        *(((), {**batch(RIGHT, WRONG), key: [1]}, rf"{key}\) = 1: give one for each of the 2") for key in COLUMNS),
        *(((), {**batch(RIGHT), key: None}, key) for key in COLUMNS[:2]),
        ((), {**single(RIGHT), "data_source": None}, "data_source"),
        ((), {**single(RIGHT), "ground_truth": None}, "ground_truth"),
        ((None, "4", SOURCE, {}), {}, "text"),
        ((), batch(RIGHT, 7), "text"),  # type: ignore[arg-type]
        ((RIGHT, "4", "who/knows", {}), {}, r"data_source = 'who/knows'.*register_rule"),
    ],
)
def test_a_wrong_call_is_refused_by_the_argument(
    call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, TypeError), match=message):
        call(*args, **kwargs)


# -- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *((text, 1.0) for text in ("false", "0", "  ", "OFF")),
        *((text, 8.0) for text in ("True", " yes ")),
    ],
)
def test_train_with_monitor_adds_the_judges_score(
    call: Any, monitored: Monitored, monkeypatch: pytest.MonkeyPatch, text: str, score: float
) -> None:
    judge = monitored(scores={"good": "7"}, api_key=KEY, model="m")
    monkeypatch.setenv("TRAIN_WITH_MONITOR", text)
    assert call(RIGHT, "4", SOURCE, {}, **THREAD) == score
    assert judge.counts().received == (score > 1)
    assert call(RIGHT, "4", SOURCE, {}, enable_openai_reward=False) == 1.0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TRAIN_WITH_MONITOR": "perhaps"}, r"TRAIN_WITH_MONITOR = 'perhaps'.*true or false"),
        ({}, r"OPENAI_API_KEY not found.*export OPENAI_API_KEY="),
        ({"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, r"OPENAI_API_KEY not found.*export OPENAI_API_KEY="),
        ({"OPENAI_API_KEY": KEY}, r"api_endpoint.*OPENAI_BASE_URL"),
    ],
)
def test_an_incomplete_environment_is_an_error_with_the_remedy(
    call: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in {"TRAIN_WITH_MONITOR": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message) as caught:
        call(**batch(RIGHT))
    assert KEY not in str(caught.value), "the key goes nowhere"


# -- with a judge -----------------------------------------------------------------------------------------------------


def test_settings_of_the_call_override_the_environment(call: Any, monitored: Monitored, mock: Mock) -> None:
    unused = monitored()
    judge = mock(scores={"good": "7", "bad": "2"}, model="other", api_key="sk-call", keep_requests=5)
    settings = {**THREAD, "reward_coefficient": 0.1, "judge_gate": "off", "system_prompt": "Be strict."}
    settings |= {"api_endpoint": judge.url, "model_name": "other", "api_key": "sk-call"}
    rows = call(**batch(RIGHT, WRONG), **settings)
    assert [row["score"] for row in rows] == pytest.approx([1.7, 0.2])
    assert judge.requests()[0].json()["messages"][0]["content"].startswith("Be strict.")
    assert unused.counts().received == 0
    with pytest.raises(ConfigError, match="reward_coeficient"):
        call(**batch(RIGHT), reward_coeficient=0.1)


@pytest.mark.parametrize(
    ("infos", "second"),
    [
        ([{"uid": "a"}, {"uid": "a"}], 8.0),
        ([{"question": "q"}, {"question": "q"}], 8.0),
        ([None, None], 8.0),
        ([{"uid": "a"}, {"uid": "b"}], 1.0),
        ([{"uid": "a", "index": 0}, {"uid": "a", "index": 1}], 8.0),
        ([{"uid": "a", "question": "q"}, {"uid": "b", "question": "q"}], 1.0),
    ],
)
def test_rows_with_equal_uid_else_question_else_truth_are_a_group(
    call: Any, monitored: Monitored, infos: list[Any], second: float
) -> None:
    monitored(scores={"good": "7", "broken": "no idea"})
    rows = call(**batch(RIGHT, "broken: #### 4", extra_infos=infos), **THREAD)
    assert [row["score"] for row in rows] == [8.0, second]


def test_verls_conventions_return_dicts_with_equal_keys_and_a_failed_row_its_groups_mean(
    call: Any, monitored: Monitored
) -> None:
    monitored(scores={"good": "7", "broken": "no idea"})
    given = batch(RIGHT, WRONG, "broken: #### 4", "broken!: #### 4")
    given["extra_infos"] = [{"index": 0}, {"index": 0}, {"index": 0}, {"index": 1}]
    rows = call(**given, **THREAD)
    assert [set(row) for row in rows] == [ROW_KEYS] * 4
    assert [row["score"] for row in rows] == [8.0, 0.0, 4.0, 1.0], "the rule score where the whole group failed"
    assert [row["judge_status"] for row in rows] == ["scored", "skipped", "failed", "failed"]
    assert [row["reward_mask"] for row in rows] == [1, 1, 0, 0]
    assert [row["original_score"] for row in rows] == [1.0, 0.0, 1.0, 1.0]
    assert all(type(value) in (float, int, str) for row in rows for value in row.values())

    for response, score, status in ((RIGHT, 8.0, "scored"), ("broken: #### 4", 1.0, "failed")):
        row = call(**single(response), **THREAD)
        assert set(row) == ROW_KEYS and (row["score"], row["judge_status"]) == (score, status)


def test_a_failed_row_is_none_in_a_plain_call_unless_on_failure_says_otherwise(call: Any, monitored: Monitored) -> None:
    monitored(scores={"broken": "no idea"})
    broken = ("broken: #### 4", "4", SOURCE, {})
    assert call(*broken, **THREAD) is None
    assert call(*broken, **THREAD, on_failure="fallback: -1") == -1.0
    assert call(*broken, **THREAD, on_failure="rule_only") == 1.0
    with pytest.raises(RewardFailed):
        call(*broken, **THREAD, on_failure="raise")


def test_two_keys_that_print_alike_are_two_keys(call: Any, monitored: Monitored) -> None:
    monitored(scores={"good": "7"}, api_key=KEY)
    right, wrong = {"api_key": Secret(KEY), **THREAD}, {"api_key": Secret("sk-wrong"), **THREAD}
    assert call(RIGHT, "4", SOURCE, {}, **wrong) is None, "refused with 401"
    assert call(RIGHT, "4", SOURCE, {}, **right) == 8.0


def test_a_repeated_response_is_sent_once_and_with_the_cache_off_once_per_batch(
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


def test_the_judge_of_a_process_is_shared_by_calls_and_ended_by_shutdown_judges(monitored: Monitored) -> None:
    judge = monitored(latency_s=0.05)

    def engines() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "freewheel-judge"]

    run_threads(*(partial(compute_score, **single(f"good {number}: #### 4"), **THREAD) for number in range(6)))
    assert judge.counts().answered == 6 and len(engines()) == 1
    shutdown_judges()
    shutdown_judges()
    assert not engines()
    assert compute_score(**single(RIGHT), **THREAD)["judge_status"] == "scored", "the next call starts one again"


@pytest.mark.parametrize("slow", ["rule", "judge"])
async def test_the_async_form_does_not_block_its_loop_and_the_plain_form_works_on_one(
    monitored: Monitored, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monitored(latency_s=0.5 if slow == "judge" else 0.0, scores={"good": "7"})
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    proceed = threading.Event()

    def rule(response: str, ground_truth: object, extra_info: object) -> Scored:
        assert proceed.wait(30)
        return Scored(1.0)

    register_rule("test/slow", rule)
    calls = [
        {**single(f"good {n}: #### 4"), "data_source": "test/slow" if slow == "rule" else SOURCE} for n in range(8)
    ]
    scoring = asyncio.gather(*(compute_score_async(**one, **THREAD) for one in calls))
    for _ in range(5):
        await asyncio.sleep(0.01)
        assert not scoring.done()
    proceed.set()
    assert [row["score"] for row in await scoring] == [8.0] * 8
    assert compute_score(**single(RIGHT), **THREAD)["score"] == 8.0


def test_by_default_the_engine_is_a_process_and_its_concurrency_starts_from_sixty_and_adapts(
    monitored: Monitored,
) -> None:
    monitored(scores={"good": "7"}, api_key=KEY)
    for _ in range(2):
        assert compute_score(RIGHT, "4", SOURCE, {}) == 8.0
    judge, config = _judge_for({})
    assert getattr(judge._link, "child_pid", None)
    assert judge.config.concurrency_start == 60
    assert judge.config.concurrency == config.max_concurrent_requests == "auto"


def test_a_judge_that_died_for_good_is_replaced_at_the_next_call(
    call: Any, monitored: Monitored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored(scores={"good": "7"})
    broken, _ = _judge_for(THREAD)

    def dies(*_: Any, **__: Any) -> Any:
        raise JudgeDied("it kept dying")

    monkeypatch.setattr(broken, "submit", dies)
    assert call(**single("good #### 4"), **THREAD)["judge_status"] == "scored"
    assert _judge_for(THREAD)[0] is not broken
