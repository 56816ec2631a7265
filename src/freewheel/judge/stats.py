"""A snapshot of the engine's work and its cost: as values, as a log line and as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

MetricSample = tuple[Mapping[str, str], float]
"""Labels and value of one line of Prometheus text."""


class BreakerState(Enum):
    """State of an endpoint's circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


def is_up(*, breaker: str = BreakerState.CLOSED.value, halted: str = "", **_: object) -> bool:
    """Whether an endpoint with these stats receives more than an occasional probe."""
    return breaker == BreakerState.CLOSED.value and not halted


class EndpointStats(msgspec.Struct, kw_only=True):
    """One endpoint. Counters only grow; `in_flight`, `limit`, `breaker` and the latencies are current values."""

    url: str
    model: str
    sent: int = 0
    answered: int = 0
    throttled: int = 0
    """429s for concurrency and for rate."""
    faults: dict[str, int] = {}
    """Failed calls by kind (`overloaded`, `timeout`, `broken`, `garbage`, …)."""
    in_flight: int = 0
    limit: int = 0
    breaker: str = "closed"
    halted: str = ""
    """Why the engine stopped sending to this endpoint; empty if it has not."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    latency_p50_s: float = 0.0
    latency_p90_s: float = 0.0
    latency_p99_s: float = 0.0

    @property
    def up(self) -> bool:
        return is_up(breaker=self.breaker, halted=self.halted)


class JudgeStats(msgspec.Struct, kw_only=True):
    """Counts of the whole engine since it started. An engine process that was restarted counts from 0, see
    `restarts`."""

    submitted: int = 0
    scored: int = 0
    relayed: int = 0
    """Answered chat completions of the gateway's clients."""
    skipped: int = 0
    failed: dict[str, int] = {}
    """Failed verdicts by reason."""
    cache_hits_memory: int = 0
    cache_hits_disk: int = 0
    shared: int = 0
    """Requests that joined an identical one in flight."""
    retries: int = 0
    reasks: int = 0
    queued: int = 0
    """Requests that wait for a slot or for the end of their back-off."""
    max_in_flight: int = 0
    restarts: int = 0
    cost_before: float = 0.0
    """Cost of this judge's earlier engines, which died. `cost` includes it."""
    loop_lag_s: float = 0.0
    """Smoothed delay of the engine's event loop. It shows starvation in `placement="thread"`."""
    endpoints: list[EndpointStats] = []

    @property
    def sent(self) -> int:
        return sum(e.sent for e in self.endpoints)

    @property
    def throttled(self) -> int:
        return sum(e.throttled for e in self.endpoints)

    @property
    def faults(self) -> dict[str, int]:
        """Failed calls by kind."""
        return dict(sum((Counter(e.faults) for e in self.endpoints), Counter()))

    @property
    def in_flight(self) -> int:
        return sum(e.in_flight for e in self.endpoints)

    @property
    def limit(self) -> int:
        return sum(e.limit for e in self.endpoints)

    @property
    def cost(self) -> float:
        return self.cost_before + sum(e.cost for e in self.endpoints)

    @property
    def cache_hits(self) -> int:
        return self.cache_hits_memory + self.cache_hits_disk

    def to_dict(self) -> dict[str, object]:
        plain: dict[str, object] = msgspec.to_builtins(self)
        return plain

    def line(self) -> str:
        """One line for a log."""
        failed = sum(self.failed.values())
        relayed = f"{self.relayed} relayed, " if self.relayed else ""
        return (
            f"judge: {self.scored} scored, {relayed}{failed} failed, {self.skipped} skipped of {self.submitted}; "
            f"{self.sent} calls, {self.cache_hits} cache hits, {self.shared} shared, {self.retries} retries, "
            f"{self.throttled} throttled; {self.in_flight} in flight of {self.limit}, {self.queued} queued; "
            f"cost {self.cost:.4f}"
        )

    def prometheus(self) -> str:
        """Prometheus text exposition, every name under `freewheel_judge_`."""
        each = [({"endpoint": e.url, "model": e.model}, e) for e in self.endpoints]
        totals = ("submitted", "scored", "relayed", "skipped", "shared", "retries", "reasks", "restarts")
        per_endpoint = ("sent", "answered", "throttled", "prompt_tokens", "completion_tokens", "cost")
        tiers = {"memory": self.cache_hits_memory, "disk": self.cache_hits_disk}
        quantiles = {"0.5": "latency_p50_s", "0.9": "latency_p90_s", "0.99": "latency_p99_s"}
        faults: list[MetricSample] = [
            ({**labels, "kind": kind}, n) for labels, e in each for kind, n in sorted(e.faults.items())
        ]
        families: dict[str, list[MetricSample]] = {
            **{f"{name}_total": [({}, getattr(self, name))] for name in totals},
            "failed_total": [({"reason": reason}, n) for reason, n in sorted(self.failed.items())],
            "cache_hits_total": [({"tier": tier}, n) for tier, n in tiers.items()],
            "queued": [({}, self.queued)],
            "loop_lag_seconds": [({}, self.loop_lag_s)],
            **{f"{name}_total": [(labels, getattr(e, name)) for labels, e in each] for name in per_endpoint},
            **{name: [(labels, getattr(e, name)) for labels, e in each] for name in ("in_flight", "limit")},
            "endpoint_up": [(labels, e.up) for labels, e in each],
            "faults_total": faults,
            "latency_seconds": [
                ({**labels, "quantile": q}, getattr(e, name)) for labels, e in each for q, name in quantiles.items()
            ],
        }
        return exposition("freewheel_judge_", families)


def exposition(prefix: str, families: Mapping[str, Iterable[MetricSample]]) -> str:
    """Prometheus text. A family whose name ends in `_total` is a counter, any other a gauge."""
    lines: list[str] = []
    for name, samples in families.items():
        lines.append(f"# TYPE {prefix}{name} {'counter' if name.endswith('_total') else 'gauge'}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(f"{prefix}{name}{f'{{{inside}}}' if inside else ''} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
