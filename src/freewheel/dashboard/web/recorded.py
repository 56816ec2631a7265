"""`Recorded`: all of a run's `metrics.jsonl` that the page shows, kept up with the file.

    metrics.jsonl ─ Tail ─ rows by kind ─▶ columns of steps, evaluations, pulses, statistics; lists of syncs and events

Reading 100,000 steps takes about a second, and each further look what is new. `generation` moves when what was told
before no longer holds: another file, or steps that were trained again after a resume; who follows begins anew then. Not
for several threads at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from freewheel.dashboard.web.columns import Columns, Numbers, means
from freewheel.dashboard.web.rows import (
    EVAL_METRICS,
    STEP_METRICS,
    Ages,
    Event,
    JudgeHistory,
    Pulse,
    Statistics,
    StatisticsHistory,
    Sync,
    by_kind,
    decoder_of,
)
from freewheel.dashboard.web.tail import Tail
from freewheel.observe.lines import decoded
from freewheel.observe.run_folder import METRICS

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
"""What the histogram of ages is made of: enough groups for its shape, and still of now."""
RECENT_PULSES = 30
"""Seconds, about, over which shares of waiting are averaged: one second is a throw of dice."""
MOST_SYNCS = 500
MOST_EVENTS = 300
LATEST_STATISTICS = 8
"""As many as a verdict looks back on, where they come every ten seconds."""
MOST_OF = {"sync": MOST_SYNCS, "event": MOST_EVENTS}
"""Kinds of which only the last are kept, and so only the last are decoded."""


class Recorded:
    """What is known of a run by its metrics. Call `look` before reading."""

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
        """Of steps and evaluations, a first and a last line: which metrics there are."""
        self._asked_for: dict[tuple[str, str], tuple[Tail, msgspec.json.Decoder[Any], Columns]] = {}
        """Metrics that are not among the columns, by kind and name, and how far they were read."""

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
        """Steps, times since the start, and metrics."""
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
        """Those that are numbers, by the first and the last row of the kind."""
        names: dict[str, None] = {}
        for row in _all(_WHOLE, self._examples.get(kind, ())):
            names |= {name: None for name, value in row.items() if type(value) in (int, float)}
        return sorted(name for name in names if name not in ("step", "time"))

    def read_metric(self, name: str, kind: str = "step") -> Columns:
        """A metric that is not among the columns: from the whole file at first, then from what came to it."""
        if (kind, name) not in self._asked_for:
            self._asked_for[kind, name] = Tail(self.path), decoder_of((name,)), Columns(("step", "elapsed_s", name))
        tail, decoder, found = self._asked_for[kind, name]
        for block in tail.look():
            rows = _all(decoder, by_kind(block.lines)[kind])
            if rows:
                extend_in_order(found, self._numbers(rows))
        return found


def extend_in_order(columns: Columns, rows: Numbers) -> int:
    """Appends rows in the order of steps: a step that comes again takes the place of it and of all after it. How often
    that was."""
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
    """Those that can be read."""
    return [row for line in lines if (row := decoded(decoder, line)) is not None]


def _ends(known: Sequence[bytes], lines: list[bytes]) -> list[bytes]:
    """The first line that there was, and the first and the last of these."""
    return [*known[:1], lines[0], lines[-1]]


def _judge_numbers(judge: JudgeHistory | None) -> tuple[float, ...]:
    """As the last of `STATISTICS_COLUMNS` name them; NaN where there is no judge."""
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
