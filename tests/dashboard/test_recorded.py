"""What the page knows of a run by its files: metrics, traces and samples, while they grow, break and go away."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freewheel.dashboard.web import samples as samples_module
from freewheel.dashboard.web import views as pages
from freewheel.dashboard.web import views as panels
from freewheel.dashboard.web.runs import Runs, RunView
from freewheel.dashboard.web.samples import Samples
from freewheel.dashboard.web.timeline import merge, window
from freewheel.errors import ConfigError
from freewheel.inspect import metrics as recorded_module
from freewheel.inspect import trace as trace_module
from freewheel.inspect.metrics import RecordedMetrics
from freewheel.inspect.trace import RecordedTrace
from freewheel.observe.lines import decoded
from freewheel.runtime.config_files import load
from freewheel.trainer.checkpoint import RunLock

from .made_run import (
    BEGAN_S,
    DEEP,
    GROUPS,
    VERDICT,
    Writer,
    closing_row,
    line,
    make_run,
    pulse_row,
    rows,
    sample_row,
    spans,
    statistics_row,
    step_row,
    sync_row,
    trace_lines,
    write_journal,
    write_lines,
)


def recorded(folder: Path) -> RecordedMetrics:
    found = RecordedMetrics(folder)
    found.look()
    return found


@pytest.fixture
def view(tmp_path: Path) -> RunView:
    make_run(tmp_path / "run", steps=40, total=100)
    found = Runs([str(tmp_path / "run")], clock=lambda: 0.0).find("run")
    assert found is not None
    return found


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_all_kinds_of_rows_are_taken_up(tmp_path: Path):
    found = recorded(make_run(tmp_path / "run", steps=40))
    assert found.marks == (40, 9, 81, 8, 40, 2)
    assert found.steps["step"].tolist() == list(range(1, 41))
    assert found.steps["elapsed_s"][0] == pytest.approx(12)
    assert found.last_pulse is not None and found.last_pulse.verdict == VERDICT
    assert found.bad_lines == 0 and found.exists
    assert "mine/of_a_hook" in found.metric_names() and "eval/correct" in found.metric_names("eval")


def test_any_metric_can_be_read_later(tmp_path: Path):
    found = recorded(make_run(tmp_path / "run", steps=40))
    hook = found.read_metrics("mine/of_a_hook")
    assert hook["mine/of_a_hook"].tolist() == [step % 7 for step in range(1, 41)]


def test_of_a_metric_that_was_asked_for_only_what_came_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_run(tmp_path / "run", steps=40)
    found = recorded(folder)
    found.read_metrics("mine/of_a_hook")
    Writer(folder, steps=40).go_on(2)
    taken: list[bytes] = []
    counted = lambda decoder, line: taken.append(line) or decoded(decoder, line)  # noqa: E731
    monkeypatch.setattr(recorded_module, "decoded", counted)
    hook = found.read_metrics("mine/of_a_hook")
    assert hook["mine/of_a_hook"].tolist() == [step % 7 for step in range(1, 43)]
    assert len(taken) == 6, "three rows a step"
    write_lines(folder / "metrics.jsonl", rows(3))
    found.look()
    assert found.read_metrics("mine/of_a_hook")["step"].tolist() == [1, 2, 3]


def test_a_row_that_is_nested_too_deeply_is_one_unreadable_line(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=3)
    found = recorded(folder)
    Writer(folder, steps=3).tear(
        b'{"kind": "step", "step": 4, "time": 1790000020, "x": ' + DEEP + b"}\n" + DEEP + b"\n"
    )
    found.look()
    assert found.steps.rows == 3 and found.bad_lines == 2
    assert "actor/loss" in found.metric_names()


def test_garbage_and_half_lines_are_passed_over_and_counted(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=3)
    writer, found = Writer(folder, steps=3), recorded(folder)
    writer.tear(b"\xff\xfe garbage\n[1, 2]\n{}\n\n" + b'{"kind": "step", "step": "four"}\n' + b'{"kind": "step", "st')
    found.look()
    assert found.steps.rows == 3 and found.bad_lines == 4
    writer.tear(b'ep": 4, "time": 1790000020.0, "rollout/reward_mean": 0.5}\n')
    found.look()
    assert found.steps["step"].tolist() == [1, 2, 3, 4]
    assert found.steps["rollout/reward_mean"][-1] == 0.5


def test_a_row_in_another_order_of_keys_is_a_row(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", [{"time": BEGAN_S, "step": 1, "kind": "step", "avg_sample_age": None}])
    found = recorded(tmp_path)
    assert found.steps.rows == 1 and np.isnan(found.steps["avg_sample_age"][0])


def test_steps_that_are_trained_again_take_the_place_of_what_was_after_them(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=10)
    found = recorded(folder)
    generation = found.generation
    Writer(folder, steps=10).add({**step_row(8, 10), "rollout/reward_mean": 0.111}, step_row(9, 10))
    found.look()
    assert found.steps["step"].tolist() == list(range(1, 10))
    assert found.steps["rollout/reward_mean"][7] == 0.111
    assert found.generation > generation


def test_another_file_of_that_name_is_another_run(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=10)
    found = recorded(folder)
    generation = found.generation
    (folder / "metrics.jsonl").unlink()
    found.look()
    assert found.steps.rows == 10 and not found.exists
    write_lines(folder / "metrics.jsonl", rows(3))
    found.look()
    assert found.steps.rows == 3 and found.generation != generation


# -- the first view, and its changes ----------------------------------------------------------------------------------


def test_the_first_view_has_what_a_person_asks_about(view: RunView):
    with view.reading():
        found = pages.overview(view)
    json.dumps(found, allow_nan=False)
    assert found["now"]["verdict"] == VERDICT and found["now"]["learning"]["trend"] == "up"
    assert (found["now"]["step"], found["now"]["total_steps"]) == (40, 100)
    assert sum(found["ages"]["counts"]) > 0 and len(found["ages"]["counts"]) == 5
    assert len(found["steps"]["rollout/reward_mean"]["x"]) == 40
    assert set(found["now"]["waits"]) == {"trainer", "rollouter-0"}
    assert found["now"]["warnings"][0]["message"] == "slow judge" and len(found["now"]["warnings"]) == 1
    assert found["state"] == "ended"


def test_changes_since_a_cursor_are_exactly_what_came(view: RunView):
    with view.reading():
        told = pages.cursor(view)
        assert pages.changes(view, told)["steps"] == {}
    Writer(view.folder, steps=40).go_on(3)
    with view.reading():
        found = pages.changes(view, told)
        assert found is not None
        assert found["steps"]["step"] == [41, 42, 43] and found["syncs"] == 3 and found["events"] == []
        again = pages.changes(view, found["cursor"])
        assert again is not None and again["steps"] == {}


@pytest.mark.parametrize("told", ["", "x", "0.0.0", "9.1.1.1.1.1.1", "0.999.0.0.0.0.0", "-1.0.0.0.0.0.0"])
def test_a_cursor_that_means_nothing_here_begins_anew(view: RunView, told: str):
    with view.reading():
        assert pages.changes(view, told) is None


def test_who_missed_too_much_begins_anew(view: RunView):
    with view.reading():
        told = pages.cursor(view)
    write_lines(view.folder / "metrics.jsonl", (sync_row(one) for one in range(pages.MOST_CHANGES + 1)), "ab")
    with view.reading():
        assert pages.changes(view, told) is None


def test_a_part_of_a_curve_is_sent_in_more_detail(view: RunView):
    write_lines(view.folder / "metrics.jsonl", (step_row(one, 9_000) for one in range(41, 9_000)), "ab")
    with view.reading():
        whole = pages.series(view, "actor/loss", "step", None, None)
        part = pages.series(view, "actor/loss", "step", 4_000, 4_500)
        assert whole is not None and part is not None
        assert len(whole["x"]) <= 1_500 and part["x"] == list(range(3_999, 4_502))
        assert pages.series(view, "no/such", "step", None, None) is None


def test_a_run_of_which_nothing_is_recorded_yet_can_be_looked_at(tmp_path: Path):
    view = RunView("x", tmp_path / "none", clock=lambda: 0.0)
    with view.reading():
        found = pages.overview(view)
        json.dumps([found, panels.judge(view), panels.weights(view), panels.ledger(view.folder)], allow_nan=False)
    assert found["state"] == "waiting" and found["now"]["learning"]["trend"] == "unknown"


def test_a_run_without_pulses_shows_what_its_statistics_have(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", rows(20, pulses=False))
    view = RunView("x", tmp_path, clock=lambda: 0.0)
    with view.reading():
        found = pages.overview(view)
    assert found["now"]["queue_size"] == 9 and found["now"]["tokens_per_s"] == pytest.approx(600, rel=0.1)
    assert len(found["pulses"]["tokens_per_s"]["x"]) == 3


def test_the_mean_throughput_of_a_run_is_the_same_wherever_it_is_told(tmp_path: Path):
    speeds = [(float(at), 1000.0) for at in range(1, 101)] + [(100 + 9.5 * at, 100.0) for at in range(1, 101)]
    pulses = [{"kind": "pulse", "time": BEGAN_S + at, "tokens_per_s": speed} for at, speed in speeds]
    write_lines(tmp_path / "metrics.jsonl", [{"kind": "event", "time": BEGAN_S}, *pulses])
    view = RunView("x", tmp_path, clock=lambda: 0.0)
    (compared,) = panels.compare([view], "eval/reward", "eval")["runs"]
    with view.reading():
        shown = pages.now(view)["tokens_per_s"]
    assert shown == compared["tokens_per_s"] == pytest.approx((1000 * 100 + 100 * 950) / 1050)


def test_a_run_is_live_while_somebody_holds_it(view: RunView):
    assert view.state == "ended"
    lock = RunLock(view.folder)
    lock.acquire()
    try:
        held = RunView("y", view.folder, clock=lambda: 0.0)
        assert held.state == "live"
    finally:
        lock.release()
    (view.folder / "final").mkdir()
    assert RunView("z", view.folder, clock=lambda: 0.0).state == "finished"


# -- what held it up, and what is not there ---------------------------------------------------------------------------

GENERATION = spans(80, train=0.2, wait_batch=0.7), spans(80, generate=0.9, wait_reward=0.05)


def looked_at(folder: Path) -> dict[str, Any]:
    view = RunView("x", folder, clock=lambda: 0.0)
    with view.reading():
        return pages.now(view)


def held_up_by_generation(folder: Path, steps: int) -> None:
    """Adds statistics by which the whole run waited for generation, whatever its pulses say."""
    row = statistics_row(10 + 2.0 * steps, steps)
    trainer, rollouter = GENERATION
    rewards = {**row["rollouter"]["rewards"], "waiting": 0}
    rewards["judge"] = {**rewards["judge"], "queued": 0, "endpoints": []}
    row = {**row, "trainer": {"spans": trainer}, "rollouter": {"spans": rollouter, "rewards": rewards}}
    Writer(folder, steps=steps).add(row, pulse_row(11 + 2.0 * steps, steps))


def test_a_run_that_is_over_has_the_closing_verdict_that_it_recorded(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=4, total=100, killed=True)
    held_up_by_generation(folder, 4)
    closing = "generation-bound: 31% of trainer time waits for responses"
    Writer(folder, steps=4).add({**closing_row(4), "verdict": closing})
    assert looked_at(folder)["verdict"] == closing
    (folder / "final").mkdir()
    assert looked_at(folder)["verdict"] == closing


def test_a_run_that_was_killed_has_the_verdict_of_what_was_seen_until_then(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=4, total=100, killed=True)
    held_up_by_generation(folder, 4)
    found = looked_at(folder)
    assert found["state"] == "ended" and found["verdict"].startswith("generation-bound: 65% of trainer time waits")
    lock = RunLock(folder)
    lock.acquire()
    try:
        assert looked_at(folder)["verdict"] == VERDICT, "one that goes on is held up by what its pulse says"
    finally:
        lock.release()


def test_steps_that_were_trained_again_are_not_in_the_verdict_of_a_killed_run(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=4, total=100, killed=True)
    held_up_by_generation(folder, 4)
    held = statistics_row(21, 4)
    replayed = {"trainer": spans(80, train=0.2, wait_batch=0.7), "rollouter": spans(80, generate=0.9, wait_reward=0.05)}
    after = spans(100, train=0.36, wait_batch=0.56), spans(100, generate=0.72, wait_reward=0.04, wait_room=0.2)
    rewards = {**held["rollouter"]["rewards"], "waiting": 0, "judge": None}
    row = {**held, "trainer": {"spans": after[0]}, "rollouter": {"spans": after[1], "rewards": rewards}}
    Writer(folder, steps=4).add({**row, "time": BEGAN_S + 21, "run": {"verdict": "", "replayed": replayed}})
    assert looked_at(folder)["verdict"].startswith("training-bound: 100% of generation time")


@pytest.mark.parametrize("absent", ["trainer", "rollouter"])
def test_a_part_that_missed_the_last_statistics_of_a_killed_run_leaves_its_verdict(tmp_path: Path, absent: str):
    folder = make_run(tmp_path / "run", steps=4, total=100, killed=True)
    held_up_by_generation(folder, 4)
    Writer(folder, steps=4).add({**statistics_row(21, 4), absent: {}, "time": BEGAN_S + 21})
    assert "-bound: " in looked_at(folder)["verdict"]


def test_a_run_that_was_killed_before_anything_was_measured_has_no_verdict(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", [{"kind": "event", "step": 0, "time": BEGAN_S, "text": "begun"}])
    assert looked_at(tmp_path)["verdict"] == ""
    Writer(tmp_path, steps=0).add(
        {"kind": "statistics", "step": 0, "time": BEGAN_S + 1, "trainer": {}, "rollouter": {}}
    )
    assert looked_at(tmp_path)["verdict"] == ""


def test_without_its_metrics_a_run_says_so_and_how_far_it_came(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "final").mkdir()
    assert looked_at(folder)["missing"] == []
    write_journal(folder, steps=12)
    (folder / "metrics.jsonl").unlink()
    found = looked_at(folder)
    assert (found["state"], found["step"], found["recorded_step"]) == ("finished", 12, 0)
    assert found["missing"] == [
        "metrics.jsonl is missing or cannot be opened: there are no curves. That it came to step 12 is known by its "
        "journal and its checkpoints, which the ledger shows"
    ]
    assert found["learning"]["words"].startswith("Whether it learns cannot be said")
    (folder / "final").rmdir()
    assert looked_at(folder)["state"] == "ended"
    (folder / "journal.sqlite").unlink()
    (folder / "checkpoints/step_4").mkdir(parents=True)
    found = looked_at(folder)
    assert found["step"] == 4 and found["learning"]["words"].startswith("Too early"), "all its rows would not tell"


def test_looking_at_a_run_changes_nothing_in_its_folder(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=3)
    write_journal(folder, steps=12)
    seen = lambda: {one: one.stat().st_mtime_ns for one in folder.rglob("*")}  # noqa: E731
    before = seen()
    assert looked_at(folder)["step"] == 12
    assert panels.ledger(folder)["report"]["steps"] == 12
    assert seen() == before


def test_a_journal_that_cannot_be_read_is_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_run(tmp_path / "run", steps=3)
    write_journal(folder, steps=12)
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", _refuse)
    view = RunView("x", folder, clock=lambda: 0.0)
    with view.reading():
        found = pages.now(view)
    assert found["step"] == 3, "by its rows"
    assert found["missing"] == [
        "journal.sqlite cannot be read (unable to open database file): the run may have come further than is shown"
    ]
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoints/step_4").mkdir(parents=True)
    assert "That it came to step 4 is known by its checkpoints" in looked_at(folder)["missing"][0]
    monkeypatch.setattr(sqlite3, "connect", connect)
    with view.reading():
        assert pages.now(view)["step"] == 12, "it is tried again"


def _refuse(*_: Any, **__: Any) -> Any:
    raise sqlite3.OperationalError("unable to open database file")


def test_rows_that_a_full_disk_cost_are_counted(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=20)
    kept = [one for one in rows(20) if one["kind"] != "step" or one["step"] in (1, 2, 20)]
    write_lines(folder / "metrics.jsonl", kept)
    (said,) = looked_at(folder)["missing"]
    assert said.startswith("metrics.jsonl has rows of 3 of 20 steps: the disk was full") and "journal" not in said
    (folder / "checkpoints/step_30").mkdir(parents=True)
    found = looked_at(folder)
    assert (found["step"], found["recorded_step"]) == (30, 20), "times are of the latter"
    (said,) = found["missing"]
    assert "rows of 3 of 30 steps" in said and said.endswith(
        "That it came to step 30 is known by its journal and its checkpoints, which the ledger shows"
    )


def test_a_metrics_file_of_garbage_is_said_to_be_that(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=3)
    (folder / "metrics.jsonl").write_bytes(b"\x00\x00\x00\n" * 9)
    found = looked_at(folder)
    assert found["missing"] == ["9 lines of metrics.jsonl could not be read"]
    assert found["learning"]["words"].startswith("Whether it learns cannot be said")


# -- the other views --------------------------------------------------------------------------------------------------


def test_the_judges_numbers_add_up(view: RunView):
    with view.reading():
        found = panels.judge(view)
    judge = found["judge"]
    assert judge["limit"] > 0 and judge["throttled"] > 0 and judge["faults"]["overloaded"] > 0
    assert judge["saved_share"] == pytest.approx(1 / 4, abs=0.02)
    assert found["rewards"]["scored"] > 0 and "judge" not in found["rewards"]
    assert set(found["curves"]) >= {"limit", "in_flight", "scored_per_s", "throttled_per_s", "faults_per_s"}
    assert judge["down"] == "" and [end["state"] for end in judge["endpoints"]] == [""]


def endpoints_of(folder: Path, *, live: bool, **changes: Any) -> dict[str, Any]:
    """The judge's panel after statistics by which its one endpoint changed, and nothing but failed calls came."""
    row = statistics_row(95, 40)
    judge = row["rollouter"]["rewards"]["judge"]
    (end,) = judge["endpoints"]
    faults = {"broken": end["faults"]["overloaded"] + 500}
    judge |= {"failed": {}, "faults": faults, "endpoints": [{**end, "faults": faults, **changes}]}
    Writer(folder, steps=40).add(row)
    lock = RunLock(folder)
    if live:
        lock.acquire()
    try:
        view = RunView("x", folder, clock=lambda: 0.0)
        with view.reading():
            return panels.judge(view)
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("changes", "live", "state"),
    [
        ({"breaker": "open"}, True, "unreachable, next try within 1 s"),
        ({"breaker": "probing"}, True, "unreachable, tried just now"),
        ({"breaker": "open"}, False, "unreachable at the end"),
        ({"halted": "401: no such key"}, True, "401: no such key"),
    ],
)
def test_a_judge_that_is_down_is_said_to_be_in_words(view: RunView, changes: dict[str, str], live: bool, state: str):
    found = endpoints_of(view.folder, live=live, **changes)
    assert [end["state"] for end in found["judge"]["endpoints"]] == [state]
    wanted = f"The judge gives no verdicts: {state}. 72 requests wait"
    assert found["judge"]["down"] == (wanted if live else wanted.replace("gives", "gave") + "ed")
    assert found["judge"]["waiting"] == 72


