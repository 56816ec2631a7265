"""Responses are scored as they finish. Each one ends, whatever a function or a judge does, and nothing else suffers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from freewheel.data.group import Prompt, Response, Ticket
from freewheel.judge import ConfigError
from freewheel.judge.judge import Judge
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge
from freewheel.judge.verdict import Failed, JudgeDied, Scored, Skipped
from freewheel.rollout import reward_stage
from freewheel.rollout.reward_functions import load_reward
from freewheel.rollout.reward_stage import FatalRewardFailure, GroupPolicy, GroupScoring, RewardStage, ScoringFailed

from .helpers import WAIT_S, until

KEY = "sk-test-0123456789-very-secret"
ROW = {"data_source": "test/words", "reward_model": {"ground_truth": "yes"}, "extra_info": {"question": "Is it?"}}

LOCK = threading.Lock()
"""Not to be pickled."""

MakeStage = Callable[..., RewardStage]


def yes(response: str, row: Any) -> float:
    return float(row["reward_model"]["ground_truth"] in response)


def only_a(response: str, row: Any) -> float:
    return {"a": 1.0}[response]


def response(text: str, **fields: Any) -> Response:
    """One token a character."""
    size = max(len(text), 1)
    arrays = {
        "tokens": np.arange(size, dtype=np.int32),
        "logprobs": np.zeros(size, np.float32),
        "versions": np.zeros(size, np.int32),
        "mask": np.ones(size, np.uint8),
    }
    return Response(**{**arrays, "finish": "stop", **fields})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_stage, "RETRY_DELAY_S", 0.0)


@pytest.fixture
async def make_stage() -> AsyncIterator[MakeStage]:
    """`make_stage(function, retries=0)`; closed with the test, after which nothing may be left."""
    made: list[RewardStage] = []

    def make(function: Any = yes, **settings: Any) -> RewardStage:
        usual = {"judge": None, "concurrency": 256, "timeout_s": WAIT_S, "workers": 2, "executor": "thread"}
        made.append(
            RewardStage(score=load_reward(function), **{**usual, "retries": 0, "on_failure": "mask", **settings})
        )
        return made[-1]

    yield make
    for stage in made:
        await asyncio.wait_for(stage.close(), WAIT_S)


def begin(stage: RewardStage, texts: Sequence[str], ordinal: int = 0, n: int | None = None) -> GroupScoring:
    """Add `texts` to a group of `n` responses."""
    group = stage.group(Ticket(ordinal, ordinal), Prompt(tokens=np.ones(1, np.int32), row=ROW), n or len(texts))
    for index, text in enumerate(texts):
        group.add(index, text, response(text))
    return group


async def scored(stage: RewardStage, *texts: str, ordinal: int = 0) -> list[Response]:
    return await asyncio.wait_for(begin(stage, texts, ordinal).result(), WAIT_S)


def numbers(rewarded: Sequence[Response]) -> list[float | None]:
    """None where a response is masked."""
    return [None if math.isnan(one.reward) else one.reward for one in rewarded]


# -- scoring during generation ----------------------------------------------------------------------------------------


async def test_a_response_is_scored_at_once_and_rewards_come_in_the_order_of_the_indexes(make_stage: MakeStage):
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def score(response: str, row: Any) -> dict[str, Any]:
        seen.put_nowait(response)
        return {"score": len(response), "acc": 1, "note": "text"}

    group = begin(make_stage(score), [], n=3)
    for index, text in ((2, "ccc"), (0, "a"), (1, "bb")):
        group.add(index, text, response(text))
        assert await asyncio.wait_for(seen.get(), WAIT_S) == text
    rewards = await group.result()
    assert numbers(rewards) == [1.0, 2.0, 3.0]
    assert rewards[1].verdict == Scored(2.0, parts={"acc": 1.0})


async def test_a_batch_function_gets_whole_groups_at_once_and_does_not_wait_for_a_slow_response(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
):
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def score(solution_strs: list[str]) -> list[float]:
        seen.put_nowait(len(solution_strs))
        return [float(len(text)) for text in solution_strs]

    stage = make_stage(score)
    slow = begin(stage, ["a", "bb"], n=3)
    assert await asyncio.wait_for(seen.get(), WAIT_S) == 2
    monkeypatch.setattr(reward_stage, "LINGER_S", 2 * WAIT_S)  # a whole group does not wait for it
    slow.add(2, "ccc", response("ccc"))
    other = begin(stage, ["dddd"])
    async with asyncio.timeout(WAIT_S):
        assert numbers([*await slow.result(), *await other.result()]) == [1.0, 2.0, 3.0, 4.0]
    assert seen.get_nowait() == 2


async def test_a_response_that_breaks_a_batch_fails_alone(make_stage: MakeStage):
    rewards = await scored(make_stage(lambda solution_strs: [1 / len(text) for text in solution_strs]), "a", "", "bb")
    assert numbers(rewards) == [1.0, None, 0.5]
    assert rewards[1].verdict.summary.startswith("ZeroDivisionError")


async def test_a_batch_that_times_out_is_not_scored_again_one_by_one(make_stage: MakeStage):
    sizes: list[int] = []

    async def score(solution_strs: list[str]) -> list[float]:
        sizes.append(len(solution_strs))
        await asyncio.Event().wait()
        return []

    with pytest.raises(ScoringFailed, match=r"reward\.timeout_s = 0\.2"):
        await scored(make_stage(score, timeout_s=0.2), "a", "b")
    assert sizes == [2]


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failed_response_is_masked_and_logged_once_with_its_traceback(make_stage: MakeStage, caplog):
    stage = make_stage(only_a)
    rewards = await scored(stage, "a", "bad", "a", *["bad"] * 8)
    assert numbers(rewards) == [1.0, None, 1.0, *[None] * 8]
    assert rewards[1].verdict.status == "failed" and rewards[1].verdict.summary == "KeyError: 'bad'"
    assert math.isnan(rewards[1].raw_reward)
    (message,) = [record.getMessage() for record in caplog.records]
    assert 'return {"a": 1.0}[response]' in message
    await scored(stage, "a", "a", "bad", ordinal=1)
    assert "10 times by now" in caplog.records[-1].getMessage()
    stats = stage.stats()
    assert (stats["failed"], stats["first_failure"]) == ({"KeyError": 10}, "KeyError: 'bad'")


async def test_a_skipped_response_is_masked_and_neither_fails_nor_is_scored_again(make_stage: MakeStage, caplog):
    calls: list[int] = []
    stage = make_stage(lambda completions: calls.append(1) or [1.0, None, 0.0][-len(completions) :], on_failure="raise")
    rewards = await scored(stage, "a", "b", "c")
    assert numbers(rewards) == [1.0, None, 0.0]
    assert rewards[1].verdict.status == "skipped"
    assert not stage.stats()["failed"] and stage.stats()["skipped"] == 1 and not caplog.records
    stage = make_stage(lambda completions: calls.append(1) or [None] * len(completions), retries=5)
    with pytest.raises(ScoringFailed, match="None"):
        await scored(stage, "a", "b")
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("fails", "retries", "rewards", "calls"),
    [
        ({"b": 1, "c": 1}, 1, [1.0, 1.0, 1.0], "abbcc"),  # only what failed is scored again
        ({"c": 9}, 3, [1.0, 1.0, None], "abc"),  # two rewards are enough
        ({"b": 9, "c": 9}, 2, ScoringFailed, "abbbccc"),
    ],
)
async def test_a_group_without_a_baseline_is_scored_again(make_stage: MakeStage, fails, retries, rewards, calls):
    made: list[str] = []

    def score(response: str, row: Any) -> float:
        made.append(response)
        if made.count(response) <= fails.get(response, 0):
            raise ConnectionError("not now")
        return 1.0

    stage = make_stage(score, retries=retries)
    if rewards is ScoringFailed:
        with pytest.raises(ScoringFailed, match=r"1 of 3 responses .* 3 tries: 2 x ConnectionError") as caught:
            await scored(stage, *"abc")
        assert caught.value.is_infra
        assert stage.stats()["dropped_groups"] == 1
    else:
        assert numbers(await scored(stage, *"abc")) == rewards
    assert "".join(sorted(made)) == calls
    stats = stage.stats()
    assert stats["retried_groups"] == max(map(calls.count, calls)) - 1
    assert stats["scored"] + sum(stats["failed"].values()) == len(calls)


SCORED, FAILED, SKIPPED, DOWN = Scored(1.0), Failed("KeyError"), Skipped("none"), Failed("down", infra=True)


@pytest.mark.parametrize(
    ("on_failure", "verdicts", "expected"),
    [
        ("mask", [SCORED], [1.0]),  # a group of one response needs one reward
        ("mask", [FAILED], "0 of 1 responses"),
        ("mask", [DOWN, FAILED], "0 of 2 responses"),
        ("mask", [DOWN, DOWN], "0 of 2 responses"),
        ("mask", [SCORED, SCORED, FAILED], [1.0, 1.0, None]),
        ("mask", [SCORED, FAILED, SKIPPED], "1 of 3 responses"),
        ("fallback: -1.0", [SCORED, FAILED, SKIPPED], [1.0, -1.0, None]),  # a skipped response did not fail
        ({"fallback": -1.0}, [SCORED, FAILED], [1.0, -1.0]),
        ("raise", [SCORED, SCORED, SKIPPED], [1.0, 1.0, None]),
        ("raise", [SCORED, SCORED, FAILED], r"1 of 3 .* reward.on_failure is 'raise': KeyError"),
    ],
)
def test_the_policy_decides_what_a_failed_response_counts(on_failure: Any, verdicts: list[Any], expected: Any):
    rewards = [one.value if isinstance(one, Scored) else math.nan for one in verdicts]
    settled = [replace(response("x"), verdict=one, reward=r) for one, r in zip(verdicts, rewards, strict=True)]
    policy = GroupPolicy.of(on_failure, retries=0)
    if isinstance(expected, str):
        with pytest.raises(FatalRewardFailure if on_failure == "raise" else ScoringFailed, match=expected) as caught:
            policy.decide(settled, 0)
        only_infra = verdicts == [DOWN, DOWN]
        assert on_failure == "raise" or caught.value.is_infra == only_infra, "the prompt is not to blame"
    else:
        decided = policy.decide(settled, 0)
        assert decided is not None and numbers(decided) == expected
        assert [one.verdict for one in decided] == verdicts


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        *(({"on_failure": policy}, r"reward\.on_failure") for policy in ("zero", "rule_only", "fallback: nan")),
        ({"judge": {"on_failure": "raise"}}, r"reward\.judge\.on_failure"),
        ({"function": lambda response, row: float(LOCK.locked()), "executor": "process"}, r"reward\.executor"),
    ],
    ids=["unknown policy", "only with a rule", "not a number", "judge raises", "function that does not pickle"],
)
async def test_a_setting_that_cannot_work_is_refused_by_its_key(make_stage: MakeStage, settings: Any, key: str):
    with pytest.raises(ConfigError, match=key):
        make_stage(**settings)


# -- time -------------------------------------------------------------------------------------------------------------


async def test_a_function_that_never_returns_fails_its_response_and_holds_up_no_other(make_stage: MakeStage, caplog):
    forever = threading.Event()
    before = set(threading.enumerate())

    def score(response: str, row: Any) -> float:
        if response == "hang":
            forever.wait()
        return 1.0

    stage = make_stage(score, workers=1, timeout_s=0.5)
    rewards = await scored(stage, "hang", "a", "hang", "b")
    assert numbers(rewards) == [None, 1.0, None, 1.0]
    assert "reward.timeout_s = 0.5" in rewards[0].verdict.summary
    assert stage.stats()["lost_threads"] == 2
    forever.set()
    await until(lambda: len(set(threading.enumerate()) - before) == 1)  # the lost threads end after their call
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.name == "asyncio"], "a late result is ignored"


async def test_a_call_whose_caller_left_keeps_its_thread_until_it_returns(make_stage: MakeStage):
    started, other = threading.Event(), threading.Event()
    overlaps: list[bool] = []

    def score(response: str, row: Any) -> float:
        if response == "left":
            started.set()
            overlaps.append(other.wait(0.2))
        other.set()
        return 1.0

    stage = make_stage(score, workers=1)
    left = begin(stage, ["left"])
    await until(started.is_set)
    left.cancel()
    assert numbers(await scored(stage, "next", ordinal=1)) == [1.0]
    assert overlaps == [False], "more calls than `workers` at once"


@pytest.mark.parametrize("odd", ["ignores its cancellation", "times out by itself", "cancels itself"])
async def test_an_async_function_fails_one_response_however_it_ends(make_stage: MakeStage, odd: str):
    stop = asyncio.Event()

    async def score(response: str, row: Any) -> float:
        if response != "odd":
            return 1.0
        if odd == "cancels itself":
            raise asyncio.CancelledError
        if odd == "times out by itself":
            async with asyncio.timeout(0):
                await stop.wait()
        while not stop.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await stop.wait()
        return 1.0

    rewards = await scored(make_stage(score, timeout_s=0.3), "odd", "a", "b")
    assert numbers(rewards) == [None, 1.0, 1.0]
    reason = {"ignores its cancellation": "timeout", "times out by itself": "TimeoutError"}.get(odd, "CancelledError")
    assert rewards[0].verdict.reason == reason
    stop.set()


# -- processes --------------------------------------------------------------------------------------------------------

REWARDS_IN_PROCESSES = """
import os, pathlib, time

