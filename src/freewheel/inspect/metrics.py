"""Reads `metrics.jsonl` of a run into columns of numbers, and follows a growing file.

    metrics.jsonl ─ Tail ─ rows by kind ─▶ columns of steps, evaluations, pulses, statistics; lists of syncs and events

The page, the planner and `freewheel inspect` read runs through this package. `Columns` holds rows that only grow, one
column per name; unknown values are NaN. Only the fields declared here are decoded of each row; invalid rows are skipped
and counted. Reading 100,000 steps takes about a second, and later looks read only what is new. `generation` increases
when earlier results no longer hold: a new file, or steps that were trained again after a resume. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import msgspec
import numpy as np

from freewheel.judge.stats import EndpointStats
from freewheel.observe.lines import Tail, decode_line
from freewheel.observe.run_folder import METRICS
from freewheel.observe.snapshot import PULSE_MAX_S

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

FIRST_ROWS = 1024
SIGNIFICANT = 7
"""Digits that are sent to the page: finer than a pixel."""
SHORTEST_S = 1e-3
"""The least duration of an interval: a clock may stop or be set back."""
NAN = math.nan


class Columns:
    """A table that only grows. Appending copies the new rows, and everything when there is no room. Each column is
    contiguous."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows = 0
        self._at = {name: index for index, name in enumerate(self.names)}
        self._data: FloatArray = np.empty((len(self.names), FIRST_ROWS))

    def extend(self, rows: Sequence[Sequence[float | None]] | FloatArray) -> None:
        if not len(rows):
            return
        block = np.asarray(rows, np.float64)  # None becomes NaN
        until = self.rows + len(block)
        if until > self._data.shape[1]:
            grown = np.empty((len(self.names), max(until, 2 * self._data.shape[1])))
            grown[:, : self.rows] = self._data[:, : self.rows]
            self._data = grown
        self._data[:, self.rows : until] = block.T
        self.rows = until

    def extend_in_order(self, rows: FloatArray) -> int:
        """Append rows in the order of steps, the first column. A step that comes again replaces itself and everything
        after it. Return how often that happened."""
        steps = np.concatenate([self[self.names[0]][-1:], rows[:, 0]])
        again = np.flatnonzero(np.diff(steps) <= 0) + 1 - (len(steps) - len(rows))
        start = 0
        for place in again.tolist():
            self.extend(rows[start:place])
            self.rows = int(np.searchsorted(self[self.names[0]], rows[place, 0]))
            start = place
        self.extend(rows[start:])
        return len(again)

    def __getitem__(self, name: str) -> FloatArray:
        return self._data[self._at[name], : self.rows]

    def last(self, name: str) -> float | None:
        """Return the last known value."""
        known = np.flatnonzero(np.isfinite(self[name]))
        return float(self[name][known[-1]]) if known.size else None

    def since(self, row: int) -> dict[str, list[float | None]]:
        """Return each column from that row on. Columns without a known value are left out."""
        return {name: plain(self[name][row:]) for name in self.names if np.isfinite(self[name][row:]).any()}


def plain(values: FloatArray) -> list[float | None]:
    """Return JSON values: short numbers, and None for NaN."""
    return [_shorten(value) for value in values.tolist()]


