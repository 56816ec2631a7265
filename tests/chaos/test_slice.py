"""A short slice of the chaos suite: real Ray, real processes, real kills. All of it: `make chaos`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .acting import carry_out, disturbed
from .harness import JOURNAL, Disturbed
from .plan import Strike

pytestmark = pytest.mark.timeout(300)

STRIKES = [
    Strike(after_step=2, delay_s=0.1, roles=("queue",)),
    Strike(after_step=5, delay_s=0.2, roles=("trainer",)),
    Strike(after_step=8, delay_s=0.0, roles=("rollouter",)),
]


def test_queue_trainer_and_rollouter_are_killed_and_every_prompt_is_trained_once(tmp_path: Path) -> None:
    result = disturbed(tmp_path, "slice", 0, lambda run: carry_out(run, STRIKES), trainer__total_steps=16)
    assert [kill.role for kill in result.kills] == ["queue", "trainer", "rollouter"]
    assert result.fine, result


def test_everything_is_killed_the_journal_loses_its_tail_and_the_resumed_run_trains_every_prompt_once(
    tmp_path: Path,
) -> None:
    def during(run: Disturbed) -> None:
        run.wait_step(6)
        run.strike_tree()
        tail = run.run_dir / f"{JOURNAL}-wal"
        os.truncate(tail, tail.stat().st_size // 2)
        run.start()

    result = disturbed(tmp_path, "slice", 1, during, trainer__total_steps=12)
    assert [kill.role for kill in result.kills] == ["tree"]
    assert result.fine, result
