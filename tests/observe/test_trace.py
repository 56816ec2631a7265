"""Traces: spans and phases as events, and all files of a run as one trace for viewers."""

from __future__ import annotations

import errno
import gzip
import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.observe import trace
from freewheel.observe.trace import Tracer, attach_trace, components, detach_trace, merge_traces, read_trace

WAIT_S = 110.0
WALL_S, CLOCK_S = 1_795_300_000.0, 100.0
"""What the two clocks show when a trace begins."""


@pytest.fixture(autouse=True)
def detached():
    yield
    detach_trace()


@pytest.fixture
def tracer(tmp_path, clock):
    """`tracer(component, every)`: with clocks of this test's own."""
    made = []

    def make(component="trainer", every=1):
        made.append(Tracer(tmp_path, component, every=every, most_bytes=10**9, clock=clock, wall_clock=lambda: WALL_S))
        return made[-1]

    yield make
    for one in made:
        one.lines.close()


def events(tmp_path, *tracers):
    for one in tracers:
        one.lines.flush()
    return list(read_trace(tmp_path))


def us(clock_s: float) -> int:
    return round((WALL_S + clock_s - CLOCK_S) * 1e6)


# -- what is written --------------------------------------------------------------------------------------------------


def test_a_span_is_one_event_and_a_phase_a_pair_that_ends_now(tmp_path, tracer, clock):
    trainer, rollouter = tracer(), tracer("rollouter-0")
    trainer.span("train", 101.0, 101.25, {"step": 3})
    clock.now = 110.5
    rollouter.phase("score", 17, 110.0, {"index": 2, "status": "scored"})
    main = {"pid": "trainer", "tid": "main"}
    same = {"cat": "group", "id": 17, "name": "score", "pid": "rollouter-0", "tid": "groups"}
    assert events(tmp_path, trainer, rollouter) == [
        {"ph": "X", "cat": "span", "name": "train", **main, "ts": us(101.0), "dur": 250_000, "args": {"step": 3}},
        {"ph": "b", **same, "ts": us(110.0), "args": {"index": 2, "status": "scored"}},
        {"ph": "e", **same, "ts": us(110.5)},
    ]


@pytest.mark.parametrize(("every", "traced"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (0, [])])
def test_every_so_many_groups_are_traced(tmp_path, tracer, every, traced):
    one = tracer(every=every)
    for ordinal in range(5):
        one.phase("store", ordinal, 100.0, {})
    one.span("train", 100.0, 101.0, {})
    found = events(tmp_path, one)
    assert [event["id"] for event in found if event["ph"] == "b"] == traced
    assert [event["name"] for event in found if event["ph"] == "X"] == ["train"]


def test_any_name_and_text_is_valid_json(tmp_path, tracer):
    one = tracer('a "b"\\')
    one.instant('rollouter-0 died:\n"\ud800"')
    one.counter("groups", {"queue_size": 3, "in_progress": float("nan")})
    one.span("load", 100.0, 101.0, {"version": 1}, track='r "0"')
    said, counted, span = events(tmp_path, one)
    assert (said["ph"], said["s"], said["pid"]) == ("i", "g", 'a "b"\\')
    assert said["name"].startswith('rollouter-0 died:\n"')
    assert (counted["ph"], counted["args"]) == ("C", {"queue_size": 3, "in_progress": None})
    assert span["tid"] == 'r "0"'


def test_a_process_traces_at_most_one_run(tmp_path):
    def report():
        trace.span("train", 0.0, 1.0, {})
        trace.phase("train", 1, 0.0, step=1)
        trace.instant("hello")
        trace.counter("groups", queue_size=1)

    report()
    attach_trace(tmp_path, "main", every=1, most_bytes=0)
    report()
    detach_trace()
    detach_trace()
    assert not list(tmp_path.iterdir())
    for name in ("a", "b"):
        attach_trace(tmp_path / name, "main", every=1, most_bytes=10**9)
        trace.instant(name)
    detach_trace()
    assert [[event["name"] for event in read_trace(tmp_path / name)] for name in ("a", "b")] == [["a"], ["b"]]


# -- put together -----------------------------------------------------------------------------------------------------


def test_names_become_numbers_and_overlapping_spans_get_their_own_track(tmp_path, tracer):
    for one in map(tracer, ("rollouter-10", "rollouter-2", "trainer", "sync", "main")):
        one.span("train", 100.0, 102.0, {})
        one.span("save", 101.0, 103.0, {})
        one.span("train", 102.0, 104.0, {})
        one.lines.flush()
    names = ["main", "trainer", "sync", "rollouter-2", "rollouter-10"]
    found = list(merge_traces(tmp_path))
    named = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert list(named.values()) == components(tmp_path) == names
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    shown = [(event["name"], tracks[event["pid"], event["tid"]]) for event in found if event["ph"] == "X"]
    assert shown == [("train", "main"), ("save", "save"), ("train", "main")] * 5


def test_phases_that_overlap_within_a_group_can_be_told_apart(tmp_path, tracer, clock):
    one = tracer("rollouter-0")
    for index, until_s in ((0, 105.0), (1, 103.0)):
        clock.now = until_s
        one.phase("response", 7, 101.0, {"index": index, "tokens": 9})
    one.phase("generate", 7, 101.0, {"attempt": 0, "responses": 2, "tokens": 18})
    one.lines.flush()
    pairs = [event for event in merge_traces(tmp_path) if event["ph"] in "be"]
    ids = [event["id2"]["local"] for event in pairs]
    assert ids == [*["7/response/0"] * 2, *["7/response/1"] * 2, *["7/generate"] * 2]
    assert [event["args"]["ordinal"] for event in pairs[::2]] == [7, 7, 7]