def test_calls_that_fail_have_a_curve_before_any_verdict_does(view: RunView):
    curves = endpoints_of(view.folder, live=True, breaker="open")["curves"]
    assert curves["faults_per_s"]["y"][-1] > 50 > 1 > curves["failed_per_s"]["y"][-1]


def test_the_curve_of_failed_calls_does_not_jump_where_a_replica_takes_its_endpoints_count_with_it(view: RunView):
    row = statistics_row(95, 40)
    judge = row["rollouter"]["rewards"]["judge"]
    judge["endpoints"][0]["faults"] = {"overloaded": 1}
    Writer(view.folder, steps=40).add(row)
    with view.reading():
        found = panels.judge(view)
    assert found["judge"]["faults"] == judge["faults"]
    assert max(found["curves"]["faults_per_s"]["y"]) < 0.3, "3 in 5 s at most"


def test_a_run_of_before_that_has_failed_calls_by_endpoint_alone_has_no_curve_of_them(tmp_path: Path):
    told = list(rows(40))
    for row in told:
        if row["kind"] == "statistics":
            del row["rollouter"]["rewards"]["judge"]["faults"]
    write_lines(tmp_path / "metrics.jsonl", told)
    view = RunView("x", tmp_path, clock=lambda: 0.0)
    with view.reading():
        found = panels.judge(view)
    assert found["judge"]["faults"] == {} and found["judge"]["sent"] > 0
    assert "faults_per_s" not in found["curves"] and "sent_per_s" in found["curves"]


