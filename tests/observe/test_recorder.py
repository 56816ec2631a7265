"""The recorder: whole rows, whatever the disk and the sinks do."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from freewheel.observe.metrics import Alerts
from freewheel.observe.recorder import Recorder, read_metrics


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.INFO, logger="freewheel")
    return lambda: [record.getMessage() for record in caplog.records]


class Keeping:
    name = "keeping"

    def __init__(self, fails_from: int = 10**9):
        self.rows, self.closed, self._fails_from = [], 0, fails_from

    def write(self, kind, step, values):
        if len(self.rows) >= self._fails_from:
            raise RuntimeError("service gone")
        self.rows.append((kind, step, values))

    def close(self):
        self.closed += 1


def test_a_row_is_one_json_line_and_there_at_once(tmp_path):
    recorder = Recorder(run_dir=tmp_path, clock=lambda: 1700000000.12345)
    recorder.record("step", 3, {"reward": 0.5, "queue": {"queue_size": 2}})
    recorder.record("event", 3, {"text": "zwei\nZeilen"})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"kind": "step", "step": 3, "time": 1700000000.123, "reward": 0.5, "queue": {"queue_size": 2}},
        {"kind": "event", "step": 3, "time": 1700000000.123, "text": "zwei\nZeilen"},
    ]
    assert [row["kind"] for row in read_metrics(tmp_path, "event")] == ["event"]
    recorder.close()
    recorder.close()


def test_nonfinite_numbers_are_null_and_named_and_values_cannot_replace_the_rows_fields(tmp_path):
    recorder = Recorder(run_dir=tmp_path)
    recorder.record("step", 7, {"loss": math.nan, "actor": {"ratio": math.inf}, "step": 1, "kind": "mine"})
    recorder.close()
    (row,) = read_metrics(tmp_path)
    assert (row["loss"], row["actor"], row["nonfinite"]) == (None, {"ratio": None}, ["loss", "actor/ratio"])
    assert (row["step"], row["kind"], row["step_"], row["kind_"]) == (7, "step", 1, "mine")


@pytest.mark.parametrize("odd", [b"[" * 100_000, b"\xff\xfe", b"7", b"{}", b'{"kind": "step", "step": "x"}'])
def test_a_line_that_is_not_a_row_is_skipped(tmp_path, odd):
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_bytes(odd + b'\n{"kind": "step", "step": 1}\n')
    assert [row["step"] for row in read_metrics(tmp_path, "step")] == [1]


@pytest.mark.parametrize("torn", [b'{"kind": "st', b'{"kind": "step", "x": "\xc3', b"x" * 200_000])
def test_half_a_line_of_a_killed_run_is_cut_off_and_never_read(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + torn)
    assert read_metrics(tmp_path) == [{"kind": "step", "step": 1}]
    recorder = Recorder(run_dir=tmp_path)
    recorder.record("step", 2, {})
    recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_threads_do_not_mix_their_rows(tmp_path):
    recorder = Recorder(run_dir=tmp_path)

    def write(number):
        for step in range(100):
            recorder.record("event", step, {"text": str(number) * 200})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    rows = read_metrics(tmp_path)
    assert len(rows) == 400
    assert all(len(set(row["text"])) == 1 for row in rows)


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_rows_is_said_once_a_minute_and_ends_when_there_is_room(tmp_path, warnings):
    now = 1000.0
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = Keeping()
    recorder = Recorder(run_dir=tmp_path, clock=lambda: now, sinks=[sink])
    for step in range(120):
        now = 1000.0 + step
        recorder.record("step", step, {"reward": 1.0})
    assert len(sink.rows) == 120, "sinks receive rows that the disk lost"
    said = [text for text in warnings() if "cannot be written" in text]
    assert len(said) == 2
    assert str(path) in said[0] and "No space left" in said[0] and "1 so far" in said[0] and "61 so far" in said[1]
    assert recorder.lost_rows == 120
    path.unlink()
    recorder.record("step", 120, {})  # goes to the old file once more, which is then opened anew
    recorder.record("step", 121, {})
    recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [121]
    assert any("can be written again; 121 rows were lost" in text for text in warnings())
    assert any("121 rows" in text and "in all" in text for text in warnings())


FULL = """
import resource, sys
from freewheel.observe.recorder import Recorder
recorder = Recorder(run_dir=sys.argv[1])
recorder.record("step", 0, {"text": "a"})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
for step in range(1, 20):
    recorder.record("step", step, {"text": "b" * 100})
