"""Functions as people write them: found by name, read by their signature, and never the end of a run."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import re
import sys
from pathlib import Path

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


def call(text: str = "#### 42", **fields: object) -> Call:
    return Call(text=text, row=ROW, **fields)


def values(function: RewardFunction, *calls: Call) -> list[float]:
    outcomes = function.score(calls)
    assert all(one.status == "scored" for one in outcomes), outcomes
    return [one.value for one in outcomes]


# -- conventions ------------------------------------------------------------------------------------------------------


def test_our_convention_gets_the_text_and_the_row():
    function = load_reward(lambda response, row: float(row["reward_model"]["ground_truth"] in response))
    assert not function.is_batch and not function.is_async
    assert values(function, call("it is 42")) == [1.0]
    assert values(function, call("it is 41")) == [0.0]


def test_verls_single_convention_gets_its_four_keywords():
    def compute(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, ground_truth, extra_info["question"]) == ("openai/gsm8k", "42", "6 x 7?")
        return {"score": float(ground_truth in solution_str), "acc": True, "pred": "42"}

    function = load_reward(compute)
    (outcome,) = function.score([call()])
    assert outcome == Scored(1.0, parts={"acc": 1.0})


def test_a_function_is_given_only_what_it_takes():
    assert values(load_reward(lambda solution_str, ground_truth, method="strict": len(method)), call()) == [6.0]


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

    function = load_reward(reward)
    assert function.is_batch and function.wants_tokens
    scored, left_out = function.score([call("a", tokens=[1, 2]), call("skip")])
    assert scored.value == 2.0
    assert isinstance(left_out, Skipped)


def test_a_trl_function_without_kwargs_is_given_only_what_it_names():
    assert values(load_reward(lambda completions: [len(one) for one in completions]), call("abc")) == [3.0]


def test_a_trl_function_that_asks_for_messages_gets_messages():
    def reward(prompts, completions: list[list[dict[str, str]]]):
        assert prompts == [[{"role": "user", "content": "6 x 7?"}]]
        return [len(one[0]["content"]) for one in completions]

    assert values(load_reward(reward), call("abc")) == [3.0]


def test_a_column_that_the_data_does_not_have_is_a_failure_that_names_it():
    (outcome,) = load_reward(lambda completions, solution: [1.0]).score([call()])
    assert outcome.status == "failed" and "solution" in outcome.summary


def test_rules_of_freewheel_are_reward_functions():
    assert values(load_reward("freewheel.rewards:gsm8k"), call()) == [1.0]
    assert values(load_reward(functools.partial(exact_match, ignore_case=False)), call("42")) == [1.0]


def test_compute_score_is_called_by_verls_convention():
    assert values(load_reward(compute_score), call()) == [1.0]
    assert load_reward(compute_score_async).is_async


def test_compute_score_with_a_judge_waits_on_the_loop_and_not_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    assert load_reward("freewheel.rewards:compute_score").is_async


async def test_async_functions_are_known_in_every_form():
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


def test_positional_only_parameters_are_given_by_position():
    assert values(load_reward(lambda response, row, /: len(response) + len(row)), call("ab")) == [6.0]


def test_without_a_function_the_task_scores():
    function = load_reward(None, get_task("word_problems"))
    row = {"reward_model": {"ground_truth": "16"}, "extra_info": {}}
    assert values(function, Call(text="6+9=15;15+1=16#16", row=row)) == [1.0]
    assert values(function, Call(text="6+9=15;15+1=16#16", row=row, finish="length")) == [0.0]


def test_what_a_function_writes_into_the_row_does_not_reach_the_data():
    def vandal(response, row, extra_info):
        row["reward_model"] = None
        extra_info.clear()
        return 1.0

    values(load_reward(vandal), call())
    assert ROW["reward_model"] and ROW["extra_info"]


def test_a_function_travels_to_another_process():
    function = load_reward("freewheel.rewards:gsm8k")
    assert values(pickle.loads(pickle.dumps(function)), call()) == [1.0]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`module(source)`: a module of that text, by its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(source: str) -> str:
        made.append(f"rewards_of_a_test_{len(made)}_{tmp_path.name}")
        (tmp_path / f"{made[-1]}.py").write_text(source)
        return made[-1]

    yield make
    for name in made:
        sys.modules.pop(name, None)


def refusal(spec: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_reward(spec)
    assert str(caught.value).startswith("reward.function = ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "spec", "message"),
    [
        ("", "nowhere_at_all.rewards:score", "no module nowhere_at_all"),
        ("", "rewards/mine.py:score", "PYTHONPATH"),
        ("undefined", "{}:score", "failed: NameError: name 'undefined' is not defined"),
        ("import not_installed_here", "{}:score", "No module named 'not_installed_here'"),
        ("def scores(response, row): return 1.0", "{}:score", "has no score; it has scores"),
        ("score = 3", "{}:score", "it is of type int"),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused_with_the_reason(module, source: str, spec: str, message: str):
    assert message in refusal(spec.format(module(source)))


def test_a_class_is_made_without_arguments(module):
    name = module(
        "class Reward:\n    def __call__(self, response, row): return 1.0\nclass Needy(Reward):\n"
        "    def __init__(self, weight): pass"
    )
    assert values(load_reward(f"{name}:Reward"), call()) == [1.0]
    assert "without arguments" in refusal(f"{name}:Needy")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda text: 1.0, "its parameters (text) fit no convention"),
        (lambda *args, **kwargs: 1.0, "none by name"),
        (lambda response, row, threshold: 1.0, "it needs 'threshold'"),
        (lambda solution_strs, weights: [], "it needs 'weights'"),
    ],
)
def test_a_signature_that_fits_none_is_refused_with_the_conventions(function, said):
    message = refusal(function)
    assert said in message and "(response, row)" in message


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [1, True, np.float32(1), {"score": 1}, Scored(1.0)])
def test_answers_that_are_scores(found):
    outcome = as_verdict(found)
    assert outcome.status == "scored" and outcome.value == 1.0


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (math.nan, "finite"),
        (-math.inf, "finite"),
        ({"score": math.nan}, "finite"),
        ("good", "number"),
        ({"value": 1}, "without 'score'"),
        (Failed("throttled", 3, "429"), "judge throttled: 429"),
        ({"score": 0.5, "judge_status": "failed", "judge_reason": "deadline"}, "judge deadline"),
    ],
)
def test_answers_that_are_failures_have_a_reason_and_no_number(found, said):
    outcome = as_verdict(found)
    assert isinstance(outcome, Failed) and said in outcome.summary


@pytest.mark.parametrize(
    ("reason", "infra"), [("throttled", True), ("deadline", True), ("unparseable", False), ("rejected", False)]
)
def test_a_failure_of_the_judge_is_infrastructure_unless_it_is_about_the_response(reason: str, infra: bool):
    found = as_verdict(Failed(reason))
    assert isinstance(found, Failed) and found.infra == infra


@pytest.mark.parametrize("found", [None, Skipped("not mine")])
def test_a_function_may_leave_a_response_out(found):
    outcome = as_verdict(found)
    assert isinstance(outcome, Skipped)


def test_numbers_beside_a_score_are_its_parts_and_format_is_one_where_it_is_given():
    parts = as_verdict({"score": 1.2, "format": True, "steps": 2, "why": "fine", "none": None}).parts
    assert parts == {"format": 1.0, "steps": 2.0}
    assert as_verdict({"score": 1.2}).parts == {}, "what was not said is not reported as right"


def test_a_plain_function_that_gives_a_coroutine_is_told_so():
    async def later():
        return 1.0

    (outcome,) = load_reward(lambda response, row: later()).score([call()])
    assert outcome.status == "failed" and "async def" in outcome.summary


@pytest.mark.parametrize("found", [[1.0], None, 1.0, {"score": 1.0}])
def test_a_batch_function_must_give_one_answer_for_each_response(found):
    outcomes = load_reward(lambda completions: found).score([call(), call()])
    assert [one.status for one in outcomes] == ["failed"] * 2


@pytest.mark.parametrize("error", [KeyError("answer"), SystemExit(3)])
def test_whatever_a_function_raises_is_a_failure_of_its_response(error):
    def raising(response, row):
        raise error

    (outcome,) = load_reward(raising).score([call()])
    assert outcome.status == "failed" and outcome.reason == type(error).__name__ and "raising" in outcome.trace


# -- documentation ----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
SECTION = re.split(r"^## ", PAGE.read_text().partition("## Reward functions\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("source", EXAMPLES)
async def test_every_example_of_the_documentation_scores(source: str):
    names: dict[str, object] = {}
    exec(source, names)
    (function,) = (one for one in names.values() if inspect.isfunction(one))
    loaded = load_reward(function)
    calls = [call("it is 42"), call("it is 41")] if loaded.is_batch else [call("it is 42")]
    outcomes = await loaded.score_async(calls) if loaded.is_async else loaded.score(calls)
    assert [one.value for one in outcomes] == [1.0, 0.0][: len(calls)]


def test_the_documentation_shows_every_convention():
    assert len(EXAMPLES) == 5
