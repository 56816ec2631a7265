"""`JudgeReward` as any trainer of TRL calls it: rows in, numbers and None out."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from freewheel.errors import ConfigError
from freewheel.integrations.trl import JudgeReward, answer_of, transcript_of

pytestmark = pytest.mark.trl

NAMED = {"api_endpoint": "http://127.0.0.1:9/v1", "model_name": "m"}


def call(reward: JudgeReward, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    columns.setdefault("completion_ids", [[0]] * len(prompts))
    return asyncio.run(reward(prompts=prompts, completions=completions, **columns))


def right_or_wrong(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


def name_of_source(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    return {"score": {"a": 1.0, "b": 2.0}[data_source] + extra_info["bonus"]}


# -- what is refused, and when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (NAMED, {}, "api_key = None: the judge needs a key: set OPENAI_API_KEY"),
        ({"model_name": "m"}, {}, "name api_endpoint"),
        ({**NAMED, "api_key": "k", "enable_openai_reward": False}, {}, "without a rule there is no other reward"),
        ({**NAMED, "api_key": "k", "penalty_scale": 2.0}, {}, "penalty_scale = 2.0: .*give a rule"),
        ({**NAMED, "api_key": "k", "judge_gate": "format"}, {}, "judge_gate = 'format'"),
        ({**NAMED, "api_key": "k", "on_failure": "rule_only"}, {}, "TRL leaves a failed row out"),
        ({**NAMED, "api_key": "k"}, {"on_failure": "rule_only"}, "without a rule this would be 0"),
        ({**NAMED, "api_key": "k"}, {"on_failure": "zero"}, "on_failure = 'zero'"),
        ({**NAMED, "api_key": "k"}, {"rule": right_or_wrong}, "ground_truth = None: name the dataset's column"),
        ({**NAMED, "api_key": "k"}, {"rule": "my/data", "ground_truth": "answer"}, "no rule is registered"),
        ({**NAMED, "api_key": "k"}, {"rule": 7, "ground_truth": "answer"}, "rule = 7"),
        ({**NAMED, "api_keys": "k"}, {}, "api_keys = '<hidden>'"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_construction(config, options, message):
    with pytest.raises(ConfigError, match=message):
        JudgeReward(config, **options)


def test_a_key_from_the_environment_does_not_go_to_an_endpoint_that_nobody_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    JudgeReward(NAMED)
    with pytest.raises(ConfigError, match="api_key = None"):
        JudgeReward({"model_name": "m"})


@pytest.mark.parametrize(
    ("profile", "message"),
    [({"api_key": "another"}, "api_key = <key from the api_key argument>"), ({"model": "n"}, "model_name = 'm'")],
)
def test_a_judge_that_refuses_key_or_model_from_the_start_is_a_configuration_error(mock, make_reward, profile, message):
    with pytest.raises(ConfigError, match=message):
        call(make_reward(mock(**profile).url), ["q"], ["a"])


def test_a_key_that_is_refused_later_fails_its_rows_only(mock, make_reward, caplog):
    server = mock(api_key="EMPTY")
    reward = make_reward(server.url)
    assert call(reward, ["q"], ["a"]) != [None]
    server.reset(type(server.profile)(api_key="another"))
    assert call(reward, ["q"], ["b"]) == [None]
    assert [record.levelname for record in caplog.records if record.name == "freewheel.rewards"] == ["ERROR"]


def test_without_token_ids_a_length_penalty_is_refused_and_quality_is_not(mock, make_reward, score):
    server = mock()
    assert call(make_reward(server.url), [], []) == []
    whole = make_reward(server.url, rule=right_or_wrong, ground_truth="answer")
    with pytest.raises(ConfigError, match="completion_ids = None: the length penalty counts tokens"):
        call(whole, ["q"], ["a"], completion_ids=None, answer=["a"])
    assert call(make_reward(server.url), ["q"], ["a"], completion_ids=None) == [score("a", "q")]


# -- rows -------------------------------------------------------------------------------------------------------------


def test_without_a_key_the_rule_scores_without_the_judge_and_one_warning_says_so(caplog):
    reward = JudgeReward({"model_name": "m"}, rule=right_or_wrong, ground_truth="answer")
    for _ in range(2):
        assert call(reward, ["q", "q"], ["x", "y"], answer=["x", "x"]) == [1.0, 0.0]
    assert [record.message for record in caplog.records] == [
        "freewheel: no key for the judge is given: the reward is rule score and length penalty only"
    ]


def test_a_row_without_a_ground_truth_has_no_reward_and_is_not_judged(mock, make_reward, score):
    server = mock()
    reward = make_reward(server.url, rule=right_or_wrong, ground_truth="answer")
    found = call(reward, ["p", "p", "q"], ["x", "y", "z"], answer=["x", "x", None])
    assert found == [1.0 + score("x", "p", "x"), 0.0, None]
    assert server.counts().received == 1


def test_a_skipped_row_keeps_rule_and_penalty_and_a_failed_one_has_no_number(mock, make_reward):
    server = mock(scores={"garbled": "I would rather not say", "": "6"})
    reward = make_reward(server.url, rule=right_or_wrong, ground_truth="answer", judge={"reasks": 0})
    texts = ["fine", "fine", "garbled", "wrong"]
    ids = [[0] * 10, [0] * 10, [0] * 10, [0] * 40]
    assert call(reward, ["p"] * 4, texts, answer=[*texts[:3], "right"], completion_ids=ids) == [7.0, 7.0, None, -1.0]


@pytest.mark.parametrize(
    ("on_failure", "expected"), [("group_mean", [5.0, 7.0, 6.0, None]), ("fallback: -2", [5.0, 7.0, -2.0, -2.0])]
)
def test_a_failed_row_gets_what_on_failure_says(mock, make_reward, on_failure, expected):
    """A group of which nothing is known has no mean."""
    server = mock(scores={"five": "5", "seven": "7", "": "?"})
    reward = make_reward(server.url, on_failure=on_failure, judge={"reasks": 0})
    assert call(reward, ["p", "p", "p", "q"], ["five", "seven", "lost", "lost too"]) == expected


def test_groups_are_equal_prompts_or_equal_values_of_a_column(mock, make_reward):
    """An environment's observation makes each prompt of a group its own; a column holds the group together."""
    server = mock(scores={"": "1"})
    prompts = [[{"role": "user", "content": f"state {n}"}] for n in range(3)]
    ids = [[0] * 10, [0] * 10, [0] * 30]
    rows = {"answer": ["x"] * 3, "task": [[7]] * 3, "completion_ids": ids}
    settings = {"rule": right_or_wrong, "ground_truth": "answer"}
    assert call(make_reward(server.url, **settings), prompts, ["x"] * 3, **rows) == [2.0, 2.0, 2.0]
    assert call(make_reward(server.url, group="task", **settings), prompts, ["x"] * 3, **rows) == [2.0, 2.0, 1.0]
    same = [prompts[0], copy.deepcopy(prompts[0]), copy.deepcopy(prompts[0])]
    assert call(make_reward(server.url, **settings), same, ["x"] * 3, **rows) == [2.0, 2.0, 1.0]


