"""Functions as people write them: found by name, read by their signature, and never the end of a run."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.data.tasks import get_task
from freewheel.judge import ConfigError, Failed, Scored, Skipped
from freewheel.rewards import compute_score, compute_score_async, exact_match
from freewheel.rollout.reward_functions import Call, RewardFunction, as_verdict, load_reward

ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "42", "style": "rule"},
    "extra_info": {"question": "6 x 7?", "index": 3},
    "level": "easy",
}


def call(text: str = "#### 42", **fields: Any) -> Call:
    return Call(text=text, row=ROW, **fields)


def values(function: RewardFunction, *calls: Call) -> list[float]:
    outcomes = function.score(calls)
    assert all(one.status == "scored" for one in outcomes), outcomes
    return [one.value for one in outcomes]


def test_one_response_comes_with_its_row_and_only_with_what_the_function_takes():
    def compute(data_source, solution_str, ground_truth, extra_info=None, method="strict"):
        assert (data_source, ground_truth, extra_info["question"], method) == ("openai/gsm8k", "42", "6 x 7?", "strict")
        return {"score": float(ground_truth in solution_str), "acc": True, "pred": "42"}

    assert load_reward(compute).score([call()]) == [Scored(1.0, parts={"acc": 1.0})]
    function = load_reward(lambda response, row: float(row["reward_model"]["ground_truth"] in response))
    assert not function.is_batch and not function.is_async
    assert [values(function, call(f"it is {number}")) for number in (42, 41)] == [[1.0], [0.0]]


def test_verls_batch_convention_gets_columns():
    def compute(data_sources, solution_strs, ground_truths, extra_infos, **more):
        assert not more and data_sources == ["openai/gsm8k"] * 2 and [one["index"] for one in extra_infos] == [3, 3]
        return [float(truth in text) for truth, text in zip(ground_truths, solution_strs, strict=True)]

    function = load_reward(compute)
    assert function.is_batch
    assert values(function, call("42"), call("1")) == [1.0, 0.0]


def test_trls_convention_gets_prompts_completions_and_the_columns_of_the_data():
    def reward(prompts, completions, completion_ids, level, **columns):
        assert prompts == ["6 x 7?"] * 2 and level == ["easy"] * 2
        assert columns["ground_truth"] == ["42"] * 2 and columns["question"] == prompts
        return [len(ids) if text != "skip" else None for text, ids in zip(completions, completion_ids, strict=True)]

    def reward_messages(prompts, completions: list[list[dict[str, str]]]):
        assert prompts == [[{"role": "user", "content": "6 x 7?"}]]
        return [len(one[0]["content"]) for one in completions]

    function = load_reward(reward)
    assert function.is_batch and function.wants_tokens
    scored, left_out = function.score([call("a", tokens=[1, 2]), call("skip")])
    assert scored.value == 2.0
    assert isinstance(left_out, Skipped)
    assert values(load_reward(reward_messages), call("abc")) == [3.0]
    (outcome,) = load_reward(lambda completions, solution: [1.0]).score([call()])
    assert outcome.status == "failed" and "solution" in outcome.summary, "the data has no such column"


def test_the_rules_of_freewheel_are_reward_functions(monkeypatch: pytest.MonkeyPatch):
    gsm8k = load_reward("freewheel.rewards:gsm8k")
    for function in (gsm8k, pickle.loads(pickle.dumps(gsm8k)), load_reward(compute_score)):
        assert values(function, call()) == [1.0]
    assert values(load_reward(functools.partial(exact_match, ignore_case=False)), call("42")) == [1.0]
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    assert load_reward(compute_score_async).is_async
    assert load_reward("freewheel.rewards:compute_score").is_async, "waiting for a judge holds no thread"


async def test_an_async_function_callable_or_partial_is_recognised():
    async def plain(response, row):
        return 1.0

    class Callable:
        async def __call__(self, solution_strs):
            return [2.0] * len(solution_strs)

    for function in (plain, functools.partial(plain), Callable()):
        loaded = load_reward(function)
        assert loaded.is_async
        (outcome,) = await loaded.score_async([call()])
        assert outcome.status == "scored"


def test_without_a_function_the_task_scores():
    function = load_reward(None, get_task("word_problems"))
    row = {"reward_model": {"ground_truth": "16"}, "extra_info": {}}
    assert values(function, Call(text="6+9=15;15+1=16#16", row=row)) == [1.0]
    assert values(function, Call(text="6+9=15;15+1=16#16", row=row, finish="length")) == [0.0]


def test_a_function_cannot_change_the_data():
    def vandal(response, row, extra_info):
        row["reward_model"] = None
        extra_info.clear()
        return 1.0

    values(load_reward(vandal), call())
    assert ROW["reward_model"] and ROW["extra_info"]


MODULE = """
score = 3
class Reward:
    def __call__(self, response, row): return 1.0