def test_syncs_are_told_the_newest_first(view: RunView):
    with view.reading():
        found = panels.weights(view)
    assert [one["version"] for one in found["syncs"]][:2] == [40, 39]
    assert found["syncs"][40 - 17]["engines"]["rollouter-0"]["attempts"] == 2


@pytest.mark.parametrize(
    ("mode", "at", "behind"), [("fully_async", 37, 0), ("fully_async", 36, 4), ("sync", 39, 0), ("sync", 38, 2)]
)
def test_an_engine_is_behind_when_it_lags_more_than_staleness_allows(tmp_path: Path, mode: str, at: int, behind: int):
    folder = make_run(tmp_path / "run", steps=40, mode=mode)
    row = statistics_row(90, 40)
    row["sync"] |= {"versions": {"rollouter-0": at, "rollouter-1": 0}, "fenced": ["rollouter-1"]}
    Writer(folder, steps=40).add(row, pulse_row(95, 60))
    view = RunView("x", folder, clock=lambda: 0.0)
    with view.reading():
        first, fenced = panels.weights(view)["engines"]
        of_the_run = load(folder / "config.yaml").staleness_threshold
        assert view.settings.staleness_threshold == of_the_run, "a remedy for a run that is over depends on it"
        assert pages.overview(view)["bounds"]["staleness_threshold"] == of_the_run, "samples are held against it too"
    assert first == {"name": "rollouter-0", "version": at, "fenced": False, "behind": behind}
    assert fenced["fenced"]


