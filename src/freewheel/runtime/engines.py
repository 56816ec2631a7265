"""The engine of a run: made in a rollouter's process, and checked before anything starts.

    TrainConfig, Plan ─▶ EngineSettings ┬─▶ load_engine ─▶ EngineFactory.load          in the rollouter
                                        └─▶ engine_problems ─ child process ─▶ EngineFactory.check

The check runs in a child process because vLLM takes seconds to import, keeps threads and memory, and dies of a driver
that does not fit. A check cannot download a model or look at other machines: then the rollouters find problems.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from freewheel.errors import ConfigError
from freewheel.rollout.engines import EngineSettings, LoadedEngine, find_engine
from freewheel.runtime.config import TrainConfig

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan

CHECK_S = 180.0
"""Time for vLLM's import from a cold disk. A slower check is abandoned, and the rollouters find problems."""
LAST_CHARS = 300
"""How much of a dead child's last line is shown."""


def load_engine(
    *, config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int = 0, replica: int = 0
) -> LoadedEngine:
    """`longest_tokens`: of the longest prompt. Takes as long as loading the model does."""
    settings = engine_settings(config, plan, model_path, longest_tokens, version=version, replica=replica)
    return find_engine(config.rollout.engine).load(settings)


def engine_settings(
    config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, *, version: int = 0, replica: int = 0
) -> EngineSettings:
    return EngineSettings(
        options=config.rollout,
        model_path=model_path,
        trust_remote_code=config.model.trust_remote_code,
        dtype=plan.dtype,
        device=plan.device_rollout,
        transport=plan.transport,
        slots=plan.slots,
        longest_prompt=longest_tokens,
        max_prompt_tokens=plan.max_prompt_tokens,
        asked_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=plan.max_new_tokens,
        gpu_memory_share=plan.gpu_memory_share,
        engines_on_a_gpu=plan.engines_on_a_gpu,
        seed=config.seed,
        eval_temperature=config.eval.temperature,
        version=version,
        replica=replica,
    )


def engine_problems(plan: Plan, model: Path | None) -> list[ConfigError]:
    """Why this machine cannot run the engine. `model`: its folder, if it is on this machine."""
    rollout = plan.config.rollout
    factory = find_engine(rollout.engine)
    try:
        factory.require(rollout)
    except ConfigError as error:
        return [error]
    if not factory.has_check or plan.config.ray.address is not None or model is None:
        return []
    return _check_in_child(plan, str(model))


def _check_in_child(plan: Plan, model: str) -> list[ConfigError]:
    path = os.pathsep.join(filter(None, sys.path))  # a user's task may be in the working directory
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps((plan, model)),
            capture_output=True,
            timeout=CHECK_S,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return []
    if done.returncode == 0:
        found: ConfigError | None = pickle.loads(done.stdout)  # from our own child
        return [] if found is None else [found]
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    why = lines[-1].strip()[:LAST_CHARS] if lines else f"its import ended with {done.returncode}"
    return [ConfigError("rollout.engine", plan.config.rollout.engine, f"it cannot be used here: {why}")]


def _check(given: BinaryIO) -> bytes:
    """In the child: the pickled ConfigError, or None."""
    from freewheel.runtime.building import Prompts, is_here, load_tokenizer

    plan, model = pickle.load(given)  # from our own parent
    config = plan.config
    try:
        longest = 1
        if is_here(config.data.task, config.data.train):
            source = Prompts(config, load_tokenizer(config))
            source.train()
            longest = source.longest_tokens
        find_engine(config.rollout.engine).check(engine_settings(config, plan, model, longest))
    except ConfigError as error:
        return pickle.dumps(error)
    return pickle.dumps(None)


def main() -> None:
    """Standard output is for the answer alone, whatever libraries print."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answer_to, "wb") as out, contextlib.suppress(BrokenPipeError):
        out.write(_check(sys.stdin.buffer))


if __name__ == "__main__":
    main()
