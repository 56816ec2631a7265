"""The recorder writes whole rows and feeds alerts and sinks, whatever the disk and the sinks do."""

from __future__ import annotations

import importlib
import json
import logging
import math
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from freewheel.observe import recorder as recorder_module
from freewheel.observe.metrics import Alerts
from freewheel.observe.recorder import (
    Background,
    PrometheusSink,
    Recorder,
    SinkError,
    TensorBoardSink,
    WandbSink,
    open_sinks,
    read_metrics,
)


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger="freewheel")
    return lambda: [record.getMessage() for record in caplog.records]


def record_steps(recorder, *steps):
    for step in steps:
        recorder.record("step", step, {"reward": 0.5})


def limits(**bounds):
    return SimpleNamespace(**{"above": None, "below": None, **bounds})


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_is_one_json_line_and_there_at_once(tmp_path):
    recorder = Recorder(run_dir=tmp_path, clock=lambda: 1700000000.12345)
    recorder.record("step", 3, {"reward": 0.5, "queue": {"queue_size": 2}})
    recorder.record("event", 3, {"text": "zwei\nZeilen"})
    same = {"step": 3, "time": 1700000000.123}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"kind": "step", **same, "reward": 0.5, "queue": {"queue_size": 2}},
        {"kind": "event", **same, "text": "zwei\nZeilen"},
    ]
    assert read_metrics(tmp_path, "event") == rows[1:]
    recorder.record("step", 7, {"loss": math.nan, "actor": {"ratio": math.inf}, "step": 1, "kind": "mine"})
    row = read_metrics(tmp_path)[-1]
    assert (row["loss"], row["actor"], row["nonfinite"]) == (None, {"ratio": None}, ["loss", "actor/ratio"])
    assert (row["step"], row["kind"], row["step_"], row["kind_"]) == (7, "step", 1, "mine")
    recorder.close()
    recorder.close()
    with pytest.raises(OSError, match="metrics"):
        Recorder(run_dir=tmp_path / "missing")


def test_a_line_that_is_not_a_row_is_skipped(tmp_path):
    assert read_metrics(tmp_path) == []
    row = {"kind": "step", "step": 1}
    lines = ["no json", "7", "{}", '{"kind": "step", "step": "x"}', json.dumps(row)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert read_metrics(tmp_path, "step") == [row]


@pytest.mark.parametrize("torn", [b'{"kind": "st', b'{"kind": "step", "x": "\xc3', b"x" * 200_000])
def test_half_a_line_of_a_killed_run_is_removed_and_never_read(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + torn)
    assert read_metrics(tmp_path) == [{"kind": "step", "step": 1}]
    recorder = Recorder(run_dir=tmp_path)
    record_steps(recorder, 2)
    recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2] and path.read_bytes().count(b"\n") == 2


def test_a_full_disk_costs_rows_is_reported_once_a_minute_and_ends_when_there_is_room(tmp_path, logged):
    now = 1000.0
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    sink = Keeping()
    recorder = Recorder(run_dir=tmp_path, clock=lambda: now, sinks=[sink])
    for step in range(120):
        now = 1000.0 + step
        record_steps(recorder, step)
    assert len(sink.rows) == 120, "sinks receive rows that the disk lost"
    said = [text for text in logged() if "cannot be written" in text]
    assert str(path) in said[0] and "No space left" in said[0] and "1 so far" in said[0] and "61 so far" in said[1]
    assert len(said) == 2 and recorder.lost_rows == 120
    path.unlink()
    record_steps(recorder, 120, 121)  # the first goes to the old file once more, which is then opened again
    recorder.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [121]
    assert any("can be written again; 121 rows were lost" in text for text in logged())
    assert any("121 rows" in text and "in all" in text for text in logged())


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
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    lost, lost_in_all = map(int, done.stdout.split())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]  # each one whole
    assert 0 < lost == lost_in_all
    assert [row["step"] for row in rows] == [*range(20 - lost), 20]


# -- alerts and sinks -------------------------------------------------------------------------------------------------


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


class Stuck(Keeping):
    def close(self):
        raise TimeoutError("not done")


def test_a_broken_sink_is_switched_off_and_the_others_continue(tmp_path, logged):
    broken, whole = Keeping(fails_from=1), Keeping()
    recorder = Recorder(run_dir=tmp_path, sinks=[broken, Stuck(), whole])
    record_steps(recorder, 0, 1, 2)
    assert (len(broken.rows), broken.closed, len(whole.rows)) == (1, 1, 3)
    recorder.close()
    recorder.close()
    assert (broken.closed, whole.closed, len(read_metrics(tmp_path))) == (1, 1, 3)
    assert logged() == [
        "keeping is switched off: RuntimeError: service gone. Training continues",
        "keeping did not close: TimeoutError: not done",
    ]