GARBAGE = (
    *("\x00", "[a]", "mode: [a]", "mode: {}", "mode:", "mode: 3", "? [a, b]\n: 3", "seed: 0x" + "f" * 9000),
    *("{a: " * 2000 + "1" + "}" * 2000, "mode: fully_async", "async_training: {staleness_threshold: many}"),
    "async_training: {staleness_threshold: .nan}",
    "{trainer: {total_steps: %s}, async_training: {staleness_threshold: %s}, data: {task: %s}}" % (("9" * 400,) * 3),
)


@pytest.mark.parametrize("config", GARBAGE, ids=lambda text: text[:30])
def test_settings_that_mean_nothing_are_as_good_as_none(tmp_path: Path, config: str):
    folder = make_run(tmp_path / "run", steps=40, killed=True)
    row = statistics_row(90, 40)
    row["sync"]["versions"] = {"rollouter-0": 1}
    Writer(folder, steps=40).add(row)
    (folder / "config.yaml").write_text(config)
    view = RunView("x", folder, clock=lambda: 0.0)
    with view.reading():
        found = pages.overview(view)
        json.dumps([found, panels.judge(view), panels.weights(view)], allow_nan=False)
        assert panels.weights(view)["engines"][0]["behind"] is None, "how far it may be is not known"
    panels.compare([view, view], "eval/reward", "eval")
    assert found["bounds"]["staleness_threshold"] is None and found["now"]["total_steps"] is None
    assert isinstance(found["mode"], str) and isinstance(found["task"], str)


