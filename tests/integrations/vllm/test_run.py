"""A whole run under Ray that generates with vLLM, whose engine core is killed in the middle."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from freewheel.observe.recorder import read_metrics
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.audit import audit
from freewheel.queue.journal import Journal
from freewheel.runtime import main as main_module
from freewheel.runtime.config_files import to_config
from freewheel.runtime.main import FullyAsyncMain

from ...ray_runs import count_steps, processes, running, wait_until
from .asking import EAGER, plan_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

WAIT_S = 300.0
STEPS = 16
KILLED_AFTER = 4
GROUPS, SAMPLES = 4, 4
GAP = 2e-3
"""Between log-probabilities of vLLM's kernels and of torch's, both in float32."""


def main_of(model: Path, run_dir: Path) -> FullyAsyncMain:
    config = to_config(
        {
            "run_dir": str(run_dir),
            "model": {"path": str(model)},
            "rollout": {"engine": "vllm", "device": "cpu", "n": SAMPLES, "max_new_tokens": 12, "vllm": EAGER},
            "trainer": {"total_steps": STEPS, "groups_per_step": GROUPS, "save_every_steps": None},
            "reward": {"function": "user_code:even"},
            "data": {"limit": 128},
            "optimizer": {"lr": 3e-3},
            "eval": {"prompts": 8, "every_steps": None},
            # A step trains on responses of its own version, so only the kernels differ from the training pass.
            "async_training": {"staleness_threshold": 0, "in_flight_updates": False, "verify_every_syncs": 1},
            "recovery": {"silent_s": 120.0},
        }
    )
    return FullyAsyncMain(config=config, plan=plan_of(config), view=None, resume=False)


def engine_core_of(rollouter: int) -> psutil.Process:
    below = psutil.Process(rollouter).children(recursive=True)
    (found,) = [one for one in below if "EngineCore" in " ".join([one.name(), *one.cmdline()])]
    return found


def test_a_run_replaces_a_vllm_engine_whose_core_dies_and_loses_nothing(
    cluster: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "LOOK_EVERY_S", 0.05)  # so that early steps are seen before the last
    with running(main_of(folder, tmp_path), wait_s=WAIT_S) as found:
        wait_until(lambda: count_steps(tmp_path) >= KILLED_AFTER or bool(found), WAIT_S)
        core = engine_core_of(processes(tmp_path, "rollouter-0")[0])
        core.send_signal(signal.SIGKILL)
    (result,) = found
    log = (tmp_path / "fully_async_training.log").read_text()
    assert result.error is None, log[-4000:]
    assert (result.outcome, result.steps) == ("finished", STEPS)
    assert len(processes(tmp_path, "rollouter-0")) == 2, "the process whose engine was killed, and its successor"
    assert "The engine died, so this process ends" in log
    assert log.count("vLLM loads and compiles") == 2, "a minute of silence is announced"
    with contextlib.closing(Journal(tmp_path / JOURNAL, readonly=True)) as journal:
        audited = audit(journal, max_lag=5)
    assert (audited.violations, audited.lost, audited.repeated, audited.stale_trained) == ([], 0, 0, 0)
    steps = read_metrics(tmp_path, "step")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    gaps = [row["rollout/logprob_gap_max"] for row in steps if "rollout/logprob_gap_max" in row]
    assert len(gaps) > STEPS // 2 and max(gaps) < GAP
    assert any(row["rollout/reward_std"] > 0 for row in steps)
    assert steps[-1]["current_param_version"] >= STEPS - 1
    assert steps[-1]["max_sample_age"] <= 5
    evaluations = read_metrics(tmp_path, "eval")
    assert (evaluations[0]["eval/version_min"], evaluations[-1]["eval/version_min"]) == (0, STEPS)
    assert "holds other weights" not in log
    assert not core.is_running()
