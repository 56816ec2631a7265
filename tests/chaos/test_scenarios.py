"""Every scenario of the chaos suite: `pytest -m chaos tests/chaos`. Takes minutes on two cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from .on_processes import roles, undisturbed
from .on_surroundings import can_mount
from .scenarios import SCENARIOS, SOAK_KILLS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reward_alone(tmp_path_factory: pytest.TempPathFactory) -> float | None:
    """The final reward of an undisturbed run."""
    result = undisturbed(tmp_path_factory.mktemp("undisturbed"), 0, 0)
    assert result.fine, result
    return result.reward


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disturbed_run_finishes_with_every_prompt_trained_once(
    tmp_path: Path, name: str, reward_alone: float | None
) -> None:
    if name == "full_disk" and not can_mount():
        pytest.skip("needs the right to mount a file system")
    scenario = SCENARIOS[name]
    result = scenario.run(tmp_path, 0, scenario.kills).compared(reward_alone if scenario.comparable else None)
    assert result.fine, result
    assert result.kills


@pytest.mark.parametrize("seed", range(3))
def test_repeated_deaths_lose_nothing(tmp_path: Path, seed: int, reward_alone: float | None) -> None:
    result = roles(tmp_path, seed, SOAK_KILLS).compared(reward_alone)
    assert result.fine, result
    assert result.kills
