"""When vLLM's engine core, its rollouter or the engine ends, every wait ends with an error and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedModel

from freewheel.rollout.engine import EngineDied, EngineError, GenerationAborted
from freewheel.rollout.vllm.engine import VllmEngine

from ...rollout.helpers import ask, request_of
from .asking import NEW_TOKENS, WAIT_S, begin, engine_of, weights_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


def cores(above: psutil.Process) -> list[psutil.Process]:
    """vLLM's processes under another."""
    return [one for one in above.children(recursive=True) if "VLLM::" in " ".join(one.cmdline())]


def kill_core(engine: VllmEngine) -> None:
    (process,) = engine._llm._core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGKILL)


async def test_the_death_of_the_core_ends_every_wait_and_every_later_one(folder: Path, new: PreTrainedModel) -> None:
    engine = engine_of(folder)
    begun = await begin(engine, request_of(1, n=3, new=NEW_TOKENS))
    await engine._pause()
    updating = asyncio.create_task(engine.update_weights(1, weights_of(new), verify=True))
    kill_core(engine)
    found = await asyncio.wait_for(asyncio.gather(begun, updating, return_exceptions=True), WAIT_S)
    assert {type(one) for one in found} == {EngineDied}
    for call in (ask(engine, request_of(2)), engine.update_weights(2, weights_of(new), verify=False)):
        with pytest.raises(EngineDied):
            await asyncio.wait_for(call, WAIT_S)
    await asyncio.wait_for(engine.close(), WAIT_S)
    await asyncio.wait_for(engine.close(), WAIT_S)


ROLLOUTER = """
import sys
from pathlib import Path
from freewheel.runtime.building import load_engine
from freewheel.runtime.model_size import read_model_size
from freewheel.runtime.placement import Machine
from freewheel.runtime.run_plan import resolve
from freewheel.runtime.config_files import to_config

if __name__ == "__main__":
    rollout = {"engine": "vllm", "device": "cpu", "slots": 2, "max_new_tokens": 16, "vllm": {"enforce_eager": True}}
    config = to_config({"model": {"path": sys.argv[1]}, "rollout": rollout})
    plan = resolve(config, Machine(cpus=2, memory_bytes=8 << 30), model=read_model_size(Path(sys.argv[1])))
    load_engine(config=config, plan=plan, model_path=sys.argv[1], longest_tokens=16)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_vllms_processes_end_with_a_rollouter_that_is_killed(folder: Path, tmp_path: Path) -> None:
    """Its successor needs the GPU's memory."""
    script = tmp_path / "rollouter.py"
    script.write_text(ROLLOUTER)
    command = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rollouter:
        assert rollouter.stdout is not None
        while (line := rollouter.stdout.readline()) and line != b"ready\n":
            pass
        below = cores(psutil.Process(rollouter.pid))
        assert len(below) == 2, "the engine core and a worker"
        rollouter.kill()
        assert not psutil.wait_procs(below, timeout=WAIT_S)[1]


async def test_closing_ends_requests_and_vllms_processes(folder: Path) -> None:
    engine = engine_of(folder)
    begun = await begin(engine, request_of(5, n=2, new=NEW_TOKENS))
    processes = cores(psutil.Process())
    assert processes
    await engine.close()
    with pytest.raises(GenerationAborted):
        await begun
    with pytest.raises(EngineError, match="closed"):
        await ask(engine, request_of(6))
    assert not psutil.wait_procs(processes, timeout=WAIT_S)[1]
