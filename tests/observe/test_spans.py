"""Spans measure what a component spends its time on; pulses record it at intervals."""

from __future__ import annotations

import itertools
import json
from contextlib import ExitStack

import pytest

from freewheel.observe.snapshot import PULSE_MAX_S, Pulse, RunSnapshot
from freewheel.observe.spans import Spans, shares


def test_seconds_add_up_by_name_and_a_running_span_counts(clock):
    spans = Spans(clock)
    for seconds in (2.0, 3.0):
        with spans("train"):
            clock.now += seconds
    with spans("sync"):
        clock.now += 1.0
        assert spans.snapshot() == {"train": 5.0, "sync": 1.0, "elapsed": 6.0}


def test_spans_of_one_name_that_overlap_count_once(clock):
    spans = Spans(clock)
    with ExitStack() as later:
        with spans("wait"):
            clock.now += 1.0
            later.enter_context(spans("wait"))
            clock.now += 1.0
        clock.now += 1.0
    assert spans.snapshot() == {"wait": 3.0, "elapsed": 3.0}


def test_shares_are_of_the_time_between_two_snapshots(clock):
    spans = Spans(clock)
    with pytest.raises(KeyError), spans("train"):
        clock.now += 10.0
        raise KeyError
    before = spans.snapshot()
    with spans("train"):
        clock.now += 3.0
    with spans("wait_batch"):
        clock.now += 1.0
    assert shares(before, spans.snapshot()) == {"train": 0.75, "wait_batch": 0.25}
    restarted = {"train": 1.0, "elapsed": 4.0}
    assert shares({"train": 50.0, "elapsed": 100.0}, restarted) == {"train": 0.25}
    assert shares(restarted, restarted) == shares({}, {}) == {}


def test_each_closed_span_is_reported_with_its_arguments(clock):
    told = []
    spans = Spans(clock, on_close=lambda *span: told.append(span))
    with spans("train", step=3):
        clock.now += 2.0
        with spans("save", step=2):
            clock.now += 1.0
    with spans("train", step=4), spans("train"):
        clock.now += 1.0
    assert told == [
        ("save", 102.0, 103.0, {"step": 2}),
        ("train", 100.0, 103.0, {"step": 3}),
        ("train", 103.0, 104.0, {"step": 4}),
    ]


# -- pulses -----------------------------------------------------------------------------------------------------------

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


def test_the_interval_of_pulses_grows_with_the_age_of_the_run():
    assert beats(60, elapsed_s=0.0) == [float(second) for second in range(60)]
    assert len(beats(600, elapsed_s=0.0, every_s=0.1)) <= 60

    found = beats(600, elapsed_s=7 * 86400.0)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert set(gaps) == {10.0} and gaps[0] >= PULSE_MAX_S


def test_a_pulse_describes_the_run_and_has_none_for_unknown_values():
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
