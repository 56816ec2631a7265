"""The examples run as their docstrings say."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from freewheel.data.group import NO_VERSION
from freewheel.runtime.config_files import compose

from .programs import run_program
from .runtime.pipeline import run_pipeline, small_config

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN = EXAMPLES / "train"
FREEWHEEL = Path(sys.executable).parent / "freewheel"


def test_the_plain_torch_loop_learns_from_rule_and_judge():
    done = run_program(sys.executable, EXAMPLES / "torch_loop.py", "--steps", "20")
    right = [int(share) for share in re.findall(r"(\d+)% right", done.stdout)]
    assert len(right) == 20
    assert right[0] < 30 < 60 < right[-1]


# -- training ---------------------------------------------------------------------------------------------------------


async def test_a_custom_task_and_reward_are_learned(
    importable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TRAIN)
    found = await run_pipeline(compose(config_path=".", config_name="own_reward"), run_dir=tmp_path)
    first, _, last = (row.values for row in found.rows if row.kind == "eval")  # at the start, half-way and at the end
    assert first["eval/reward"] < 0.4 < 0.8 < last["eval/reward"]  # of at most 1.2
    assert first["eval/answer"] < last["eval/answer"] <= 1 and last["eval/steps"] <= 2  # the parts of the reward
    assert 0 < first["eval/answer_se"] < 0.1
    trained = [row["reward/answer"] for row in found.metrics]
    assert len(trained) == 20 and sum(trained[:5]) < sum(trained[-5:])


async def test_a_custom_loss_and_estimator_train(importable: None, tmp_path: Path):
    functions = {"loss": "custom_loss:cispo", "advantage": "custom_loss:above_median"}
    config = small_config(algorithm=functions, trainer={"total_steps": 2, "micro_batch_tokens": 200})
    found = await run_pipeline(config, run_dir=tmp_path)
    assert found.ending == "finished" and len(found.metrics) == 2
    assert all(0 <= row["cispo/truncated_ratio"] <= 1 and row["actor/grad_norm"] > 0 for row in found.metrics)
    dry = [FREEWHEEL, "train", "--dry-run", *(f"algorithm.{key}={name}" for key, name in functions.items())]
    said = " ".join(run_program(*dry, cwd=TRAIN).stdout.split())
    assert "advantages from custom_loss:above_median; the loss is custom_loss:cispo" in said


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAIN))


@pytest.mark.parametrize(
    ("response", "finish", "wanted"),
    [
        ("6+9=15;15+2=17#17", "stop", 1.2),
        ("6+9=15;15+2=18#18", "stop", 0.1),
        ("#17", "stop", 1.0),
        ("6+9=15;15+2=17#17", "length", 0.2),
        ("#1#7", "stop", 0.0),
    ],
)
def test_the_custom_reward_counts_answer_and_steps(importable: None, response: str, finish: str, wanted: float) -> None:
    from own_reward import Shopping, reward

    (row,) = Shopping().load("test", TRAIN / "problems/test.jsonl", limit=1)
    row["reward_model"]["ground_truth"] = 17
    assert reward(response, row, finish)["score"] == pytest.approx(wanted)


async def test_the_custom_trainer_gets_two_turns_with_the_tool_output_masked(importable: None, tmp_path: Path) -> None:
    given: dict[str, Any] = yaml.safe_load((TRAIN / "custom_trainer.yaml").read_text())
    config = small_config(
        data=given["data"],
        rollout=given["rollout"],
        trainer={"trainer_class": given["trainer"]["trainer_class"], "total_steps": 3},
    )
    found = await run_pipeline(config, run_dir=tmp_path)
    assert found.ending == "finished" and found.queue["dropped_samples"] == 0
    groups = [group for step in found.trained for group in step]
    masked = [response for group in groups for response in map(group.response, range(len(group))) if 0 in response.mask]
    assert masked
    for response in masked:
        tool = response.mask == 0
        assert (response.versions[tool] == NO_VERSION).all() and (response.logprobs[tool] == 0).all()
        assert response.mask[0] == response.mask[-1] == 1
        assert len(np.flatnonzero(np.diff(response.mask.astype(int)))) == 2  # one masked span, between two turns
    shares = [row["tool/used_ratio"] for row in found.metrics]
    assert np.mean(shares) == pytest.approx(len(masked) / sum(map(len, groups)))


def test_the_calculator_and_the_monitor_of_the_custom_trainer(
    importable: None, caplog: pytest.LogCaptureFixture
) -> None:
    from custom_trainer import calculator, monitor

    assert [calculator(text) for text in ("6+9=", "6+9=15;15-2=", "#17", "2-9=")] == ["15", "13", None, None]
    with caplog.at_level(logging.INFO, "freewheel"):
        monitor({"processed_samples": 32}, {"total_generated_samples": 40})
    assert "40 responses generated, 32 trained on, 8 in between" in caplog.text