def test_compared_runs_are_told_apart_by_what_differs(tmp_path: Path):
    names = [str(make_run(tmp_path / f"run-{seed}", steps=20, seed=seed)) for seed in (0, 1)]
    runs = Runs(names, clock=lambda: 0.0)
    found = panels.compare(runs.all(), "eval/reward", "eval")
    assert [len(run["curve"]["x"]) for run in found["runs"]] == [5, 5]
    assert found["differing"] == [{"key": "seed", "values": ["0", "1"]}]
    assert "step actor/loss" in found["metrics"]


# -- traces -----------------------------------------------------------------------------------------------------------


def test_the_timeline_has_lanes_by_part_and_lives_by_group(tmp_path: Path):
    make_run(tmp_path, steps=6)
    trace = RecordedTrace(tmp_path)
    trace.look()
    found = window(trace)
    assert [(lane["part"], lane["name"]) for lane in found["lanes"]][:3] == [
        ("trainer", "pack"), ("trainer", "train"), ("trainer", "wait_batch"),
    ]  # fmt: skip
    assert found["groups_in_window"] == 6 * GROUPS
    names = [bar.name for bar in found["groups"][0]["bars"]]
    assert names.count("response") == 4 and names[-1] == "ready"
    assert found["groups"][0]["bars"][0].about.tokens == 60
    busy = {(lane["part"], lane["name"]): lane["busy_s"] for lane in found["lanes"]}
    assert busy["trainer", "train"] == pytest.approx(6 * 0.7, abs=1e-3)