class Needy(Reward):
    def __init__(self, weight): pass
class Loads(Reward):
    def __init__(self): raise RuntimeError("a model was loaded")
"""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere_at_all.rewards:score", "no module nowhere_at_all"),
        ("my_rewards:scores", "has no scores"),
        ("my_rewards:score", "it is of type int"),
        ("my_rewards:Needy", "without arguments"),
        (None, "there is no task"),
        (lambda text: 1.0, r"its parameters \(text\) fit no convention: take \(response, row\)"),
        (lambda *args, **kwargs: 1.0, r"none by name.*\(response, row\)"),
        (lambda response, row, /: 1.0, "none by name"),
        (lambda response, row, threshold: 1.0, r"it needs 'threshold'.*\(response, row\)"),
        (lambda solution_strs, weights: [], "it needs 'weights'"),
    ],
)
def test_a_function_that_cannot_be_found_or_called_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Any, message: str
):
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    for construct in (True, False):
        with pytest.raises(ConfigError, match=r"reward\.function = .*" + message):
            load_reward(spec, construct=construct)
    assert values(load_reward("my_rewards:Reward"), call()) == [1.0]
    load_reward("my_rewards:Loads", construct=False)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        *((one, Scored(1.0)) for one in (1, True, np.float32(1), {"score": 1}, Scored(1.0))),
        ({"score": 1.2, "steps": 2, "why": "fine", "none": None}, Scored(1.2, parts={"steps": 2.0})),
        ({"score": 1.2, "format": True}, Scored(1.2, parts={"format": 1.0})),  # a part only if it is given
        (None, Skipped("none: the function gave None")),
        (Skipped("not mine"), Skipped("skipped: not mine")),
    ],
)
def test_a_result_is_a_score_or_leaves_a_response_out(found: Any, expected: Any):
    assert as_verdict(found) == expected


@pytest.mark.parametrize(
    ("found", "summary", "infra"),
    [
        (math.nan, "finite", False),
        (-math.inf, "finite", False),
        ({"score": math.nan}, "finite", False),
        ("good", "number", False),
        ({"value": 1}, "without 'score'", False),
        # A failure of the judge is about the infrastructure, unless the judge rejects this very response.
        (Failed("throttled", 3, "429"), "judge throttled: 429", True),
        ({"score": 0.5, "judge_status": "failed", "judge_reason": "deadline"}, "judge deadline", True),
        (Failed("unparseable"), "judge unparseable", False),
        (Failed("rejected"), "judge rejected", False),
    ],
)
def test_a_result_that_is_not_a_score_is_a_failure_with_a_reason(found: Any, summary: str, infra: bool):
    outcome = as_verdict(found)
    assert isinstance(outcome, Failed) and summary in outcome.summary and outcome.infra == infra


@pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(3), ConnectionError("refused")])
def test_an_exception_is_a_failure_of_its_response(error: BaseException):
    def raising(response, row):
        raise error

    (outcome,) = load_reward(raising).score([call()])
    assert isinstance(outcome, Failed) and outcome.reason == type(error).__name__ and "raising" in outcome.trace
    assert outcome.infra == isinstance(error, OSError)


def test_a_plain_function_that_gives_a_coroutine_is_a_failure_with_the_remedy():
    async def later():
        return 1.0

    (outcome,) = load_reward(lambda response, row: later()).score([call()])
    assert outcome.status == "failed" and "async def" in outcome.summary


@pytest.mark.parametrize("found", [[1.0], None, 1.0, {"score": 1.0}])
def test_a_batch_function_must_give_one_result_for_each_response(found: Any):
    outcomes = load_reward(lambda completions: found).score([call(), call()])
    assert [one.status for one in outcomes] == ["failed"] * 2


PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
SECTION = re.split(r"^## ", PAGE.read_text().partition("## Reward functions\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("source", EXAMPLES)
async def test_every_example_of_the_documentation_scores(source: str):
    assert len(EXAMPLES) == 5
    names: dict[str, object] = {}
    exec(source, names)
    (function,) = (one for one in names.values() if inspect.isfunction(one))
    loaded = load_reward(function)
    calls = [call("it is 42"), call("it is 41")] if loaded.is_batch else [call("it is 42")]
    outcomes = await loaded.score_async(calls) if loaded.is_async else loaded.score(calls)
    assert [one.value for one in outcomes] == [1.0, 0.0][: len(calls)]
