"""freewheel in verl's real reward loop: real configuration, real Ray actors, a judge on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.metric_utils import process_validation_metrics

from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

from .stage import (
    FUNCTIONS,
    LENGTHS,
    WITH_PENALTY,
    Answer,
    DataProto,
    actor_names,
    columns,
    ours,
    reward_loop,
    rollouts,
    scores,
    text_of,
    until,
    verl_config,
)

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

KEYS = {
    "acc",
    "original_score",
    "openai_quality_reward",
    "length_penalty",
    "response_length",
    "median_length",
    "raw_reward",
    "reward_mask",
    "judge_status",
    "judge_reason",
    "group_complete",
}


Behave = Callable[..., None]


@pytest.fixture(scope="module")
def judge() -> Iterator[RunningJudge]:
    with MockJudge().in_process() as mock:
        yield mock


@pytest.fixture(scope="module")
def loop(ray_session: None, tokenizer_path: Path, judge: RunningJudge) -> Iterator[RewardLoopManager]:
    """Two reward workers, so that the rows of a group arrive in two processes."""
    deadline = "+reward.reward_kwargs.group_deadline_s=20"
    no_cache = {"judge.cache": "false"}
    config = verl_config(
        tokenizer_path,
        *ours(judge.url, reward_coefficient=0.1, **no_cache),
        deadline,
        f"reward.custom_reward_function.path={FUNCTIONS}",
        "reward.custom_reward_function.name=moody",
        workers=2,
    )
    with reward_loop(config) as loop:
        yield loop


@pytest.fixture
def behave(judge: RunningJudge) -> Behave:
    def behave(**profile: Any) -> None:
        judge.reset(JudgeProfile(**{"scores": {"unratable": "no idea", "x": "7"}, **profile}))

    behave()
    return behave


def table_actors() -> list[str]:
    return [name for name in actor_names() if name.startswith("freewheel-rewards-")]


def test_a_group_has_one_median_though_its_rows_are_in_two_processes(
    loop: RewardLoopManager, behave: Behave, tokenizer: Any
) -> None:
    # Interleaved, each half of the batch holds a half of every group.
    answers = [Answer(text_of(length), uid) for length in LENGTHS for uid in "abcdef"]
    result = loop.compute_rm_score(rollouts(tokenizer, answers))
    assert scores(result) == [score for score in WITH_PENALTY for _ in "abcdef"]
    assert set(columns(result)["median_length"]) == {25.0}
    assert len(table_actors()) == 1


def test_rows_that_fail_neither_end_the_run_nor_are_zero_nor_break_the_collation(
    loop: RewardLoopManager, behave: Behave, tokenizer: Any
) -> None:
    texts = ("x #### 4", "unratable #### 4", "x boom", "x dict #### 4")
    answers = [Answer(text, uid) for text in texts for uid in ("fail-1", "fail-2")]
    result = loop.compute_rm_score(rollouts(tokenizer, answers))
    reported = columns(result)
    assert set(reported) == KEYS
    assert reported["judge_status"] == ["scored"] * 2 + ["failed"] * 4 + ["scored"] * 2
    assert all(score > 0 for score in scores(result))
    for group in (0, 1):
        good = [scores(result)[row] for row in (group, 6 + group)]
        assert scores(result)[2 + group] == scores(result)[4 + group] == pytest.approx(np.mean(good), abs=1e-4)
    assert reported["reward_mask"] == [1, 1, 0, 0, 0, 0, 1, 1]


def test_validation_metrics_of_failed_rows_are_the_mean_of_the_others(
    loop: RewardLoopManager, behave: Behave, tokenizer: Any
) -> None:
    answers = [Answer(text, "metrics") for text in ("x #### 4", "unratable #### 4", "x boom", "x #### 4")]
    reported = columns(loop.compute_rm_score(rollouts(tokenizer, answers)))
    metrics = process_validation_metrics(["gsm8k"] * 4, ["metrics"] * 4, reported)["gsm8k"]
    assert metrics["openai_quality_reward"]["mean@4"] == pytest.approx(0.7)
    assert metrics["acc"]["mean@4"] == 1.0
    assert metrics["reward_mask"]["mean@4"] == 0.5
    assert all(np.isfinite(value) for variable in metrics.values() for value in variable.values())


def test_rows_that_verl_adds_to_fill_a_batch_change_nothing(
    loop: RewardLoopManager, behave: Behave, tokenizer: Any
) -> None:
    # Five rows for two workers: verl adds a copy of the first, which is then one row too many in its group.
    answers = [Answer(text_of(length), "filled") for length in LENGTHS]
    more = Answer("x #### 4", "one", split="test")  # val_kwargs.n is 1: this group is whole
    result = loop.compute_rm_score(rollouts(tokenizer, [*answers, more]))
    assert columns(result)["group_complete"] == [1] * 5
    assert scores(result)[4] == 1.7 and len(scores(result)) == 5


def test_rows_whose_actor_dies_are_sent_again_and_get_their_rewards(
    loop: RewardLoopManager, behave: Behave, judge: RunningJudge, tokenizer: Any
) -> None:
    behave(latency_s=1.5)
    answers = [Answer(text_of(length), uid) for length in LENGTHS for uid in "ghij"]
    results: list[DataProto] = []
    run = threading.Thread(target=lambda: results.append(loop.compute_rm_score(rollouts(tokenizer, answers))))
    run.start()
    until(lambda: judge.counts().in_flight > 0)
    [name] = table_actors()
    ray.kill(ray.get_actor(name))
    run.join(60)
    assert scores(results[0]) == [score for score in WITH_PENALTY for _ in "ghij"]
    assert columns(results[0])["judge_status"] == ["scored"] * 16


def test_rows_in_the_form_of_verls_agent_loop_join_their_group_and_collate(
    loop: RewardLoopManager, behave: Behave, tokenizer: Any
) -> None:
    """Through the agent loop's own `_compute_score` and `_postprocess`: a call a row, to a worker chosen at random."""
    for undeclared in ("cachetools", "uvicorn"):
        pytest.importorskip(undeclared, reason="verl 0.9.1 needs it for its agent loop, and does not say so")
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopMetrics,
        AgentLoopOutput,
        AgentLoopWorker,
        _InternalAgentLoopOutput,
    )

    texts = [text_of(length) for length in LENGTHS] + ["x boom", "unratable #### 4", "x dict #### 4", "x #### 4"]
    answers = [Answer(text, "abcd"[row // 4] + "-agent") for row, text in enumerate(texts)]
    batch = rollouts(tokenizer, answers)
    worker = SimpleNamespace(
        reward_loop_worker_handles=loop.reward_loop_worker_handles,
        _compute_multi_modal_inputs=lambda output, input_ids: {},
        _compute_position_ids=lambda input_ids, mask, *_: mask.cumsum(dim=-1),
        _get_mm_processor_kwargs=lambda *_: {},
    )

    async def one(row: int) -> Any:
        prompt, response = tokenizer.encode("What is 2+2?"), tokenizer.encode(answers[row].text)
        output = AgentLoopOutput(
            prompt_ids=prompt, response_ids=response, response_mask=[1] * len(response), metrics=AgentLoopMetrics()
        )
        reported = {key: values[row] for key, values in batch.non_tensor_batch.items()}
        await AgentLoopWorker._compute_score(worker, [output], reported)
        ids = batch.batch[row : row + 1]
        return _InternalAgentLoopOutput(
            prompt_ids=ids["prompts"],
            response_ids=ids["responses"],
            input_ids=ids["input_ids"],
            position_ids=ids["position_ids"],
            response_mask=torch.ones_like(ids["responses"]),
            attention_mask=ids["attention_mask"],
            num_turns=2,
            metrics=output.metrics,
            reward_score=output.reward_score,
            extra_fields=output.extra_fields,
        )

    async def all_rows() -> list[Any]:
        return await asyncio.gather(*map(one, range(len(answers))))

    result = AgentLoopWorker._postprocess(worker, asyncio.run(all_rows()))
    assert set(result.meta_info["reward_extra_keys"]) == KEYS
    assert scores(result)[:4] == WITH_PENALTY
    assert result.non_tensor_batch["judge_status"].tolist() == ["scored"] * 4 + ["failed", "failed", "scored", "scored"]
    assert all(score > 0 for score in scores(result))