lost = recorder.lost_rows
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
recorder.record("step", 20, {"text": "c"})
recorder.close()
sys.stdout.write(f"{lost} {recorder.lost_rows}")
"""


def test_a_file_that_may_not_grow_keeps_whole_lines_and_grows_again(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    lost, lost_in_all = map(int, done.stdout.split())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]  # each one whole
    assert 0 < lost == lost_in_all
    assert [row["step"] for row in rows] == [*range(20 - lost), 20]


def test_a_run_directory_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    with pytest.raises(OSError, match="metrics"):
        Recorder(run_dir=tmp_path / "missing")


# -- sinks and alerts -------------------------------------------------------------------------------------------------


def test_a_sink_that_raises_is_switched_off_and_the_others_go_on(tmp_path, warnings):
    broken, whole = Keeping(fails_from=1), Keeping()
    recorder = Recorder(run_dir=tmp_path, sinks=[broken, whole])
    for step in range(3):
        recorder.record("step", step, {"reward": 0.5})
    assert (len(broken.rows), broken.closed, len(whole.rows)) == (1, 1, 3)
    assert [text for text in warnings() if "switched off" in text] == [
        "keeping is switched off: RuntimeError: service gone. Training goes on"
    ]
    recorder.close()
    recorder.close()
    assert (broken.closed, whole.closed) == (1, 1)
    assert len(read_metrics(tmp_path)) == 3


def test_a_sink_that_does_not_close_is_said_and_does_not_stop_the_end(tmp_path, warnings):
    class Stuck(Keeping):
        def close(self):
            raise TimeoutError("not done")

    last = Keeping()
    recorder = Recorder(run_dir=tmp_path, sinks=[Stuck(), last])
    recorder.close()
    assert last.closed == 1
    assert any("did not close: TimeoutError: not done" in text for text in warnings())


def test_alerts_go_to_the_log_at_their_level_and_dead_ones_are_named_at_the_end(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="freewheel")
    alerts = Alerts({"queue_size": SimpleNamespace(above=10, below=None), "quue": SimpleNamespace(above=None, below=0)})
    recorder = Recorder(run_dir=tmp_path, alerts=alerts)
    for size in (5, 11, 12, 9):
        recorder.record("statistics", 1, {"queue": {"queue_size": size}})
    recorder.record("event", 1, {"queue_size": 99})  # an event is no measurement
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert "queue/queue_size = 11" in said[0][1] and "observe.alerts.queue_size" in said[0][1]
    assert recorder.alerts == []
    recorder.close()
    assert "quue" in caplog.records[-1].getMessage()


def test_a_pulse_and_a_sync_are_for_the_file_alone(tmp_path, warnings):
    """Alerts and sinks have these numbers from the statistics, by the names that are documented."""
    sink = Keeping()
    recorder = Recorder(
        run_dir=tmp_path, sinks=[sink], alerts=Alerts({"queue_size": SimpleNamespace(above=1, below=None)})
    )
    recorder.record("pulse", 1, {"queue_size": 2, "waits": {"trainer": {"train": 0.5}}})
    recorder.record("sync", 1, {"version": 1, "took_s": 0.5, "engines": {"rollouter-0": {"took_s": 0.5}}})
    assert (sink.rows, warnings()) == ([], [])
    recorder.record("statistics", 1, {"queue": {"queue_size": 2}})
    assert len(sink.rows) == 1 and any("queue_size = 2 is too high" in text for text in warnings())
    recorder.close()
    assert [row["kind"] for row in read_metrics(tmp_path)] == ["pulse", "sync", "statistics"]
