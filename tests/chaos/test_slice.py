"""A short slice of the chaos suite: real Ray, real processes, real kills. All of it: `make chaos`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .acting import carry_out, disturbed
from .harness import JOURNAL, Disturbed
from .plan import Strike

pytestmark = pytest.mark.timeout(300)

STRIKE = Strike(after_step=2, delay_s=0.1, roles=("queue",))


def test_a_run_with_a_killed_queue_a_kill_of_everything_and_a_truncated_journal_trains_every_prompt_once(
    tmp_path: Path,
) -> None:
    def during(run: Disturbed) -> None:
        carry_out(run, [STRIKE])
        run.wait_step(6)
        run.strike_tree()
        tail = run.run_dir / f"{JOURNAL}-wal"
        os.truncate(tail, tail.stat().st_size // 2)
        run.start()

    result = disturbed(tmp_path, "slice", 0, during, trainer__total_steps=12)
    assert [kill.role for kill in result.kills] == ["queue", "tree"]
    assert result.fine, result
