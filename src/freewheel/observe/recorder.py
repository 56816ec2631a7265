"""Records metrics: `metrics.jsonl`, alerts, and optional sinks (TensorBoard, Weights & Biases, Prometheus).

    record(kind, step, values) ─▶ plain values ─┬─▶ metrics.jsonl   one JSON object per line, written at once
                                                ├─▶ alerts ─▶ log
                                                └─▶ each sink       a sink that raises is switched off

    Recorder ── write ──▶ Prometheus            (a dictionary; scraped from its own thread)
             └─ write ──▶ Background ─ thread ─▶ TensorBoard, Weights & Biases
                           never waits: a hanging sink loses rows

`FullyAsyncMain` is the only caller. Nothing here raises into training once the run has started. A full disk costs rows,
which are counted; recording continues when there is room. Metrics keep their names in sinks; evaluation metrics get the
prefix `eval/`. Events are not numbers and go only to `metrics.jsonl` and the log.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from freewheel.observe.lines import Tail, decode_line, read_lines
from freewheel.observe.metrics import Alerts, describe, numbers, plain, without_nonfinite
from freewheel.observe.run_folder import METRICS
from freewheel.utils.files import WholeLines, open_private, private_folder

log = logging.getLogger("freewheel.observe")

WAITING_ROWS = 1000
"""Rows that a slow sink may lag behind. A step has one or two rows, so this covers minutes of a hanging disk or
service."""
CLOSE_WAIT_S = 15.0
"""How long the end of a run waits for a sink's last rows: an upload takes seconds, an outage hours."""
FLUSH_EVERY_S = 5.0
"""TensorBoard reads its files every few seconds, and a flush waits for the disk."""
WANDB_ID_CHARS = 8
"""As in wandb."""
PREFIX = "freewheel_"
LOCAL = "127.0.0.1"
"""Metrics are not secret, but other machines have no use for them."""


class SinkError(ValueError):
    """A sink cannot be opened. `key`, `value` and `remedy` tell the user why."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key, self.value, self.remedy = key, value, remedy


class Sink(Protocol):
    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Take a row of plain values. An exception switches the sink off."""

    def close(self) -> None: ...


def open_sinks(
    *,
    run_dir: str | os.PathLike[str],
    tensorboard: bool = False,
    wandb_project: str | None = None,
    prometheus_port: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """Open the sinks named in the settings of `observe`. `SinkError` names the setting that cannot work."""
    run_dir = Path(run_dir)
    sinks: list[Sink] = []
    if tensorboard:
        need("tensorboardX", key="observe.tensorboard", value=True)
        sinks.append(Background("TensorBoard", lambda: TensorBoardSink(run_dir=run_dir)))
    if wandb_project is not None:
        need("wandb", key="observe.wandb_project", value=wandb_project)
        project = wandb_project
        sinks.append(
            Background("Weights & Biases", lambda: WandbSink(run_dir=run_dir, project=project, config=config or {}))
        )
    if prometheus_port is not None:
        try:
            sinks.append(PrometheusSink(port=prometheus_port))
        except SinkError:
            for sink in sinks:
                sink.close()
            raise
    return sinks


def need(module: str, *, key: str, value: object, package: str | None = None) -> Any:
    """Import a package that only a sink needs. `package`: the name to install it by."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = f"it needs a package that is not installed: pip install {package or module} ({error})"
        raise SinkError(key, value, remedy) from error


def name_numbers(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row under the names that sinks show."""
    for name, number in numbers(values) if kind != "event" else ():
        yield (name if kind != "eval" or name.startswith("eval/") else f"eval/{name}"), number


class Background:
    """Runs a sink in a thread, so that `write` never waits. The next `write` or `close` raises what the sink raised."""

    def __init__(self, name: str, start: Callable[[], Sink], *, close_wait_s: float = CLOSE_WAIT_S) -> None:
        self.name = name
        self.lost_rows = 0
        self._close_wait_s = close_wait_s
        self._rows: queue.Queue[tuple[str, int, Mapping[str, Any]] | None] = queue.Queue(WAITING_ROWS)
        self._error: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, args=(start,), name=f"{name} sink", daemon=True)
        self._thread.start()

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._rows.put_nowait((kind, step, values))
        except queue.Full:
            if not self.lost_rows:
                log.warning("%s does not keep up: rows are lost there (metrics.jsonl has them)", self.name)
            self.lost_rows += 1

    def close(self) -> None:
        deadline = time.monotonic() + self._close_wait_s
        if not self._closing:
            self._closing = True
            with contextlib.suppress(queue.Full):
                self._rows.put(None, timeout=self._close_wait_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"not done within {self._close_wait_s:g} s; its last rows are in metrics.jsonl only")
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, start: Callable[[], Sink]) -> None:
        try:
            with contextlib.closing(start()) as sink:
                while (row := self._rows.get()) is not None:
                    sink.write(*row)
        except Exception as error:  # noqa: BLE001  # kept, for the thread that may tell the user
            self._error = error


