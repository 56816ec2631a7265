"""Sinks: what arrives, and what happens when nothing can."""

from __future__ import annotations

import importlib
import math
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import urllib.request

import pytest

from freewheel.observe import recorder as sinks
from freewheel.observe.recorder import (
    Background,
    PrometheusSink,
    Recorder,
    SinkError,
    TensorBoardSink,
    WandbSink,
    open_sinks,
)

ROWS = [
    ("step", 1, {"reward": 0.25, "note": "text is no number"}),
    ("step", 2, {"reward": math.nan, "queue": {"queue_size": 7}}),
    ("eval", 1, {"accuracy": 0.5, "eval/reward": 0.75}),
    ("event", 2, {"seconds": 3}),
]


def write(sink):
    for row in ROWS:
        sink.write(*row)


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def scalars(folder):
    """(tag, step, value) of all event files, read by their format: length, its checksum, data, its checksum."""
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


def test_tensorboard_has_steps_and_evaluations(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(run_dir=tmp_path)
    write(sink)
    sink.close()
    found = scalars(tmp_path / "tensorboard")
    assert [(tag, step) for tag, step, _ in found] == [
        ("reward", 1),
        ("reward", 2),
        ("queue/queue_size", 2),
        ("eval/accuracy", 1),
        ("eval/reward", 1),
    ]
    assert (found[0][2], found[2][2], found[3][2]) == (0.25, 7.0, 0.5)
    assert math.isnan(found[1][2])
    resumed = TensorBoardSink(run_dir=tmp_path)
    resumed.write("step", 3, {"reward": 0.5})
    resumed.close()
    assert scalars(tmp_path / "tensorboard")[5:] == [("reward", 3, 0.5)], "a resumed run adds a file"


# -- Prometheus -------------------------------------------------------------------------------------------------------


def scrape(port):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_serves_the_last_value_of_each_metric():
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(port=0)
    try:
        write(sink)
        sink.write("step", 3, {"actor/grad-norm": 1.5, "total_generated_samples": 64})
        lines = scrape(sink.port).splitlines()
    finally:
        sink.close()
    values = dict(line.split() for line in lines if not line.startswith("#"))
    assert values == {
        "freewheel_step": "3.0",
        "freewheel_reward": "NaN",
        "freewheel_queue_queue_size": "7.0",
        "freewheel_eval_accuracy": "0.5",
        "freewheel_eval_reward": "0.75",
        "freewheel_actor_grad_norm": "1.5",
        "freewheel_total_generated_samples": "64.0",
    }
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


# -- Weights & Biases -------------------------------------------------------------------------------------------------


class StandIn(types.ModuleType):
    """What we use of wandb."""

    def __init__(self, logged_in):
        super().__init__("wandb")
        self.logged_in, self.asked, self.inits, self.rows, self.finished = logged_in, [], [], [], 0
        self.Error = ConnectionError
        self.Settings = lambda **settings: settings

    def login(self, **options):
        self.asked.append(options)
        if isinstance(self.logged_in, Exception):
            raise self.logged_in
        return self.logged_in

    def init(self, **options):
        self.inits.append(options)
        return self

    def define_metric(self, *names, **options): ...

    def log(self, values):
        self.rows.append(values)

    def finish(self):
        self.finished += 1


@pytest.fixture
def stand_in(monkeypatch):
    def put(logged_in=True):
        module = StandIn(logged_in)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    monkeypatch.delenv("WANDB_MODE", raising=False)
    return put


def test_wandb_gets_rows_by_our_steps_so_that_late_evaluations_count(tmp_path, stand_in):
    wandb = stand_in()
    sink = WandbSink(run_dir=tmp_path, project="p", config={"seed": 1})
    sink.write("step", 12, {"reward": 0.5})
    sink.write("eval", 10, {"accuracy": 0.9})
    sink.write("event", 12, {"text": "x"})
    sink.close()
    assert wandb.rows == [{"reward": 0.5, "step": 12}, {"eval/accuracy": 0.9, "step": 10}]
    assert wandb.inits[0]["config"] == {"seed": 1} and wandb.finished == 1


@pytest.mark.parametrize("logged_in", [False, ConnectionError("no route to host")])
def test_wandb_never_asks_for_a_key_and_is_offline_without_one(tmp_path, stand_in, monkeypatch, logged_in):
    wandb = stand_in(logged_in)
    WandbSink(run_dir=tmp_path, project="p", config={})
    assert wandb.asked == [{"prompt": False}] and wandb.inits[0]["mode"] == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    WandbSink(run_dir=tmp_path, project="p", config={})
    assert len(wandb.asked) == 1 and wandb.inits[1]["mode"] == "disabled"


def test_a_resumed_run_continues_its_wandb_run(tmp_path, stand_in):
    wandb = stand_in()
    (tmp_path / "other").mkdir()
    for run_dir in (tmp_path, tmp_path, tmp_path / "other"):
        WandbSink(run_dir=run_dir, project="p", config={})
    first, again, other = (options["id"] for options in wandb.inits)
    assert first == again != other


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


# -- what is not there, hangs or breaks -------------------------------------------------------------------------------


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

    monkeypatch.setattr(sinks.importlib, "import_module", missing)
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


def test_the_recording_side_imports_no_sink_no_torch_and_no_other_package_of_ours():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["set()", "['observe', 'utils']"]


def test_sinks_that_opened_are_closed_when_another_cannot(tmp_path):
    pytest.importorskip("tensorboardX")
    pytest.importorskip("prometheus_client")
    before = threading.active_count()
    with pytest.raises(SinkError):
        open_sinks(run_dir=tmp_path, tensorboard=True, prometheus_port=70000)
    assert threading.active_count() == before


class Gate:
    """A sink that stands still until it is let go."""

    def __init__(self):
        self.open, self.rows, self.closed = threading.Event(), [], False

    def write(self, *row):
        assert self.open.wait(30)
        self.rows.append(row)

    def close(self):
        self.closed = True


def test_a_sink_that_hangs_holds_nobody_up_and_loses_only_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(sinks, "WAITING_ROWS", 5)
    gate = Gate()
    sink = Background("slow", lambda: gate, close_wait_s=30)
    for step in range(20):
        sink.write("step", step, {})
    assert sink.lost_rows >= 14
    gate.open.set()
    sink.close()
    assert gate.closed and len(gate.rows) == 20 - sink.lost_rows
    steps = [row[1] for row in gate.rows]
    assert steps == sorted(set(steps))


def test_closing_a_sink_that_hangs_ends_after_its_deadline():
    gate = Gate()
    sink = Background("stuck", lambda: gate, close_wait_s=0.05)
    sink.write("step", 1, {})
    with pytest.raises(TimeoutError, match=r"metrics\.jsonl"):
        sink.close()
    gate.open.set()


def test_what_a_background_sink_raises_reaches_the_recorder_which_switches_it_off(tmp_path, caplog):
    def start():
        raise ConnectionError("no such service")

    sink = Background("Weights & Biases", start)
    sink._thread.join()
    recorder = Recorder(run_dir=tmp_path, sinks=[sink])
    recorder.record("step", 1, {"reward": 0.5})
    recorder.record("step", 2, {"reward": 0.5})
    recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        "Weights & Biases is switched off: ConnectionError: no such service. Training goes on"
    ]


def test_what_the_last_row_raised_is_said_at_the_end(tmp_path, caplog):
    class Broken(Gate):
        def write(self, *row):
            raise RuntimeError("late")

    recorder = Recorder(run_dir=tmp_path, sinks=[Background("broken", Broken)])
    recorder.record("step", 1, {"reward": 0.5})
    recorder.close()
    assert [record.getMessage() for record in caplog.records] == ["broken did not close: RuntimeError: late"]
