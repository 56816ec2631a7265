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


def test_the_queue_is_killed_then_everything_the_journal_loses_its_tail_and_the_resumed_run_trains_every_prompt_once(
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
