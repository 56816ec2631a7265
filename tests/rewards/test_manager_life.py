"""A reward manager's life: starts, ends, forks, pickles, and engines that die under it (SPEC 1.1)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from freewheel.judge import Failed, Handle, JudgeRequest, Scored, transport
from freewheel.judge.verdict import JudgeDied
from freewheel.rewards import LengthPenaltyRewardManager, RewardFailed
from freewheel.rewards import manager as manager_module
from freewheel.rewards import openai_manager as openai_manager_module

from .conftest import KEY, WAIT_S, Characters, MakeManager, Mock, batch_of, last_values, rule

Logged = Callable[..., list[str]]


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def engines() -> list[threading.Thread]:
    """The judge's engines in this process: their threads, or the threads that talk to their processes."""
    names = ("freewheel-judge", "freewheel-judge-link")
    return [thread for thread in threading.enumerate() if thread.name in names]


def child_pid(manager: LengthPenaltyRewardManager) -> int:
    assert manager.async_openai_manager is not None
    judge: Any = manager.async_openai_manager
    assert eventually(lambda: judge._link is not None and judge._link.child_pid is not None)
    return int(judge._link.child_pid)


class Held:
    """What this process holds: threads, children, descriptors."""

    def __init__(self) -> None:
        gc.collect()
        process = psutil.Process()
        self.threads = {thread.ident for thread in threading.enumerate()}
        self.children = {child.pid for child in process.children(recursive=True)}
        self.fds = sorted(open_files())
        self.ports = {(one.laddr, one.raddr) for one in process.net_connections("inet")}

    def as_before(self, before: Held) -> bool:
        return (
            self.threads <= before.threads
            and self.children <= before.children
            and len(self.fds) <= len(before.fds)
            and self.ports <= before.ports
        )


def open_files() -> Iterator[str]:
    for fd in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder was read
            yield str(fd.readlink())


@pytest.fixture
def five(mock: Mock) -> str:
    """A judge that gives everything a 5: `yes` is then worth 6."""
    return mock(scores={"": "5"}).url


# -- start and shutdown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["process", "thread", "async off", "no key"])
def test_workers_start_at_the_first_use_and_a_shutdown_leaves_nothing(
    five: str, make_manager: MakeManager, placement: str
) -> None:
    is_async = placement in ("process", "thread")

    async def call_inside_a_loop(manager: LengthPenaltyRewardManager) -> None:
        manager(batch_of("yes"))

    def live() -> None:
        judge = {"placement": placement} if is_async else {"cache": False}
        manager = make_manager(None if placement == "no key" else five, use_async_io=is_async, judge=judge)
        manager.shutdown_workers()
        assert not engines()
        for _ in range(2):
            data = batch_of("yes a", "yes b")
            assert last_values(manager(data), data) == [1.0 if placement == "no key" else 6.0] * 2
            found = engines()
            assert len(found) == is_async
            for _ in range(2):
                manager.start_workers()
            asyncio.run(call_inside_a_loop(manager))
            manager._ensure_event_loop()
            manager.submit(batch_of("yes d"))
            assert engines() == found, "workers persist"
            for _ in range(2):
                manager.shutdown_workers()
            names = [one.name for one in threading.enumerate()]
            assert not [name for name in names if name.startswith(("freewheel-judge", "freewheel-rewards"))]
        asyncio.set_event_loop(None)

    live()  # opens what stays open, such as a module's files
    before = Held()
    live()
    assert eventually(lambda: Held().as_before(before)), (vars(before), vars(Held()))


def test_a_shutdown_or_cancel_ends_a_batch_as_failed_and_nobody_hangs(
    mock: Mock, make_manager: MakeManager, logged: Logged
) -> None:
    judge = mock(hang_share=1.0)
    for end in ("shutdown", "cancel"):
        manager = make_manager(judge.url, use_async_io=True)
        handle = manager.submit(batch_of(f"yes {end}"), return_dict=True)
        assert eventually(lambda: judge.counts().in_flight == 1)
        for _ in range(2):
            handle.cancel() if end == "cancel" else manager.shutdown_workers()
        extra = handle.result()["reward_extra_info"]
        assert (extra["judge_status"], extra["judge_reason"]) == (["failed"], ["cancelled"])
        assert extra["reward_mask"] == [0] and handle.done()
        if end == "shutdown":
            assert not engines()
            assert "1 batches are not complete: their rows without a verdict have failed" in logged(logging.WARNING)
        assert eventually(lambda: judge.counts().in_flight == 0)


class SlowRule:
    """A `compute_score` that waits for `proceed`."""

    def __init__(self) -> None:
        self.started, self.proceed = threading.Event(), threading.Event()

    def __call__(self, **_: Any) -> float:
        self.started.set()
        assert self.proceed.wait(WAIT_S)
        return 1.0


