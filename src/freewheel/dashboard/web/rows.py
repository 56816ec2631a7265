"""The rows of `metrics.jsonl` as the page needs them: of each kind its numbers, and nothing else is decoded.

A row that is no such thing (half a line, another's) is passed over. `recorded` keeps what comes out of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from freewheel.judge.stats import EndpointStats
from freewheel.observe.lines import decoded

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
"""Of a step, what is on the page from the start. Any other is read when somebody asks for it."""
EVAL_METRICS = ("eval/reward", "eval/reward_se", "eval/response_length_mean", "eval/truncation_ratio")
AGES = "sample_age_counts"


def decoder_of(metrics: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Of rows as `(step, time, metric, metric, …)`: everything else in a row is skipped over, not built."""
    fields: list[Any] = [("step", int), ("time", float)]
    for at, name in enumerate(metrics):
        fields.append((f"metric_{at}", float | None, msgspec.field(name=name, default=NAN)))
    return msgspec.json.Decoder(msgspec.defstruct("Row", fields, gc=False))


class Ages(msgspec.Struct, gc=False):
    """Of a step: groups by their lag."""

    step: int
    counts: list[int] | None = msgspec.field(name=AGES, default=None)


class Pulse(msgspec.Struct, gc=False):
    """What the run was at, about once a second."""

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
    """The run was over, and the verdict is of all of it."""


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
    """Of a judge, what has a curve."""

    scored: int = 0
    failed: dict[str, int] = {}
    shared: int = 0
    queued: int = 0
    sent: int = 0
    throttled: int = 0
    faults: dict[str, int] | None = None
    """Failed calls by kind; None in runs of before, which have them by endpoint alone."""
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
    """Of `Statistics`, what has a curve: of all but the last row nothing else is decoded."""

    time: float
    step: int = 0
    rollouter: RollouterHistory = msgspec.field(default_factory=RollouterHistory)
    queue: QueueHistory = msgspec.field(default_factory=QueueHistory)


class JudgeNumbers(JudgeHistory):
    """As `Judging.stats` has it: of all endpoints together, and of each."""

    submitted: int = 0
    skipped: int = 0
    retries: int = 0
    reasks: int = 0
    restarts: int = 0
    endpoints: Sequence[EndpointStats] = ()


class Rewards(RewardsHistory):
    """As `RewardStage.stats` has it."""

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
    """Spans by component, until steps of the journal were trained again after a resume."""


class Statistics(StatisticsHistory):
    """What the components said of themselves, every `observe.statistics_every_s`."""

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
"""How the recorder begins a row: its kind is then known without decoding it."""


def by_kind(lines: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Lines by the kind of row that they are, in their order; those that are none under the empty text."""
    found: dict[str, list[bytes]] = {kind: [] for kind in ("", *KINDS)}
    known = _BEGINNINGS.get
    for line in lines:
        found[known(line[:_PREFIX]) or _decoded_kind(line)].append(line)
    return found


def _decoded_kind(line: bytes) -> str:
    """Of a row that begins otherwise, or of what is no row."""
    found = decoded(_KINDS, line)
    return found.kind if found is not None and found.kind in KINDS else ""
