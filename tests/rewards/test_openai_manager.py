"""`AsyncOpenAIManager` and `AsyncOpenAIWorker`: the judge under the promised names and arguments (SPEC 1.3).

What the judge itself does (one request for equal content, its limits, its cache) is tested in tests/judge.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from typing import Any

import pytest

from freewheel.judge import Failed, JudgeClosed, JudgeRequest, Scored, Skipped
from freewheel.judge.request import RequestHasher
from freewheel.rewards import AsyncOpenAIManager, AsyncOpenAIWorker, LengthPenaltyConfig, get_request_hash

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
        assert 1 <= judge.counts().open_connections <= 2, "they are pooled and stay open"
    assert [worker.reward(verdict) for verdict in verdicts] == [4.0] * 12
    assert judge.requests()[0].json()["messages"][0]["content"].startswith(PROMPT)
    assert threading.active_count() <= before + 1  # the loop's executor may keep a thread


def test_a_hash_is_sha_256_in_hex_of_what_the_judge_itself_compares() -> None:
    config = LengthPenaltyConfig(api_key=KEY, model_name="m", api_endpoint=URL).judge_config()
    found = get_request_hash("an answer", config)
    assert found == get_request_hash(JudgeRequest("an answer", id="7"), config)
    assert found == RequestHasher(config)(JudgeRequest("an answer")).hex() and len(found) == 64
    other = AsyncOpenAIManager(KEY, "other", URL)
    assert other.get_request_hash("an answer") == get_request_hash("an answer", other.config) != found