def test_prompts_that_are_all_different_are_pointed_out_once(mock, make_reward, caplog):
    reward = make_reward(mock().url, rule=right_or_wrong, ground_truth="answer")
    for _ in range(2):
        call(reward, ["p", "q"], ["x", "y"], answer=["x", "y"])
    assert caplog.text.count("no two prompts of a batch are equal") == 1


def test_a_rule_gets_its_data_source_and_the_rows_other_columns(mock, make_reward):
    reward = make_reward(
        mock(scores={"": "1"}).url, rule=name_of_source, ground_truth="answer", data_source="from", enable=False
    )
    columns = {"answer": [0, 0], "from": ["a", "b"], "bonus": [0.0, 0.5], "trainer_state": object()}
    assert call(reward, ["p", "p"], ["x", "y"], **columns) == [2.0, 3.5]


def test_a_number_as_ground_truth_is_a_reference_too(mock, make_reward, score):
    assert call(make_reward(mock().url, ground_truth="n"), ["q"], ["a"], n=[42]) == [score("a", "q", "42")]


def test_metrics_and_table_columns_are_reported_where_the_trainer_takes_them(mock, make_reward):
    server = mock(scores={"five": "5", "": "?"})
    reward = make_reward(server.url, judge={"reasks": 0}, name="quality")
    metrics: dict[str, float] = {}
    columns: dict[str, list[Any]] = {}
    for _ in range(2):
        call(reward, ["p", "p"], ["five", "lost"], log_metric=metrics.__setitem__, log_extra=columns.__setitem__)
    assert metrics == {
        "quality/judge_failed": 0.5,
        "quality/judge_skipped": 0.0,
        "quality/judge_cached": 0.5,
        "quality/judge_score": 5.0,
    }
    assert columns == {"quality/judge": ["scored", "failed: unparseable"]}


