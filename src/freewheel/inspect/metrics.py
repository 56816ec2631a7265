"""Reads `metrics.jsonl` of a run into columns of numbers, and keeps up with a growing file.

    metrics.jsonl ─ Tail ─ rows by kind ─▶ columns of steps, evaluations, pulses, statistics; lists of syncs and events

`Columns` holds rows that only grow, one column per name; unknown values are NaN. `RecordedMetrics` decodes of each kind
of row only the numbers that are shown. Invalid rows are skipped. Reading 100,000 steps takes about a second; later
looks read only what is new. `generation` increases when earlier results no longer hold: a new file, or steps that were
trained again after a resume. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from freewheel.judge.stats import EndpointStats
from freewheel.observe.lines import Tail, decoded
from freewheel.observe.run_folder import METRICS
from freewheel.observe.snapshot import PULSE_MAX_S as LATER_S

Numbers = np.ndarray[Any, np.dtype[np.float64]]

FIRST_ROWS = 1024
SIGNIFICANT = 7
"""Digits that are sent: more than a screen has pixels."""
SHORTEST_S = 1e-3
"""The least duration of an interval: a clock may stand still or be set back."""


class Columns:
    """Appending copies the new rows, and now and then everything. A column is contiguous."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows = 0
        self._at = {name: index for index, name in enumerate(self.names)}
        self._data: Numbers = np.empty((len(self.names), FIRST_ROWS))

    def extend(self, rows: Sequence[Sequence[float | None]] | Numbers) -> None:
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

    def cut(self, rows: int) -> None:
        """Keep the first `rows` rows."""
        self.rows = min(self.rows, rows)

    def __getitem__(self, name: str) -> Numbers:
        return self._data[self._at[name], : self.rows]

    def last(self, name: str) -> float | None:
        """Return the last known value."""
        known = np.flatnonzero(np.isfinite(self[name]))
        return float(self[name][known[-1]]) if known.size else None

    def since(self, row: int) -> dict[str, list[float | None]]:
        """Return each column from that row on. Columns without a known value are left out."""
        found = {}
        for name in self.names:
            values = self[name][row:]
            if np.isfinite(values).any():
                found[name] = plain(values)
        return found


def plain(values: Numbers) -> list[float | None]:
    """Return JSON values: short numbers, and None for NaN."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    if value != value or value in (float("inf"), float("-inf")):
        return None
    if value.is_integer():
        return int(value) if abs(value) < 2**53 else value
    return float(f"{value:.{SIGNIFICANT}g}")


def rates(counter: Numbers, time_s: Numbers) -> Numbers:
    """Return the growth of a counter per second, row by row; NaN in the first. A counter that fell was restarted."""
    grown = np.diff(counter, prepend=np.nan)
    grown = np.where(grown < 0, counter, grown)
    passed = np.diff(time_s, prepend=np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Numbers = np.where(passed > 0, grown / passed, np.nan)
    return found


def mean_over_time(values: Numbers, time_s: Numbers) -> float | None:
    """Return the time-weighted mean of values that were measured from time to time. A value counts for the time since
    the row before it, but no longer than the interval between pulses of a running run. None if nothing is known."""
    known = np.isfinite(values)
    if not known.any():
        return None
    passed = np.clip(np.diff(time_s, prepend=0.0), SHORTEST_S, LATER_S)
    return float(np.average(values[known], weights=passed[known]))


def means(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over all mappings; a missing name counts as 0."""
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: sum(one.get(name, 0.0) for one in shares) / len(shares) for name in names}


NAN = math.nan

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
AGES = "sample_age_counts"


