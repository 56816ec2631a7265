"""Settings and models that real vLLM would refuse are refused before a run starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.tasks.word_problems import model_path
from freewheel.doctor import software
from freewheel.errors import ConfigError
from freewheel.runtime.preflight import engine_problems

from .asking import EAGER, config_of, engine_of, plan_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_usable_settings_are_not_a_problem(folder: Path) -> None:
    assert engine_problems(plan_of(config_of(folder)), folder) == []


@pytest.mark.parametrize(
    ("given", "key", "says"),
    [
        ({"vllm": {"block_size": "many"}}, "rollout.vllm", "vLLM refuses it"),
        ({"temperature": 5.0}, "rollout", "temperature"),
    ],
    ids=str,
)
def test_a_value_that_vllm_does_not_allow_is_refused_before_anything_starts(
    folder: Path, given: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        engine_of(folder, **{**given, "vllm": {**EAGER, **given.get("vllm", {})}})
    assert refused.value.key == key


def test_a_model_that_vllm_has_no_kernels_for_is_refused_at_the_start() -> None:
    """The embedded model's heads have size 16: on a CPU vLLM would die at the first prompt."""
    with pytest.raises(ConfigError, match=r"heads have size 16.*rollout\.engine=native") as refused:
        engine_of(model_path(), max_new_tokens=16)
    assert refused.value.key == "model.path"


def test_a_run_is_refused_with_exit_code_2_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    settings = ["rollout.engine=vllm", "rollout.device=cpu", "trainer.device=cpu", f"model.path={folder}"]
    command = [sys.executable, "-m", "freewheel", "train", *settings, "rollout.vllm={enforce_eagre: true}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 2 and "did you mean enforce_eager?" in done.stderr, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0 and "did you mean" in done.stdout.partition("Against this run here")[2]


def test_the_doctor_accepts_this_release() -> None:
    (found,) = software.vllm(wanted=True)
    assert found.state == "ok"