def test_a_window_has_what_happened_in_it(tmp_path: Path):
    make_run(tmp_path, steps=40)
    trace = RecordedTrace(tmp_path)
    trace.look()
    found = window(trace, 10, 12)
    assert (found["from_s"], found["to_s"]) == (10, 12)
    assert all(bar.end_s >= 10 and bar.start_s <= 12 for lane in found["lanes"] for bar in lane["bars"])
    assert 0 < found["groups_in_window"] < 40
    assert window(trace, 1e9, 2e9)["groups_in_window"] == 0


def test_spans_closer_than_a_pixel_are_one_bar_that_says_so():
    bars = np.array([[0.0, 0.1], [0.1001, 0.2], [5.0, 5.5]])
    found = merge("train", bars, 0.01)
    assert [(bar.start_s, bar.end_s, bar.count) for bar in found] == [(0.0, 0.2, 2), (5.0, 5.5, 1)]
    assert merge("train", np.zeros((0, 2)), 0.01) == []


def test_a_trace_that_is_rotated_and_broken_is_followed(tmp_path: Path):
    trainer, _ = trace_lines(2)
    file = write_lines(tmp_path / "trace/trainer-1.jsonl", trainer)
    trace = RecordedTrace(tmp_path)
    assert window(trace)["recorded"] is False
    trace.look()
    before = window(trace)["length_s"]
    file.rename(tmp_path / "trace/trainer-1.1.jsonl")
    later, _ = trace_lines(2, first=10)
    file.write_bytes(b"garbage\n" + b"".join(map(line, later)) + b'{"ph":"X","na')
    trace.look()
    found = window(trace)
    assert found["length_s"] > before
    assert sum(bar.count for lane in found["lanes"] if lane["name"] == "train" for bar in lane["bars"]) == 4