def _shorten(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    if value.is_integer():
        return int(value) if abs(value) < 2**53 else value
    return float(f"{value:.{SIGNIFICANT}g}")


def rates(counter: FloatArray, time_s: FloatArray) -> FloatArray:
    """Return the growth of a counter per second, row by row; NaN in the first. A counter that fell was restarted."""
    grown = np.diff(counter, prepend=np.nan)
    grown = np.where(grown < 0, counter, grown)
    passed = np.diff(time_s, prepend=np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: FloatArray = np.where(passed > 0, grown / passed, np.nan)
    return found


def mean_over_time(values: FloatArray, time_s: FloatArray) -> float | None:
    """Return the time-weighted mean of values that were measured from time to time. A value counts for the time since
    the row before it, but no longer than the interval between pulses of a running run. None if nothing is known."""
    known = np.isfinite(values)
    if not known.any():
        return None
    passed = np.clip(np.diff(time_s, prepend=0.0), SHORTEST_S, PULSE_MAX_S)
    return float(np.average(values[known], weights=passed[known]))


def means(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over all mappings; a missing name counts as 0."""
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: sum(one.get(name, 0.0) for one in shares) / len(shares) for name in names}


# -- rows -------------------------------------------------------------------------------------------------------------

STEP_METRICS = (
    "rollout/reward_mean",
    "rollout/reward_std",
    "rollout/raw_reward_mean",
    "rollout/response_length_mean",
    "rollout/truncation_ratio",
    "rollout/masked_ratio",
    "rollout/zero_variance_ratio",
    "avg_sample_age",
    "max_sample_age",
    "stale_samples_ratio",
    "actor/loss",
    "actor/grad_norm",
    "actor/kl",
    "actor/entropy",
    "actor/ess",
    "actor/lr",
)
"""Step metrics that the page shows at once. Others are read on request."""
EVAL_METRICS = ("eval/reward", "eval/reward_se", "eval/response_length_mean", "eval/truncation_ratio")


def define_row(kind: str, metrics: Sequence[str]) -> Any:
    """Return the type of a row of a kind: step, time, metrics, `sample_age_counts`. Other fields are skipped."""
    fields: list[Any] = [("step", int), ("time", float)]
    fields += [(f"metric_{at}", float | None, msgspec.field(name=name, default=NAN)) for at, name in enumerate(metrics)]
    fields.append(("sample_age_counts", list[int] | None, None))
    return msgspec.defstruct("Row", fields, tag_field="kind", tag=kind, gc=False)


class PulseRow(msgspec.Struct, gc=False, tag_field="kind", tag="pulse"):
    """The state of the run, about once a second."""

    time: float
    step: int = 0
    queue_size: float | None = NAN
    in_progress: float | None = NAN
    version: float | None = NAN
    published_version: float | None = NAN
    tokens_per_s: float | None = NAN
    samples_per_s: float | None = NAN
    waits: dict[str, dict[str, float]] = {}
    verdict: str = ""
    last: bool = False
    """The run was over, and the verdict covers the whole run."""


class EngineSync(msgspec.Struct):
    took_s: float | None = None
    attempts: int = 0
    error: str = ""


class Sync(msgspec.Struct, tag_field="kind", tag="sync"):
    """One weight version on its way to the engines."""

    time: float
    step: int = 0
    version: int = 0
    took_s: float | None = None
    bytes: float | None = None
    engines: dict[str, EngineSync] = {}
    failed: bool = False


class EventRow(msgspec.Struct, gc=False, tag_field="kind", tag="event"):
    time: float
    step: int = 0
    text: str = ""
    shared_gpu: bool | None = None
    """Whether training and generation share a GPU, recorded at the start."""


class JudgeNumbers(msgspec.Struct):
    """All endpoints together, and each endpoint, as `_Judging.stats` reports them."""

    scored: int = 0
    failed: dict[str, int] = {}
    shared: int = 0
    queued: int = 0
    sent: int = 0
    throttled: int = 0
    faults: dict[str, int] = {}
    """Failed calls by kind."""
    in_flight: int = 0
    limit: int = 0
    cache_hits: int = 0
    cost: float = 0.0
    submitted: int = 0
    skipped: int = 0
    retries: int = 0
    reasks: int = 0
    restarts: int = 0
    endpoints: Sequence[EndpointStats] = ()


class RewardNumbers(msgspec.Struct):
    """Statistics of scoring, as `RewardStage.stats` reports them."""

    scored: int = 0
    failed: dict[str, int] = {}
    in_flight: int = 0
    waiting: int = 0
    skipped: int = 0
    retried_groups: int = 0
    dropped_groups: int = 0
    mean_latency_s: float = 0.0
    busy_s: float = 0.0
    judge: JudgeNumbers | None = None


class RollouterNumbers(msgspec.Struct):
    generated_tokens: float = NAN
    engine_busy_s: float = NAN
    slots: float | None = None
    rewards: RewardNumbers = msgspec.field(default_factory=RewardNumbers)


class QueueNumbers(msgspec.Struct):
    version: float = NAN
    waiting_for: str = ""
    paused: str = ""
    memory_bytes: float = NAN
    dropped_by_reason: dict[str, int] = {}


class SyncNumbers(msgspec.Struct):
    sync_failures: int = 0
    last_sync_s: float = 0.0
    mean_sync_s: float = 0.0
    longest_sync_s: float = 0.0
    param_sync_count: int = 0
    state: str = ""
    fenced: list[str] = []
    versions: dict[str, int] = {}


class Statistics(msgspec.Struct, tag_field="kind", tag="statistics"):
    """What the components reported about themselves, every `observe.statistics_every_s`."""

    time: float
    step: int = 0
    rollouter: RollouterNumbers = msgspec.field(default_factory=RollouterNumbers)
    queue: QueueNumbers = msgspec.field(default_factory=QueueNumbers)
    sync: SyncNumbers = msgspec.field(default_factory=SyncNumbers)


StepRow, EvalRow = define_row("step", STEP_METRICS), define_row("eval", EVAL_METRICS)
_ROWS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[StepRow, EvalRow, PulseRow, Statistics, Sync, EventRow])  # noqa: UP007
_WHOLE = msgspec.json.Decoder(dict[str, Any])

PULSE_NUMBERS = ("queue_size", "in_progress", "version", "published_version", "tokens_per_s", "samples_per_s")
PULSE_COLUMNS = ("elapsed_s", "step", *PULSE_NUMBERS, "wait_batch", "wait_reward", "wait_room")
STATISTICS_COLUMNS = (
    *("elapsed_s", "step", "generated_tokens", "engine_busy_s"),
    *("scored", "failed", "scoring", "waiting", "settled", "reward_busy_s"),
    *("limit", "in_flight", "queued", "sent", "judged", "throttled", "cache_hits", "shared", "judge_failed", "cost"),
    "faults",
)

RECENT_STEPS = 100
"""Steps in the histogram of ages: enough groups for its shape, and recent."""
RECENT_PULSES = 30
"""Pulses, about one per second, over which wait shares are averaged, because a single one is too noisy."""
MOST_SYNCS = 500
MOST_EVENTS = 300
LATEST_STATISTICS = 8
"""Rows that are kept, at one row every ten seconds."""


class RecordedMetrics:
    """The metrics of a run. Call `look` before reading."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self._tail = Tail(self.path)
        self._resets = 0
        self._begin()

    def _begin(self) -> None:
        self.steps = Columns(("step", "elapsed_s", *STEP_METRICS))
        self.evals = Columns(("step", "elapsed_s", *EVAL_METRICS))
        self.pulses = Columns(PULSE_COLUMNS)
        self.statistics = Columns(STATISTICS_COLUMNS)
        self.ages: deque[tuple[int, list[int]]] = deque(maxlen=RECENT_STEPS)
        """Step, and number of groups by lag."""
        self.waits: deque[dict[str, dict[str, float]]] = deque(maxlen=RECENT_PULSES)
        self.syncs: deque[Sync] = deque(maxlen=MOST_SYNCS)
        self.events: deque[EventRow] = deque(maxlen=MOST_EVENTS)
        self.syncs_seen = self.events_seen = 0
        self.shared_gpu: bool | None = None
        """Whether training and generation shared a GPU after the last start; None if not recorded."""
        self.last_pulse: PulseRow | None = None
        self.latest_statistics: deque[Statistics] = deque(maxlen=LATEST_STATISTICS)
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.bad_lines = 0
        self._examples: dict[Any, list[bytes]] = {}
        """The first and the last line of steps and evaluations: they show which metrics exist."""
        self._requested: dict[tuple[str, ...], tuple[Tail, msgspec.json.Decoder[Any], Columns]] = {}
        """Requested metrics that are not columns, by kind and names, with the position reached."""

    @property
    def exists(self) -> bool:
        return self._tail.exists

    @property
    def last_statistics(self) -> Statistics | None:
        return self.latest_statistics[-1] if self.latest_statistics else None

    @property
    def generation(self) -> int:
        return self._tail.generation + self._resets

    @property
    def marks(self) -> tuple[int, ...]:
        """How far it has been read, by kind."""
        kinds = (self.steps, self.evals, self.pulses, self.statistics)
        return (*(kind.rows for kind in kinds), self.syncs_seen, self.events_seen)

    def look(self) -> None:
        before = self._tail.generation
        blocks = self._tail.look()
        if self._tail.generation != before:
            self._begin()
        for block in blocks:
            found: dict[Any, list[Any]] = defaultdict(list)
            for line in block.lines:
                row = decode_line(_ROWS, line)
                if row is None:
                    self.bad_lines += bool(line)
                    continue
                kind = type(row)
                found[kind].append(row)
                if kind is StepRow or kind is EvalRow:
                    self._examples.setdefault(kind, [line])[1:] = [line]
            if found:
                self._add(found)

    def _add(self, found: Mapping[Any, list[Any]]) -> None:
        times = [rows[at].time for rows in found.values() for at in (0, -1)]
        if self.first_time is None:
            self.first_time = min(times)
        self.last_time = max(times)
        self._resets += self.steps.extend_in_order(self._metrics(found[StepRow], self.steps))
        self.ages.extend((row.step, row.sample_age_counts) for row in found[StepRow] if row.sample_age_counts)
        self._resets += self.evals.extend_in_order(self._metrics(found[EvalRow], self.evals))
        self.pulses.extend([self._pulse(row) for row in found[PulseRow]])
        self.waits.extend(row.waits for row in found[PulseRow])
        self.last_pulse = found[PulseRow][-1] if found[PulseRow] else self.last_pulse
        self.statistics.extend([self._statistics(row) for row in found[Statistics]])
        self.latest_statistics.extend(found[Statistics])
        self.syncs.extend(found[Sync])
        self.syncs_seen += len(found[Sync])
        self.events.extend(found[EventRow])
        self.events_seen += len(found[EventRow])
        for row in found[EventRow]:
            self.shared_gpu = self.shared_gpu if row.shared_gpu is None else row.shared_gpu

    def _since_start(self, time_s: float) -> float:
        assert self.first_time is not None
        return time_s - self.first_time

    def _metrics(self, rows: Sequence[Any], columns: Columns) -> FloatArray:
        """Return steps, times since the start, and metrics."""
        values = [msgspec.structs.astuple(row)[:-1] for row in rows]
        numbers = np.array(values, np.float64).reshape(-1, len(columns.names))
        numbers[:, 1] -= self.first_time or 0.0
        return numbers

    def _pulse(self, row: PulseRow) -> tuple[float | None, ...]:
        trainer = row.waits.get("trainer", {})
        several = [spans for name, spans in row.waits.items() if name.startswith("rollouter")]
        replicas = several[0] if len(several) == 1 else means(several)
        waited = (trainer.get("wait_batch"), replicas.get("wait_reward"), replicas.get("wait_room"))
        return (self._since_start(row.time), row.step, *(getattr(row, name) for name in PULSE_NUMBERS), *waited)

    def _statistics(self, row: Statistics) -> tuple[float, ...]:
        made, rewards, judge = row.rollouter, row.rollouter.rewards, row.rollouter.rewards.judge
        failed = sum(rewards.failed.values())
        numbers = (
            *(self._since_start(row.time), row.step, made.generated_tokens, made.engine_busy_s),
            *(rewards.scored, failed, rewards.in_flight, rewards.waiting),
            *(rewards.scored + rewards.skipped + failed, rewards.busy_s),
        )
        if judge is None:
            return (*numbers, *(NAN,) * (len(STATISTICS_COLUMNS) - len(numbers)))
        return (
            *numbers,
            *(judge.limit, judge.in_flight, judge.queued, judge.sent, judge.scored, judge.throttled),
            *(judge.cache_hits, judge.shared, sum(judge.failed.values()), judge.cost),
            sum(judge.faults.values()),
        )

    # -- any metric ---------------------------------------------------------------------------------------------------

    def metric_names(self, kind: str = "step") -> list[str]:
        """Return the names of numbers in the first and last row of that kind."""
        rows = [
            decode_line(_WHOLE, line) or {} for line in self._examples.get(StepRow if kind == "step" else EvalRow, ())
        ]
        names = {name for row in rows for name, value in row.items() if type(value) in (int, float)}
        return sorted(names - {"step", "time"})

    def read_metrics(self, *names: str, kind: str = "step") -> Columns:
        """Return metrics with steps and times. Those that are not columns are read from the whole file at first, then
        from what was added."""
        columns = self.steps if kind == "step" else self.evals
        if set(names) <= set(columns.names):
            return columns
        if (kind, *names) not in self._requested:
            decoder = msgspec.json.Decoder(define_row(kind, names))
            self._requested[kind, *names] = Tail(self.path), decoder, Columns(("step", "elapsed_s", *names))
        tail, decoder, found = self._requested[kind, *names]
        for block in tail.look():
            rows = [decode_line(decoder, line) for line in block.lines]
            found.extend_in_order(self._metrics([row for row in rows if row is not None], found))
        return found