def score(response, row):
    kind, _, rest = response.partition(" ")
    if kind == "die":
        os._exit(9)
    if kind == "die_once" and not pathlib.Path(rest).exists():
        pathlib.Path(rest).write_text("died")
        os._exit(9)
    if kind == "hang":
        print("hanging", flush=True)
        time.sleep(3600)
    if kind == "raise":
        raise KeyError(rest)
    return {"score": 1.0, "pid": os.getpid()}
"""


@pytest.fixture
def in_processes(make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeStage:
    (tmp_path / "rewards_in_processes.py").write_text(REWARDS_IN_PROCESSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda **settings: make_stage("rewards_in_processes:score", executor="process", workers=1, **settings)


async def test_processes_score_and_fail_as_threads_do_and_a_dead_one_is_replaced(in_processes, tmp_path: Path):
    stage = in_processes()
    rewards = await scored(stage, "a", "raise answer", f"die_once {tmp_path / 'mark'}", "die", "b")
    assert numbers(rewards) == [1.0, None, 1.0, None, 1.0]
    assert rewards[1].verdict.summary == "KeyError: 'answer'"
    assert "exit code 9" in rewards[3].verdict.summary and rewards[3].verdict.infra
    assert rewards[0].verdict.parts["pid"] != os.getpid()
    assert stage.stats()["process_deaths"] == 3


async def test_a_process_that_hangs_is_killed(in_processes: MakeStage):
    first, hung, last = await scored(in_processes(timeout_s=1.0), "a", "hang", "c")
    assert numbers([first, hung, last]) == [1.0, None, 1.0]
    assert hung.verdict.reason == "timeout" and hung.verdict.infra
    assert not psutil.pid_exists(int(first.verdict.parts["pid"]))


async def test_a_function_that_a_process_cannot_load_fails_with_the_reason(in_processes: MakeStage, tmp_path: Path):
    stage = in_processes()
    (tmp_path / "rewards_in_processes.py").write_text("")
    with pytest.raises(ScoringFailed, match="the function could not be loaded there: AttributeError"):
        await scored(stage, "a")


def test_a_process_that_is_busy_ends_with_its_parent(tmp_path: Path):
    (tmp_path / "rewards_in_processes.py").write_text(REWARDS_IN_PROCESSES)
    code = """
        import asyncio
        from freewheel.rollout.reward_functions import Call, load_reward
        from freewheel.rollout.reward_workers import FunctionRunner

        function = load_reward("rewards_in_processes:score")
        runner = FunctionRunner(function, workers=1, executor="process", timeout_s=3600)
        asyncio.run(runner.score([Call(text="hang", row={})]))
    """
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with psutil.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"hanging\n"
        children = parent.children()
        parent.kill()
    assert children and not psutil.wait_procs(children, timeout=WAIT_S)[1]


async def test_a_lambda_is_sent_to_the_process_by_value(make_stage: MakeStage):
    offset = 2.0
    stage = make_stage(lambda response, row: len(response) + offset, executor="process", workers=1)
    assert numbers(await scored(stage, "a", "bb")) == [3.0, 4.0]


# -- judge and length penalty -----------------------------------------------------------------------------------------


def judged(mock: RunningJudge, **settings: Any) -> dict[str, Any]:
    usual = {"api_key": KEY, "api_endpoint": mock.url, "model_name": "m", "enable": False, "judge_gate": "off"}
    return {**usual, "judge": {"placement": "thread"}, **settings}


async def test_the_judge_is_added_to_the_rule_and_raw_and_shaped_are_kept_apart(make_stage: MakeStage):
    with MockJudge(JudgeProfile(scores={"fine": "8", "poor": "3"})).in_thread() as mock:
        stage = make_stage(judge=judged(mock, enable=True, reward_coefficient=0.1))
        rewards = await scored(stage, "fine yes", "fine yes", "fine yes, and yes again", "poor one")
        await stage.close()
    assert [one.raw_reward for one in rewards] == pytest.approx([1.8, 1.8, 1.8, 0.3])
    assert rewards[0].reward == pytest.approx(1.8)
    assert rewards[2].reward == pytest.approx(0.8), "three times the median length costs max_penalty"
    parts = {"rule": 1.0, "quality": pytest.approx(0.8), "length_penalty": 1.0, "judged": 1.0}
    assert rewards[2].verdict.parts == parts


BAD = JudgeProfile(scores={"bad": "no score at all", "good": "5", "fine": "8"})


@pytest.mark.parametrize(
    ("texts", "judge", "rewards", "odd", "sent"),
    [
        # The gate keeps a response whose rule gave 0 from the judge, and its rule score counts.
        (("fine yes", "fine", "yes, fine"), {"judge_gate": "on"}, [9.0, 0.0, 9.0], "scored", 2),
        (("good yes", "bad yes", "good"), {}, [6.0, None, 5.0], "failed", 4),  # asked twice
        (("good yes", "bad yes", "good"), {"on_failure": "rule_only"}, [6.0, 1.0, 5.0], "failed", 4),
        (("good", "odd", "good"), {}, [5.0, None, 5.0], "failed", 1),  # its rule fails: it is not judged
    ],
)
async def test_a_missing_verdict_is_never_a_zero(make_stage: MakeStage, caplog, texts, judge, rewards, odd, sent):
    def rule(response: str, row: Any) -> float:
        return 1 / 0 if response == "odd" else yes(response, row)

    with MockJudge(BAD).in_thread() as mock:
        on_failure = "raise" if "on_failure" in judge else "mask"
        stage = make_stage(rule, judge=judged(mock, **judge), on_failure=on_failure)
        found = await scored(stage, *texts)
        await stage.close()
        assert len(set(mock.counts().contents)) == sent
    assert numbers(found) == rewards
    assert found[1].verdict.status == odd
    assert found[1].verdict.parts["judged"] == 0.0
    reason = {"bad yes": "judge unparseable", "odd": "ZeroDivisionError"}.get(texts[1])
    assert stage.stats()["failed"] == ({reason: 1} if reason else {})
    assert KEY not in caplog.text


async def test_statistics_of_the_judge_come_without_a_wait(make_stage: MakeStage):
    with MockJudge(JudgeProfile(scores={"fine": "8"})).in_thread() as mock:
        stage = make_stage(judge=judged(mock))
        assert "judge" not in stage.stats(), "it is not started before the first request"
        await scored(stage, "fine", "fine", "fine and more")
        await until(lambda: stage.stats()["judge"]["scored"] == 3)  # each call brings them for the next one
    found = stage.stats()["judge"]
    assert (found["sent"], found["throttled"], found["failed"], found["faults"]) == (2, 0, {}, {})
    assert found["shared"] + found["cache_hits"] == 1
    assert [(one["url"], one["answered"]) for one in found["endpoints"]] == [(mock.url, 2)]
    assert found["limit"] > 0
    assert KEY not in str(found)


async def test_only_the_judge_is_asked_again_where_the_rule_is_known(make_stage: MakeStage):
    ruled: list[str] = []

    def score(response: str, row: Any) -> float:
        ruled.append(response)
        return 1.0

    # Neither the first request nor the differently worded second one gets a readable reply; then the judge recovers.
    profile = JudgeProfile(scores={"good": "5"}, unparseable_share=1.0, faults_per_content=1)
    with MockJudge(profile).in_thread() as mock:
        stage = make_stage(score, judge=judged(mock), retries=1)
        assert numbers(await scored(stage, "good a", "good b")) == [6.0, 6.0]
        await stage.close()
    assert sorted(ruled) == ["good a", "good b"]
    assert stage.stats()["retried_groups"] == 1


async def test_a_judge_that_broke_down_is_replaced_once(make_stage: MakeStage, monkeypatch, caplog):
    submits: list[Any] = []
    submit = Judge.submit

    def breaks(judge: Judge, *given: Any, **more: Any) -> Any:
        submits.append(judge)
        if len(submits) in (1, 3, 4):
            raise JudgeDied("exit code 9")
        return submit(judge, *given, **more)

    monkeypatch.setattr(Judge, "submit", breaks)
    with MockJudge(BAD).in_thread() as mock:
        stage = make_stage(judge=judged(mock))
        assert numbers(await scored(stage, "good")) == [5.0]
        assert submits[0] is not submits[1]
        with pytest.raises(ScoringFailed, match="judge engine: exit code 9"):
            await scored(stage, "fine", ordinal=1)
        await stage.close()
    assert "another one is started: exit code 9" in caplog.text


async def test_without_a_key_the_length_penalty_works_alone_and_counts_the_policys_own_tokens(
    make_stage: MakeStage, caplog
):
    stage = make_stage(judge={"api_endpoint": "http://127.0.0.1:9/v1", "enable": True})
    group = begin(stage, ["yes", "yes", "yes and yes and yes"], n=4)
    group.add(3, "yes", response("y" * 20, mask=np.array([1, 1, 1] + [0] * 17, np.uint8)))
    rewards = await group.result()
    assert numbers(rewards) == [1.0, 1.0, 0.0, 1.0]
    assert rewards[2].raw_reward == 1.0
    assert "No API key" in caplog.text


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_closing_leaves_no_thread_process_or_open_group(in_processes: MakeStage):
    before = set(threading.enumerate())
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    with MockJudge(JudgeProfile(hang_share=1.0)).in_thread() as mock:
        stage = in_processes(judge=judged(mock, judge={"placement": "process"}))
        group = begin(stage, ["a", "b"])
        waiting = asyncio.create_task(group.result())
        await until(lambda: mock.counts().in_flight == 2)
        await stage.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await stage.close()
    assert set(threading.enumerate()) <= before
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children


async def test_a_group_that_is_given_up_returns_its_permits(make_stage: MakeStage):
    started: list[str] = []
    go_on = asyncio.Event()

    async def score(response: str, row: Any) -> float:
        started.append(response)
        await go_on.wait()
        return 1.0

    stage = make_stage(score, concurrency=1)
    waiting = asyncio.create_task(begin(stage, ["a", "b", "c"]).result())
    while not started:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    wanted = begin(stage, ["d", "e"], ordinal=1)
    go_on.set()
    assert numbers(await wanted.result()) == [1.0, 1.0]
    assert started == ["a", "d", "e"]


async def test_statistics_of_the_stage(make_stage: MakeStage):
    now = 0.0
    go_on = asyncio.Event()

    async def score(response: str, row: Any) -> float:
        await go_on.wait()
        return 1.0

    stage = make_stage(score, concurrency=1, clock=lambda: now)
    group = begin(stage, ["a", "b"])
    await asyncio.sleep(0)
    assert stage.stats()["in_flight"] == 1 and stage.stats()["waiting"] == 1, "`concurrency` at a time"
    now = 3.0
    go_on.set()
    await group.result()
    now = 10.0
    stats = stage.stats()
    assert (stats["in_flight"], stats["waiting"], stats["scored"]) == (0, 0, 2)
    assert stats["mean_latency_s"] == 3.0
    assert stats["busy_s"] == 3.0, "time after the last response is idle time"