def test_of_a_trace_that_is_too_long_the_newest_part_of_every_component_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, rollouter = trace_lines(40)
    write_lines(tmp_path / "trace/trainer-1.jsonl", trainer)
    for number in range(6):
        replica = [{**event, "pid": f"rollouter-{number}"} for event in rollouter]
        write_lines(tmp_path / f"trace/rollouter-{number}-1.jsonl", replica)
    whole = RecordedTrace(tmp_path)
    whole.look()
    assert window(whole)["whole_from_s"] == 0
    monkeypatch.setattr(trace_module, "MOST_KEPT", 3_000)
    short = RecordedTrace(tmp_path)
    short.look()
    found = window(short)
    kept = [end_us for file in short._files.values() for end_us in file.ends_us()]
    assert 1_500 <= len(kept) <= 3_000 and min(kept) >= short.complete_from_us
    assert found["length_s"] == window(whole)["length_s"] and 0 < found["whole_from_s"] < found["length_s"]
    since = found["whole_from_s"]
    assert window(short, since)["lanes"] == window(whole, since)["lanes"]
    assert len({lane["part"] for lane in found["lanes"]}) == 7


def test_other_events_and_tracks_of_their_own_are_told_apart(tmp_path: Path):
    same: dict[str, Any] = {"ph": "X", "cat": "span", "name": "load", "pid": "sync", "ts": 1e15, "dur": 5, "args": {}}
    write_lines(
        tmp_path / "trace/sync-1.jsonl",
        [
            {**same, "tid": "rollouter-0"}, {**same, "tid": "rollouter-1"}, {**same, "tid": "main", "name": "sync"},
            {"ph": "C", "name": "groups", "pid": "main", "ts": 1, "args": {"queue_size": 1}},
            {"ph": "i", "name": "text", "pid": "main", "ts": 1},
            *({"ph": half, "name": "generate", "pid": "main", "ts": 2e15, "id": "007"} for half in "be"),
            *({"ph": half, "name": "generate", "pid": "main", "ts": 2e15} for half in "be"),
        ],
    )  # fmt: skip
    trace = RecordedTrace(tmp_path)
    trace.look()
    assert {lane["name"] for lane in window(trace)["lanes"]} == {"load rollouter-0", "load rollouter-1", "sync"}
    assert window(trace)["groups"] == []


# -- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_listed_newest_first_and_found(tmp_path: Path):
    make_run(tmp_path, steps=1)
    samples = Samples(tmp_path)
    assert samples.page()["total"] == 0
    samples.look()
    page = samples.page()
    assert page["total"] == 60 and [card.ordinal for card in page["cards"]][:2] == [59, 58] and len(page["cards"]) == 40
    assert [card.ordinal for card in samples.page(before=page["cards"][-1].time)["cards"]] == list(range(19, -1, -1))
    assert [card.ordinal for card in samples.page(find="#7")["cards"]] == [7]
    assert {card.ordinal % 5 for card in samples.page(only="failed")["cards"]} == {0}
    assert samples.page(find="APPLES")["found"] == 60 and samples.page(find="pears")["found"] == 0


