"""`LengthPenaltyRewardManager` as a trainer uses it: what comes back for a batch, row by row (SPEC 1.1)."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from freewheel.judge import JudgeRequest
from freewheel.rewards import LengthPenaltyRewardManager, RewardHandle
from freewheel.rewards.rules import rule_score

from .conftest import (
    KEY,
    WAIT_S,
    Characters,
    MakeManager,
    Mock,
    Proto,
    Row,
    batch_of,
    last_values,
    objects,
    run_threads,
)

SPEC_KEYS = ["original_score", "openai_quality_reward", "length_penalty", "response_length", "median_length"]
SECTION_4_KEYS = ["reward_mask", "judge_status"]

both_ways = pytest.mark.parametrize("use_async_io", [True, False], ids=["async", "sync"])


def extra_of(manager: LengthPenaltyRewardManager, data: Any) -> dict[str, list[Any]]:
    extra: dict[str, list[Any]] = manager(data, return_dict=True)["reward_extra_info"]
    return extra


# -- signature --------------------------------------------------------------------------------------------------------


def test_the_constructor_has_the_names_the_order_and_the_defaults_that_scripts_rely_on() -> None:
    names = ["tokenizer", "num_examine", "compute_score", "reward_fn_key", "length_penalty_config"]
    assert list(inspect.signature(LengthPenaltyRewardManager).parameters) == names
    manager = LengthPenaltyRewardManager(Characters(), 0)
    assert (manager.compute_score, manager.reward_fn_key) == (rule_score, "data_source")
    assert inspect.signature(manager.__call__).parameters["return_dict"].default is False


def test_compute_score_gets_the_row_under_verls_keywords(make_manager: MakeManager) -> None:
    seen: list[dict[str, Any]] = []

    def score(**given: Any) -> float:
        seen.append(given)
        return 1.0

    rows = Row("text", truth=["a", "b"], extra={"index": 7}), Row("b", extra=None)
    make_manager(compute_score=score, reward_fn_key="task")(batch_of(*rows, task=objects(["one", "two"])))
    assert seen == [
        {"data_source": "one", "solution_str": "text", "ground_truth": ["a", "b"], "extra_info": {"index": 7}},
        {"data_source": "two", "solution_str": "b", "ground_truth": "yes", "extra_info": {}},
    ]


# -- the reward -------------------------------------------------------------------------------------------------------


@both_ways
def test_a_reward_is_rule_plus_quality_minus_penalty_on_the_last_valid_token(
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


@both_ways
def test_an_empty_batch_gives_an_empty_tensor(mock: Mock, make_manager: MakeManager, use_async_io: bool) -> None:
    judge = mock()
    result = make_manager(judge.url, use_async_io=use_async_io)(batch_of(), return_dict=True)
    assert result["reward_tensor"].shape == (0, 24) and result["reward_tensor"].dtype == torch.float32
    assert all(result["reward_extra_info"][key] == [] for key in SPEC_KEYS + SECTION_4_KEYS)
    assert judge.counts().received == 0


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
    data = batch_of("yes", "yes", rm_scores=scores, acc=objects([0.5, 1.0]))
    assert manager(data) is manager.submit(data).result() is scores
    assert manager(data, return_dict=True) == {"reward_tensor": scores, "reward_extra_info": {}}
    data.meta_info["reward_extra_keys"] = ["acc"]
    assert manager(data, return_dict=True)["reward_extra_info"]["acc"].tolist() == [0.5, 1.0]
    assert manager(Proto({"rm_scores": scores}, {})) is scores, "no other column is needed"
    assert judge.counts().received == 0


# -- what compute_score may return ------------------------------------------------------------------------------------


def test_other_entries_of_a_dict_are_reported_and_do_not_replace_ours(make_manager: MakeManager) -> None:
    def score(solution_str: str, **_: Any) -> dict[str, Any]:
        first = {"score": 1.0, "acc": True, "reward_mask": 9}
        return first if solution_str == "a" else {"score": 0.0, "pred": "b"}

    extra = extra_of(make_manager(compute_score=score), batch_of("a", "b"))
    assert extra["acc"] == [True, None] and extra["pred"] == [None, "b"]
    assert extra["original_score"] == [1.0, 0.0] and extra["reward_mask"] == [1, 1]
    assert all(len(column) == 2 for column in extra.values())


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
def test_a_row_whose_compute_score_fails_is_a_failed_row_and_the_others_are_scored(
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
    assert judge.counts().received == 2, "a row without a rule score is not judged"
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
    assert "Why?" in second.json()["messages"][-1]["content"], "without extra_info.question the prompt is decoded"
    assert first.headers["authorization"] == f"Bearer {KEY}" and KEY not in first.body


@pytest.mark.parametrize(
    ("gate", "sent"),
    [("on", ["fmt yes"]), ("format", ["fmt no", "fmt yes"]), ("off", ["bad no", "fmt no", "fmt yes"])],
)
@both_ways
def test_the_judge_receives_only_what_the_gate_lets_through(
    mock: Mock, make_manager: MakeManager, gate: str, sent: list[str], use_async_io: bool
) -> None:
    def score(solution_str: str, **_: Any) -> dict[str, float]:
        return {"score": float("yes" in solution_str), "format": float("fmt" in solution_str)}

    quality = {"bad no": 2.0, "fmt no": 6.0, "fmt yes": 9.0}
    judge = mock(scores={text: str(int(score)) for text, score in quality.items()})
    manager = make_manager(judge.url, compute_score=score, judge_gate=gate, use_async_io=use_async_io)
    data = batch_of(*quality)
    result = manager(data, return_dict=True)
    extra = result["reward_extra_info"]
    assert [one for one in quality if judge.counts().containing(one)] == sent
    assert judge.counts().received == len(sent)
    assert extra["judge_status"] == ["scored" if one in sent else "skipped" for one in quality]
    assert extra["reward_mask"] == [1, 1, 1], "a skipped row is trained on"
    assert extra["openai_quality_reward"] == [quality[one] if one in sent else 0.0 for one in quality]
    wanted = [quality[one] * (one in sent) + ("yes" in one) for one in quality]
    assert last_values(result["reward_tensor"], data) == wanted


def test_all_groups_of_a_batch_go_to_the_judge_at_once(mock: Mock, make_manager: MakeManager) -> None:
    judge = mock(latency_s=0.3)
    manager = make_manager(judge.url, use_async_io=True, judge={"concurrency_start": 12})
    manager(batch_of(*[Row(f"yes {number}", uid=f"g{number // 2}") for number in range(12)]))
    assert judge.counts().max_in_flight > 2, "a group has two rows"


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


@both_ways
def test_a_batch_that_times_out_has_failed_verdicts_and_no_zeros_and_is_logged(
    mock: Mock, make_manager: MakeManager, logged: Callable[..., list[str]], use_async_io: bool
) -> None:
    manager = make_manager(mock(hang_share=1.0).url, use_async_io=use_async_io, batch_timeout_s=0.3)
    data = batch_of("yes a", "yes b")
    result = manager(data, return_dict=True)
    assert last_values(result["reward_tensor"], data) == [1.0, 1.0], "the rule score: the whole group failed"
    extra = result["reward_extra_info"]
    assert extra["judge_status"] == ["failed", "failed"] and extra["judge_reason"] == ["deadline", "deadline"]
    assert extra["reward_mask"] == [0, 0]
    [warning] = logged(logging.WARNING)
    assert warning.startswith("OpenAI API evaluation timeout, using fallback")


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


def test_threads_that_wait_for_one_handle_get_one_result_that_is_computed_once(make_manager: MakeManager) -> None:
    scored: list[str] = []
    at_once = threading.Barrier(4)

    def score(solution_str: str, **_: Any) -> float:
        scored.append(solution_str)
        return 1.0

    handles = [make_manager(compute_score=score).submit(batch_of(text)) for text in "ab"]
    found: list[Any] = []

    def ask(order: list[int]) -> None:
        at_once.wait(WAIT_S)
        found.append({number: handles[number].result() for number in order})

    run_threads(*(partial(ask, order) for order in ([0, 1], [1, 0], [0, 1], [1, 0])))
    assert sorted(scored) == ["a", "b"]
    assert len(found) == 4 and all(one[number] is found[0][number] for one in found for number in (0, 1))


# -- loops and threads ------------------------------------------------------------------------------------------------


@both_ways
def test_a_call_works_inside_a_running_loop_and_in_a_thread_whose_own_loop_stays_in_place(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    """Otherwise later code raises "There is no current event loop in thread" (SPEC 5)."""
    manager = make_manager(mock(scores={"": "5"}).url, use_async_io=use_async_io)
    data = batch_of("yes")
    found: list[Any] = []

    async def train() -> None:
        found.append(last_values(manager(data), data))

    def work() -> None:
        found.append(last_values(manager(data), data))
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        found.append(last_values(manager(data), data))
        assert asyncio.get_event_loop() is loop and not loop.is_closed()
        asyncio.set_event_loop(None)
        loop.close()
        found.append("the loop stayed")

    asyncio.run(train())
    run_threads(work)
    assert found == [[6.0], [6.0], [6.0], "the loop stayed"]


def test_there_is_a_judge_only_with_a_key_and_async_on(mock: Mock, make_manager: MakeManager) -> None:
    judge = mock()
    manager = make_manager(judge.url, use_async_io=True)
    assert manager.use_async_io is True and manager.async_openai_manager is not None
    with pytest.raises(AttributeError):
        manager.use_async_io = False  # type: ignore[misc]
    assert make_manager(use_async_io=True).async_openai_manager is None, "without a key"
    assert make_manager(judge.url, use_async_io=False).async_openai_manager is None
    off = make_manager(judge.url, use_async_io=True, enable_openai_reward=False)
    data = batch_of("yes", "no")
    assert off.async_openai_manager is None and last_values(off(data), data) == [1.0, 0.0]
    assert extra_of(off, data)["judge_status"] == ["skipped", "skipped"] and judge.counts().received == 0


@both_ways
async def test_both_batch_members_return_a_verdict_per_request(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    manager = make_manager(mock(scores={"first one": "4", "second one": "6"}).url, use_async_io=use_async_io)
    requests = [JudgeRequest("first one"), JudgeRequest("second one")]
    from_async = await manager._get_batched_openai_quality_rewards_async(requests)
    from_sync = manager._get_batched_openai_quality_rewards_sync(requests)
    assert [verdict.value for verdict in from_async] == [verdict.value for verdict in from_sync] == [4.0, 6.0]


@both_ways
def test_a_key_that_leaves_or_enters_the_environment_later_changes_nothing(
    mock: Mock, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, use_async_io: bool
) -> None:
    """Otherwise a row would be skipped silently, or sent although the log says that none is."""
    judge = mock(scores={"": "5"}, api_key=KEY)
    settings = {"api_key": None, "use_async_io": use_async_io}
    without = make_manager(judge.url, **settings)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with_key = make_manager(judge.url, **settings)
    assert extra_of(without, batch_of("yes a"))["judge_status"] == ["skipped"]
    monkeypatch.delenv("OPENAI_API_KEY")
    assert extra_of(with_key, batch_of("yes b"))["judge_status"] == ["scored"]
    assert judge.counts().received == 1


def test_ensure_event_loop_gives_a_thread_its_own_loop_and_the_same_one_again(make_manager: MakeManager) -> None:
    manager = make_manager()
    found: list[Any] = []

    def work() -> None:
        loop = manager._ensure_event_loop()
        found.append(loop)
        assert manager._ensure_event_loop() is loop and asyncio.get_event_loop() is loop
        found.append(loop.run_until_complete(asyncio.sleep(0, "ran")))

    for _ in range(3):  # a thread's number is used again after its end
        run_threads(work)
    loops, results = found[::2], found[1::2]
    assert results == ["ran"] * 3
    assert [loop.is_closed() for loop in loops] == [True, True, False], "a loop is closed after its thread has ended"
    manager.shutdown_workers()
    assert loops[-1].is_closed()


def test_shutdown_leaves_a_loop_that_another_thread_runs_to_the_next_shutdown(make_manager: MakeManager) -> None:
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


@both_ways
def test_num_examine_samples_of_each_data_source_are_logged_in_each_batch(
    mock: Mock, make_manager: MakeManager, logged: Callable[..., list[str]], use_async_io: bool
) -> None:
    def samples() -> list[str]:
        return [line for line in logged() if "[response]" in line]

    url = mock(scores={"broken": "no idea"}).url
    make_manager(url, num_examine=0, use_async_io=use_async_io)(batch_of("yes"))
    assert not samples()
    rows = [Row("yes broken" if row == 0 else f"yes {row}", source="one" if row < 4 else "two") for row in range(6)]
    manager = make_manager(url, num_examine=2, use_async_io=use_async_io)
    for _ in range(2):
        manager(batch_of(*rows))
    assert [line.splitlines()[0] for line in samples()] == ["[one]", "[one]", "[two]", "[two]"] * 2
    wanted = ("yes broken", "yes 1", "yes 4", "yes 5") * 2
    assert all(text in line for text, line in zip(wanted, samples(), strict=True))
    assert "Why?" in samples()[0] and "[ground_truth] yes" in samples()[0] and "judge failed" in samples()[0]