def test_a_shutdown_waits_five_seconds_at_most(
    five: str, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert manager_module.SHUTDOWN_TIMEOUT_S == openai_manager_module.SHUTDOWN_TIMEOUT_S == 5.0
    monkeypatch.setattr(manager_module, "SHUTDOWN_TIMEOUT_S", 0.3)
    rule = SlowRule()
    manager = make_manager(five, use_async_io=True, compute_score=rule)
    handle = manager.submit(batch_of("yes"))
    before = time.monotonic()
    manager.shutdown_workers()
    assert time.monotonic() - before < 10
    rule.proceed.set()
    assert handle.result().sum() == 6.0, "a submitted batch is still answered"


def test_a_rule_that_outlasts_a_shutdown_does_not_start_the_new_engine(five: str, make_manager: MakeManager) -> None:
    rule = SlowRule()
    manager = make_manager(five, use_async_io=True, compute_score=rule)
    manager.start_workers()
    handle = manager.submit(batch_of("yes"))
    assert rule.started.wait(WAIT_S)
    first = manager.async_openai_manager
    assert first is not None
    first.shutdown()
    manager.async_openai_manager = fresh = manager._new_manager()
    rule.proceed.set()
    assert float(handle.result().sum()) == 6.0
    assert fresh is not None and not fresh.running


def test_a_batch_that_is_cancelled_before_it_reaches_the_judge_ends_when_its_rules_do(
    five: str, make_manager: MakeManager
) -> None:
    rule = SlowRule()
    handle = make_manager(five, use_async_io=True, compute_score=rule).submit(batch_of("yes"), return_dict=True)
    assert rule.started.wait(WAIT_S)
    handle.cancel()
    assert not handle.done()
    rule.proceed.set()
    assert handle.result()["reward_extra_info"]["judge_reason"] == ["cancelled"]


def test_a_manager_that_nobody_holds_takes_its_engine_with_it(five: str) -> None:
    config = {"api_key": KEY, "api_endpoint": five, "use_async_io": True, "judge": {"placement": "thread"}}
    manager = LengthPenaltyRewardManager(Characters(), 0, rule, length_penalty_config=config)
    manager(batch_of("yes"))
    assert len(engines()) == 1
    del manager
    gc.collect()
    assert eventually(lambda: not engines())


def test_a_program_that_never_shuts_down_still_ends(five: str, tmp_path: Path) -> None:
    source = f"""
    import sys
    from types import SimpleNamespace
    import torch
    from freewheel.rewards import LengthPenaltyRewardManager
    config = {{"api_key": "EMPTY", "api_endpoint": {five!r}, "model_name": "m", "use_async_io": True}}
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "text")
    manager = LengthPenaltyRewardManager(tokenizer, 0, lambda **_: 1.0, length_penalty_config=config)
    one = torch.ones(1, 1, dtype=torch.int64)
    tensors = {{"prompts": one, "responses": one, "attention_mask": torch.ones(1, 2, dtype=torch.int64)}}
    columns = {{"data_source": ["x"], "reward_model": [{{"ground_truth": ""}}], "uid": ["a"]}}
    batch = SimpleNamespace(batch=tensors, non_tensor_batch=columns, meta_info={{}})
    print(manager(batch).item(), manager.async_openai_manager._link.child_pid, flush=True)
    manager.submit(batch)
    """
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(source))
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    reward, pid = ended.stdout.split()
    assert reward == "6.0"
    assert eventually(lambda: not psutil.pid_exists(int(pid)))


# -- failures of the engine -------------------------------------------------------------------------------------------