class TensorBoardSink:
    """Writes event files to `tensorboard/` in the run directory; `tensorboard --logdir runs` shows all runs together.
    It writes record by record, because tensorboardX's `SummaryWriter` loses errors in its thread."""

    def __init__(self, *, run_dir: Path) -> None:
        writer = need("tensorboardX.record_writer", key="observe.tensorboard", value=True, package="tensorboardX")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        folder = private_folder(run_dir / "tensorboard")
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = writer.RecordWriter(str(folder / name))
        self._flushed_at = time.monotonic()
        self._put(file_version="brain.Event:2")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        found = [self._summary.Value(tag=name, simple_value=number) for name, number in name_numbers(kind, values)]
        if found:
            self._put(step=step, summary=self._summary(value=found))
        if time.monotonic() - self._flushed_at >= FLUSH_EVERY_S:
            self._file.flush()
            self._flushed_at = time.monotonic()

    def _put(self, **fields: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """A run of Weights & Biases. A resumed training continues it: its id is stored in the run directory.

    `WANDB_MODE` works as usual. If it is unset and there is no login or network, the run is written to disk for `wandb
    sync`, so that nothing asks for a key in the middle of the terminal view.
    """

    def __init__(self, *, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        wandb = need("wandb", key="observe.wandb_project", value=project)
        mode = os.environ.get("WANDB_MODE")
        if not mode and (reason := _no_login(wandb)):
            mode = "offline"
            log.warning(
                "Weights & Biases: %s; the run is kept in %s/wandb, and `wandb sync` uploads it", reason, run_dir
            )
        self._run = wandb.init(
            project=project,
            name=run_dir.resolve().name,
            id=_kept_id(run_dir / "wandb_run_id"),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Evaluations arrive after later steps, and wandb drops rows older than its own step.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        found = dict(name_numbers(kind, values))
        if found:
            self._run.log({**found, "step": step})

    def close(self) -> None:
        self._run.finish()


def _no_login(wandb: Any) -> str:
    """Return why nothing can be sent now; empty if it can."""
    try:
        return "" if wandb.login(prompt=False) else "no login was found"
    except wandb.Error as error:
        return f"{type(error).__name__}: {error}"


def _kept_id(path: Path) -> str:
    """Return the id in the file, or a new one if there is none or it is invalid: wandb names folders by it."""
    with os.fdopen(open_private(path, os.O_RDWR), "r+", encoding="utf-8", errors="replace") as file:
        kept = file.read(WANDB_ID_CHARS + 1).strip()
        if not re.fullmatch(r"[0-9a-f]+", kept):
            kept = uuid.uuid4().hex[:WANDB_ID_CHARS]
            file.seek(0)
            file.truncate()
            file.write(kept)
    return kept


class PrometheusSink:
    """Serves the last value of each metric at `http://127.0.0.1:PORT/metrics`, as in `freewheel_queue_queue_size`."""

    name = "Prometheus"

    def __init__(self, *, port: int) -> None:
        key = "observe.prometheus_port"
        client = need("prometheus_client", key=key, value=port, package="prometheus-client")
        self._family = importlib.import_module("prometheus_client.core").GaugeMetricFamily
        self._values: dict[str, tuple[str, float]] = {}
        self._help = {name: f"{metric.what} ({metric.unit})" for name, metric in describe().items()}
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, addr=LOCAL, registry=registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            remedy = f"{LOCAL}:{port} cannot be used ({reason}): give a free port, or 0 for any"
            raise SinkError(key, port, remedy) from error
        self.port: int = self._server.server_port

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        found = {
            PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name): (self._help.get(name.rpartition("/")[2], name), number)
            for name, number in name_numbers(kind, values)
        }
        if kind == "step":
            found[f"{PREFIX}step"] = ("last training step recorded", float(step))
        self._values = {**self._values, **found}  # replaced as a whole: a scrape may read it meanwhile

    def collect(self) -> Iterable[Any]:
        """Yield what prometheus_client collects at each scrape."""
        for name, (text, value) in self._values.items():
            yield self._family(name, text, value=value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


RowKind = Literal["step", "eval", "statistics", "event", "pulse", "sync"]
RESERVED = ("kind", "step", "time", "nonfinite")
"""Fields of every row. A value with one of these names gets a trailing underscore."""
WATCHED = ("step", "eval", "statistics")
"""Kinds that alerts look at. Statistics contain everything that a pulse does."""
FILE_ONLY = ("pulse", "sync")
"""Kinds for viewers only: sinks have the same numbers under their documented names."""


class Recorder:
    """A recorded row is in the file when `record` returns, or is counted in `lost_rows`."""

    def __init__(
        self,
        *,
        run_dir: str | os.PathLike[str],
        sinks: Iterable[Sink] = (),
        alerts: Alerts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(run_dir) / METRICS
        self._sinks = list(sinks)
        self._alerts = alerts or Alerts({})
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._file = WholeLines(self.path, unit="rows", clock=clock)
        self._file.open()

    @property
    def lost_rows(self) -> int:
        return self._file.lost

    def record(self, kind: RowKind, step: int, values: Mapping[str, Any]) -> None:
        found: dict[str, Any] = plain(values)
        with self._lock:
            self._file.append(self._row(kind, step, found))
            if kind in WATCHED:
                for level, text in self._alerts.check(found):
                    log.log(level, "Alert: %s", text)
            for sink in [] if kind in FILE_ONLY else list(self._sinks):
                self._write_to(sink, kind, step, found)

    @property
    def alerts(self) -> list[str]:
        """Describe what is out of bounds now."""
        return self._alerts.active

    def close(self) -> None:
        """Close the file and all sinks. May be called twice."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                _close(sink, logging.WARNING)
            if self._closed:
                return
            self._closed = True
            if self._alerts.unseen:
                log.warning(
                    "observe.alerts: no metric had the name %s; docs/metrics.md lists the names",
                    ", ".join(self._alerts.unseen),
                )
            self._file.close()

    def _row(self, kind: RowKind, step: int, values: dict[str, Any]) -> bytes:
        finite, nonfinite = without_nonfinite(values)
        row: dict[str, Any] = {"kind": kind, "step": int(step), "time": round(self._clock(), 3)}
        row |= {name + "_" if name in RESERVED else name: value for name, value in finite.items()}
        if nonfinite:
            row["nonfinite"] = nonfinite
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"

    # -- sinks --------------------------------------------------------------------------------------------------------

    def _write_to(self, sink: Sink, kind: RowKind, step: int, values: Mapping[str, Any]) -> None:
        try:
            sink.write(kind, step, values)
            return
        except Exception as error:  # noqa: BLE001  # other people's code; training continues without it
            log.warning("%s is switched off: %s: %s. Training continues", _name(sink), type(error).__name__, error)
        self._sinks.remove(sink)
        _close(sink, logging.DEBUG)


def read_metrics(run_dir: str | os.PathLike[str], kind: RowKind | None = None) -> list[dict[str, Any]]:
    """Return the rows of a run, all or of one kind, during or after it. Invalid lines are skipped."""
    rows = [row for row in read_lines(Path(run_dir) / METRICS) if isinstance(row, dict)]
    return [row for row in rows if isinstance(row.get("step"), int) and kind in (None, row.get("kind"))]


class _Row(msgspec.Struct):
    kind: str
    step: int


_ROW = msgspec.json.Decoder(_Row)


class StepCounter:
    """Finds the last step with metrics, during or after a run. Reads only what was appended since it looked before."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._tail = Tail(Path(run_dir) / METRICS)
        self._step = 0
        self._lock = threading.Lock()

    def look(self) -> int:
        """Return the last step; 0 without metrics."""
        with self._lock:
            generation, blocks = self._tail.generation, self._tail.look()
            if self._tail.generation != generation:
                self._step = 0
            rows = (decode_line(_ROW, line) for block in blocks for line in block.lines)
            steps = (row.step for row in rows if row is not None and row.kind in ("step", "eval"))
            self._step = max([self._step, *steps])
            return self._step


def _close(sink: Sink, level: int) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001  # other people's code
        log.log(level, "%s did not close: %s: %s", _name(sink), type(error).__name__, error)


def _name(sink: Sink) -> str:
    return getattr(sink, "name", type(sink).__name__)