def decoder_of(metrics: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of rows as `(step, time, metric, metric, …)`. Other fields are skipped without being built."""
    fields: list[Any] = [("step", int), ("time", float)]
    for at, name in enumerate(metrics):
        fields.append((f"metric_{at}", float | None, msgspec.field(name=name, default=NAN)))
    return msgspec.json.Decoder(msgspec.defstruct("Row", fields, gc=False))


class Ages(msgspec.Struct, gc=False):
    """Number of groups by lag, of one step."""

    step: int
    counts: list[int] | None = msgspec.field(name=AGES, default=None)


class Pulse(msgspec.Struct, gc=False):
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


class Sync(msgspec.Struct):
    """One weight version on its way to the engines."""

    time: float
    step: int = 0
    version: int = 0
    took_s: float | None = None
    bytes: float | None = None
    engines: dict[str, EngineSync] = {}
    failed: bool = False


class Event(msgspec.Struct, gc=False):
    time: float
    step: int = 0
    text: str = ""


class Warned(msgspec.Struct, gc=False):
    """A line of `log.jsonl`."""

    time: float
    level: str
    message: str
    role: str = ""
    step: int | None = None


class JudgeHistory(msgspec.Struct, gc=False):
    """The numbers of a judge that have a curve."""

    scored: int = 0
    failed: dict[str, int] = {}
    shared: int = 0
    queued: int = 0
    sent: int = 0
    throttled: int = 0
    faults: dict[str, int] | None = None
    """Failed calls by kind. None in older runs, which have them only per endpoint."""
    in_flight: int = 0
    limit: int = 0
    cache_hits: int = 0
    cost: float = 0.0


class RewardsHistory(msgspec.Struct, gc=False):
    scored: int = 0
    failed: dict[str, int] = {}
    in_flight: int = 0
    waiting: int = 0
    judge: JudgeHistory | None = None


class RollouterHistory(msgspec.Struct, gc=False):
    generated_tokens: float = NAN
    total_generated_samples: float = NAN
    rewards: RewardsHistory = msgspec.field(default_factory=RewardsHistory)


class QueueHistory(msgspec.Struct, gc=False):
    queue_size: float = NAN
    in_progress: float = NAN
    version: float = NAN
    published_version: float = NAN


class StatisticsHistory(msgspec.Struct, gc=False):
    """The numbers of `Statistics` that have a curve. Only the last row is decoded completely."""

    time: float
    step: int = 0
    rollouter: RollouterHistory = msgspec.field(default_factory=RollouterHistory)
    queue: QueueHistory = msgspec.field(default_factory=QueueHistory)


class JudgeNumbers(JudgeHistory):
    """All endpoints together, and each endpoint, as `Judging.stats` reports them."""

    submitted: int = 0
    skipped: int = 0
    retries: int = 0
    reasks: int = 0
    restarts: int = 0
    endpoints: Sequence[EndpointStats] = ()


class Rewards(RewardsHistory):
    """As `RewardStage.stats` reports them."""

    skipped: int = 0
    retried_groups: int = 0
    dropped_groups: int = 0
    mean_latency_s: float = 0.0
    judge: JudgeNumbers | None = None


class RollouterNumbers(RollouterHistory):
    rewards: Rewards = msgspec.field(default_factory=Rewards)
    running: float | None = None
    slots: float | None = None
    spans: dict[str, float] = {}


class TrainerNumbers(msgspec.Struct):
    spans: dict[str, float] = {}


class QueueNumbers(QueueHistory):
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


class RunNumbers(msgspec.Struct):
    replayed: dict[str, dict[str, float]] = {}
    """Spans by component up to the end of the steps that were trained again after a resume."""


class Statistics(StatisticsHistory):
    """What the components reported about themselves, every `observe.statistics_every_s`."""

    trainer: TrainerNumbers = msgspec.field(default_factory=TrainerNumbers)
    rollouter: RollouterNumbers = msgspec.field(default_factory=RollouterNumbers)
    queue: QueueNumbers = msgspec.field(default_factory=QueueNumbers)
    sync: SyncNumbers = msgspec.field(default_factory=SyncNumbers)
    run: RunNumbers = msgspec.field(default_factory=RunNumbers)


class _Kind(msgspec.Struct):
    kind: str


KINDS = ("step", "eval", "pulse", "statistics", "sync", "event")
_KINDS = msgspec.json.Decoder(_Kind)
_PREFIX = len(b'{"kind": "step"')
_BEGINNINGS = {f'{{"kind": "{kind}"'.encode()[:_PREFIX]: kind for kind in KINDS}
"""The start of a row as the recorder writes it: shows the kind without decoding."""


def by_kind(lines: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Return lines by their kind of row, in order; other lines under the empty text."""
    found: dict[str, list[bytes]] = {kind: [] for kind in ("", *KINDS)}
    known = _BEGINNINGS.get
    for line in lines:
        found[known(line[:_PREFIX]) or _decoded_kind(line)].append(line)
    return found


def _decoded_kind(line: bytes) -> str:
    """Return the kind of a row that starts differently; empty if it is not a row."""
    found = decoded(_KINDS, line)
    return found.kind if found is not None and found.kind in KINDS else ""


STEP_COLUMNS = ("step", "elapsed_s", *STEP_METRICS)
EVAL_COLUMNS = ("step", "elapsed_s", *EVAL_METRICS)
PULSE_NUMBERS = ("queue_size", "in_progress", "version", "published_version", "tokens_per_s", "samples_per_s")
PULSE_COLUMNS = ("elapsed_s", "step", *PULSE_NUMBERS, "wait_batch", "wait_reward", "wait_room")
STATISTICS_COLUMNS = (
    *("elapsed_s", "step", "queue_size", "in_progress", "version", "published_version"),
    *("generated_tokens", "generated_samples", "scored", "failed", "scoring", "waiting"),
    *("limit", "in_flight", "queued", "sent", "judged", "throttled", "cache_hits", "shared", "judge_failed", "cost"),
    "faults",
)

RECENT_STEPS = 100
"""Steps in the histogram of ages: enough groups for its shape, and recent."""
RECENT_PULSES = 30
"""Seconds, about, over which wait shares are averaged: one second is too noisy."""
MOST_SYNCS = 500
MOST_EVENTS = 300
LATEST_STATISTICS = 8
"""Rows that a verdict looks back on, at one row every ten seconds."""
MOST_OF = {"sync": MOST_SYNCS, "event": MOST_EVENTS}
"""Kinds of which only the last rows are kept and decoded."""


class RecordedMetrics:
    """The metrics of a run. Call `look` before reading."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS
        self._tail = Tail(self.path)
        self._resets = 0
        self._begin()

    def _begin(self) -> None:
        self.steps = Columns(STEP_COLUMNS)
        self.evals = Columns(EVAL_COLUMNS)
        self.pulses = Columns(PULSE_COLUMNS)
        self.statistics = Columns(STATISTICS_COLUMNS)
        self.ages: deque[tuple[int, list[int]]] = deque(maxlen=RECENT_STEPS)
        self.waits: deque[dict[str, dict[str, float]]] = deque(maxlen=RECENT_PULSES)
        self.syncs: deque[Sync] = deque(maxlen=MOST_SYNCS)
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.syncs_seen = self.events_seen = 0
        self.last_pulse: Pulse | None = None
        self.latest_statistics: deque[Statistics] = deque(maxlen=LATEST_STATISTICS)
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.bad_lines = 0
        self._examples: dict[str, list[bytes]] = {}
        """A first and a last line of steps and evaluations: they show which metrics exist."""
        self._asked_for: dict[tuple[str, str], tuple[Tail, msgspec.json.Decoder[Any], Columns]] = {}
        """Requested metrics that are not columns, by kind and name, with the position reached."""

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
            self._take(by_kind(block.lines))

    def _take(self, found: dict[str, list[bytes]]) -> None:
        self.bad_lines += sum(bool(line) for line in found.get("", ()))
        kept = {kind: lines[-MOST_OF.get(kind, 0) :] for kind, lines in found.items() if kind in _DECODERS}
        decoded = {kind: self._decode(_DECODERS[kind], lines) for kind, lines in kept.items()}
        times = [rows[at].time for rows in decoded.values() if rows for at in (0, -1)]
        if not times:
            return
        if self.first_time is None:
            self.first_time = min(times)
        self.last_time = max(times)
        for kind, rows in decoded.items():
            if rows:
                getattr(self, f"_take_{kind}")(rows, found[kind])

    def _decode(self, decoder: msgspec.json.Decoder[Any], lines: list[bytes]) -> list[Any]:
        found = _all(decoder, lines)
        self.bad_lines += len(lines) - len(found)
        return found

    def _since_start(self, time_s: float) -> float:
        assert self.first_time is not None
        return time_s - self.first_time

    # -- by kind ------------------------------------------------------------------------------------------------------

    def _take_step(self, rows: list[Any], lines: list[bytes]) -> None:
        self._resets += extend_in_order(self.steps, self._numbers(rows))
        self._examples["step"] = _ends(self._examples.get("step", ()), lines)
        self.ages.extend((row.step, row.counts) for row in _all(_AGES, lines[-RECENT_STEPS:]) if row.counts)

    def _take_eval(self, rows: list[Any], lines: list[bytes]) -> None:
        self._resets += extend_in_order(self.evals, self._numbers(rows))
        self._examples["eval"] = _ends(self._examples.get("eval", ()), lines)

    def _numbers(self, rows: list[Any]) -> Numbers:
        """Return steps, times since the start, and metrics."""
        assert self.first_time is not None
        numbers = np.array([msgspec.structs.astuple(row) for row in rows], np.float64)
        numbers[:, 1] -= self.first_time
        return numbers

    def _take_pulse(self, rows: list[Pulse], lines: list[bytes]) -> None:
        numbers = []
        for row in rows:
            trainer = row.waits.get("trainer", {})
            several = [spans for name, spans in row.waits.items() if name.startswith("rollouter")]
            replicas = several[0] if len(several) == 1 else means(several)
            waited = (trainer.get("wait_batch"), replicas.get("wait_reward"), replicas.get("wait_room"))
            at_s = self._since_start(row.time)
            numbers.append((at_s, row.step, *(getattr(row, name) for name in PULSE_NUMBERS), *waited))
        self.waits.extend(row.waits for row in rows[-RECENT_PULSES:])
        self.pulses.extend(numbers)
        self.last_pulse = rows[-1]

    def _take_statistics(self, rows: list[StatisticsHistory], lines: list[bytes]) -> None:
        numbers = []
        for row in rows:
            queue, made, rewards = row.queue, row.rollouter, row.rollouter.rewards
            numbers.append(
                (
                    *(self._since_start(row.time), row.step, queue.queue_size, queue.in_progress),
                    *(queue.version, queue.published_version, made.generated_tokens, made.total_generated_samples),
                    *(rewards.scored, sum(rewards.failed.values()), rewards.in_flight, rewards.waiting),
                    *_judge_numbers(rewards.judge),
                )
            )
        self.statistics.extend(numbers)
        self.latest_statistics.extend(_all(_STATISTICS, lines[-LATEST_STATISTICS:]))

    def _take_sync(self, rows: list[Sync], lines: list[bytes]) -> None:
        self.syncs.extend(rows)
        self.syncs_seen += len(lines)

    def _take_event(self, rows: list[Event], lines: list[bytes]) -> None:
        self.events.extend(rows)
        self.events_seen += len(lines)

    # -- any metric ---------------------------------------------------------------------------------------------------

    def metric_names(self, kind: str = "step") -> list[str]:
        """Return the names of numbers in the first and last row of that kind."""
        names: dict[str, None] = {}
        for row in _all(_WHOLE, self._examples.get(kind, ())):
            names |= {name: None for name, value in row.items() if type(value) in (int, float)}
        return sorted(name for name in names if name not in ("step", "time"))

    def read_metric(self, name: str, kind: str = "step") -> Columns:
        """Return a metric that is not a column: from the whole file at first, then from what was added."""
        if (kind, name) not in self._asked_for:
            self._asked_for[kind, name] = Tail(self.path), decoder_of((name,)), Columns(("step", "elapsed_s", name))
        tail, decoder, found = self._asked_for[kind, name]
        for block in tail.look():
            rows = _all(decoder, by_kind(block.lines)[kind])
            if rows:
                extend_in_order(found, self._numbers(rows))
        return found


def extend_in_order(columns: Columns, rows: Numbers) -> int:
    """Append rows in the order of steps. A step that comes again replaces itself and everything after it. Returns how
    often that happened."""
    steps = np.concatenate([columns["step"][-1:], rows[:, 0]])
    again = np.flatnonzero(np.diff(steps) <= 0) + 1 - (len(steps) - len(rows))
    start = 0
    for place in again.tolist():
        columns.extend(rows[start:place])
        columns.cut(int(np.searchsorted(columns["step"], rows[place, 0])))
        start = place
    columns.extend(rows[start:])
    return len(again)


def _all(decoder: msgspec.json.Decoder[Any], lines: Sequence[bytes]) -> list[Any]:
    """Return the lines that can be decoded."""
    return [row for line in lines if (row := decoded(decoder, line)) is not None]


def _ends(known: Sequence[bytes], lines: list[bytes]) -> list[bytes]:
    """Return the first known line, and the first and last of the new ones."""
    return [*known[:1], lines[0], lines[-1]]


def _judge_numbers(judge: JudgeHistory | None) -> tuple[float, ...]:
    """Return the values for the last of `STATISTICS_COLUMNS`; NaN if there is no judge."""
    if judge is None:
        return (np.nan,) * 11
    return (
        *(judge.limit, judge.in_flight, judge.queued, judge.sent, judge.scored, judge.throttled),
        *(judge.cache_hits, judge.shared, sum(judge.failed.values()), judge.cost),
        np.nan if judge.faults is None else sum(judge.faults.values()),
    )


_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "step": decoder_of(STEP_METRICS),
    "eval": decoder_of(EVAL_METRICS),
    "pulse": msgspec.json.Decoder(Pulse),
    "statistics": msgspec.json.Decoder(StatisticsHistory),
    "sync": msgspec.json.Decoder(Sync),
    "event": msgspec.json.Decoder(Event),
}
_AGES = msgspec.json.Decoder(Ages)
_WHOLE = msgspec.json.Decoder(dict[str, Any])
_STATISTICS = msgspec.json.Decoder(Statistics)
