"""The views of the page: what they say of a run, live, finished, killed, broken or removed."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freewheel.dashboard.web import views
from freewheel.dashboard.web.runs import Runs, RunView
from freewheel.errors import ConfigError
from freewheel.runtime.config_files import load
from freewheel.trainer.checkpoint import RunLock

from .made_run import (
    BEGAN_S,
    VERDICT,
    Writer,
    closing_row,
    make_run,
    pulse_row,
    rows,
    statistics_row,
    step_row,
    sync_row,
    write_journal,
    write_lines,
)


def open_view(folder: Path) -> RunView:
    return RunView("x", folder, clock=lambda: 0.0)


def now(folder: Path) -> dict[str, Any]:
    with open_view(folder).reading() as view:
        return views.now(view)


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    make_run(tmp_path / "run", steps=40, total=100)
    return open_view(tmp_path / "run")


# -- curves -----------------------------------------------------------------------------------------------------------


@given(
    arrays.arrays(np.float64, st.integers(0, 400), elements=st.floats(allow_nan=True, allow_infinity=True, width=32)),
    st.integers(4, 60),
)
def test_a_thinned_curve_keeps_ends_extremes_and_order(values, most):
    kept = views.thin(values, most)
    places = np.flatnonzero(np.isfinite(values))
    assert len(kept) <= most and np.all(np.diff(kept) > 0) and np.isfinite(values[kept]).all()
    if len(places):
        assert (values[kept].min(), values[kept].max()) == (values[places].min(), values[places].max())
        assert (kept[0], kept[-1]) == (places[0], places[-1])
    assert len(places) > most or len(kept) == len(places)


@given(st.integers(0, 99_999))
def test_a_spike_of_one_step_in_a_hundred_thousand_stays(where):
    values = np.zeros(100_000)
    values[where] = 1.0
    assert where in views.thin(values) and where in views.thin(-values)
    short = views.curve(np.array([1.0, 2.0, 3.0]), np.array([0.123456789, math.nan, math.inf]))
    assert short == {"x": [1], "y": [0.1234568]}


STEPS = list(range(100))


@pytest.mark.parametrize(
    ("given", "trend"),
    [
        ({"eval_steps": [0, 40], "held_out": [0.1, 0.9], "errors": [0.02, 0.02]}, "up"),
        ({"eval_steps": [0, 40], "held_out": [0.9, 0.1], "errors": [0.02, 0.02]}, "down"),
        ({"eval_steps": [0, 40], "held_out": [0.50, 0.53], "errors": [0.02, 0.02]}, "flat"),
        ({"eval_steps": [0, 40], "held_out": [0.5, 0.5], "errors": [0.0, 0.0]}, "flat"),
        # with fewer than two evaluations, training rewards decide
        ({"steps": STEPS, "rewards": [step / 100 for step in STEPS]}, "up"),
        ({"steps": STEPS, "rewards": np.random.default_rng(1).normal(size=100).tolist()}, "flat"),
        ({"steps": STEPS[:5], "rewards": [0.1, 0.2, 0.3, 0.4, 0.5]}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_a_run_learns_if_the_difference_is_clear(given, trend):
    names = ("steps", "rewards", "eval_steps", "held_out", "errors")
    assert views.learning(**{name: np.array(given.get(name, []), float) for name in names}).trend == trend


# -- the first view ---------------------------------------------------------------------------------------------------


def test_the_first_view_answers_what_a_person_asks(view):
    with view.reading():
        found = views.overview(view)
    json.dumps(found, allow_nan=False)
    assert found["now"]["verdict"] == VERDICT and found["now"]["learning"]["trend"] == "up"
    assert (found["now"]["step"], found["now"]["total_steps"], found["state"]) == (40, 100, "ended")
    assert sum(found["ages"]["counts"]) > 0 and len(found["ages"]["counts"]) == 5
    assert len(found["steps"]["rollout/reward_mean"]["x"]) == 40
    assert set(found["now"]["waits"]) == {"trainer", "rollouter-0"}
    assert [one["message"] for one in found["now"]["warnings"]] == ["slow judge"]


def test_changes_since_a_cursor_are_exactly_what_was_added(view):
    with view.reading():
        told = views.cursor(view)
        assert views.changes(view, told)["steps"] == {}
    Writer(view.folder, steps=40).go_on(3)
    with view.reading():
        found = views.changes(view, told)
        assert found["steps"]["step"] == [41, 42, 43] and found["syncs"] == 3 and found["events"] == []
        assert views.changes(view, found["cursor"])["steps"] == {}
        for wrong in ("", "x", "0.0.0", "9.1.1.1.1.1.1", "0.999.0.0.0.0.0", "-1.0.0.0.0.0.0"):
            assert views.changes(view, wrong) is None, "everything is sent again"
        told = views.cursor(view)
    write_lines(view.folder / "metrics.jsonl", (sync_row(one) for one in range(views.MOST_CHANGES + 1)), "ab")
    with view.reading():
        assert views.changes(view, told) is None, "a client that missed too much fetches everything"


def test_a_part_of_a_curve_is_sent_in_more_detail(view):
    write_lines(view.folder / "metrics.jsonl", (step_row(one, 9_000) for one in range(41, 9_000)), "ab")
    with view.reading():
        assert len(views.series(view, "actor/loss", "step", None, None)["x"]) <= 1_500
        assert views.series(view, "actor/loss", "step", 4_000, 4_500)["x"] == list(range(3_999, 4_502))
        assert views.series(view, "no/such", "step", None, None) is None


def test_the_mean_throughput_is_the_same_in_every_view(tmp_path):
    speeds = [(float(at), 1000.0) for at in range(1, 101)] + [(100 + 9.5 * at, 100.0) for at in range(1, 101)]
    pulses = [{"kind": "pulse", "time": BEGAN_S + at, "tokens_per_s": speed} for at, speed in speeds]
    write_lines(tmp_path / "metrics.jsonl", [{"kind": "event", "time": BEGAN_S}, *pulses])
    (compared,) = views.compare([open_view(tmp_path)], "eval/reward", "eval")["runs"]
    mean = pytest.approx((1000 * 100 + 100 * 950) / 1050)
    assert now(tmp_path)["tokens_per_s"] == compared["tokens_per_s"] == mean


def test_the_state_and_the_verdict_follow_the_run(tmp_path):
    folder = tmp_path / "run"
    assert open_view(folder).state == "waiting"
    make_run(folder, steps=4, total=100, killed=True)
    with RunLock(folder):
        assert (now(folder)["state"], now(folder)["verdict"]) == ("live", VERDICT)
    assert (now(folder)["state"], now(folder)["verdict"]) == ("ended", VERDICT)
    closing = "generation-bound: 31% of trainer time waits for responses"
    Writer(folder, steps=4).add({**closing_row(4), "verdict": closing})
    (folder / "final").mkdir()
    assert (now(folder)["state"], now(folder)["verdict"]) == ("finished", closing)


# -- gaps in the records ----------------------------------------------------------------------------------------------


def test_a_run_without_metrics_shows_the_last_step_that_it_reached(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "final").mkdir()
    assert now(folder)["missing"] == []
    write_journal(folder, steps=12)
    (folder / "metrics.jsonl").unlink()
    before = {one: one.stat().st_mtime_ns for one in folder.rglob("*")}
    found = now(folder)
    assert views.ledger(folder)["report"]["steps"] == 12
    assert {one: one.stat().st_mtime_ns for one in folder.rglob("*")} == before, "reading changes nothing"
    assert (found["state"], found["step"], found["recorded_step"]) == ("finished", 12, 0)
    assert found["missing"] == [
        "metrics.jsonl is missing or cannot be opened, so there are no curves. Its journal and checkpoints (see the "
        "ledger) show that it reached step 12"
    ]
    assert found["learning"]["words"].startswith("Whether it learns is unknown")
    (folder / "journal.sqlite").unlink()
    (folder / "checkpoints/step_4").mkdir(parents=True)
    found = now(folder)
    assert found["step"] == 4 and found["learning"]["words"].startswith("Too early"), "all its rows would not tell"


def test_an_unreadable_journal_is_reported_and_read_later(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=3)
    write_journal(folder, steps=12)
    (folder / "checkpoints/step_4").mkdir(parents=True)

    def refuse(*_: Any, **__: Any) -> Any:
        raise sqlite3.OperationalError("unable to open database file")

    with monkeypatch.context() as patched, open_view(folder).reading() as view:
        patched.setattr(sqlite3, "connect", refuse)
        found = views.now(view)
    words = "journal.sqlite cannot be read (unable to open database file): the run may have gone further than shown"
    assert found["step"] == 4 and words in found["missing"]
    assert "Its checkpoints show that it reached step 4" in found["missing"][-1]
    with view.reading():
        assert views.now(view)["step"] == 12


def test_lost_and_unreadable_rows_are_counted(tmp_path):
    folder = make_run(tmp_path / "run", steps=20)
    kept = [one for one in rows(20) if one["kind"] != "step" or one["step"] in (1, 2, 20)]
    write_lines(folder / "metrics.jsonl", kept)
    (said,) = now(folder)["missing"]
    assert said.startswith("metrics.jsonl has rows of 3 of 20 steps: the disk was full") and "ledger" not in said
    (folder / "checkpoints/step_30").mkdir(parents=True)
    found = now(folder)
    assert (found["step"], found["recorded_step"]) == (30, 20), "times are of the latter"
    (said,) = found["missing"]
    assert "rows of 3 of 30 steps" in said and "(see the ledger) show that it reached step 30" in said
    (folder / "checkpoints/step_30").rmdir()
    (folder / "metrics.jsonl").write_bytes(b"\x00\x00\x00\n" * 9)
    found = now(folder)
    assert found["missing"] == ["9 lines of metrics.jsonl could not be read"]
    assert found["learning"]["words"].startswith("Whether it learns is unknown")


# -- judge and weights ------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_judge_add_up(view):
    with view.reading():
        found = views.judge(view)
    judge = found["judge"]
    assert judge["limit"] > 0 and judge["throttled"] > 0 and judge["faults"]["overloaded"] > 0
    assert judge["saved_share"] == pytest.approx(1 / 4, abs=0.02) and found["rewards"]["scored"] > 0
    assert set(found["curves"]) >= {"limit", "in_flight", "scored_per_s", "throttled_per_s", "faults_per_s"}
    assert judge["down"] == "" and [end["state"] for end in judge["endpoints"]] == [""]


@pytest.mark.parametrize(
    ("changes", "live", "state"),
    [
        ({"breaker": "open"}, True, "unreachable, next try within 1 s"),
        ({"breaker": "probing"}, True, "unreachable, tried just now"),
        ({"breaker": "open"}, False, "unreachable at the end"),
        ({"halted": "401: no such key"}, True, "401: no such key"),
    ],
)
def test_a_judge_that_is_down_is_described(view, changes, live, state):
    row = statistics_row(95, 40)
    judge = row["rollouter"]["rewards"]["judge"]
    (end,) = judge["endpoints"]
    faults = {"broken": end["faults"]["overloaded"] + 500}
    judge |= {"failed": {}, "faults": faults, "endpoints": [{**end, "faults": faults, **changes}]}
    Writer(view.folder, steps=40).add(row)
    with RunLock(view.folder) if live else nullcontext(), view.reading():
        found = views.judge(view)
    assert [end["state"] for end in found["judge"]["endpoints"]] == [state]
    words = f"The judge gives no verdicts: {state}. 72 requests wait"
    assert found["judge"]["down"] == (words if live else words.replace("gives", "gave") + "ed")
    assert found["judge"]["waiting"] == 72
    curves = found["curves"]
    assert curves["faults_per_s"]["y"][-1] > 50 > 1 > curves["failed_per_s"]["y"][-1], "calls fail before verdicts do"


@pytest.mark.parametrize(
    ("mode", "at", "behind"), [("fully_async", 37, 0), ("fully_async", 36, 4), ("sync", 39, 0), ("sync", 38, 2)]
)
def test_an_engine_is_behind_if_it_lags_more_than_staleness_allows(tmp_path, mode, at, behind):
    folder = make_run(tmp_path / "run", steps=40, mode=mode)
    row = statistics_row(90, 40)
    row["sync"] |= {"versions": {"rollouter-0": at, "rollouter-1": 0}, "fenced": ["rollouter-1"]}
    Writer(folder, steps=40).add(row, pulse_row(95, 60))
    with open_view(folder).reading() as view:
        found = views.weights(view)
        assert views.overview(view)["bounds"]["staleness_threshold"] == load(folder / "config.yaml").staleness_threshold
    first, fenced = found["engines"]
    assert first == {"name": "rollouter-0", "version": at, "fenced": False, "behind": behind} and fenced["fenced"]
    assert [one["version"] for one in found["syncs"]][:2] == [40, 39], "the newest first"
    assert found["syncs"][40 - 17]["engines"]["rollouter-0"]["attempts"] == 2


BOMB = "&a [x, x]" + "".join(f", &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise("abcdefghi"))
"""Nested aliases: written out, they fill any memory."""
GARBAGE = (
    *("\x00", "[a]", "mode: [a]", "mode: {}", "mode:", "mode: 3", "? [a, b]\n: 3", "seed: 0x" + "f" * 9000),
    *("{a: " * 2000 + "1" + "}" * 2000, "mode: fully_async", "async_training: {staleness_threshold: many}"),
    *("async_training: {staleness_threshold: .nan}", f"mode: [{BOMB}]"),
    "{trainer: {total_steps: %s}, async_training: {staleness_threshold: %s}, data: {task: %s}}" % (("9" * 400,) * 3),
)


@pytest.mark.parametrize("config", GARBAGE, ids=lambda text: text[:30])
def test_meaningless_settings_are_as_good_as_none(tmp_path, config):
    folder = make_run(tmp_path / "run", steps=40, killed=True)
    Writer(folder, steps=40).add(statistics_row(90, 40))
    (folder / "config.yaml").write_text(config)
    with open_view(folder).reading() as view:
        found = views.overview(view)
        weights = views.weights(view)
        json.dumps([found, weights, views.judge(view)], allow_nan=False)
    assert views.ledger(folder)["report"]["live"] == "", "the ledger needs no settings"
    assert weights["engines"][0]["behind"] is None, "how far it may lag is unknown"
    views.compare([view, view], "eval/reward", "eval")
    assert found["bounds"]["staleness_threshold"] is None and found["now"]["total_steps"] is None
    assert isinstance(found["mode"], str) and isinstance(found["task"], str)


# -- which runs -------------------------------------------------------------------------------------------------------


def test_compared_runs_show_the_settings_that_differ(tmp_path):
    names = [str(make_run(tmp_path / f"run-{seed}", steps=20, seed=seed)) for seed in (0, 1)]
    found = views.compare(Runs(names, clock=lambda: 0.0).all(), "eval/reward", "eval")
    assert [len(run["curve"]["x"]) for run in found["runs"]] == [5, 5]
    assert found["differing"] == [{"key": "seed", "values": ["0", "1"]}] and "step actor/loss" in found["metrics"]


def test_a_folder_of_runs_gives_the_newest_first_and_finds_new_ones(tmp_path):
    for name, began in (("a-1", 30), ("a-2", 10), ("b-1", 20), ("b-2", 20)):
        make_run(tmp_path / name, steps=1)
        os.utime(tmp_path / name / "config.yaml", (began, began))
    (tmp_path / "no-run").mkdir()
    runs = Runs([str(tmp_path)], clock=lambda: 0.0)
    assert [view.id for view in runs.all()] == ["a-1", "b-2", "b-1", "a-2"]
    make_run(tmp_path / "a-3", steps=1)
    assert runs.find("a-3") is not None and runs.find("../etc") is None
    alike = [str(make_run(tmp_path / parent / "same run", steps=1)) for parent in ("x", "y")]
    assert [view.id for view in Runs(alike, clock=lambda: 0.0).all()] == ["same_run", "same_run-2"]


def test_a_folder_without_a_run_is_refused_or_skipped(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no such folder"):
        Runs([str(tmp_path / "none")], clock=lambda: 0.0)
    with pytest.raises(ConfigError, match="it contains no run"):
        Runs([str(tmp_path)], clock=lambda: 0.0)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    exists = Path.exists

    def refuse_theirs(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse_theirs)
    assert [view.id for view in Runs([str(tmp_path)], clock=lambda: 0.0).all()] == ["mine"]


def test_a_removed_run_stays_as_it_was_read(tmp_path):
    folder, unread, later = make_run(tmp_path / "run", steps=5), make_run(tmp_path / "b", steps=1), tmp_path / "later"
    runs = Runs([str(folder), str(unread)], clock=lambda: 0.0)
    view, other = runs.all()
    with view.reading():
        pass
    shutil.rmtree(folder)
    shutil.rmtree(unread)
    assert runs.all() == [view, other] and other.state == "removed"
    with view.reading():
        found = views.overview(view)
    assert views.ledger(view.folder)["report"] is None and views.prompt(view.folder, 3)["life"] is None
    assert found["state"] == "removed" and found["now"]["step"] == 5
    (starting,) = Runs([str(later)], clock=lambda: 0.0, must_exist=False).all()
    with starting.reading():
        views.overview(starting), views.judge(starting), views.weights(starting)
        assert starting.state == "waiting"
    later.mkdir()
    assert starting.state == "waiting"
    later.rmdir()
    assert starting.state == "removed"
