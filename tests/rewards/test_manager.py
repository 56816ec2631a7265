"""`LengthPenaltyRewardManager` as a trainer uses it: what comes back for a batch, row by row (SPEC 1.1)."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from freewheel.data import DataProto
from freewheel.judge import ConfigError, JudgeRequest
from freewheel.judge.verdict import Scored
from freewheel.rewards import LengthPenaltyRewardManager, RewardFailed, RewardHandle
from freewheel.rewards.rules import rule_score

from .conftest import KEY, WAIT_S, Characters, MakeManager, Mock, Proto, Row, batch_of, last_values, objects

SPEC_KEYS = ["original_score", "openai_quality_reward", "length_penalty", "response_length", "median_length"]
SECTION_4_KEYS = ["reward_mask", "judge_status"]

both_ways = pytest.mark.parametrize("use_async_io", [True, False], ids=["async", "sync"])


def extra_of(manager: LengthPenaltyRewardManager, data: Any) -> dict[str, list[Any]]:
    extra: dict[str, list[Any]] = manager(data, return_dict=True)["reward_extra_info"]
    return extra


# -- signature --------------------------------------------------------------------------------------------------------


def test_the_constructor_has_the_names_the_order_and_the_defaults_that_scripts_rely_on() -> None:
    parameters = inspect.signature(LengthPenaltyRewardManager).parameters
    empty = inspect.Parameter.empty
    assert [(name, one.default) for name, one in parameters.items()] == [
        ("tokenizer", empty),
        ("num_examine", empty),
        ("compute_score", None),
        ("reward_fn_key", "data_source"),
        ("length_penalty_config", None),
    ]
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in parameters.values())
    assert inspect.signature(LengthPenaltyRewardManager.__call__).parameters["return_dict"].default is False


def test_without_a_compute_score_the_rule_of_the_data_source_scores() -> None:
    manager = LengthPenaltyRewardManager(Characters(), num_examine=0)
    assert manager.compute_score is rule_score
    data = batch_of(Row("#### 4", truth="4", source="openai/gsm8k"), Row("#### 5", truth="4", source="openai/gsm8k"))
    assert last_values(manager(data), data) == [1.0, 0.0]


def test_a_data_source_without_a_rule_says_which_and_what_to_do() -> None:
    manager = LengthPenaltyRewardManager(Characters(), num_examine=0)
    with pytest.raises(ConfigError, match=r"data_source = 'who/knows'.*register_rule"):
        manager(batch_of(Row("x", source="who/knows")))


def test_reward_fn_key_names_the_column_of_the_data_source(make_manager: MakeManager) -> None:
    seen: list[str] = []

    def score(data_source: str, **_: Any) -> float:
        seen.append(data_source)
        return 1.0

    make_manager(compute_score=score, reward_fn_key="task")(batch_of("a", "b", task=objects(["one", "two"])))
    assert seen == ["one", "two"]


def test_compute_score_gets_the_row_under_verls_keywords(make_manager: MakeManager) -> None:
    seen: list[dict[str, Any]] = []

    def score(**given: Any) -> float:
        seen.append(given)
        return 1.0

    make_manager(compute_score=score)(batch_of(Row("text", truth=["a", "b"], extra={"index": 7}), Row("b", extra=None)))
    assert seen == [
        {"data_source": "test/words", "solution_str": "text", "ground_truth": ["a", "b"], "extra_info": {"index": 7}},
        {"data_source": "test/words", "solution_str": "b", "ground_truth": "yes", "extra_info": {}},
    ]


# -- the reward -------------------------------------------------------------------------------------------------------


@both_ways
def test_a_reward_is_rule_plus_quality_less_penalty_on_the_last_valid_token(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    judge = mock(scores={"yes one": "8", "yes two": "3", "yes long": "10"})
    manager = make_manager(
        judge.url,
        use_async_io=use_async_io,
        enable=True,
        penalty_scale=2.0,
        max_penalty=0.5,
        reward_coefficient=0.1,
    )
    # Lengths 7, 7 and 12: the median is 7, and 12 is beyond 7 · 1.5.
    data = batch_of("yes one", "yes two", "yes long...!")
    result = manager(data, return_dict=True)
    assert set(result) == {"reward_tensor", "reward_extra_info"}
    assert last_values(result["reward_tensor"], data) == pytest.approx([1.8, 1.3, 1.0 + 1.0 - 2.0 * 0.5])
    extra = result["reward_extra_info"]
    assert extra["original_score"] == [1.0, 1.0, 1.0]
    assert extra["openai_quality_reward"] == pytest.approx([0.8, 0.3, 1.0])
    assert extra["length_penalty"] == pytest.approx([0.0, 0.0, 1.0])
    assert extra["response_length"] == [7, 7, 12]
    assert extra["median_length"] == [7.0, 7.0, 7.0]
    assert extra["reward_mask"] == [1, 1, 1]
    assert extra["judge_status"] == ["scored"] * 3


def test_the_extra_info_has_every_promised_key_with_one_value_a_row_in_batch_order(
    mock: Mock, make_manager: MakeManager
) -> None:
    words = [f"yes {word}" for word in ("zulu", "alpha", "mike", "kilo", "echo")]
    judge = mock(scores={word: str(number) for number, word in enumerate(words, start=2)})
    rows = [Row(word, uid=f"g{number % 2}") for number, word in enumerate(words)]
    extra = extra_of(make_manager(judge.url, use_async_io=True), batch_of(*rows))
    for key in SPEC_KEYS + SECTION_4_KEYS:
        assert len(extra[key]) == len(rows), key
    assert extra["openai_quality_reward"] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert extra["response_length"] == [len(word) for word in words]


@both_ways
def test_an_empty_batch_gives_an_empty_tensor(mock: Mock, make_manager: MakeManager, use_async_io: bool) -> None:
    judge = mock()
    result = make_manager(judge.url, use_async_io=use_async_io)(batch_of(), return_dict=True)
    assert result["reward_tensor"].shape == (0, 24) and result["reward_tensor"].dtype == torch.float32
    assert all(result["reward_extra_info"][key] == [] for key in SPEC_KEYS + SECTION_4_KEYS)
    assert judge.counts().received == 0


def test_an_empty_response_holds_its_reward_on_the_first_token_and_stays_finite(make_manager: MakeManager) -> None:
    data = batch_of(Row("", uid="a"), Row("", uid="a"), Row("yes", uid="b"))
    manager = make_manager(enable=True, compute_score=lambda **_: -1.0)
    result = manager(data, return_dict=True)
    assert last_values(result["reward_tensor"], data) == [-1.0, -1.0, -1.0]
    assert result["reward_tensor"][0, 0] == -1.0
    assert result["reward_extra_info"]["median_length"] == [0.0, 0.0, 3.0]
    assert result["reward_extra_info"]["length_penalty"] == [0.0, 0.0, 0.0]


def test_responses_without_room_for_a_token_give_a_tensor_without_columns(make_manager: MakeManager) -> None:
    assert make_manager()(batch_of("", "", width=0)).shape == (2, 0)


def test_a_batch_is_left_as_it_was(make_manager: MakeManager) -> None:
    made = batch_of("yes", "no")
    data = DataProto.from_dict(made.batch, made.non_tensor_batch, made.meta_info)
    before = {key: tensor.clone() for key, tensor in data.batch.items()}
    make_manager(enable=True)(data, return_dict=True)
    assert set(data.batch.keys()) == set(before)
    assert all(torch.equal(data.batch[key], tensor) for key, tensor in before.items())
    assert set(data.non_tensor_batch) == set(made.non_tensor_batch)


# -- rm_scores --------------------------------------------------------------------------------------------------------


@both_ways
def test_a_batch_with_rm_scores_gets_that_tensor_back_and_nothing_is_computed_or_sent(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    def never(**_: Any) -> float:
        raise AssertionError("nothing is computed")

    judge = mock()
    scores = torch.tensor([[0.5, math.nan], [1.0, 2.0]])
    manager = make_manager(judge.url, use_async_io=use_async_io, compute_score=never)
    data = batch_of("yes", "yes", rm_scores=scores)
    assert manager(data) is scores
    result = manager(data, return_dict=True)
    assert result["reward_tensor"] is scores and result["reward_extra_info"] == {}
    assert manager.submit(data).result() is scores
    assert judge.counts().received == 0


def test_rm_scores_need_no_other_column(make_manager: MakeManager) -> None:
    scores = torch.ones(2, 3)
    assert make_manager()(Proto({"rm_scores": scores}, {})) is scores


def test_rm_scores_come_with_the_extra_columns_that_the_batch_names(make_manager: MakeManager) -> None:
    data = batch_of("yes", rm_scores=torch.ones(1, 24), acc=objects([0.5]))
    data.meta_info["reward_extra_keys"] = ["acc"]
    assert make_manager()(data, return_dict=True)["reward_extra_info"]["acc"].tolist() == [0.5]


# -- errors in the batch ----------------------------------------------------------------------------------------------


def test_a_batch_without_tensors_is_refused_and_not_an_attribute_error(make_manager: MakeManager) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        make_manager()(Proto(None, {"data_source": objects(["a"]), "reward_model": objects([{"ground_truth": 1}])}))


@pytest.mark.parametrize("given", [{"style": "rule"}, None, "42"])
def test_a_row_without_a_ground_truth_is_named_by_its_number(make_manager: MakeManager, given: Any) -> None:
    column = objects([{"ground_truth": "a"}, given])
    with pytest.raises(ConfigError, match=r"reward_model\[1\].*ground_truth"):
        make_manager()(batch_of("yes", "no", reward_model=column))


# -- what compute_score may return ------------------------------------------------------------------------------------


def test_what_else_a_dict_holds_is_reported_with_none_where_a_row_lacks_it(make_manager: MakeManager) -> None:
    def score(solution_str: str, **_: Any) -> dict[str, Any]:
        return {"score": 1.0, "acc": True} if solution_str == "a" else {"score": 0.0, "pred": "b"}

    extra = extra_of(make_manager(compute_score=score), batch_of("a", "b"))
    assert extra["acc"] == [True, None] and extra["pred"] == [None, "b"]
    assert all(len(column) == 2 for column in extra.values())


def test_what_a_dict_calls_by_one_of_our_names_does_not_replace_ours(make_manager: MakeManager) -> None:
    extra = extra_of(make_manager(compute_score=lambda **_: {"score": 0.5, "reward_mask": 9}), batch_of("a"))
    assert extra["original_score"] == [0.5] and extra["reward_mask"] == [1]


BAD_SCORES = [math.nan, math.inf, None, "great", {"acc": 1.0}, {"score": None}, {"score": math.nan}, [1.0, 2.0]]
BAD_SCORES += [torch.tensor([1.0, 2.0]), torch.tensor(math.nan), Scored(math.nan), Scored(-math.inf)]


@both_ways
@pytest.mark.parametrize("found", BAD_SCORES, ids=repr)
def test_a_score_that_is_no_finite_number_is_an_error_that_names_compute_score(
    mock: Mock, make_manager: MakeManager, found: Any, use_async_io: bool
) -> None:
    manager = make_manager(mock().url, compute_score=lambda **_: found, use_async_io=use_async_io)
    with pytest.raises(ConfigError, match="compute_score"):
        manager(batch_of("a"))


@both_ways
def test_an_error_inside_compute_score_surfaces_at_result_and_the_next_batch_is_fine(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    def score(solution_str: str, **_: Any) -> float:
        if solution_str == "bad":
            raise ZeroDivisionError("mine")
        return 1.0

    manager = make_manager(mock(scores={"": "4"}).url, compute_score=score, use_async_io=use_async_io)
    handle = manager.submit(batch_of("bad", "bad"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            handle.result()
    assert handle.done() or not use_async_io
    handle.cancel()
    data = batch_of("good")
    assert last_values(manager(data), data) == [5.0]


@pytest.mark.parametrize("breaks", [ZeroDivisionError("mine"), float("nan"), None])
@both_ways
def test_a_row_whose_compute_score_fails_is_a_failed_row_and_the_batch_goes_on(
    mock: Mock, make_manager: MakeManager, caplog: pytest.LogCaptureFixture, breaks: Any, use_async_io: bool
) -> None:
    def score(solution_str: str, **_: Any) -> Any:
        if solution_str == "bad":
            if isinstance(breaks, Exception):
                raise breaks
            return breaks
        return 1.0

    judge = mock(scores={"": "4"})
    manager = make_manager(judge.url, compute_score=score, use_async_io=use_async_io, enable=False)
    data = batch_of(Row("good 1", "a"), Row("bad", "a"), Row("good 2", "b"), Row("bad", "c"))
    result = manager(data, return_dict=True)
    assert last_values(result["reward_tensor"], data) == [5.0, 5.0, 5.0, 5.0], "its group's mean, or the batch's"
    extra = result["reward_extra_info"]
    assert extra["judge_status"] == ["scored", "failed", "scored", "failed"]
    assert (extra["judge_reason"][1], extra["reward_mask"]) == ("compute_score", [1, 0, 1, 0])
    assert judge.counts().received == 2, "what has no rule score is not judged"
    assert "compute_score failed in row 1 of 4" in caplog.text


# -- the judge --------------------------------------------------------------------------------------------------------


@both_ways
def test_the_judge_sees_question_response_and_reference_and_the_key_goes_in_the_header(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    judge = mock(keep_requests=10, api_key=KEY, model="m")
    manager = make_manager(judge.url, use_async_io=use_async_io, system_prompt="Rate it. Only an integer 1-10.")
    manager(batch_of(Row("yes: because", extra={"question": "Is it so?"}), Row("yes: it is so")))
    first, second = sorted(judge.requests(), key=lambda one: "because" not in one.body)
    messages = first.json()["messages"]
    assert messages[0]["role"] == "system" and messages[0]["content"].startswith("Rate it. Only an integer 1-10.")
    for part in ("Is it so?", "yes: because", "yes"):
        assert part in messages[-1]["content"]
    assert "Why?" in second.json()["messages"][-1]["content"], "the decoded prompt stands in for extra_info.question"
    assert first.headers["authorization"] == f"Bearer {KEY}" and KEY not in first.body


@pytest.mark.parametrize(
    ("gate", "sent"),
    [
        ("on", ["fmt yes"]),
        (True, ["fmt yes"]),
        ("format", ["fmt no", "fmt yes"]),
        ("off", ["bad no", "fmt no", "fmt yes"]),
    ],
)
@both_ways
def test_the_gate_keeps_from_the_judge_what_it_says(
    mock: Mock, make_manager: MakeManager, gate: Any, sent: list[str], use_async_io: bool
) -> None:
    def score(solution_str: str, **_: Any) -> dict[str, float]:
        return {"score": float("yes" in solution_str), "format": float("fmt" in solution_str)}

    responses = ["bad no", "fmt no", "fmt yes"]
    judge = mock(scores={"fmt yes": "9", "fmt no": "6", "bad no": "2"})
    quality = {"fmt yes": 9.0, "fmt no": 6.0, "bad no": 2.0}
    manager = make_manager(judge.url, compute_score=score, judge_gate=gate, use_async_io=use_async_io)
    data = batch_of(*responses)
    result = manager(data, return_dict=True)
    extra = result["reward_extra_info"]
    assert [one for one in responses if judge.counts().containing(one)] == sent
    assert judge.counts().received == len(sent)
    assert extra["judge_status"] == ["scored" if one in sent else "skipped" for one in responses]
    assert extra["openai_quality_reward"] == [quality[one] if one in sent else 0.0 for one in responses]
    assert extra["reward_mask"] == [1, 1, 1], "a skipped row is trained on"
    wanted = [quality[one] * (one in sent) + ("yes" in one) for one in responses]
    assert last_values(result["reward_tensor"], data) == wanted


def test_all_groups_of_a_batch_go_to_the_judge_as_one_batch(mock: Mock, make_manager: MakeManager) -> None:
    """A group at a time would never have more in flight than a group has rows."""
    judge = mock(latency_s=0.3)
    manager = make_manager(judge.url, use_async_io=True, judge={"concurrency_start": 12})
    handed: list[int] = []
    assert manager.async_openai_manager is not None
    submit = manager.async_openai_manager.submit
    manager.async_openai_manager.submit = lambda requests, **given: (  # type: ignore[method-assign]
        handed.append(len(requests)) or submit(requests, **given)  # type: ignore[func-returns-value]
    )
    manager(batch_of(*[Row(f"yes {number}", uid=f"g{number // 2}") for number in range(12)]))
    assert handed == [12]
    assert judge.counts().max_in_flight > 2


def test_async_and_sync_give_the_same_rewards(mock: Mock, make_manager: MakeManager) -> None:
    judge = mock(scores={"yes bad": "no idea"})
    rows = [Row(f"yes {number}" + "." * (number % 7), uid=f"g{number % 3}") for number in range(20)]
    rows += [Row("yes bad", uid="g0"), Row("no", uid="g1"), Row("yes bad bad", uid="alone"), Row("", uid="empty")]
    data = batch_of(*rows)
    config = {"enable": True, "reward_coefficient": 0.3, "judge": {"cache": False, "reasks": 0}}
    one, other = (make_manager(judge.url, use_async_io=on, **config)(data, return_dict=True) for on in (True, False))
    assert torch.equal(one["reward_tensor"], other["reward_tensor"])
    assert repr(one["reward_extra_info"]) == repr(other["reward_extra_info"])
    assert {"scored", "failed", "skipped"} == set(one["reward_extra_info"]["judge_status"])
    last_values(one["reward_tensor"], data)


# -- failed rows ------------------------------------------------------------------------------------------------------

FAILING = {"yes broken": "no idea", "yes nine": "9", "yes five": "5"}
GROUPS = [
    Row("yes nine", uid="a"),
    Row("yes broken", uid="a"),
    Row("yes five", uid="a"),
    Row("yes broken!", uid="b"),
    Row("yes broken?", uid="b"),
]


@both_ways
def test_a_failed_row_holds_its_groups_mean_or_its_rule_score_and_is_masked(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    manager = make_manager(mock(scores=FAILING).url, use_async_io=use_async_io)
    data = batch_of(*GROUPS)
    result = manager(data, return_dict=True)
    assert last_values(result["reward_tensor"], data) == [10.0, 8.0, 6.0, 1.0, 1.0]
    extra = result["reward_extra_info"]
    assert extra["reward_mask"] == [1, 0, 1, 0, 0]
    assert extra["judge_status"] == ["scored", "failed", "scored", "failed", "failed"]
    assert extra["judge_reason"] == ["", "unparseable", "", "unparseable", "unparseable"]
    assert [math.isnan(value) for value in extra["openai_quality_reward"]] == [False, True, False, True, True]


@both_ways
def test_on_failure_raise_says_how_many_and_why(mock: Mock, make_manager: MakeManager, use_async_io: bool) -> None:
    manager = make_manager(mock(scores=FAILING).url, use_async_io=use_async_io, on_failure="raise")
    with pytest.raises(RewardFailed, match=r"3 of 5 judgements failed.*unparseable"):
        manager(batch_of(*GROUPS))
    fine = batch_of(GROUPS[0])
    assert last_values(manager(fine), fine) == [10.0]


@both_ways
def test_a_batch_that_times_out_has_failed_verdicts_and_no_zeros(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    judge = mock(hang_share=1.0)
    manager = make_manager(judge.url, use_async_io=use_async_io, batch_timeout_s=0.4)
    data = batch_of("yes a", "yes b")
    result = manager(data, return_dict=True)
    assert last_values(result["reward_tensor"], data) == [1.0, 1.0], "the rule score: the whole group failed"
    extra = result["reward_extra_info"]
    assert extra["judge_status"] == ["failed", "failed"] and extra["judge_reason"] == ["deadline", "deadline"]
    assert extra["reward_mask"] == [0, 0]


@both_ways
def test_a_failed_judgement_is_asked_again_in_the_next_batch(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    judge = mock(unparseable_share=1.0, faults_per_content=1)
    manager = make_manager(judge.url, use_async_io=use_async_io, judge={"reasks": 0})
    data = batch_of("yes again")
    assert [extra_of(manager, data)["judge_status"] for _ in range(3)] == [["failed"], ["scored"], ["scored"]]
    assert judge.counts().received == 2, "the failure was not cached; the score was"


# -- submit -----------------------------------------------------------------------------------------------------------


def test_submit_returns_while_the_judge_is_slow_and_result_is_what_a_call_gives(
    mock: Mock, make_manager: MakeManager
) -> None:
    judge = mock(latency_s=1.0)
    manager = make_manager(judge.url, use_async_io=True)
    data = batch_of("yes a", "yes b")
    before = time.monotonic()
    handle = manager.submit(data, return_dict=True)
    took_s = time.monotonic() - before
    assert isinstance(handle, RewardHandle) and not handle.done()
    result = handle.result()
    assert time.monotonic() - before >= 1.0 > took_s
    assert handle.done() and handle.result() is result
    again = manager(data, return_dict=True)
    assert torch.equal(again["reward_tensor"], result["reward_tensor"])
    assert again["reward_extra_info"] == result["reward_extra_info"]


def test_submit_does_not_wait_for_a_slow_rule_either(mock: Mock, make_manager: MakeManager) -> None:
    go_on = threading.Event()

    def slow(**_: Any) -> float:
        assert go_on.wait(WAIT_S)
        return 1.0

    manager = make_manager(mock(scores={"": "5"}).url, use_async_io=True, compute_score=slow)
    data = batch_of("a")
    handle = manager.submit(data)
    assert not handle.done()
    go_on.set()
    assert last_values(handle.result(), data) == [6.0]


def test_handles_may_be_asked_in_any_order_and_from_several_threads(mock: Mock, make_manager: MakeManager) -> None:
    judge = mock(latency_s=0.1, scores={f"yes {number}.": str(number) for number in range(1, 7)})
    manager = make_manager(judge.url, use_async_io=True)
    batches = [batch_of(f"yes {number}.") for number in range(1, 7)]
    handles = [manager.submit(data) for data in batches]
    found: dict[int, list[float]] = {}

    def ask(number: int) -> None:
        found[number] = last_values(handles[number].result(), batches[number])

    for number in (5, 0, 3):
        ask(number)
    threads = [threading.Thread(target=ask, args=(number,)) for number in (4, 1, 2, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == {number: [number + 2.0] for number in range(6)}


def test_threads_that_ask_one_handle_at_once_get_one_result_that_is_worked_out_once(make_manager: MakeManager) -> None:
    scored: list[str] = []

    def slow(solution_str: str, **_: Any) -> float:
        scored.append(solution_str)
        time.sleep(0.2)
        return 1.0

    handle = make_manager(compute_score=slow).submit(batch_of("a"))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(handle.result())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert scored == ["a"] and len(found) == 4 and all(one is found[0] for one in found)


def test_a_cancelled_batch_has_failed_rows_and_does_not_wait(mock: Mock, make_manager: MakeManager) -> None:
    manager = make_manager(mock(hang_share=1.0).url, use_async_io=True)
    handle = manager.submit(batch_of("yes a"), return_dict=True)
    handle.cancel()
    extra = handle.result()["reward_extra_info"]
    assert extra["judge_status"] == ["failed"] and extra["judge_reason"] == ["cancelled"]
    handle.cancel()


# -- loops and threads ------------------------------------------------------------------------------------------------


@both_ways
def test_a_call_inside_a_running_loop_works(mock: Mock, make_manager: MakeManager, use_async_io: bool) -> None:
    manager = make_manager(mock(scores={"": "5"}).url, use_async_io=use_async_io)
    data = batch_of("yes")

    async def train() -> list[float]:
        asyncio.get_running_loop()
        return last_values(manager(data), data)

    assert asyncio.run(train()) == [6.0]


@both_ways
def test_a_call_in_a_thread_without_a_loop_works(mock: Mock, make_manager: MakeManager, use_async_io: bool) -> None:
    manager = make_manager(mock(scores={"": "5"}).url, use_async_io=use_async_io)
    data = batch_of("yes")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(last_values(manager(data), data)))
    thread.start()
    thread.join(WAIT_S)
    assert found == [[6.0]]


def test_the_synchronous_path_leaves_the_threads_own_loop_in_place(mock: Mock, make_manager: MakeManager) -> None:
    """Or code that comes after us meets "There is no current event loop in thread" (SPEC 5)."""
    manager = make_manager(mock().url)
    found: list[Any] = []

    def work() -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        manager(batch_of("yes"))
        found.append(asyncio.get_event_loop() is loop and not loop.is_closed())
        asyncio.set_event_loop(None)
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    assert found == [True]


def test_the_members_that_people_use_are_there(mock: Mock, make_manager: MakeManager) -> None:
    manager = make_manager(mock().url, use_async_io=True)
    assert manager.use_async_io is True and manager.async_openai_manager is not None
    for name in ("start_workers", "shutdown_workers", "_ensure_event_loop"):
        assert callable(getattr(manager, name))
    assert inspect.iscoroutinefunction(manager._get_batched_openai_quality_rewards_async)
    assert not inspect.iscoroutinefunction(manager._get_batched_openai_quality_rewards_sync)
    import freewheel.rewards

    assert not hasattr(freewheel.rewards, "OpenAIWorkerManager")


def test_there_is_no_async_manager_without_a_key_or_with_async_off(mock: Mock, make_manager: MakeManager) -> None:
    assert make_manager(use_async_io=True).async_openai_manager is None
    assert make_manager(mock().url, use_async_io=False).async_openai_manager is None
    assert make_manager(mock().url, use_async_io=True, enable_openai_reward=False).async_openai_manager is None


@both_ways
def test_the_judge_turned_off_sends_nothing_although_there_is_a_key(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    judge = mock()
    data = batch_of("yes", "no")
    result = make_manager(judge.url, enable_openai_reward=False, use_async_io=use_async_io)(data, return_dict=True)
    assert last_values(result["reward_tensor"], data) == [1.0, 0.0]
    assert result["reward_extra_info"]["judge_status"] == ["skipped", "skipped"]
    assert judge.counts().received == 0


@both_ways
async def test_both_batch_members_give_a_verdict_a_request(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    manager = make_manager(mock(scores={"first one": "4", "second one": "6"}).url, use_async_io=use_async_io)
    requests = [JudgeRequest("first one"), JudgeRequest("second one")]
    from_async = await manager._get_batched_openai_quality_rewards_async(requests)
    from_sync = manager._get_batched_openai_quality_rewards_sync(requests)
    assert [verdict.value for verdict in from_async] == [verdict.value for verdict in from_sync] == [4.0, 6.0]


async def test_the_async_member_does_not_block_the_loop(mock: Mock, make_manager: MakeManager) -> None:
    manager = make_manager(mock(latency_s=0.5).url, use_async_io=True)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await manager._get_batched_openai_quality_rewards_async([JudgeRequest("a")])
    ticking.cancel()
    assert ticks >= 5


@both_ways
async def test_without_a_key_neither_member_sends_anything_even_if_the_environment_has_one(
    monkeypatch: pytest.MonkeyPatch, make_manager: MakeManager, use_async_io: bool
) -> None:
    """The default endpoint is nobody's choice: the key in the environment must not go there."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    calls = forbid_sending(monkeypatch)
    manager = make_manager(use_async_io=use_async_io, judge={"placement": "thread", "max_attempts": 1})
    verdicts = manager._get_batched_openai_quality_rewards_sync([JudgeRequest("a")])
    verdicts += await manager._get_batched_openai_quality_rewards_async([JudgeRequest("a")])
    assert [verdict.status for verdict in verdicts] == ["skipped", "skipped"]
    assert calls == []