TEXT = {"type": "text", "text": "see "}


@pytest.mark.parametrize(
    ("completion", "answer", "transcript"),
    [
        ("plain", "plain", "plain"),
        ([{"role": "assistant", "content": "said"}], "said", "said"),
        ([{"role": "assistant", "content": None}], "", ""),
        ([], "", ""),
        ([{"role": "assistant", "content": [TEXT, {"type": "image", "image": 0}]}], "see [image]", "see [image]"),
        (
            [
                {"role": "assistant", "content": "ask", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "name": "f", "content": "#### 1"},
            ],
            "ask",
            "[assistant]\nask\ncalls f({})\n\n[tool f]\n#### 1",
        ),
        (
            [
                {"role": "assistant", "content": "first", "tool_calls": None},
                {"role": "user", "content": "sure?"},
                {"role": "assistant", "content": "last"},
            ],
            "last",
            "[assistant]\nfirst\n\n[user]\nsure?\n\n[assistant]\nlast",
        ),
    ],
)
def test_the_rule_reads_the_last_answer_and_the_judge_the_whole_completion(completion, answer, transcript):
    assert answer_of(completion) == answer
    assert transcript_of(completion) == transcript


# -- processes, threads and loops -------------------------------------------------------------------------------------


def test_a_pickle_carries_everything_but_the_key_and_the_engine(mock, make_reward, monkeypatch, caplog):
    server = mock(scores={"": "3"}, api_key="k-secret")
    reward = make_reward(server.url, api_key="k-secret", rule=right_or_wrong, ground_truth="a", name="mine")
    assert call(reward, ["q"], ["x"], a=["x"]) == [4.0]
    pickled = pickle.dumps(reward)
    assert b"k-secret" not in pickled
    assert "another process needs OPENAI_API_KEY" in caplog.text
    copied = pickle.loads(pickled)
    assert (copied.__name__, copied.rule, copied.ground_truth) == ("mine", right_or_wrong, "a")
    with pytest.raises(ConfigError, match="a key given as text is not sent"):
        call(copied, ["q"], ["x"], a=["x"])
    monkeypatch.setenv("OPENAI_API_KEY", "k-secret")
    caplog.clear()
    again = pickle.loads(pickle.dumps(reward))
    assert not caplog.records
    assert call(again, ["q"], ["x"], a=["x"]) == [4.0]
    again.close()


def test_threads_with_their_own_loops_share_one_engine(mock, make_reward, score):
    server = mock(latency_s=0.1)
    reward = pickle.loads(pickle.dumps(make_reward(server.url)))  # not opened yet

    def judge(_: int) -> list[float | None]:
        return call(reward, ["q"] * 10, [f"answer {n}" for n in range(10)])

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(judge, range(4)))
    assert found == [[score(f"answer {n}", "q") for n in range(10)]] * 4
    assert server.counts().received == 10
    reward.close()


async def test_calls_on_one_loop_share_the_judge_and_do_not_wait_for_each_other(mock, make_reward, score):
    server = mock(latency_s=0.3)
    reward = make_reward(server.url, judge={"concurrency_start": 16})
    calls = [reward(prompts=["q", "q"], completions=[f"{n} a", f"{n} b"]) for n in range(6)]
    assert await asyncio.gather(*calls) == [[score(f"{n} a", "q"), score(f"{n} b", "q")] for n in range(6)]
    assert server.counts().max_in_flight > 2, "a call has two rows"
    assert server.counts().most_received == 1


def test_a_closed_reward_starts_again_when_it_is_called(mock, make_reward, score):
    reward = make_reward(mock().url)
    for _ in range(2):
        assert call(reward, ["q"], ["a"]) == [score("a", "q")]
        reward.close()


def test_an_engine_that_cannot_start_fails_only_the_rows_that_need_it(mock, make_reward, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "")
    reward = make_reward(mock().url, rule=right_or_wrong, ground_truth="a")
    with caplog.at_level(logging.WARNING):
        assert call(reward, ["q", "q"], ["x", "y"], a=["x", "x"]) == [None, 0.0]
        assert call(reward, ["q", "q"], ["x", "y"], a=["x", "x"]) == [None, 0.0]
    assert "could not be started" in caplog.text


def test_nothing_of_trl_is_imported():
    code = "import sys, freewheel.integrations.trl; sys.exit('trl' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent).returncode == 0
