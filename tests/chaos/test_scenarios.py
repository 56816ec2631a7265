"""Every scenario of the chaos suite: `pytest -m chaos tests/chaos`. Takes minutes on two cores. And a short slice."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from .harness import JOURNAL, Disturbed
from .plan import Strike
from .scenarios import ALONE, SCENARIOS, SOAK, Scenario, can_mount, carry_out


@pytest.mark.timeout(300)
def test_a_run_with_a_killed_queue_a_kill_of_everything_and_a_truncated_journal_trains_every_prompt_once(
    tmp_path: Path,
) -> None:
    """A short slice of the suite: real Ray, real processes, real kills."""

    def disturb(run: Disturbed, draw: random.Random) -> None:
        carry_out(run, [Strike(after_step=2, delay_s=0.1, roles=("queue",))])
        run.wait_step(6)
        run.strike_tree()
        tail = run.run_dir / f"{JOURNAL}-wal"
        os.truncate(tail, tail.stat().st_size // 2)
        run.start()

    short = {"trainer.total_steps": 9, "observe.dashboard": "false"}
    slice_ = Scenario(
        name="slice", disturb=disturb, kills=2, comparable=False, prepare=None, prompts=None, settings=short
    )
    result = slice_.run(tmp_path, 0)
    assert [kill.role for kill in result.kills] == ["queue", "tree"]
    assert result.fine, result


@pytest.fixture(scope="module")
def reward_alone(tmp_path_factory: pytest.TempPathFactory) -> float | None:
    """The final reward of an undisturbed run."""
    result = SCENARIOS[ALONE].run(tmp_path_factory.mktemp(ALONE), 0)
    assert result.fine, result
    return result.reward


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in SCENARIOS if name != ALONE), (SOAK, 1), (SOAK, 2)])
def test_a_disturbed_run_finishes_with_every_prompt_trained_once(
    tmp_path: Path, name: str, seed: int, reward_alone: float | None
) -> None:
    if name == "full_disk" and not can_mount():
        pytest.skip("needs the right to mount a file system")
    scenario = SCENARIOS[name]
    result = scenario.run(tmp_path, seed).compared(reward_alone if scenario.comparable else None)
    assert result.fine, result
    assert result.kills
