"""A whole run under Ray that generates with vLLM, and goes on when vLLM's engine core is killed in the middle of it."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

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
STRUCK_AFTER = 4
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
            # What a step trains on is of its own version: the gap to the training pass is that of the kernels alone.
            "async_training": {"staleness_threshold": 0, "in_flight_updates": False, "verify_every_syncs": 1},
            "recovery": {"silent_s": 120.0},
        }
    )
    return FullyAsyncMain(config=config, plan=plan_of(config), view=None, resume=False)


def engine_core_of(rollouter: int) -> psutil.Process:
    below = psutil.Process(rollouter).children(recursive=True)
    (found,) = [one for one in below if "EngineCore" in " ".join([one.name(), *one.cmdline()])]
    return found


class Struck:
    """A run whose engine core is killed after some steps."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        main = main_of(model, folder)
        with running(main, wait_s=WAIT_S) as found:
            wait_until(lambda: count_steps(folder) >= STRUCK_AFTER or bool(found), WAIT_S)
            self.core = engine_core_of(processes(folder, "rollouter-0")[0])
            self.core.send_signal(signal.SIGKILL)
        (self.result,) = found
        self.rollouters = processes(folder, "rollouter-0")
        self.steps: list[dict[str, Any]] = read_metrics(folder, "step")
        self.log = (folder / "fully_async_training.log").read_text()


def check_that_it_went_on_with_another_engine_and_lost_nothing(run: Struck) -> None:
    assert run.result.error is None, run.log[-4000:]
    assert (run.result.outcome, run.result.steps) == ("finished", STEPS)
    assert len(run.rollouters) == 2, "the process whose engine was killed, and its successor"
    assert "The engine died, so this process ends" in run.log
    assert run.log.count("vLLM loads and compiles") == 2, "a minute of silence is announced"
    with contextlib.closing(Journal(run.folder / JOURNAL, readonly=True)) as journal:
        found = audit(journal, max_lag=5)
    assert (found.violations, found.lost, found.repeated, found.stale_trained) == ([], 0, 0, 0)


def check_that_every_step_was_trained_on_what_the_policy_says(run: Struck) -> None:
    assert [row["step"] for row in run.steps] == list(range(1, STEPS + 1))
    gaps = [row["rollout/logprob_gap_max"] for row in run.steps if "rollout/logprob_gap_max" in row]
    assert len(gaps) > STEPS // 2 and max(gaps) < GAP
    assert any(row["rollout/reward_std"] > 0 for row in run.steps)


def check_that_new_weights_reached_the_engine(run: Struck) -> None:
    last = run.steps[-1]
    assert last["current_param_version"] >= STEPS - 1
    assert last["max_sample_age"] <= 5
    evaluations = read_metrics(run.folder, "eval")
    assert (evaluations[0]["eval/version_min"], evaluations[-1]["eval/version_min"]) == (0, STEPS)
    assert "holds other weights" not in run.log


def test_a_run_with_vllm_goes_on_after_the_death_of_an_engine_core(
    cluster: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "LOOK_EVERY_S", 0.05)  # so that it is known of early steps before the last
    run = Struck(folder, tmp_path)
    check_that_it_went_on_with_another_engine_and_lost_nothing(run)
    check_that_every_step_was_trained_on_what_the_policy_says(run)
    check_that_new_weights_reached_the_engine(run)
    assert not run.core.is_running()
