"""What real vLLM would refuse is refused before a run starts: by name, by value, by the model's heads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from freewheel.data.tasks.word_problems import model_path
from freewheel.doctor import software
from freewheel.runtime.preflight import engine_problems

from .asking import config_of, plan_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def problem(folder: Path, **given: object) -> str:
    plan = plan_of(config_of(folder, **given))  # type: ignore[arg-type]
    return "; ".join(map(str, engine_problems(plan, folder)))


def test_what_can_serve_is_no_problem(folder: Path) -> None:
    assert problem(folder) == ""


def test_an_argument_that_this_vllm_does_not_have_is_named(folder: Path) -> None:
    said = problem(folder, vllm={"enforce_eagre": True})
    assert "rollout.vllm.enforce_eagre = True: this vLLM has no such argument: did you mean enforce_eager?" in said


def test_a_value_that_vllm_refuses_is_told_in_its_words(folder: Path) -> None:
    said = problem(folder, vllm={"kv_cache_dtype": "float3"})
    assert said.startswith("rollout.vllm = {'kv_cache_dtype': 'float3'}: vLLM refuses it: ")


def test_a_context_that_is_too_short_for_the_prompts_is_told(folder: Path) -> None:
    assert "rollout.vllm.max_model_len = 9" in problem(folder, vllm={"max_model_len": 9})


def test_heads_that_vllm_has_no_kernel_for_are_told() -> None:
    assert "its heads have size 16" in problem(model_path(), max_new_tokens=20)


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
