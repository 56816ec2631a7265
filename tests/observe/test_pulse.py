"""The pulse of a run: once a second while it is young, and not much more often than a chart can show when it is old."""

from __future__ import annotations

import itertools
import json

from freewheel.observe.snapshot import PULSE_MAX_S as LATER_S
from freewheel.observe.snapshot import Pulse, RunSnapshot

NOW = RunSnapshot(
    mode="fully_async",
    step=12,
    total_steps=40,
    version=12,
    published_version=11,
    queue={"queue_size": 18, "in_progress": 40, "dropped_samples": 2},
    waits={"trainer": {"wait_batch": 1 / 3, "train": 2 / 3}},
    tokens_per_s=18503.2,
)


def beats(looks: int, *, elapsed_s: float, every_s: float = 1.0) -> list[float]:
    pulse, found = Pulse(), []
    for look in range(looks):
        now = look * every_s
        if pulse.beat(now, RunSnapshot(mode="sync", step=0, total_steps=1, elapsed_s=elapsed_s + now)) is not None:
            found.append(now)
    return found


def test_a_young_run_has_one_at_every_look_and_none_in_between():
    assert beats(60, elapsed_s=0.0) == [float(second) for second in range(60)]
    assert len(beats(600, elapsed_s=0.0, every_s=0.1)) <= 60


def test_an_old_run_has_one_in_ten_seconds():
    found = beats(600, elapsed_s=7 * 86400.0)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert set(gaps) == {10.0} and gaps[0] >= LATER_S


def test_a_row_has_what_the_run_does_now_and_none_for_what_is_unknown():
    row = {
        "queue_size": 18,
        "in_progress": 40,
        "version": 12,
        "published_version": 11,
        "tokens_per_s": 18503.2,
        "samples_per_s": None,
        "waits": {"trainer": {"wait_batch": 0.3333, "train": 0.6667}},
        "verdict": "",
    }
    pulse = Pulse()
    assert pulse.beat(1.0, NOW) == row
    assert pulse.beat(1.1, NOW) is None
    assert pulse.beat(1.2, NOW, last=True) == {**row, "last": True}, "the end is reported however soon it comes"
    unknown = Pulse().beat(1.0, RunSnapshot(mode="sync", step=0, total_steps=0))
    assert unknown is not None and (unknown["queue_size"], unknown["waits"]) == (None, {})
    json.dumps(unknown, allow_nan=False)