def test_alerts_go_to_the_log_and_unused_ones_are_named_at_the_end(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="freewheel")
    recorder = Recorder(run_dir=tmp_path, alerts=Alerts({"queue_size": limits(above=10), "quue": limits(below=0)}))
    for size in (5, 11, 12, 9):
        recorder.record("statistics", 1, {"queue": {"queue_size": size}})
    recorder.record("event", 1, {"queue_size": 99})  # an event is no measurement
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"] and recorder.alerts == []
    assert "queue/queue_size = 11" in said[0][1] and "observe.alerts.queue_size" in said[0][1]
    recorder.close()
    assert "quue" in caplog.records[-1].getMessage()


def test_pulses_and_syncs_are_for_the_file_alone(tmp_path, logged):
    """Alerts and sinks have these numbers from the statistics, by their documented names."""
    sink = Keeping()
    recorder = Recorder(run_dir=tmp_path, sinks=[sink], alerts=Alerts({"queue_size": limits(above=1)}))
    recorder.record("pulse", 1, {"queue_size": 2, "waits": {"trainer": {"train": 0.5}}})
    recorder.record("sync", 1, {"version": 1, "took_s": 0.5, "engines": {"rollouter-0": {"took_s": 0.5}}})
    assert (sink.rows, logged()) == ([], [])
    recorder.record("statistics", 1, {"queue": {"queue_size": 2}})
    assert len(sink.rows) == 1 and any("queue_size = 2 is too high" in text for text in logged())
    recorder.close()
    assert [row["kind"] for row in read_metrics(tmp_path)] == ["pulse", "sync", "statistics"]


ROWS = [
    ("step", 1, {"reward": 0.25, "note": "text is no number"}),
    ("step", 2, {"reward": math.nan, "queue": {"queue_size": 7}}),
    ("eval", 1, {"accuracy": 0.5, "eval/reward": 0.75}),
    ("event", 2, {"seconds": 3}),
]


