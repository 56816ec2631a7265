"""`compute_score` as verl's `custom_reward_function`, and the managers of older verl: through verl's own loaders."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.workers.reward_manager import get_reward_manager_cls

from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge
from freewheel.rewards import LengthPenaltyRewardManager, shutdown_judges

from .stage import Answer, rollouts, text_of, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

SINGLE = ("reward.custom_reward_function.path=pkg://freewheel.rewards",)
ASYNC = (*SINGLE, "reward.custom_reward_function.name=compute_score_async")
COEFFICIENT = "+reward.custom_reward_function.reward_kwargs.reward_coefficient=0.1"


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningJudge]:
    """A judge that the environment names, as `compute_score` finds it."""
    with MockJudge(JudgeProfile(scores={"unratable": "no idea", "x": "7"})).in_process() as mock:
        monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
        monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
        monkeypatch.setenv("OPENAI_BASE_URL", mock.base_url)
        yield mock
        shutdown_judges()


def test_verl_loads_it_by_its_package_path(tokenizer_path: Path) -> None:
    score = get_custom_reward_fn(verl_config(tokenizer_path, *SINGLE))
    row = {"data_source": "openai/gsm8k", "ground_truth": "4", "extra_info": {"index": 0}}
    assert [score(solution_str=text, **row) for text in ("x #### 4", "x #### 5")] == [1.0, 0.0]


@pytest.mark.parametrize("name", ["single", "async"])
async def test_the_naive_manager_of_the_reward_loop_takes_it(
    tokenizer: PreTrainedTokenizerFast, tokenizer_path: Path, judge: RunningJudge, name: str
) -> None:
    config = verl_config(tokenizer_path, *(SINGLE if name == "single" else ASYNC), COEFFICIENT)
    manager = load_reward_manager(config, tokenizer)
    assert inspect.iscoroutinefunction(manager.compute_score) == (name == "async")
    answers = [Answer("x #### 4", "a"), Answer("x #### 5", "a"), Answer("unratable #### 4", "a")]
    batch = rollouts(tokenizer, answers)
    rows = await asyncio.gather(*(manager.run_single(batch[row : row + 1]) for row in range(len(batch))))
    assert [round(row["reward_score"], 5) for row in rows] == [1.7, 0.0, 1.0]
    assert [row["reward_extra_info"]["judge_status"] for row in rows] == ["scored", "skipped", "failed"]
    assert len({tuple(row["reward_extra_info"]) for row in rows}) == 1, "verl collates by the first row's keys"


def test_the_legacy_batch_manager_takes_it(
    tokenizer: PreTrainedTokenizerFast, tokenizer_path: Path, judge: RunningJudge
) -> None:
    score = get_custom_reward_fn(verl_config(tokenizer_path, *SINGLE, COEFFICIENT))
    manager = get_reward_manager_cls("batch")(tokenizer, 0, score)
    texts = ("x #### 4", "x #### 5", "unratable #### 4", "x #### 4")
    result = manager(rollouts(tokenizer, [Answer(text, "a") for text in texts]), return_dict=True)
    rewards = [round(value, 5) for value in result["reward_tensor"].sum(dim=-1).tolist()]
    assert rewards == [1.7, 0.0, round(3.4 / 3, 5), 1.7]
    assert result["reward_extra_info"]["judge_status"] == ["scored", "skipped", "failed", "scored"]


def test_length_penalty_is_registered_where_older_verl_looks_for_it(
    tokenizer: PreTrainedTokenizerFast, judge: RunningJudge
) -> None:
    import freewheel.integrations.verl  # importing it registers

    made = get_reward_manager_cls("length_penalty")
    assert issubclass(made, LengthPenaltyRewardManager)
    assert all(hasattr(freewheel.integrations.verl, name) for name in freewheel.integrations.verl.__all__)
    settings = {"api_endpoint": judge.url, "reward_coefficient": 0.1, "use_async_io": True}
    # The keywords of `load_reward_manager` in verl 0.4 to 0.7.
    manager = made(
        tokenizer=tokenizer,
        num_examine=0,
        compute_score=None,
        reward_fn_key="data_source",
        length_penalty_config=settings,
    )
    try:
        answers = [Answer(text_of(length), "a") for length in (20, 20, 30, 40)]
        result = manager(rollouts(tokenizer, answers), return_dict=True)
    finally:
        manager.shutdown_workers()
    rewards = result["reward_tensor"].sum(dim=-1)
    assert [round(value, 5) for value in rewards.tolist()] == [1.7, 1.7, 1.7, 0.7]
    assert result["reward_extra_info"]["median_length"] == [25.0] * 4


@pytest.mark.parametrize("drop", [(), ("uid",)], ids=["by uid", "by prompt"])
def test_reports_of_length_penalty_can_be_averaged_whatever_failed(
    tokenizer: PreTrainedTokenizerFast, judge: RunningJudge, drop: tuple[str, ...]
) -> None:
    from freewheel.integrations.verl import LegacyRewardManager

    def score(solution_str: str, **_: Any) -> Any:
        if "bare" in solution_str:
            return 1.0
        return {"score": 0.5, "acc": 0.25, "pred": "4", "steps": [1, 2], "loss": math.nan}

    manager = LegacyRewardManager(
        tokenizer, 0, score, length_penalty_config={"api_endpoint": judge.url, "reward_coefficient": 0.1}
    )
    texts = ["x bare #### 4", "x #### 4", "unratable #### 4", "x #### 4"]
    answers = [Answer(text, "a") for text in texts] + [Answer("unratable bare", "b")] * (0 if drop else 2)
    batch = rollouts(tokenizer, answers)
    for key in drop:
        batch.non_tensor_batch.pop(key)
    told = manager(batch, return_dict=True)["reward_extra_info"]
    for key, values in told.items():
        assert len(values) == len(answers)
        if not isinstance(values[0], str):
            assert math.isfinite(np.mean(values)), key
        assert np.array(values).dtype.kind in "fiU", key
    assert told["openai_quality_reward"] == pytest.approx([0.7] * 4 + [0.0] * (len(answers) - 4))
    assert told["raw_reward"][2] == pytest.approx((1.7 + 1.2 + 1.2) / 3)
    assert told["acc"][0] == 0.25 and told["pred"][0] == "" and told["loss"] == [0.0] * len(answers)
    assert told["judge_status"][2] == "failed" and told["reward_mask"][2] == 0
    if not drop:
        assert told["raw_reward"][4:] == [1.0, 1.0] and told["acc"][4:] == [0.25] * 2


def test_verl_imports_the_integration_by_itself_where_the_environment_says_so() -> None:
    code = (
        "import verl\n"
        "from verl.workers.reward_manager import get_reward_manager_cls as legacy\n"
        "from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls as loop\n"
        "print(legacy('length_penalty').__name__, loop('length_penalty').__name__)"
    )
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "freewheel.integrations.verl"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split()[-2:] == ["LegacyRewardManager", "FreewheelRewardManager"], done.stderr
