"""What the gateway itself did, beside what its engine did: counted by `server`, read by `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

PREFIX = "freewheel_gateway_"


class Counts:
    """Counters only grow."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By (route, status). A client that hung up before its reply counts as `GONE`."""
        self.rejected: Counter[str] = Counter()
        """By the limit that was met: the error's `code`, or `connections`."""
        self.connections = 0

    def prometheus(self, *, open_connections: int, in_flight: int, waiting: int, draining: bool) -> str:
        """Prometheus text exposition, every name under `freewheel_gateway_`."""
        gauges = {
            "open_connections": open_connections,
            "in_flight": in_flight,
            "waiting": waiting,
            "draining": int(draining),
        }
        return "\n".join([*self._counters(), *_gauges(gauges)]) + "\n"

    def _counters(self) -> Iterator[str]:
        yield f"# TYPE {PREFIX}requests_total counter"
        for (route, status), number in sorted(self.requests.items()):
            yield f'{PREFIX}requests_total{{route="{route}",status="{status}"}} {number}'
        yield f"# TYPE {PREFIX}rejected_total counter"
        for limit, number in sorted(self.rejected.items()):
            yield f'{PREFIX}rejected_total{{limit="{limit}"}} {number}'
        yield f"# TYPE {PREFIX}connections_total counter"
        yield f"{PREFIX}connections_total {self.connections}"


GONE = 499
"""The status that proxies write down for a client that closed its connection; no client ever sees it."""


def _gauges(values: dict[str, int]) -> Iterator[str]:
    for name, value in values.items():
        yield f"# TYPE {PREFIX}{name} gauge"
        yield f"{PREFIX}{name} {value}"
