"""The parts of a scoring job on their own: lines, rows, the rule that stops, the file, and the job over a judge."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freewheel.errors import ConfigError
from freewheel.judge import (
    Endpoint,
    EndpointStats,
    Failed,
    JudgeConfig,
    JudgeRequest,
    JudgeStats,
    Scored,
    Skipped,
    Verdict,
    row_files,
)
from freewheel.judge.row_files import (
    AddedFields,
    Fields,
    FileOutput,
    Line,
    MalformedRowError,
    Replacement,
    RowCounts,
    RowFormat,
)
from freewheel.judge.scoring import (
    FIRST_FAILURES,
    OUTAGE_ROWS,
    CallsMeter,
    Ruling,
    ScoringJob,
    ScoringProgress,
    StopRule,
    is_down,
)
from freewheel.judge.testing import RunningJudge

CONFIG = JudgeConfig(endpoint="http://127.0.0.1:1/v1", model="m")
OK = Scored(5.0, "5")


def line(text: bytes, number: int = 1) -> Line:
    return Line(number, text, 0, len(text) + 1)


def rows_of(config: JudgeConfig = CONFIG, **fields: str) -> RowFormat:
    return RowFormat(config, Fields(**fields))


@contextlib.contextmanager
def descriptor(data: bytes) -> Iterator[int]:
    read, write = os.pipe()
    try:
        os.write(write, data)
        os.close(write)
        yield read
    finally:
        os.close(read)


# -- lines -------------------------------------------------------------------------------------------------------------


@given(texts=st.lists(st.binary(max_size=12).filter(lambda text: b"\n" not in text), max_size=20), ends=st.booleans(),
       block=st.integers(1, 16), first=st.integers(1, 12))  # fmt: skip
def test_lines_do_not_depend_on_the_size_of_reads(texts: list[bytes], ends: bool, block: int, first: int) -> None:
    data = b"\n".join(texts) + (b"\n" if ends and texts else b"")
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    with pytest.MonkeyPatch.context() as patch, descriptor(data) as fd:
        patch.setattr(row_files, "READ_BYTES", block)
        found = [each for block in row_files.read_lines(fd, first) for each in block]
    assert [each.text for each in found] == expected[first - 1 :]
    assert [each.number for each in found] == list(range(first, len(expected) + 1))
    for each in found:
        assert data[each.start : each.end].removesuffix(b"\n") == each.text
        assert each.is_complete == data[: each.end].endswith(b"\n")


def test_a_line_that_is_too_long_is_marked_and_the_next_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "READ_BYTES", 7)
    with descriptor(b"short\n" + b"x" * 100 + b"\nnext\n") as fd:
        found = [each for block in row_files.read_lines(fd, max_bytes=20) for each in block]
    assert [(each.text, each.is_too_long) for each in found] == [(b"short", False), (b"", True), (b"next", False)]
    with pytest.raises(MalformedRowError, match="longer than"):
        rows_of().read(found[1])


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_row_is_read_by_the_names_of_its_fields() -> None:
    rows = rows_of(response="a", prompt="q", reference="gold", skip="why_not")
    assert rows.read(line(b'{"q": "Q", "a": "A", "gold": null, "response": 3}')) == JudgeRequest("A", "Q")
    assert rows.read(line(b'{"why_not": true}')).skip == "skip"
    assert rows.read(line(b'{"a": "A", "why_not": false}')).skip == ""


TEXTS = st.text(st.characters(codec=None))  # lone surrogates too
VALUES = TEXTS | st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(TEXTS, VALUES))
@example({"\ud800": None})
def test_any_row_is_written_unchanged(fields: dict[str, Any]) -> None:
    fields = {key: value for key, value in fields.items() if key not in ("prompt", "reference", "skip", "verdict")}
    given_row = {**fields, "response": "r"}
    text = json.dumps(given_row).encode()
    rows = rows_of()
    request = rows.read(line(text))
    written = rows.write(line(text), AddedFields.of(1, rows.key(request), OK))
    verdict = json.loads(written).pop("verdict")
    assert {**json.loads(written), "verdict": None} == {**given_row, "verdict": None}
    assert rows.read_written(written).key == verdict["key"] == rows.key(request)


def test_the_key_depends_on_judge_and_content_but_not_on_the_endpoint() -> None:
    request = JudgeRequest("a", "b")
    key = rows_of().key(request)
    elsewhere = JudgeConfig(endpoint=Endpoint(url="http://127.0.0.1:2/v1"), model="m")
    assert rows_of(elsewhere).key(request) == key
    others = [{"model": "n"}, {"rubric": "number"}, {"temperature": 1.0}, {"max_tokens": 5}, {"sampling": {"seed": 1}}]
    keys = [rows_of(JudgeConfig(**{"endpoint": "http://h", "model": "m", **other})).key(request) for other in others]
    contents = [JudgeRequest("ab"), JudgeRequest("", "ab"), JudgeRequest("a", "", "b"), JudgeRequest("a\ud800", "b")]
    keys += [rows_of().key(content) for content in contents]
    assert len({key, *keys}) == 1 + len(keys)


# -- when to stop ------------------------------------------------------------------------------------------------------


GONE = Failed("unavailable", 3, "no answer")
WRITE, HOLD, STOP = Ruling.WRITE, Ruling.HOLD, Ruling.STOP


@pytest.mark.parametrize(
    ("down", "verdicts", "rulings", "end"),
    [
        *((False, [Failed(reason)], [STOP], WRITE) for reason in ("auth", "not_found", "quota", "budget", "engine")),
        (False, [Failed("cancelled")], [STOP], WRITE),
        *((True, [Failed(reason)], [STOP], STOP) for reason in ("unavailable", "deadline", "throttled")),
        (False, [GONE] * OUTAGE_ROWS, [HOLD] * (OUTAGE_ROWS - 1) + [STOP], WRITE),
        (False, [GONE, OK] * OUTAGE_ROWS, [HOLD, WRITE] * OUTAGE_ROWS, WRITE),
        (False, [Failed("rejected")] * FIRST_FAILURES, [WRITE] * (FIRST_FAILURES - 1) + [STOP], WRITE),
        (False, [OK, *[Failed("rejected")] * FIRST_FAILURES], [WRITE] * (FIRST_FAILURES + 1), WRITE),
    ],
)
def test_the_rule_stops_for_an_outage_and_for_failures_of_every_row_but_not_for_a_single_row(
    down: bool, verdicts: list[Verdict], rulings: list[Ruling], end: Ruling
) -> None:
    rule = StopRule(lambda: down)
    assert [rule.judge(verdict) for verdict in verdicts] == rulings
    assert rule.end() is end
    if rulings[-1] is STOP and rulings[0] is WRITE:
        assert rule.why is not None and "none was scored" in rule.why.detail


def test_a_judge_is_down_when_no_endpoint_works_or_none_has_shown_a_sign_of_life() -> None:
    def asked(**state: Any) -> EndpointStats:
        return EndpointStats(url="a", model="m", sent=8, **state)

    unasked, halted, opened = EndpointStats(url="b", model="m"), asked(halted="401"), asked(breaker="open")
    silent = asked(faults={"broken": 7, "timeout": 1})  # one row's attempts are fewer than the breaker's
    for endpoints in ([halted, opened], [silent], [silent, unasked, halted]):
        assert is_down(JudgeStats(endpoints=endpoints))
    for alive in (asked(answered=1), asked(throttled=8), asked(faults={"garbage": 8})):
        assert not is_down(JudgeStats(endpoints=[silent, alive]))
    assert not is_down(JudgeStats()) and not is_down(JudgeStats(endpoints=[unasked, halted]))


# -- accounts ----------------------------------------------------------------------------------------------------------


def test_the_counts_of_a_tally_add_up() -> None:
    tally = RowCounts()
    for verdict in (OK, Scored(1.0, cached=True), Failed("deadline"), Skipped("why")):
        tally.count(AddedFields.of(7, "k", verdict))
    assert (tally.rows, tally.scored, tally.cached, tally.failed, tally.skipped) == (4, 2, 1, 1, 1)


def test_counts_add_up_over_the_restarts_of_an_engine() -> None:
    meter = CallsMeter()
    for sent, restarts, cost_before in ((10, 0, 0.0), (50, 0, 0.0), (50, 1, 0.0), (5, 1, 5.0), (7, 1, 5.0)):
        endpoint = EndpointStats(url="a", model="m", sent=sent, cost=sent / 10)
        calls = meter.update(JudgeStats(restarts=restarts, cost_before=cost_before, endpoints=[endpoint]))
    assert calls.sent == 57
    assert calls.cost == pytest.approx(5.7)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_replacement_of_a_link_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "real").write_bytes(b"old\n")
    (tmp_path / "out").symlink_to(Path("elsewhere") / "real")
    output = FileOutput(tmp_path / "out")
    replacement = Replacement(output)
    replacement.append(b"new\n")
    replacement.finish(is_complete=True)
    output.close()
    assert (tmp_path / "out").is_symlink()
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "elsewhere").iterdir()] == [("real", b"new\n")]


@pytest.mark.parametrize("tail", [b"", b'{"resp', b"\x00\x00\x00"])
def test_a_scan_finds_where_to_continue(tmp_path: Path, tail: bytes) -> None:
    rows = rows_of()
    written = [rows.write(line(b'{"response":"a"}'), AddedFields.of(n, f"k{n}", OK)) for n in (1, 2, 4)]
    (tmp_path / "out").write_bytes(b"".join([*written, written[-1]]))
    with (
        pytest.raises(ConfigError, match="its line 4 is not a row"),
        contextlib.closing(FileOutput(tmp_path / "out")) as output,
    ):
        output.scan(rows)
    (tmp_path / "out").write_bytes(b"".join(written) + tail)
    output = FileOutput(tmp_path / "out")
    output.scan(rows)
    output.close()
    assert (output.last_line, output.last_key, output.tally.scored) == (4, "k4", 3)
    assert (tmp_path / "out").read_bytes() == b"".join(written)


# -- the job -----------------------------------------------------------------------------------------------------------


def test_a_job_reports_its_progress(tmp_path: Path, mock: Callable[..., RunningJudge]) -> None:
    source, told = tmp_path / "in", list[ScoringProgress]()
    source.write_text("".join(json.dumps({"response": str(n)}) + "\n" for n in range(200)))
    config = JudgeConfig(
        endpoint=mock(latency_s=0.05).base_url, model="m", placement="thread", concurrency="fixed:8"
    )  # fmt: skip
    with ScoringJob(str(source), str(tmp_path / "out"), config, on_progress=told.append) as job:
        summary = job.run()
    assert summary.tally.scored == 200 and summary.stopped is None
    assert told and told[-1].bytes_total == source.stat().st_size
    decided = [progress.decided for progress in told]
    assert decided == sorted(decided) and decided[-1] > 0
    assert any(progress.in_flight for progress in told)


def test_a_stopped_retry_leaves_the_output_unchanged(tmp_path: Path, mock: Callable[..., RunningJudge]) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(json.dumps({"response": f"row {n}"}) + "\n" for n in range(5)))
    judge = mock(scores={"row 2": "no idea"}, api_key="right")
    config = {"endpoint": judge.base_url, "model": "m", "placement": "thread"}
    with ScoringJob(str(source), str(target), JudgeConfig(**config, api_key="right")) as job:
        assert job.run().tally.failed == 1
    before = target.read_bytes()
    with ScoringJob(str(source), str(target), JudgeConfig(**config, api_key="wrong"), retry_failed=True) as job:
        stopped = job.run().stopped
    assert stopped is not None and stopped.reason == "auth"
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["in", "out"]


class Verdicts:
    """A judge that gives these verdicts, and is down from this query of its stats on."""

    def __init__(self, verdicts: list[Verdict], down_from: int) -> None:
        self._verdicts, self._down_from, self._queries = iter(verdicts), down_from, 0

    def __enter__(self) -> Verdicts:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> JudgeStats:
        halted = "401" if self._queries >= self._down_from else ""
        self._queries += 1
        return JudgeStats(endpoints=[EndpointStats(url="a", model="m", sent=1, answered=1, halted=halted)])

    def submit(self, requests: list[JudgeRequest], deadline_s: float | None) -> Any:
        verdicts = [next(self._verdicts) for _ in requests]
        return SimpleNamespace(wait=lambda timeout_s: True, result=lambda: verdicts, cancel=lambda: None)


@pytest.mark.parametrize(
    ("verdicts", "down_from", "statuses", "reason"),
    [
        ([OK, GONE, OK], 99, ["scored", "failed", "scored"], None),
        ([OK, OK, GONE], 99, ["scored", "scored", "failed"], None),
        ([OK, GONE, OK], 0, ["scored"], "unavailable"),
        ([OK, OK, GONE], 1, ["scored", "scored"], "unavailable"),
        ([OK, Failed("auth"), OK], 99, ["scored"], "auth"),
        ([Skipped("why"), Failed("rejected"), OK], 99, ["skipped", "failed", "scored"], None),
    ],
)
def test_a_job_writes_the_rows_that_are_decided_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: list[Verdict], down_from: int, statuses: list[str],
    reason: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr("freewheel.judge.scoring.Judge", lambda config: Verdicts(verdicts, down_from))
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"response": "a"}\n{"response": "b"}\n{"response": "c"}\n')
    with ScoringJob(str(source), str(target), CONFIG) as job:
        summary = job.run()
    assert [json.loads(row)["verdict"]["status"] for row in target.read_text().splitlines()] == statuses
    assert (summary.stopped.reason if summary.stopped else None) == reason
    assert summary.stopped is None or summary.stopped.next_line == len(statuses) + 1


def test_a_retry_reads_a_repaired_line_again(tmp_path: Path, mock: Callable[..., RunningJudge]) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text('{"response": "a"}\noops\n{"response": "c"}\n')
    config = JudgeConfig(endpoint=mock().base_url, model="m", placement="thread")
    with ScoringJob(str(source), str(target), config) as job:
        assert job.run().tally.malformed == 1
    source.write_text('{"response": "a"}\n{"response": "b"}\n{"response": "c"}\n{"response": "d"}\n')
    with ScoringJob(str(source), str(target), config, retry_failed=True) as job:
        assert job.run().tally.scored == 4
    assert [json.loads(row)["response"] for row in target.read_text().splitlines()] == ["a", "b", "c", "d"]