GOOD = '{"ph":"X","cat":"span","name":"train","pid":"trainer","tid":"main","ts":1,"dur":1,"args":{}}'
BEGIN = '{"ph":"b","cat":"group","id":%d,"name":"store","pid":"trainer","tid":"groups","ts":%d,"args":{}}'
END = '{"ph":"e","cat":"group","id":%d,"name":"store","pid":"trainer","tid":"groups","ts":%d}'


@pytest.mark.parametrize(
    "lines",
    [
        [BEGIN % (1, 5)],
        [END % (1, 5)],
        [BEGIN % (1, 5), BEGIN % (2, 5), END % (1, 6)],
        [BEGIN % (1, 5), END % (1, 4)],
        ["null", "[]", '"X"', "{}", '{"ph":"X"}', '{"ph":["X"]}'],
        [GOOD.replace('"ts":1', '"ts":"now"'), GOOD.replace('"pid":"trainer"', '"pid":7')],
        [GOOD.replace('"args":{}', '"args":[]'), GOOD.replace('"dur":1', '"dur":null'), GOOD[:-9]],
        [GOOD.replace('"trainer"', '"somebody else"')],
    ],
)
def test_incomplete_pairs_and_invalid_events_are_skipped(tmp_path, lines):
    (tmp_path / "trace").mkdir()
    text = "\n".join([*lines, GOOD, BEGIN % (9, 7), END % (9, 8)]) + "\n"
    (tmp_path / "trace" / "trainer-1.jsonl").write_text(text)
    found = [(event["ph"], event.get("id2")) for event in merge_traces(tmp_path) if event["ph"] != "M"]
    assert found == [("X", None), ("b", {"local": "9/store"}), ("e", {"local": "9/store"})]


# -- the command ------------------------------------------------------------------------------------------------------

COMMAND = """
import sys
sys.argv[0] = "freewheel"
from freewheel.cli import app
try:
    app(prog_name="freewheel")
finally:
    heavy = {"torch", "ray"} & set(sys.modules)
    assert not heavy, heavy
"""


def invoke(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def kinds(data) -> list[str]:
    return [event["ph"] for event in json.loads(data)["traceEvents"]]


@pytest.fixture
def run_dir(tmp_path, tracer):
    (tmp_path / "config.yaml").write_text("{}\n")
    one = tracer()
    one.span("train", 100.0, 101.0, {"step": 1})
    one.lines.flush()
    return tmp_path


def test_the_command_writes_what_viewers_open_and_imports_nothing_heavy(run_dir, tmp_path):
    command = [sys.executable, "-c", COMMAND, "trace", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"\S*trace.json: 4 events. Open it at https://ui.perfetto.dev", done.stdout)
    output, zipped = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    assert kinds(output.read_bytes()) == ["M", "M", "M", "X"]
    assert invoke(run_dir, "--output", zipped).exit_code == 0
    assert gzip.decompress(zipped.read_bytes()) == output.read_bytes()
    assert {one.stat().st_mode & 0o777 for one in (output, zipped)} == {0o600}


def test_the_command_reports_what_is_missing_and_leaves_the_output_unchanged(run_dir, tmp_path):
    for name, text in {"untraced": None, "empty": "", "garbage": "{\nno event\n", "unreadable": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("{}\n")
        if text is not None:
            (tmp_path / name / "trace").mkdir()
            (tmp_path / name / "trace" / "main-1.jsonl").write_text(text)
    (tmp_path / "unreadable" / "trace").write_text("not a folder")
    output = tmp_path / "out.json"
    output.write_text("before")
    for name, to, text in (
        ("untraced", output, "it has no trace: train with observe.trace_mb above 0"),
        ("nowhere", output, "there is no such folder"),
        ("unreadable", output, f"{tmp_path / 'unreadable' / 'trace'} cannot be read (Not a directory)"),
        ("empty", output, "main-1.jsonl: copy the run's folder again"),
        ("garbage", output, "main-1.jsonl (2 lines are not events): copy the run's folder again"),
        (run_dir, tmp_path, "it cannot be written (Is a directory)"),
        (run_dir, tmp_path / "no" / "where", "it cannot be written (No such file or directory)"),
    ):
        done = invoke(tmp_path / name, "--output", to)
        assert (done.exit_code, text in done.stderr) == (2, True), done.stderr
    assert output.read_text() == "before"


def test_lines_that_are_not_events_are_counted_by_file(run_dir, tmp_path):
    garbage = tmp_path / "trace" / "main-1.jsonl"
    garbage.write_text(f'{{"ph": \nnull\n7\n{GOOD}\n{{"ph": "X", "being": "writ')
    done = invoke(run_dir, "-o", "-")
    assert done.exit_code == 0 and "M" in kinds(done.stdout)
    assert "standard output: " in done.stderr
    assert f"warning: skipped 3 lines that are not events, in {garbage}" in done.stderr


def test_a_trace_that_cannot_be_read_is_not_reported_as_an_output_that_cannot_be_written(run_dir, monkeypatch):
    def refuses(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(trace, "read_lines", refuses)
    done = invoke(run_dir, "--output", run_dir / "out.json")
    assert done.exit_code == 2 and "--output" not in done.stderr
    assert re.search(r"trainer-\d+\.jsonl cannot be read \(Permission denied\)", done.stderr), done.stderr
