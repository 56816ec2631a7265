"""Files of a run are read while it writes them: whole lines only, nothing twice, and garbage costs itself."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest

from freewheel.dashboard.web import samples as samples_module
from freewheel.dashboard.web.runs import WatchedSettings, flat
from freewheel.dashboard.web.samples import Samples
from freewheel.dashboard.web.timeline import merge, window
from freewheel.inspect import metrics as metrics_module
from freewheel.inspect import trace as trace_module
from freewheel.inspect.metrics import Columns, RecordedMetrics, mean_over_time, plain, rates
from freewheel.inspect.trace import RecordedTrace
from freewheel.observe import lines as lines_module
from freewheel.observe.lines import Folder, Tail, decode_line, read_lines

from .made_run import (
    BEGAN_S,
    DEEP,
    GROUPS,
    VERDICT,
    Writer,
    line,
    make_run,
    rows,
    sample_row,
    step_row,
    trace_lines,
    write_lines,
)


def lines_of(tail: Tail) -> list[bytes]:
    return [line for block in tail.look() for line in block.lines]


def look(found: Any) -> Any:
    found.look()
    return found


# -- lines ------------------------------------------------------------------------------------------------------------


def test_blocks_know_their_position_and_endless_lines_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 8)
    monkeypatch.setattr(lines_module, "LONGEST_LINE_BYTES", 32)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"abc\ndef\nghi\njkl\n")
    blocks = list(Tail(path).look())
    assert [(block.offset, block.lines) for block in blocks] == [(0, [b"abc", b"def"]), (8, [b"ghi", b"jkl"])]
    path.write_bytes(b"x" * 20 + b"\n" + b"y" * 200 + b"\nend\n")
    found = lines_of(Tail(path))
    assert (found[0], found[-1]) == (b"x" * 20, b"end") and all(len(line) < 64 for line in found)


def test_a_replaced_file_is_read_from_its_start(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    assert (lines_of(tail), tail.generation) == ([b"one", b"two"], 0)
    path.unlink()
    assert (lines_of(tail), tail.exists) == ([], False)
    path.write_bytes(b"three\n")
    assert lines_of(tail) == [b"three"]
    path.write_bytes(b"4\n")
    assert lines_of(tail) == [b"4"] and tail.generation >= 1


def test_links_pipes_and_folders_are_not_opened(tmp_path):
    (tmp_path / "secret").write_bytes(b'"mine"\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("link", "pipe", "folder"):
        path = tmp_path / f"{name}.jsonl"
        assert lines_of(Tail(path)) == list(read_lines(path)) == []


def test_a_rotated_file_is_not_read_twice_and_a_lost_one_is_forgotten(tmp_path):
    folder, gone = Folder(tmp_path / "trace"), []

    def found() -> list[bytes]:
        return sorted(line for _, blocks in folder.look(gone.append) for block in blocks for line in block.lines)

    assert found() == [] and not folder.exists
    path = tmp_path / "trace/a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"one\n")
    assert found() == [b"one"] and folder.exists
    with path.open("ab") as file:
        file.write(b"two\n")
    path.rename(path.with_name("a.1.jsonl"))
    path.write_bytes(b"three\n")
    assert found() == [b"three", b"two"] and gone == []
    path.with_name("a.1.jsonl").unlink()
    assert found() == [] and len(gone) == 1
    path.write_bytes(b"4\n")
    assert found() == [b"4"] and len(gone) == 2


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_read_again_when_they_change_and_garbage_is_empty(tmp_path):
    settings = look(WatchedSettings(tmp_path))
    assert settings.values == {}
    (tmp_path / "config.yaml").write_text("trainer:\n  total_steps: 7\n  odd: .nan\n")
    settings.look()
    assert settings.number("trainer.total_steps") == 7 and settings.get("no.such", "x") == "x"
    assert settings.number("trainer.odd") is None
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe: [")
    os.utime(tmp_path / "config.yaml", ns=(1, 1))
    settings.look()
    assert settings.values == {}
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": "1", "a.c": "{}", "d": "null"}


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_all_kinds_of_rows_are_read(tmp_path):
    found = look(RecordedMetrics(make_run(tmp_path / "run", steps=40)))
    assert found.marks == (40, 9, 81, 8, 40, 2)
    assert found.steps["step"].tolist() == list(range(1, 41))
    assert found.steps["elapsed_s"][0] == pytest.approx(12)
    assert found.last_pulse.verdict == VERDICT and found.last_pulse.last
    assert found.bad_lines == 0 and found.exists
    assert "mine/of_a_hook" in found.metric_names() and "eval/correct" in found.metric_names("eval")


def test_a_metric_is_read_on_request_and_then_only_what_was_added(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=40)
    found = look(RecordedMetrics(folder))
    hook = found.read_metrics("mine/of_a_hook")
    assert hook["mine/of_a_hook"].tolist() == [step % 7 for step in range(1, 41)]
    Writer(folder, steps=40).go_on(2)
    taken: list[bytes] = []
    monkeypatch.setattr(metrics_module, "decode_line", lambda how, line: taken.append(line) or decode_line(how, line))
    assert found.read_metrics("mine/of_a_hook")["mine/of_a_hook"].tolist() == [step % 7 for step in range(1, 43)]
    assert len(taken) == 6, "three rows per step"
    write_lines(folder / "metrics.jsonl", rows(3))
    found.look()
    assert found.read_metrics("mine/of_a_hook")["step"].tolist() == [1, 2, 3]
    both = found.read_metrics("mine/of_a_hook", "tokens")
    assert both["tokens"].tolist() == [GROUPS * 4 * 15] * 3


def test_garbage_and_half_lines_are_skipped_and_counted(tmp_path):
    folder = make_run(tmp_path / "run", steps=3)
    writer, found = Writer(folder, steps=3), look(RecordedMetrics(folder))
    deep = b'{"kind": "step", "step": 4, "time": 1790000020, "x": ' + DEEP + b"}\n" + DEEP + b"\n"
    writer.tear(deep + b"\xff\xfe garbage\n[1, 2]\n{}\n\n" + b'{"kind": "step", "step": "four"}\n{"kind": "step", "st')
    found.look()
    assert found.steps.rows == 3 and found.bad_lines == 6 and "actor/loss" in found.metric_names()
    writer.tear(b'ep": 4, "time": 1790000020.0, "rollout/reward_mean": 0.5}\n')
    writer.add({"time": BEGAN_S, "step": 5, "kind": "step", "avg_sample_age": None})
    found.look()
    assert found.steps["step"].tolist() == [1, 2, 3, 4, 5], "the order of keys does not matter"
    assert found.steps["rollout/reward_mean"][3] == 0.5 and np.isnan(found.steps["avg_sample_age"][4])


def test_steps_that_are_trained_again_replace_what_followed_them(tmp_path):
    folder = make_run(tmp_path / "run", steps=10)
    found = look(RecordedMetrics(folder))
    generation = found.generation
    Writer(folder, steps=10).add({**step_row(8, 10), "rollout/reward_mean": 0.111}, step_row(9, 10))
    found.look()
    assert found.steps["step"].tolist() == list(range(1, 10)) and found.steps["rollout/reward_mean"][7] == 0.111
    assert found.generation > generation
    Writer(folder, steps=9).add({**step_row(9, 10), "rollout/reward_mean": 0.222})
    found.look()
    assert found.steps["step"].tolist() == list(range(1, 10)) and found.steps["rollout/reward_mean"][8] == 0.222
    generation = found.generation
    (folder / "metrics.jsonl").unlink()
    found.look()
    assert found.steps.rows == 9 and not found.exists, "what was read stays"
    write_lines(folder / "metrics.jsonl", rows(3))
    found.look()
    assert found.steps.rows == 3 and found.generation != generation, "another file is another run"


def test_columns_grow_and_rates_and_means_follow_the_clock():
    columns = Columns(["a", "b"])
    for start in range(0, 5_000, 50):
        columns.extend([(float(at), None) for at in range(start, start + 50)])
    assert columns.rows == 5_000 and columns["a"][-1] == columns.last("a") == 4_999 and columns.last("b") is None
    assert columns.since(4_998) == {"a": [4_998, 4_999]}
    restarted = rates(np.array([0.0, 10.0, 30.0, 4.0]), np.array([0.0, 1.0, 2.0, 4.0]))
    assert plain(restarted) == [None, 10, 20, 2]
    assert mean_over_time(np.array([10.0, 10.0, 10.0, 1.0]), np.array([1.0, 2.0, 3.0, 10.0])) == pytest.approx(3.7)
    assert mean_over_time(np.array([math.nan, 4.0]), np.array([5.0, 6.0])) == 4
    assert mean_over_time(np.array([math.nan]), np.array([1.0])) is None
    night_s = 36_000.0  # the run was stopped in between
    times = np.array([*np.arange(10.0) * 9.5, *night_s + np.arange(10.0) * 9.5])
    values = np.array([10.0] * 10 + [1.0] * 10)
    assert mean_over_time(values, times) == pytest.approx((10 * 9 + 1 * 10) / 19, rel=1e-3)


# -- traces -----------------------------------------------------------------------------------------------------------


def test_the_timeline_has_lanes_by_component_and_a_life_by_group(tmp_path):
    make_run(tmp_path, steps=6)
    found = window(look(RecordedTrace(tmp_path)))
    lanes = [(lane["part"], lane["name"]) for lane in found["lanes"]]
    assert lanes[:4] == [("trainer", name) for name in ("pack", "train", "wait_batch")] + [("rollouter-0", "generate")]
    assert found["lanes"][1]["busy_s"] == pytest.approx(6 * 0.7, abs=1e-3)
    assert found["groups_in_window"] == 6 * GROUPS
    bars = found["groups"][0]["bars"]
    names = [bar.name for bar in bars]
    assert names.count("response") == 4 and names[-1] == "ready" and bars[0].about.tokens == 60


def test_a_window_has_what_happened_in_it(tmp_path):
    make_run(tmp_path, steps=40)
    trace = look(RecordedTrace(tmp_path))
    found = window(trace, 10, 12)
    assert (found["from_s"], found["to_s"]) == (10, 12)
    assert all(bar.end_s >= 10 and bar.start_s <= 12 for lane in found["lanes"] for bar in lane["bars"])
    assert 0 < found["groups_in_window"] < 40 and window(trace, 1e9, 2e9)["groups_in_window"] == 0
    bars = merge("train", np.array([[0.0, 0.1], [0.1001, 0.2], [5.0, 5.5]]), 0.01)
    assert [(bar.start_s, bar.end_s, bar.count) for bar in bars] == [(0.0, 0.2, 2), (5.0, 5.5, 1)]
    assert merge("train", np.zeros((0, 2)), 0.01) == []


def test_a_rotated_and_broken_trace_is_followed(tmp_path):
    file = write_lines(tmp_path / "trace/trainer-1.jsonl", trace_lines(2)[0])
    trace = RecordedTrace(tmp_path)
    assert window(trace)["recorded"] is False
    before = window(look(trace))["length_s"]
    file.rename(tmp_path / "trace/trainer-1.1.jsonl")
    file.write_bytes(b"garbage\n" + b"".join(map(line, trace_lines(2, first=10)[0])) + b'{"ph":"X","na')
    found = window(look(trace))
    assert found["length_s"] > before
    assert sum(bar.count for lane in found["lanes"] if lane["name"] == "train" for bar in lane["bars"]) == 4


def test_the_newest_part_of_a_long_trace_is_kept_of_every_component(tmp_path, monkeypatch):
    trainer, rollouter = trace_lines(40)
    write_lines(tmp_path / "trace/trainer-1.jsonl", trainer)
    for number in range(6):
        replica = [{**event, "pid": f"rollouter-{number}"} for event in rollouter]
        write_lines(tmp_path / f"trace/rollouter-{number}-1.jsonl", replica)
    whole = look(RecordedTrace(tmp_path))
    assert window(whole)["whole_from_s"] == 0
    monkeypatch.setattr(trace_module, "MOST_KEPT", 3_000)
    short = look(RecordedTrace(tmp_path))
    ends = [end for spans in short.spans.values() for _, end in spans]
    ends += [phase.end_us for phases in short.phases.values() for phase in phases]
    assert 1_500 <= len(ends) <= 3_000 and min(ends) >= short.complete_from_us
    found = window(short)
    since = found["whole_from_s"]
    assert found["length_s"] == window(whole)["length_s"] and 0 < since < found["length_s"]
    assert window(short, since)["lanes"] == window(whole, since)["lanes"]
    assert len({lane["part"] for lane in found["lanes"]}) == 7


def test_tracks_are_lanes_and_other_events_are_ignored(tmp_path):
    same = {"ph": "X", "cat": "span", "name": "load", "pid": "sync", "ts": 1e15, "dur": 5, "args": {}}
    events = [{**same, "tid": "rollouter-0"}, {**same, "tid": "rollouter-1"}, {**same, "tid": "main", "name": "sync"}]
    events += [{"ph": kind, "name": "groups", "pid": "main", "ts": 1, "args": {"queue_size": 1}} for kind in "Ci"]
    for identity in ({"id": "007"}, {}):
        events += [{"ph": half, "name": "generate", "pid": "main", "ts": 2e15, **identity} for half in "be"]
    events.append({"ph": "e", "name": "score", "pid": "main", "ts": 2e15, "id": 3})  # its start is missing
    write_lines(tmp_path / "trace/sync-1.jsonl", events)
    found = window(look(RecordedTrace(tmp_path)))
    assert {lane["name"] for lane in found["lanes"]} == {"load rollouter-0", "load rollouter-1", "sync"}
    assert found["groups"] == []


# -- samples ----------------------------------------------------------------------------------------------------------


def test_samples_are_listed_newest_first_and_found(tmp_path):
    make_run(tmp_path, steps=1)
    samples = Samples(tmp_path)
    assert samples.page()["total"] == 0
    page = look(samples).page()
    assert page["total"] == 60 and [card.ordinal for card in page["cards"]] == list(range(59, 19, -1))
    assert [card.ordinal for card in samples.page(before=page["cards"][-1].time)["cards"]] == list(range(19, -1, -1))
    assert [card.ordinal for card in samples.page(find="#7")["cards"]] == [7]
    assert {card.ordinal % 5 for card in samples.page(only="failed")["cards"]} == {0}
    assert samples.page(find="APPLES")["found"] == 60 and samples.page(find="pears")["found"] == 0


def test_a_sample_is_read_in_full_by_its_place_in_the_file(tmp_path):
    found = [sample_row(0), sample_row(1, text="ünï\ncode"), sample_row(2)]
    path = tmp_path / "samples/rollouter-0-1.jsonl"
    path.parent.mkdir()
    path.write_bytes(line(found[0]) + b"garbage\n" + line(found[1]) + line(found[2])[:-5])
    samples = look(Samples(tmp_path))
    newest = samples.page()["cards"][0]
    assert samples.read(newest.key) == found[1]
    path.rename(path.with_name("rollouter-0-1.0.jsonl"))
    assert look(samples).read(newest.key) == found[1]
    path.with_name("rollouter-0-1.0.jsonl").unlink()
    assert samples.read(newest.key) is None
    assert look(samples).page()["total"] == 0 and samples.read("1") is None and samples.read("../x") is None


def test_the_oldest_of_too_many_samples_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module, "MOST_CARDS", 3)
    write_lines(tmp_path / "samples/rollouter-0-1.jsonl", [sample_row(ordinal) for ordinal in (7, 8, 9)])
    write_lines(tmp_path / "samples/rollouter-1-1.jsonl", [sample_row(ordinal) for ordinal in (1, 2, 10)])
    assert [card.ordinal for card in look(Samples(tmp_path)).page()["cards"]] == [10, 9, 8]
