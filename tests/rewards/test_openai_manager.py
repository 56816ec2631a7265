"""`AsyncOpenAIManager` and `AsyncOpenAIWorker`: the judge under the promised names and arguments (SPEC 1.3).

What the judge itself does (one request for equal content, its limits, its cache) is tested in tests/judge.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from freewheel.judge import Failed, JudgeClosed, JudgeRequest, Scored, Skipped
from freewheel.rewards import AsyncOpenAIManager, AsyncOpenAIWorker, LengthPenaltyConfig, get_request_hash
from freewheel.rewards.openai_manager import run_privately

from .conftest import KEY, Mock

PROMPT = "Rate the answer: one integer from 1 to 10, and nothing else."
URL = "http://127.0.0.1:9/v1/chat/completions"


@pytest.mark.parametrize("kind", [AsyncOpenAIManager, AsyncOpenAIWorker])
def test_the_constructor_takes_the_promised_arguments_in_order(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(kind).parameters
    names = ["api_key", "model_name", "api_endpoint", "system_prompt", "reward_coefficient", "max_concurrent"]
    assert list(parameters) == names
    assert parameters["reward_coefficient"].default == 1.0 and parameters["max_concurrent"].default == 10
    made = kind(KEY, "m", URL, PROMPT)
    assert made.config.concurrency == 10 and made.config.loaded_rubric.system == PROMPT
    assert made.config.model == "m" and made.config.endpoints[0].url == URL and made.config.cache
    assert KEY not in repr(vars(made)) + repr(made) + repr(made.config)
    assert KEY.encode() not in pickle.dumps(made.config)
    scaled = kind(KEY, "m", URL, PROMPT, 2.0)
    assert [scaled.reward(one) for one in (Scored(3.0), Failed("deadline"), Skipped("gate"))] == [6.0, None, None]

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    monkeypatch.setenv("MONITOR_CACHE", "false")
    unkeyed = kind(None, "m", URL, PROMPT).config
    assert unkeyed.key_for(unkeyed.endpoints[0]).reveal() == "sk-of-the-environment" and not unkeyed.cache


def test_a_manager_runs_in_a_child_process_from_its_first_batch_until_its_shutdown(mock: Mock) -> None:
    judge = mock(latency_s=0.1, scores={"an answer": "7"}, api_key=KEY)
    manager = AsyncOpenAIManager(KEY, "m", judge.url, PROMPT, reward_coefficient=0.1)
    assert not manager.running and manager.pending == 0
    try:
        handle = manager.submit([JudgeRequest("an answer", "a question")])
        assert not handle.done() and manager.pending == 1
        [verdict] = manager.results(handle)
        assert manager.reward(verdict) == pytest.approx(0.7)
        assert getattr(manager._link, "child_pid", None)
        copied = copy.deepcopy(manager)
        assert copied.reward_coefficient == 0.1 and copied.config.model == "m" and not copied.running
    finally:
        for _ in range(2):
            manager.shutdown()
    assert not manager.running
    with pytest.raises(JudgeClosed):
        manager.submit(["a"])


async def test_a_worker_scores_on_the_running_loop_over_few_connections(mock: Mock) -> None:
    judge = mock(scores={"an answer": "8"}, keep_requests=1, api_key=KEY)
    before = threading.active_count()
    async with AsyncOpenAIWorker(KEY, "m", judge.url, PROMPT, 0.5, max_concurrent=2) as worker:
        verdicts = await worker.score([f"an answer {number}" for number in range(12)])
    assert [worker.reward(verdict) for verdict in verdicts] == [4.0] * 12
    assert judge.counts().connections <= 3, "they are pooled"
    assert judge.requests()[0].json()["messages"][0]["content"].startswith(PROMPT)
    assert threading.active_count() <= before + 1  # the loop's executor may keep a thread


# -- the hash ---------------------------------------------------------------------------------------------------------

BASE = LengthPenaltyConfig(api_key=KEY, model_name="m", api_endpoint=URL, system_prompt=PROMPT)
REQUEST_TEXTS = ("an answer", "a question", "a reference")
REQUEST = JudgeRequest(*REQUEST_TEXTS)


def hash_of(request: Any = REQUEST, **changes: Any) -> str:
    return get_request_hash(request, dataclasses.replace(BASE, **changes).judge_config())


def test_a_hash_is_sha_256_in_hex_and_equal_for_everything_that_does_not_decide_the_reply() -> None:
    found = hash_of()
    assert len(found) == 64 and set(found) <= set("0123456789abcdef")
    assert hash_of(JudgeRequest(*REQUEST_TEXTS, id="7")) == found
    assert hash_of(dict(zip(("response", "prompt", "reference"), REQUEST_TEXTS, strict=True))) == found
    assert hash_of("an answer") == hash_of(JudgeRequest("an answer"))
    for changes in (
        {"api_key": "sk-other"},
        {"max_concurrent_requests": 3},
        {"reward_coefficient": 3.0},
        {"penalty_scale": 3.0},
        {"use_async_io": True},
        {"judge": {"cache": False, "placement": "thread", "max_attempts": 2}},
    ):
        assert hash_of(**changes) == found, changes


def test_a_hash_is_equal_in_another_process() -> None:
    """A cache on a disk outlives this one."""
    source = f"""
from freewheel.rewards import AsyncOpenAIManager
from freewheel.judge import JudgeRequest
print(AsyncOpenAIManager("EMPTY", "m", {URL!r}, {PROMPT!r}).get_request_hash(JudgeRequest(*{REQUEST_TEXTS!r})))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.strip() == hash_of()


def test_a_hash_differs_where_the_reply_may_differ() -> None:
    requests = [
        REQUEST,
        JudgeRequest("another", "a question", "a reference"),
        JudgeRequest("an answer", "another", "a reference"),
        JudgeRequest("an answer", "a question", "another"),
        JudgeRequest("an answera question", "", "a reference"),
        JudgeRequest("an answer", "a questiona reference", ""),
    ]
    changes: list[dict[str, Any]] = [
        {"model_name": "other"},
        {"api_endpoint": "http://127.0.0.1:10/v1"},
        {"system_prompt": "Other words."},
        {"judge": {"temperature": 1.0}},
        {"judge": {"max_tokens": 5}},
        {"judge": {"sampling": {"seed": 1}}},
    ]
    hashes = [*map(hash_of, requests), *(hash_of(**one) for one in changes)]
    assert len(set(hashes)) == len(hashes)


# -- run_privately ----------------------------------------------------------------------------------------------------


def test_private_work_runs_in_this_thread_or_next_to_a_running_loop_in_another() -> None:
    async def work(fails: bool) -> str:
        if fails:
            raise KeyError("mine")
        return threading.current_thread().name

    async def inside(fails: bool) -> str:
        return run_privately(work(fails))

    assert run_privately(work(False)) == threading.current_thread().name
    assert asyncio.run(inside(False)).startswith("freewheel-rewards-sync")
    assert not [one for one in threading.enumerate() if one.name.startswith("freewheel-rewards-sync")]
    with pytest.raises(KeyError, match="mine"):
        run_privately(work(True))
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(inside(True))
