"""`Judge` and `Handle` as users meet them, in both placements, and `InlineJudge` on the caller's loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge import (
    ConfigError,
    Failed,
    Judge,
    JudgeClosed,
    JudgeConfig,
    JudgeDied,
    JudgeRequest,
    Rubric,
    Skipped,
    Verdict,
)
from freewheel.judge import engine as engine_module
from freewheel.judge import tracker as tracker_module
from freewheel.judge.judge import STATS_TIMEOUT_S, InlineJudge
from freewheel.judge.testing import RunningJudge

from .helpers import SLACK_S, WAIT_S, open_fds, reasons, texts, until, wait_until

Mock = Callable[..., RunningJudge]
Make = Callable[..., Judge]
UNREACHABLE = "http://127.0.0.1:1/v1"

in_process = pytest.mark.parametrize("placement", ["process"], indirect=True)


def child_pid(judge: Judge) -> int:
    link = judge._link
    assert link is not None
    wait_until(lambda: link.child_pid is not None)
    assert link.child_pid is not None
    return link.child_pid


# -- batches ---------------------------------------------------------------------------------------------------------


def test_verdicts_come_in_the_order_of_the_requests(mock: Mock, make_judge: Make) -> None:
    judge = make_judge(mock(max_prompt_chars=20_000, scores={"five": "5", "nine": "9"}).url)
    handle = judge.submit(["five", {"response": "x" * 30_000}, JudgeRequest("a", skip="empty"), JudgeRequest("nine")])
    verdicts = handle.result(WAIT_S)
    assert [v.status for v in verdicts] == ["scored", "failed", "skipped", "scored"]
    assert verdicts[0].value == 5.0 and verdicts[3].value == 9.0 and verdicts[2] == Skipped("empty")
    assert handle.done() and handle.progress() == (4, 2, 1, 1) and handle.progress().share == 1.0 and len(handle) == 4
    assert handle.result(0) == verdicts, "the result can be requested again"


def test_an_empty_batch_is_done_at_once_and_starts_nothing(make_judge: Make) -> None:
    judge = make_judge(UNREACHABLE)
    handle = judge.submit([])
    assert handle.done() and handle.result() == [] and handle.progress().share == 1.0
    assert asyncio.run(judge.score(iter(()))) == []
    assert "not started" in repr(judge)


def test_submit_returns_at_once_and_a_timeout_leaves_the_batch_running(mock: Mock, make_judge: Make) -> None:
    hanging = mock(hang_share=1.0)
    judge = make_judge(hanging.url).start()
    began = time.monotonic()
    handle = judge.submit(texts(5000))
    assert time.monotonic() - began < SLACK_S
    with pytest.raises(TimeoutError, match=r"0 of 5000 verdicts are in after 0\.2 s"):
        handle.result(timeout_s=0.2)
    assert not handle.done() and handle.progress().done == 0
    handle.cancel()
    assert reasons(handle.result(0)) == {"cancelled"}
    wait_until(lambda: hanging.counts().in_flight == 0)


def test_a_handle_can_be_awaited_and_iterated_in_order_and_as_completed(mock: Mock, make_judge: Make) -> None:
    judge = make_judge(mock(latency="lognormal", latency_s=0.05).url)

    async def main() -> None:
        handle = judge.submit(texts(40))
        in_order = [verdict async for verdict in handle]
        pairs = [pair async for pair in handle.as_completed()]
        assert sorted(index for index, _ in pairs) == list(range(40))
        assert [dict(pairs)[index] for index in range(40)] == in_order == await handle == handle.result(0)

    asyncio.run(main())


def test_threads_and_event_loops_submit_at_once_and_no_wake_is_lost(mock: Mock, make_judge: Make) -> None:
    judge = make_judge(mock().url)
    judge.submit(["warm up"]).result(WAIT_S)
    ends: list[set[str]] = []

    async def score_twice(name: str) -> list[Verdict]:
        halves = await asyncio.gather(judge.score(texts(20, name)), judge.score(texts(20, name + "b")))
        return halves[0] + halves[1]

    def live(number: int) -> None:
        for step in range(20):
            ends.append(reasons(judge.submit(texts(2, f"{number} {step}")).result(WAIT_S)))
        ends.append(reasons(asyncio.run(score_twice(f"loop {number}"))))

    threads = [threading.Thread(target=live, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert ends == [{"scored"}] * 6 * 21 and judge.stats().scored == 1 + 6 * 80


def test_cancelling_a_score_cancels_its_batch(mock: Mock, make_judge: Make) -> None:
    hanging = mock(hang_share=1.0)
    judge = make_judge(hanging.url)

    async def main() -> None:
        scoring = asyncio.create_task(judge.score(texts(4)))
        await asyncio.to_thread(wait_until, lambda: hanging.counts().in_flight == 4)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(main())
    assert judge.pending == 0
    wait_until(lambda: hanging.counts().in_flight == 0)


def test_a_judge_works_inside_a_running_loop(mock: Mock, make_judge: Make) -> None:
    async def main() -> None:
        judge = make_judge(mock().url)
        assert reasons(judge.submit(texts(3)).result(WAIT_S)) == {"scored"}
        async with judge:
            assert reasons(await judge.score(texts(3, "more"))) == {"scored"}
        with pytest.raises(JudgeClosed):
            await judge.score(texts(1))

    asyncio.run(main())


@pytest.mark.parametrize("placement", ["thread"], indirect=True)
def test_verdicts_do_not_wait_for_more_once_all_batches_are_answered(
    mock: Mock, make_judge: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.judge.transport.LINGER_S", 1e6)
    assert reasons(make_judge(mock().url).submit(texts(3)).result(WAIT_S)) == {"scored"}


def test_large_and_odd_texts_arrive(mock: Mock, make_judge: Make) -> None:
    class Text(str):
        pass

    judge = make_judge(mock(max_prompt_chars=1 << 30).url)
    odd = [
        "",
        " ",
        "\x00",
        "a\x00b",
        "\ud800",
        "x\udfffy",
        "\u2028\r\n",
        "𝟙\u202e",
        '"}\\',
        "{response}",
        "x" * (3 << 20),
    ]
    requests = [*odd, *(JudgeRequest("r", one, one) for one in odd), Text("a"), JudgeRequest(Text("a"), Text("b"))]
    assert reasons(judge.submit(requests).result(WAIT_S)) == {"scored"}
    odd_skip = judge.submit([JudgeRequest("a", skip="why \ud800", id="\udfff")]).result(WAIT_S)
    assert isinstance(odd_skip[0], Skipped)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (["fine", 7], r"requests\[1\] = 7"),
        ([None], r"requests\[0\]"),
        ([b"bytes"], r"requests\[0\]"),
        ([{"prompt": "p"}], r"requests\[0\].*response"),
        (["a", {"response": 7}], r"requests\[1\]\.response = 7: give text"),
        ([{"response": "r", "promt": "p"}], r"requests\[0\]\.promt.*unknown field; known are response, prompt"),
        ([JudgeRequest(7)], r"requests\[0\]\.response = 7"),  # type: ignore[arg-type]
        ([JudgeRequest("r", None)], r"requests\[0\]\.prompt = None"),  # type: ignore[arg-type]
        ([JudgeRequest("r", reference=None)], r"requests\[0\]\.reference = None"),  # type: ignore[arg-type]
        ([JudgeRequest("r", id=5.5)], r"requests\[0\]\.id = 5"),  # type: ignore[arg-type]
        ([JudgeRequest("r", skip=True)], r"requests\[0\]\.skip = True"),  # type: ignore[arg-type]
        ([{"response": ["x" * 1_000_000]}], r"\A.{1,500}\Z"),
        ("a string", "give several"),
        ({"response": "r"}, "give several"),
        (JudgeRequest("r"), "give several"),
        (None, "give several"),
    ],
)
def test_a_request_of_the_wrong_shape_is_named_and_starts_nothing(requests: Any, message: str) -> None:
    with Judge({"endpoint": UNREACHABLE, "model": "m"}) as judge:
        with pytest.raises(ConfigError, match=message):
            judge.submit(requests)
        assert "not started" in repr(judge)


@pytest.mark.parametrize("deadline_s", [0, -1, -1.0, float("nan"), float("inf"), "5", True])
def test_an_impossible_deadline_is_refused(deadline_s: Any) -> None:
    with (
        Judge(JudgeConfig(endpoint=UNREACHABLE, model="m")) as judge,
        pytest.raises(ConfigError, match="deadline_s"),
    ):
        judge.submit(["a"], deadline_s=deadline_s)


@pytest.mark.parametrize("fault", ["ca_file", "no_such_module"])
def test_a_setting_that_fails_only_at_the_start_is_reported_and_nothing_hangs(
    make_judge: Make, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "bundle.pem").write_text("no certificate")
    rubric = Rubric(name="r", system="s", parser="no_such_module:read")
    settings = {"ca_file": {"ca_file": str(tmp_path / "bundle.pem")}, "no_such_module": {"rubric": rubric}}[fault]
    threads = threading.active_count()
    judge = make_judge("https://127.0.0.1:1/v1", batch_deadline_s=None, **settings)
    with contextlib.suppress(JudgeDied):  # the engine may have ended before the batch arrives
        (verdict,) = judge.submit(["a"]).result(WAIT_S)
        assert isinstance(verdict, Failed) and verdict.reason == "engine" and fault in verdict.detail
    with pytest.raises(JudgeDied, match=fault):
        judge.submit(["a"])
    began = time.monotonic()
    assert judge.stats().scored == 0 and time.monotonic() - began < STATS_TIMEOUT_S
    judge.close()
    wait_until(lambda: threading.active_count() <= threads)


# -- deadlines -------------------------------------------------------------------------------------------------------


def test_a_batchs_deadline_is_kept(mock: Mock, make_judge: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_judge(mock(hang_share=1.0).url)
    began = time.monotonic()
    assert reasons(judge.submit(texts(5), deadline_s=0.05).result(WAIT_S)) == {"deadline"}, "while the engine starts"
    assert time.monotonic() - began < 0.05 + 2 * SLACK_S
    monkeypatch.setattr(tracker_module, "GRACE_S", 10.0)  # so that the engine ends it
    began = time.monotonic()
    verdicts = judge.submit(texts(50), deadline_s=0.4).result(WAIT_S)
    assert 0.4 <= time.monotonic() - began < 0.4 + SLACK_S
    assert reasons(verdicts) == {"deadline"} and any("no reply so far" in v.detail for v in verdicts)


def test_a_deadline_of_a_thousand_years_is_accepted(mock: Mock, make_judge: Make) -> None:
    judge = make_judge(mock().url, request_deadline_s=3e10, batch_deadline_s=3e10, attempt_timeout_s=3e10)
    assert reasons(judge.submit(["a"]).result(WAIT_S)) == {"scored"}


@in_process
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_deadline_is_kept_while_the_engines_process_is_stopped_or_restarted(
    mock: Mock, make_judge: Make, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("freewheel.judge.transport.FIRST_PAUSE_S", 5.0)
    judge = make_judge(mock(hang_share=1.0).url)
    judge.stats()
    began = time.monotonic()
    handle = judge.submit(texts(3), deadline_s=0.6)
    os.kill(child_pid(judge), number)
    assert reasons(handle.result(WAIT_S)) == {"deadline"} and 0.6 <= time.monotonic() - began < 0.6 + SLACK_S
    if number == signal.SIGSTOP:
        os.kill(child_pid(judge), signal.SIGCONT)
    began = time.monotonic()
    judge.close()
    assert time.monotonic() - began < 4.5, "closing does not wait for the pause"


# -- deaths of the engine's process ----------------------------------------------------------------------------------


@in_process
def test_a_killed_process_costs_time_and_no_verdict(
    mock: Mock, make_judge: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server = mock(latency_s=0.02)
    judge = make_judge(server.url, concurrency="fixed:8")
    handle = judge.submit(texts(300))
    wait_until(lambda: handle.progress().done > 60)
    os.kill(child_pid(judge), signal.SIGKILL)
    assert reasons(handle.result(WAIT_S)) == {"scored"} and judge.stats().restarts == 1
    counts = server.counts()
    assert counts.received <= 300 + 16 and counts.most_received <= 2, "only what was in flight is sent again"
    assert "died" in caplog.text and "-9" in caplog.text


@in_process
def test_max_cost_holds_across_a_restart(mock: Mock, make_judge: Make) -> None:
    server = mock()
    prices = {"m": {"input": 1000.0, "output": 1000.0}}
    judge = make_judge(server.url, prices=prices, max_cost=5.0, max_tokens=4, concurrency="fixed:2")
    assert reasons(judge.submit(texts(60)).result(WAIT_S)) == {"scored", "budget"}
    received = server.counts().received
    os.kill(child_pid(judge), signal.SIGKILL)
    assert reasons(judge.submit(texts(60, "more")).result(WAIT_S)) == {"budget"}
    assert server.counts().received == received and judge.stats().restarts == 1


@in_process
def test_a_process_that_keeps_dying_is_given_up_and_nothing_hangs(
    mock: Mock, make_judge: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.judge.transport.FIRST_PAUSE_S", 0.001)
    judge = make_judge(mock(hang_share=1.0).url, batch_deadline_s=None)
    handle = judge.submit(texts(5))
    killed: set[int] = set()
    while not handle.wait(0.01):
        pid = child_pid(judge)
        if pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
    assert len(killed) == 6
    (detail,) = {v.detail for v in handle.result(0)}
    assert reasons(handle.result(0)) == {"engine"} and "died 6 times" in detail and "-9" in detail
    with pytest.raises(JudgeDied, match="died 6 times"):
        judge.submit(texts(1))


# -- closing ---------------------------------------------------------------------------------------------------------


def children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            found.update(task.read_text().split())
    return found


def test_closing_leaves_no_thread_no_descriptor_and_no_child(mock: Mock, make_judge: Make, tmp_path: Path) -> None:
    server = mock()
    counted = []
    for cycle in range(4):
        judge = make_judge(server.url)
        assert reasons(judge.submit(texts(2, str(cycle))).result(WAIT_S)) == {"scored"}
        judge.close()
        judge.close()
        wait_until(lambda: server.counts().open_connections == 0)
        gc.collect()
        counted.append((threading.active_count(), open_fds(), children()))
    assert counted[1:] == [counted[0]] * 3
    for refused in (lambda: judge.submit(texts(1)), lambda: judge.submit([]), judge.start):
        with pytest.raises(JudgeClosed):
            refused()
    assert judge.stats().scored == 2, "the last figures stay readable"
    assert "closed" in repr(judge) and judge._link is not None
    files = [(tmp_path / str(n)).open("wb+", buffering=0) for n in range(20)]  # with the descriptors of the link
    judge._link.wake()
    assert all(file.seek(0, os.SEEK_END) == 0 for file in files)
    for file in files:
        file.close()


def test_closing_ends_open_batches_at_once_and_draining_waits_for_them(mock: Mock, make_judge: Make) -> None:
    judge = make_judge(mock(latency_s=0.2).url)
    drained = judge.submit(texts(5))
    judge.close(drain=True, timeout_s=WAIT_S)
    assert reasons(drained.result(0)) == {"scored"}
    hanging = mock(hang_share=1.0)
    for settings in ({"drain": True, "timeout_s": 0.2}, {}):
        judge = make_judge(hanging.url)
        handle = judge.submit(texts(5))
        wait_until(lambda: hanging.counts().in_flight == 5)
        waited: list[Any] = []
        thread = threading.Thread(target=lambda h=handle, w=waited: w.append(h.result(WAIT_S)))
        thread.start()
        judge.close(**settings)
        thread.join(WAIT_S)
        assert reasons(waited[0]) == {"cancelled"} and "the judge was closed" in waited[0][0].detail
        wait_until(lambda: hanging.counts().in_flight == 0)


@in_process
@pytest.mark.parametrize("is_ready", [True, False])
def test_a_stopped_process_is_killed_at_closing_and_not_replaced(mock: Mock, make_judge: Make, is_ready: bool) -> None:
    judge = make_judge(mock().url)
    threads = threading.active_count()
    judge.start()
    if is_ready:
        judge.submit(["a"]).result(WAIT_S)
    pid = child_pid(judge)
    os.kill(pid, signal.SIGSTOP)
    judge.close(timeout_s=0.3)
    assert not Path(f"/proc/{pid}").exists() and threading.active_count() == threads


def test_an_unreferenced_judge_lives_as_long_as_its_open_batch(mock: Mock, placement: str) -> None:
    url, threads = mock(latency_s=0.2).url, threading.active_count()
    handle = Judge(JudgeConfig(endpoint=url, model="m", placement=placement)).submit(["a", "b"])
    gc.collect()
    assert reasons(handle.result(WAIT_S)) == {"scored"} and threading.active_count() > threads
    del handle
    gc.collect()
    wait_until(lambda: threading.active_count() == threads)


# -- elsewhere -------------------------------------------------------------------------------------------------------


def test_a_judge_is_pickled_as_its_config(mock: Mock, make_judge: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_judge(mock(api_key="sk-pickled-123456").url, api_key="sk-pickled-123456")
    assert reasons(judge.submit(["a"]).result(WAIT_S)) == {"scored"}
    pickled = pickle.dumps(judge)
    assert b"sk-pickled" not in pickled
    monkeypatch.setenv("OPENAI_API_KEY", "sk-pickled-123456")
    with pickle.loads(pickled) as twin:
        assert reasons(twin.submit(["b"]).result(WAIT_S)) == {"scored"}
    monkeypatch.delenv("OPENAI_API_KEY")
    with pickle.loads(pickled) as twin:
        (verdict,) = twin.submit(["c"]).result(WAIT_S)
        assert verdict.reason == "auth" and "OPENAI_API_KEY" in verdict.detail
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(judge.submit([]))


def test_stats_are_zero_before_the_engine_starts(mock: Mock, make_judge: Make) -> None:
    judge = make_judge(mock().url)
    assert judge.stats().submitted == judge.recent_stats().submitted == 0
    judge.submit([*texts(5), texts(5)[0]]).result(WAIT_S)
    stats = judge.stats()
    assert (stats.submitted, stats.scored, stats.sent, stats.shared) == (6, 6, 5, 1)
    assert judge.recent_stats().scored == 6
    assert "6 scored" in stats.line() and "freewheel_judge_scored_total 6" in stats.prometheus()


@in_process
def test_the_engines_log_reaches_the_callers_logger(
    mock: Mock, make_judge: Make, caplog: pytest.LogCaptureFixture
) -> None:
    judge = make_judge(mock(api_key="right").url)
    with caplog.at_level(logging.INFO, "freewheel.judge"):
        judge.submit(["a"]).result(WAIT_S)
        judge.close()
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.name == "freewheel.judge" and "401" in record.getMessage()


async def test_a_starved_thread_warns_once_and_a_lively_one_does_not(
    mock: Mock, bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "LAG_SMOOTHING", 1 / 4)
    async with bench(mock(hang_share=1.0).url, placement="thread") as engine:
        engine.submit(["open"])
        await asyncio.sleep(0.1)
        assert "late" not in caplog.text
        for _ in range(12):
            time.sleep(0.15)  # the loop is held, as by a thread that keeps the interpreter to itself
            await asyncio.sleep(0.03)
        assert engine.engine.stats().loop_lag_s > engine_module.LAG_WARN_S
    (record,) = [r for r in caplog.records if "late" in r.getMessage()]
    assert record.name == "freewheel.judge" and "placement='process'" in record.getMessage()


# -- on the caller's loop --------------------------------------------------------------------------------------------


async def test_an_inline_judge_gives_the_verdicts_of_a_separate_judge(mock: Mock) -> None:
    requests = [*texts(40), JudgeRequest("b", skip="not now")]
    config = JudgeConfig(endpoint=mock(latency_s=0.01).url, model="m", cache=False)
    async with InlineJudge(config) as judge:
        verdicts = await judge.score(requests)
        assert await judge.score([]) == []
        with pytest.raises(ConfigError, match="give several"):
            await judge.score("one")
    with Judge(config) as separate:
        expected = separate.submit(requests).result(WAIT_S)
    assert [getattr(v, "value", v) for v in verdicts] == [getattr(v, "value", v) for v in expected]


@pytest.mark.parametrize("end", ["deadline", "cancel", "close"])
async def test_open_requests_of_an_inline_judge_end_with_their_deadline_caller_or_judge(mock: Mock, end: str) -> None:
    before = asyncio.all_tasks()
    judge = await InlineJudge(JudgeConfig(endpoint=mock(hang_share=1.0).url, model="m")).start()
    task = asyncio.create_task(judge.score(["slow"], deadline_s=0.5 if end == "deadline" else None))
    await until(lambda: judge.stats().in_flight)
    assert judge.share_done == 0.0
    if end == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    if end == "close":
        await judge.close()
    if end != "cancel":
        assert reasons(await task) == {"deadline" if end == "deadline" else "cancelled"}
    await until(lambda: judge.stats().in_flight == 0)
    await judge.close()
    assert judge.share_done == 1.0 and asyncio.all_tasks() - {task} == before
    with pytest.raises(JudgeClosed):
        await judge.score(["more"])
