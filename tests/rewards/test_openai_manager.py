"""`AsyncOpenAIManager` and `AsyncOpenAIWorker`: their signatures, and that nothing is sent twice (SPEC 1.3)."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge import Failed, JudgeClosed, JudgeRequest, Scored, Skipped
from freewheel.rewards import AsyncOpenAIManager, AsyncOpenAIWorker, LengthPenaltyConfig, get_request_hash
from freewheel.rewards.openai_manager import run_privately

from .conftest import KEY, WAIT_S, Mock

PROMPT = "Rate the answer: one integer from 1 to 10, and nothing else."
URL = "http://127.0.0.1:9/v1/chat/completions"

Make = Callable[..., AsyncOpenAIManager]


@pytest.fixture
def make() -> Iterator[Make]:
    """Managers in a thread of this process, which their constructor does not offer; shut down with the test."""
    with ExitStack() as stack:

        def start(url: str, **settings: Any) -> AsyncOpenAIManager:
            judge = {"placement": "thread", **settings.pop("judge", {})}
            config = LengthPenaltyConfig(
                **{"api_key": KEY, "model_name": "m", "api_endpoint": url, "judge": judge, **settings}
            )
            manager = AsyncOpenAIManager.of(config.judge_config(), config.reward_coefficient)
            stack.callback(manager.shutdown)
            return manager

        yield start


@pytest.mark.parametrize("kind", [AsyncOpenAIManager, AsyncOpenAIWorker])
def test_the_constructor_takes_the_promised_arguments_in_the_promised_order(kind: Any) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [
        "api_key",
        "model_name",
        "api_endpoint",
        "system_prompt",
        "reward_coefficient",
        "max_concurrent",
    ]
    assert parameters["reward_coefficient"].default == 1.0 and parameters["max_concurrent"].default == 10
    made = kind(KEY, "m", URL, PROMPT)
    assert made.config.concurrency == 10 and made.config.loaded_rubric.system == PROMPT
    assert made.reward_coefficient == 1.0 and made.config.model == "m" and made.config.endpoints[0].url == URL


def test_making_one_starts_nothing_and_shutting_it_down_is_safe() -> None:
    threads = threading.active_count()
    manager = AsyncOpenAIManager(KEY, "m", URL, PROMPT, 0.5, 20)
    assert threading.active_count() <= threads and not manager.running
    manager.shutdown()
    manager.shutdown()
    assert not manager.running
    with pytest.raises(JudgeClosed):
        manager.submit(["a"])


def test_by_default_it_runs_in_a_child_process_and_submit_does_not_wait(mock: Mock) -> None:
    judge = mock(latency_s=0.4, scores={"an answer": "7"}, api_key=KEY)
    manager = AsyncOpenAIManager(KEY, "m", judge.url, PROMPT, reward_coefficient=0.1)
    try:
        before = time.monotonic()
        handle = manager.submit([JudgeRequest("an answer", "a question")])
        assert not handle.done()
        [verdict] = handle.result(WAIT_S)
        assert time.monotonic() - before >= 0.4
        assert isinstance(verdict, Scored) and manager.reward(verdict) == pytest.approx(0.7)
        assert getattr(manager.judge._link, "child_pid", None)
    finally:
        manager.shutdown()
    assert not manager.running


def test_a_verdict_without_a_score_has_no_reward(make: Make) -> None:
    manager = make(URL, reward_coefficient=2.0)
    assert manager.reward(Scored(3.0)) == 6.0
    assert manager.reward(Failed("deadline")) is None and manager.reward(Skipped("gate")) is None


def test_max_concurrent_is_an_upper_bound(mock: Mock, make: Make) -> None:
    judge = mock(latency_s=0.05)
    manager = make(judge.url, max_concurrent_requests=4)
    manager.submit([f"answer {number}" for number in range(20)]).result(WAIT_S)
    assert judge.counts().answered == 20 and judge.counts().max_in_flight <= 4


def test_a_request_is_not_sent_twice_while_one_is_in_flight(mock: Mock, make: Make) -> None:
    judge = mock(latency_s=0.5)
    manager = make(judge.url)
    handles = [manager.submit(["the same"] * 5), manager.submit(["the same"])]
    values = {verdict.value for handle in handles for verdict in handle.result(WAIT_S)}
    assert len(values) == 1
    assert judge.counts().received == 1


def test_a_request_is_not_sent_again_after_a_usable_answer_not_even_by_another_manager(mock: Mock, make: Make) -> None:
    judge = mock()
    first, second = make(judge.url), make(judge.url)
    [one] = first.submit(["the same"]).result(WAIT_S)
    [again] = first.submit(["the same"]).result(WAIT_S)
    first.shutdown()
    [later] = second.submit(["the same"]).result(WAIT_S)
    assert one.value == again.value == later.value and (one.cached, again.cached, later.cached) == (False, True, True)
    assert judge.counts().received == 1


def test_an_answer_that_is_of_no_use_is_asked_for_again(mock: Mock, make: Make) -> None:
    judge = mock(scores={"hopeless": "no idea"})
    manager = make(judge.url, judge={"reasks": 0})
    for number in (1, 2):
        [verdict] = manager.submit(["hopeless"]).result(WAIT_S)
        assert verdict.status == "failed" and judge.counts().received == number


def test_with_the_cache_off_only_the_sharing_within_a_batch_remains(
    mock: Mock, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONITOR_CACHE", "false")
    judge = mock(latency_s=0.1)
    manager = make(judge.url)
    assert manager.config.cache is False and AsyncOpenAIManager(KEY, "m", URL, PROMPT).config.cache is False
    manager.submit(["the same"] * 4).result(WAIT_S)
    assert judge.counts().received == 1
    manager.submit(["the same"] * 4).result(WAIT_S)
    assert judge.counts().received == 2


def test_a_batch_that_times_out_is_marked_and_nothing_is_invented(mock: Mock, make: Make) -> None:
    manager = make(mock(hang_share=1.0).url)
    assert manager.config.batch_deadline_s == 300.0
    verdicts = manager.submit(["a", "b"], timeout_s=0.3).result(WAIT_S)
    assert [(one.status, one.reason) for one in verdicts] == [("failed", "deadline")] * 2


async def test_score_does_not_block_the_loop_and_a_cancelled_caller_cancels_the_batch(mock: Mock, make: Make) -> None:
    judge = mock(hang_share=1.0)
    manager = make(judge.url)
    scoring = asyncio.create_task(manager.score(["a"]))
    while judge.counts().in_flight == 0:
        await asyncio.sleep(0.01)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    while judge.counts().in_flight:
        await asyncio.sleep(0.01)


def test_the_key_goes_into_no_print_and_no_pickle_and_comes_from_the_environment_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    for kind in (AsyncOpenAIManager, AsyncOpenAIWorker):
        made: Any = kind(KEY, "m", URL, PROMPT)
        assert KEY not in repr(vars(made)) + repr(made) + repr(made.config)
        assert KEY.encode() not in pickle.dumps(made.config)
        unkeyed: Any = kind(None, "m", URL, PROMPT)
        assert unkeyed.config.key_for(unkeyed.config.endpoints[0]).reveal() == "sk-of-the-environment"


def test_the_key_is_in_no_file_of_the_cache(mock: Mock, make: Make, tmp_path: Path) -> None:
    manager = make(mock(scores={"an answer": "7"}).url, judge={"cache_dir": str(tmp_path / "kept")})
    manager.submit(["an answer"]).result(WAIT_S)
    manager.shutdown()
    files = [one for one in (tmp_path / "kept").rglob("*") if one.is_file()]
    assert files and not [one for one in files if KEY.encode() in one.read_bytes()]


# -- the worker -------------------------------------------------------------------------------------------------------


async def test_a_worker_scores_on_the_running_loop_over_few_connections(mock: Mock) -> None:
    judge = mock(scores={"an answer": "8"}, keep_requests=1, api_key=KEY)
    before = threading.active_count()
    async with AsyncOpenAIWorker(KEY, "m", judge.url, PROMPT, 0.5, max_concurrent=2) as worker:
        verdicts = await worker.score([f"an answer {number}" for number in range(12)])
        assert worker.reward_coefficient == 0.5
    assert [verdict.value for verdict in verdicts] == [8.0] * 12
    assert judge.counts().connections <= 3, "they are pooled"
    assert judge.requests()[0].json()["messages"][0]["content"].startswith(PROMPT)
    assert threading.active_count() <= before + 1  # the loop's executor may keep a thread


# -- the hash ---------------------------------------------------------------------------------------------------------

BASE = LengthPenaltyConfig(api_key=KEY, model_name="m", api_endpoint=URL, system_prompt=PROMPT)
REQUEST_TEXTS = ("an answer", "a question", "a reference")
REQUEST = JudgeRequest(*REQUEST_TEXTS)


def hash_of(request: Any = REQUEST, **changes: Any) -> str:
    return get_request_hash(request, dataclasses.replace(BASE, **changes).judge_config())


def test_a_hash_is_sha_256_in_hex_and_the_managers_own_is_the_same() -> None:
    found = hash_of()
    assert len(found) == 64 and set(found) <= set("0123456789abcdef")
    assert AsyncOpenAIManager(KEY, "m", URL, PROMPT).get_request_hash(REQUEST) == found


def test_a_hash_is_the_same_for_all_that_does_not_decide_the_reply() -> None:
    assert hash_of(JudgeRequest("an answer", "a question", "a reference", id="7")) == hash_of()
    assert hash_of({"response": "an answer", "prompt": "a question", "reference": "a reference"}) == hash_of()
    assert hash_of("an answer") == hash_of(JudgeRequest("an answer"))
    for changes in (
        {"api_key": "sk-other"},
        {"max_concurrent_requests": 3},
        {"reward_coefficient": 3.0},
        {"penalty_scale": 3.0},
        {"use_async_io": True},
        {"judge": {"cache": False, "placement": "thread", "max_attempts": 2}},
    ):
        assert hash_of(**changes) == hash_of(), changes


def test_a_hash_is_the_same_in_another_process() -> None:
    """A cache on a disk outlives this one."""
    source = f"""