def test_a_sample_is_read_in_full_by_its_place_in_the_file(tmp_path: Path):
    rows_ = [sample_row(0), sample_row(1, text="ünï\ncode"), sample_row(2)]
    path = tmp_path / "samples/rollouter-0-1.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(rows_[0]) + b"garbage\n" + line(rows_[1]) + line(rows_[2])[:-5])
    samples = Samples(tmp_path)
    samples.look()
    newest = samples.page()["cards"][0]
    assert samples.read(newest.key) == rows_[1]
    path.rename(tmp_path / "samples/rollouter-0-1.0.jsonl")
    samples.look()
    assert samples.read(newest.key) == rows_[1]
    (tmp_path / "samples/rollouter-0-1.0.jsonl").unlink()
    assert samples.read(newest.key) is None
    samples.look()
    assert samples.page()["total"] == 0 and samples.read("1") is None and samples.read("../x") is None


def test_of_too_many_samples_the_oldest_are_left_out_whatever_their_files_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samples_module, "MOST_CARDS", 3)
    write_lines(tmp_path / "samples/rollouter-0-1.jsonl", [sample_row(ordinal) for ordinal in (7, 8, 9)])
    write_lines(tmp_path / "samples/rollouter-1-1.jsonl", [sample_row(ordinal) for ordinal in (1, 2, 10)])
    samples = Samples(tmp_path)
    samples.look()
    assert [card.ordinal for card in samples.page()["cards"]] == [10, 9, 8]


# -- which runs -------------------------------------------------------------------------------------------------------


def test_a_folder_of_runs_gives_its_runs_the_newest_first_and_finds_those_that_come(tmp_path: Path):
    for name, began in (("a-1", 30), ("a-2", 10), ("b-1", 20), ("b-2", 20)):
        make_run(tmp_path / name, steps=1)
        os.utime(tmp_path / name / "config.yaml", (began, began))
    (tmp_path / "no-run").mkdir()
    runs = Runs([str(tmp_path)], clock=lambda: 0.0)
    assert [view.id for view in runs.all()] == ["a-1", "b-2", "b-1", "a-2"]
    make_run(tmp_path / "a-3", steps=1)
    assert runs.find("a-3") is not None
    assert runs.find("../etc") is None


def test_a_folder_of_another_user_takes_no_run_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    exists = Path.exists

    def looked_at(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", looked_at)
    assert [view.id for view in Runs([str(tmp_path)], clock=lambda: 0.0).all()] == ["mine"]


def test_runs_of_one_name_have_ids_of_their_own(tmp_path: Path):
    names = [str(make_run(tmp_path / parent / "same run", steps=1)) for parent in ("a", "b")]
    assert [view.id for view in Runs(names, clock=lambda: 0.0).all()] == ["same_run", "same_run-2"]


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such folder"):
        Runs([str(tmp_path / "none")], clock=lambda: 0.0)
    with pytest.raises(ConfigError, match="no run is in it"):
        Runs([str(tmp_path)], clock=lambda: 0.0)


def test_a_run_that_is_removed_stays_as_it_was_read(tmp_path: Path):
    folder = make_run(tmp_path / "run", steps=5)
    runs = Runs([str(folder)], clock=lambda: 0.0)
    (view,) = runs.all()
    with view.reading():
        pass
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    (view,) = runs.all()
    with view.reading():
        found = pages.overview(view)
        assert panels.ledger(view.folder)["report"] is None and panels.prompt(view.folder, 3)["life"] is None
    assert found["state"] == "removed" and found["now"]["step"] == 5


def test_a_run_that_is_removed_before_anybody_opened_it_is_not_one_that_starts(tmp_path: Path):
    folder, later = make_run(tmp_path / "run", steps=5), tmp_path / "later"
    (view,) = Runs([str(folder)], clock=lambda: 0.0).all()
    shutil.rmtree(folder)
    assert view.state == "removed"
    (view,) = Runs([str(later)], clock=lambda: 0.0, must_exist=False).all()
    assert view.state == "waiting"
    later.mkdir()
    assert view.state == "waiting"
    later.rmdir()
    assert view.state == "removed"