@both_ways
def test_a_key_that_leaves_or_enters_the_environment_later_changes_nothing(
    mock: Mock, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, use_async_io: bool
) -> None:
    """Or a row would be skipped without a word, or sent after it was said that nothing is."""
    judge = mock(scores={"": "5"}, api_key=KEY)
    settings = {"api_key": None, "use_async_io": use_async_io}
    without = make_manager(judge.url, **settings)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with_key = make_manager(judge.url, **settings)
    assert extra_of(without, batch_of("yes a"))["judge_status"] == ["skipped"]
    monkeypatch.delenv("OPENAI_API_KEY")
    assert extra_of(with_key, batch_of("yes b"))["judge_status"] == ["scored"]
    assert judge.counts().received == 1


def forbid_sending(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every HTTP exchange of this process is refused and noted."""
    from freewheel.judge.client import ChatClient

    calls: list[str] = []

    async def ask(self: Any, *_: Any, **__: Any) -> Any:
        calls.append(str(self._url))
        raise AssertionError("something was sent")

    monkeypatch.setattr(ChatClient, "ask", ask)
    return calls


def test_ensure_event_loop_gives_a_thread_a_loop_of_its_own_and_the_same_one_again(make_manager: MakeManager) -> None:
    manager = make_manager()
    found: list[Any] = []

    def work() -> None:
        loop = manager._ensure_event_loop()
        found.append(loop)
        assert manager._ensure_event_loop() is loop and asyncio.get_event_loop() is loop
        found.append(loop.run_until_complete(asyncio.sleep(0, "ran")))

    for _ in range(3):  # a thread's number is used again after its end
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(WAIT_S)
    assert [one for one in found if isinstance(one, str)] == ["ran"] * 3
    manager.shutdown_workers()
    assert all(one.is_closed() for one in found if not isinstance(one, str))


async def test_ensure_event_loop_gives_the_running_one_where_one_runs(make_manager: MakeManager) -> None:
    assert make_manager()._ensure_event_loop() is asyncio.get_running_loop()


def test_shutdown_does_not_trip_over_a_loop_that_another_thread_runs(make_manager: MakeManager) -> None:
    manager = make_manager()
    running, stop = threading.Event(), threading.Event()

    def work() -> None:
        async def main() -> None:
            running.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

        manager._ensure_event_loop().run_until_complete(main())

    thread = threading.Thread(target=work)
    thread.start()
    assert running.wait(WAIT_S)
    try:
        manager.shutdown_workers()
    finally:
        stop.set()
        thread.join(WAIT_S)
    manager.shutdown_workers()
    assert not manager._loops


def said_samples(said: Callable[..., list[str]]) -> list[str]:
    return [line for line in said() if "[response]" in line]


def test_num_examine_samples_of_each_data_source_are_logged(
    make_manager: MakeManager, said: Callable[..., list[str]]
) -> None:
    rows = [Row(f"yes {number}", source="one" if number < 4 else "two") for number in range(6)]
    make_manager(num_examine=2)(batch_of(*rows))
    samples = said_samples(said)
    assert [line.splitlines()[0] for line in samples] == ["[one]", "[one]", "[two]", "[two]"]
    assert all(f"yes {number}" in line for number, line in zip((0, 1, 4, 5), samples, strict=True))
    assert "Why?" in samples[0] and "[ground_truth] yes" in samples[0]


@both_ways
def test_num_examine_zero_logs_no_sample_and_each_batch_counts_anew(
    mock: Mock, make_manager: MakeManager, said: Callable[..., list[str]], use_async_io: bool
) -> None:
    url = mock(scores={"broken": "no idea"}).url
    make_manager(url, num_examine=0, use_async_io=use_async_io)(batch_of("yes"))
    assert not said_samples(said)
    manager = make_manager(url, num_examine=1, use_async_io=use_async_io)
    for _ in range(2):
        manager(batch_of("yes broken", "yes"))
    assert len(said_samples(said)) == 2
    assert "judge failed" in said_samples(said)[0]