def read_scalars(folder):
    """Return (tag, step, value) of all event files, by their format: length, its checksum, data, its checksum."""
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.glob("*tfevents*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            at += length + 16
    return found


def test_tensorboard_gets_steps_and_evaluations(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(run_dir=tmp_path)
    for row in ROWS:
        sink.write(*row)
    sink.close()
    found = read_scalars(tmp_path / "tensorboard")
    tags = [("reward", 1), ("reward", 2), ("queue/queue_size", 2), ("eval/accuracy", 1), ("eval/reward", 1)]
    assert [(tag, step) for tag, step, _ in found] == tags
    assert (found[0][2], found[2][2], found[3][2]) == (0.25, 7.0, 0.5) and math.isnan(found[1][2])
    resumed = TensorBoardSink(run_dir=tmp_path)
    resumed.write("step", 3, {"reward": 0.5})
    resumed.close()
    assert read_scalars(tmp_path / "tensorboard")[5:] == [("reward", 3, 0.5)], "a resumed run adds a file"


def test_prometheus_serves_the_last_value_of_each_metric():
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(port=0)
    try:
        for row in [*ROWS, ("step", 3, {"actor/grad-norm": 1.5, "total_generated_samples": 64})]:
            sink.write(*row)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        sink.close()
    values = {"step": "3.0", "reward": "NaN", "queue_queue_size": "7.0", "eval_accuracy": "0.5", "eval_reward": "0.75"}
    values |= {"actor_grad_norm": "1.5", "total_generated_samples": "64.0"}
    served = dict(line.split() for line in lines if not line.startswith("#"))
    assert served == {f"freewheel_{name}": value for name, value in values.items()}
    assert "# HELP freewheel_total_generated_samples responses generated (responses)" in lines


def test_a_taken_port_names_the_setting_and_closing_frees_it():
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SinkError, match=rf"observe\.prometheus_port = {port}: .*free port") as error:
            PrometheusSink(port=port)
        assert (error.value.key, error.value.value) == ("observe.prometheus_port", port)
    sink = PrometheusSink(port=0)
    sink.close()
    PrometheusSink(port=sink.port).close()
    for port in (70000, -1):
        with pytest.raises(SinkError, match=r"observe\.prometheus_port"):
            PrometheusSink(port=port)


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, logged in."""
    module = Mock(Error=ConnectionError)
    module.run = module.init.return_value
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_wandb_gets_rows_by_our_steps_and_a_resumed_run_continues(tmp_path, wandb):
    sink = WandbSink(run_dir=tmp_path, project="p", config={"seed": 1})
    for row in (("step", 12, {"reward": 0.5}), ("eval", 10, {"accuracy": 0.9}), ("event", 12, {"text": "x"})):
        sink.write(*row)
    sink.close()
    assert wandb.run.log.mock_calls == [call({"reward": 0.5, "step": 12}), call({"eval/accuracy": 0.9, "step": 10})]
    assert wandb.init.call_args.kwargs["config"] == {"seed": 1} and wandb.run.finish.call_count == 1
    (tmp_path / "other").mkdir()
    for run_dir in (tmp_path, tmp_path / "other"):
        WandbSink(run_dir=run_dir, project="p", config={})
    first, again, other = (one.kwargs["id"] for one in wandb.init.call_args_list)
    assert first == again != other


@pytest.mark.parametrize("login", [{"return_value": False}, {"side_effect": ConnectionError("no route to host")}])
def test_wandb_never_asks_for_a_key_and_is_offline_without_one(tmp_path, wandb, monkeypatch, login):
    wandb.login.configure_mock(**login)
    WandbSink(run_dir=tmp_path, project="p", config={})
    monkeypatch.setenv("WANDB_MODE", "disabled")
    WandbSink(run_dir=tmp_path, project="p", config={})
    assert wandb.login.mock_calls == [call(prompt=False)]
    assert [one.kwargs["mode"] for one in wandb.init.call_args_list] == ["offline", "disabled"]


def test_real_wandb_writes_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recorder = Recorder(run_dir=tmp_path, sinks=open_sinks(run_dir=tmp_path, wandb_project="p", config={"seed": 1}))
    for row in ROWS:
        recorder.record(*row)
    recorder.close()
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30  # wandb's own process writes the file, a moment after `finish` has returned
    while b"eval/accuracy" not in run.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert b"eval/accuracy" in run.read_bytes() and b"queue/queue_size" in run.read_bytes()


# -- missing, hanging and broken sinks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "key", "package"),
    [
        ({"tensorboard": True}, "observe.tensorboard", "tensorboardX"),
        ({"wandb_project": "p"}, "observe.wandb_project", "wandb"),
        ({"prometheus_port": 0}, "observe.prometheus_port", "prometheus-client"),
    ],
)
def test_a_missing_package_is_named_with_its_setting(tmp_path, monkeypatch, setting, key, package):
    def missing(name, *rest):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(recorder_module.importlib, "import_module", missing)
    with pytest.raises(SinkError, match=rf"{key} = .*pip install {package}") as error:
        open_sinks(run_dir=tmp_path, **setting)
    assert error.value.key == key


ALONE = """
import sys
import freewheel.observe.logs, freewheel.observe.metrics, freewheel.observe.recorder, freewheel.observe.snapshot
import freewheel.observe.spans
packages = {name.partition(".")[0] for name in sys.modules}
print(packages & {"tensorboardX", "wandb", "prometheus_client", "torch", "ray"})
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("freewheel.")}))
"""


def test_recording_imports_no_sink_no_torch_and_no_package_of_ours_but_utils():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["set()", "['observe', 'utils']"]


def test_open_sinks_are_closed_if_another_cannot_be_opened(tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("prometheus_client")
    before = threading.active_count()
    with pytest.raises(SinkError):
        open_sinks(run_dir=tmp_path, tensorboard=True, prometheus_port=70000)
    assert threading.active_count() == before


class Gate(Keeping):
    """A sink that waits until it is opened."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()

    def write(self, *row):
        assert self.open.wait(30)
        super().write(*row)


def test_a_hanging_sink_delays_nothing_and_loses_only_rows_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(recorder_module, "WAITING_ROWS", 5)
    gate = Gate()
    sink = Background("slow", lambda: gate, close_wait_s=30)
    for step in range(20):
        sink.write("step", step, {})
    assert sink.lost_rows >= 14
    gate.open.set()
    sink.close()
    steps = [row[1] for row in gate.rows]
    assert gate.closed and len(steps) == 20 - sink.lost_rows and steps == sorted(set(steps))
    stuck = Gate()
    sink = Background("stuck", lambda: stuck, close_wait_s=0.05)
    sink.write("step", 1, {})
    with pytest.raises(TimeoutError, match=r"metrics\.jsonl"):
        sink.close()
    stuck.open.set()


def test_errors_of_a_background_sink_reach_the_recorder(tmp_path, logged):
    def start():
        raise ConnectionError("no such service")

    sink = Background("Weights & Biases", start)
    sink._thread.join()
    late = Background("broken", lambda: Keeping(fails_from=0))
    recorder = Recorder(run_dir=tmp_path, sinks=[sink])
    record_steps(recorder, 1, 2)
    recorder.close()
    late.write("step", 1, {})
    recorder = Recorder(run_dir=tmp_path, sinks=[late])
    recorder.close()
    assert logged() == [
        "Weights & Biases is switched off: ConnectionError: no such service. Training continues",
        "broken did not close: RuntimeError: service gone",
    ]
