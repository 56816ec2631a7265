"""Whether the engine that a run names can serve it, found out before anything is started.

    Plan ─▶ engine_problems ─ child process ─▶ engines.check_engine: vLLM's arguments, device, heads; servers' answers
                                        └────▶ ConfigError, or nothing

A child, because vLLM takes seconds to import, keeps threads and memory, and dies of a driver that does not fit. What a
child cannot find out (the model is not here, the engines are on other machines) the rollouters find when they start.
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

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan

LOOK_S = 180.0
"""For vLLM's import on a cold disk. One that takes longer is left to the rollouters."""
LAST_CHARS = 300
"""Of the line that a child died with."""


def engine_problems(plan: Plan, model: Path | None) -> list[ConfigError]:
    """What stands against the run's engine on this machine. `model`: its folder, where it is here."""
    rollout = plan.config.rollout
    if rollout.engine != "vllm":
        return []
    if rollout.urls is None:
        from freewheel.rollout.vllm.api import require

        try:
            require()
        except ConfigError as error:
            return [error]
    if plan.config.ray.address is not None or model is None:
        return []
    return _asked(plan, str(model))


def _asked(plan: Plan, model: str) -> list[ConfigError]:
    path = os.pathsep.join(filter(None, sys.path))  # a user's task may be in the working directory
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps((plan, model)),
            capture_output=True,
            timeout=LOOK_S,
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


def _answer(given: BinaryIO) -> bytes:
    """In the child."""
    from freewheel.runtime.building import Prompts, is_here, load_tokenizer
    from freewheel.runtime.engines import check_engine

    plan, model = pickle.load(given)  # from our own parent
    config = plan.config
    try:
        longest = 1
        if is_here(config.data.task, config.data.train):
            source = Prompts(config, load_tokenizer(config))
            source.train()
            longest = source.longest_tokens
        check_engine(config=config, plan=plan, model_path=model, longest_tokens=longest)
    except ConfigError as error:
        return pickle.dumps(error)
    return pickle.dumps(None)


def main() -> None:
    """Standard output is for the answer alone, whatever the libraries print."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answer_to, "wb") as out, contextlib.suppress(BrokenPipeError):
        out.write(_answer(sys.stdin.buffer))


if __name__ == "__main__":
    main()
