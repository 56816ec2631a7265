"""A user's own engine works like a built-in one, and an engine that cannot work is refused before the start."""

from __future__ import annotations

import io
import pickle
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.data.group import Response
from freewheel.data.tasks.word_problems import model_path
from freewheel.errors import ConfigError
from freewheel.rollout.engine import Engine, GenerationRequest
from freewheel.rollout.engine_factories import EngineFactory, EngineSettings, LoadedEngine, RolloutOptions, find_engine
from freewheel.rollout.vllm import engine as vllm_engine
from freewheel.runtime import placement, preflight
from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Machine
from freewheel.runtime.run_plan import RunPlan, render, resolve

from .pipeline import plan_of as pipeline_plan
from .pipeline import run_pipeline, small_config

LAPTOP = Machine(cpus=2, memory_bytes=8 << 30)
DEAD = "http://127.0.0.1:9"
"""The address of a server that does not answer."""


def plan_of(url: str, **rollout: Any) -> RunPlan:
    return resolve(to_config({"rollout": {"engine": "vllm", "urls": [url], **rollout}}), LAPTOP)


def check_here(plan: RunPlan, model: str = str(model_path())) -> list[ConfigError]:
    """Check as the child process would, without its slow start."""
    problem = pickle.loads(preflight._check_engine(io.BytesIO(pickle.dumps((plan, model)))))
    return [] if problem is None else [problem]


def test_the_check_of_a_server_passes_the_longest_prompt_and_response_and_the_runs_type_of_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vllm_engine, "find_server", lambda *given: asked.append(given))
    assert check_here(plan_of(DEAD)) == []
    ((url, tokens, dtype),) = asked
    assert (url, dtype) == (DEAD, "float32") and 30 < tokens < 100, "word problems are short"


def test_a_run_whose_server_does_not_answer_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "_ask_smi", lambda: "")
    monkeypatch.setattr(preflight, "_check_in_child", check_here)
    settings = ["train", "rollout.engine=vllm", f"rollout.urls=[{DEAD}]"]
    done = CliRunner().invoke(app, settings)
    assert done.exit_code == 2 and "there is no vLLM server" in done.stderr and not list(tmp_path.iterdir())
    done = CliRunner().invoke(app, [*settings, "--dry-run"])
    text = " ".join(done.stdout.split())
    assert done.exit_code == 0 and "there is no vLLM server" in text.partition("Against this run here")[2]
    assert f"asks the vLLM server {DEAD} for responses" in text and "vllm engine" not in text


def test_an_engine_is_checked_in_a_child_process_if_the_run_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (problem,) = preflight.engine_problems(plan_of(DEAD), model_path())
    assert problem.key == "rollout.urls" and "there is no vLLM server" in str(problem)
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "CHECK_S", 0.01)
        assert preflight.engine_problems(plan_of(DEAD), model_path()) == [], "it takes too long"
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.stderr.write('no kernel image\\n'); sys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = preflight.engine_problems(plan_of(DEAD), model_path())
    assert problem.key == "rollout.engine" and "it cannot be used here: " in str(problem)
    monkeypatch.setattr(subprocess, "run", None)
    elsewhere = to_config({"rollout": {"engine": "vllm", "urls": [DEAD]}, "ray": {"address": "auto"}})
    assert preflight.engine_problems(resolve(elsewhere, LAPTOP), model_path()) == []
    assert preflight.engine_problems(plan_of(DEAD), None) == [], "a check does not download a model"
    assert preflight.engine_problems(resolve(to_config({}), LAPTOP), model_path()) == [], "the native engine has none"


# -- a user's own engine ----------------------------------------------------------------------------------------------


class CountingEngine:
    """Wraps the native engine and counts requests."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generate(self, request: GenerationRequest) -> AsyncIterator[tuple[int, Response]]:
        self.requests += 1
        return self._inner.generate(request)


class CountingFactory(EngineFactory):
    made: ClassVar[list[CountingEngine]] = []

    def describe(self, options: RolloutOptions, slots: int) -> str:
        return f"counting engine, {slots} slots"

    def load(self, settings: EngineSettings) -> LoadedEngine:
        loaded = find_engine("native").load(settings)
        self.made.append(CountingEngine(loaded.engine))
        return LoadedEngine(engine=self.made[-1], generation_config=loaded.generation_config)


COUNTING = f"{__name__}:CountingFactory"


async def test_a_run_trains_with_the_users_own_engine(tmp_path: Path) -> None:
    CountingFactory.made.clear()
    config = small_config(trainer={"total_steps": 2}, rollout={"engine": COUNTING})
    done = await run_pipeline(config, run_dir=tmp_path / "own")
    (engine,) = CountingFactory.made
    assert len(done.trained) == 2 and engine.requests >= 2 * config.trainer.groups_per_step
    assert "counting engine" in render(pipeline_plan(config)).plain


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("gpu_memory_share", 0.5),
        ("vllm", {"enforce_eager": True}),
        ("urls", ["http://127.0.0.1:8000"]),
    ],
)
@pytest.mark.parametrize("engine", ["native", COUNTING])
def test_an_engine_refuses_options_that_it_does_not_have(engine: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match="engine does not have it: leave it out, or give") as refused:
        preflight.preflight(to_config({"rollout": {"engine": engine, key: value}}))
    assert refused.value.key == f"rollout.{key}"