def test_an_engine_that_keeps_dying_is_replaced_by_the_synchronous_path_which_says_so(
    mock: Mock, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_RESTARTS_ALLOWED", 1)
    judge = mock(scores={"": "5"}, latency_s=0.5)
    manager = make_manager(judge.url, use_async_io=True, judge={"placement": "process", "cache": False})
    data = batch_of("yes a", "yes b")
    handle = manager.submit(data, return_dict=True)
    killed: set[int] = set()
    while len(killed) < 2:
        pid = child_pid(manager)
        if pid not in killed:
            assert eventually(lambda: judge.counts().in_flight > 0)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            assert eventually(lambda: judge.counts().in_flight == 0)
        time.sleep(0.01)
    result = handle.result()
    assert last_values(result["reward_tensor"], data) == [6.0, 6.0]
    assert result["reward_extra_info"]["judge_status"] == ["scored", "scored"]
    [warning] = logged(logging.WARNING)
    assert warning.startswith("Async evaluation failed for 2 of 2 responses") and "synchronous" in warning
    assert "Using synchronous method for batch with 2 responses (set use_async_io=True for async)" in logged()

    again = batch_of("yes c")
    assert last_values(manager(again), again) == [6.0], "later batches find it broken"
    assert "JudgeDied" in logged(logging.WARNING)[-1] and "synchronous path" in logged(logging.WARNING)[-1]
    manager.shutdown_workers()
    assert last_values(manager(again), again) == [6.0]
    assert len(logged(logging.WARNING)) == 2, "after a shutdown there is a new engine"


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
@pytest.mark.parametrize("moment", ["process", "link"])
def test_an_engine_that_cannot_start_is_replaced_by_the_synchronous_path(
    five: str,
    make_manager: MakeManager,
    logged: Logged,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moment: str,
    error: Exception,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    if moment == "process":
        monkeypatch.setattr(transport, "start_child", fail)
    else:
        monkeypatch.setattr(transport.Link, "start", fail)

    def sockets() -> set[str]:
        return {file for file in open_files() if file.startswith("socket")}

    before = sockets()
    manager = make_manager(five, use_async_io=True, judge={"placement": "process"})
    for number in range(2):
        data = batch_of(f"yes {number}")
        result = manager(data, return_dict=True)
        assert last_values(result["reward_tensor"], data) == [6.0]
        assert result["reward_extra_info"]["judge_status"] == ["scored"]
    assert eventually(lambda: sockets() <= before), "the engine's socket was left open"
    warned = logged(logging.WARNING)
    assert len(warned) == 2 and all("Async evaluation failed" in line and "synchronous" in line for line in warned)


async def test_a_dead_engine_and_broken_rows_are_replaced_inside_a_running_loop_too(
    five: str, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(five, use_async_io=True)
    requests = [JudgeRequest("yes a"), JudgeRequest("yes b")]
    data = batch_of("yes a", "yes b")

    def break_first(requests: Any) -> Handle:
        handle = Handle(0, requests, None, cancel=lambda _: None)
        handle.put(0, Failed("engine", detail="it broke"))
        handle.put(1, Scored(7.0))
        handle.wake()
        return handle

    def die(*_: Any, **__: Any) -> Any:
        raise JudgeDied("it died")

    for submit, scores in ((break_first, [5.0, 7.0]), (die, [5.0, 5.0])):
        monkeypatch.setattr(manager.async_openai_manager, "submit", submit)
        verdicts = await manager._get_batched_openai_quality_rewards_async(requests)
        assert [verdict.value for verdict in verdicts] == scores
        for rewards in (manager(data), await manager.submit(data)):
            assert last_values(rewards, data) == [1.0 + score for score in scores]
    warnings = logged(logging.WARNING)
    assert ["it broke" in line for line in warnings] == [True] * 3 + [False] * 3
    assert ["it died" in line for line in warnings] == [False] * 3 + [True] * 3


def test_a_batch_for_which_no_thread_is_left_is_judged_by_its_result(
    five: str, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(five, use_async_io=True)

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        handle = manager.submit(batch_of("yes"))
    assert float(handle.result().sum()) == 6.0
    assert "can't start new thread" in logged(logging.WARNING)[0]


@pytest.mark.parametrize("use_async_io", [True, False])
def test_max_cost_is_one_for_all_batches(mock: Mock, make_manager: MakeManager, use_async_io: bool) -> None:
    judge = mock(scores={"": "5"})
    prices = {"m": {"input": 0.0, "output": 1e6}}  # 1 a token, and a reply has one
    settings = {"prices": prices, "max_cost": 3.0, "max_tokens": 1}
    manager = make_manager(judge.url, use_async_io=use_async_io, judge={"placement": "thread", **settings})
    statuses = []
    for batch in range(3):
        result = manager(batch_of(f"yes {batch}a", f"yes {batch}b"), return_dict=True)
        statuses += result["reward_extra_info"]["judge_status"]
    assert statuses.count("scored") == judge.counts().answered == 3


@pytest.mark.parametrize("use_async_io", [True, False])
def test_a_result_that_raised_raises_again_and_sends_nothing_more(
    mock: Mock, make_manager: MakeManager, use_async_io: bool
) -> None:
    judge = mock(scores={"": "no score at all"})
    handle = make_manager(judge.url, use_async_io=use_async_io, on_failure="raise").submit(batch_of("yes"))
    for _ in range(2):
        with pytest.raises(RewardFailed):
            handle.result()
    assert handle.done() and judge.counts().received == 2, "the request and its repetition"


# -- other processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_async_io", [True, False])
def test_a_pickle_has_no_key_and_its_copy_judges_where_the_environment_has_one(
    mock: Mock, make_manager: MakeManager, logged: Logged, monkeypatch: pytest.MonkeyPatch, use_async_io: bool
) -> None:
    judge = mock(scores={"": "5"})
    manager = make_manager(judge.url, use_async_io=use_async_io, num_examine=3)
    batch = batch_of("yes")
    manager(batch)
    data = pickle.dumps(manager)
    assert KEY.encode() not in data
    copied = pickle.loads(data)
    assert copied.async_openai_manager is None and last_values(copied(batch), batch) == [1.0]
    [warning] = logged(logging.WARNING)
    assert "API key" in warning and "OPENAI_API_KEY" in warning
    assert judge.counts().received == 1
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    copied = pickle.loads(data)
    assert (copied.async_openai_manager is not None) is use_async_io
    assert copied.num_examine == 3 and last_values(copied(batch), batch) == [6.0]
    copied.shutdown_workers()
    assert last_values(manager(batch), batch) == [6.0]


def test_a_deep_copy_keeps_the_key_and_has_a_separate_engine(five: str, make_manager: MakeManager) -> None:
    manager = make_manager(five, use_async_io=True)
    copied = copy.deepcopy(manager)
    data = batch_of("yes")
    assert last_values(copied(data), data) == [6.0]
    assert manager.async_openai_manager is not None and not manager.async_openai_manager.running
    copied.shutdown_workers()