from freewheel.rewards import AsyncOpenAIManager
from freewheel.judge import JudgeRequest
print(AsyncOpenAIManager("EMPTY", "m", {URL!r}, {PROMPT!r}).get_request_hash(JudgeRequest(*{REQUEST_TEXTS!r})))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == hash_of()


def test_a_hash_differs_where_the_reply_may() -> None:
    hashes = [
        hash_of(),
        hash_of(JudgeRequest("another", "a question", "a reference")),
        hash_of(JudgeRequest("an answer", "another", "a reference")),
        hash_of(JudgeRequest("an answer", "a question", "another")),
        hash_of(JudgeRequest("an answera question", "", "a reference")),
        hash_of(JudgeRequest("an answer", "a questiona reference", "")),
        hash_of(model_name="other"),
        hash_of(api_endpoint="http://127.0.0.1:10/v1"),
        hash_of(system_prompt="Other words."),
        hash_of(judge={"temperature": 1.0}),
        hash_of(judge={"max_tokens": 5}),
        hash_of(judge={"sampling": {"seed": 1}}),
    ]
    assert len(set(hashes)) == len(hashes)


# -- run_privately ----------------------------------------------------------------------------------------------------


def test_work_runs_here_without_a_loop_and_in_a_short_lived_thread_beside_one() -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert run_privately(where()) == threading.current_thread().name

    async def inside() -> str:
        return run_privately(where())

    assert asyncio.run(inside()) == "freewheel-rewards-sync"
    assert not [one for one in threading.enumerate() if one.name == "freewheel-rewards-sync"]


def test_an_error_of_the_work_is_raised_where_it_was_asked_for() -> None:
    async def broken() -> None:
        raise KeyError("mine")

    async def inside() -> None:
        run_privately(broken())

    with pytest.raises(KeyError, match="mine"):
        run_privately(broken())
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(inside())
