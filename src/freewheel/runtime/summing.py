"""What several replicas say of themselves, as one: numbers are added, nested ones too. Pure. Called by `RunAccount`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from freewheel.judge.stats import is_up

PERCENTILES = ("latency_p50_s", "latency_p90_s", "latency_p99_s")
OF_SEVERAL = {"version": min, "mean_latency_s": max, "loop_lag_s": max, **dict.fromkeys(PERCENTILES, max)}
"""Of several replicas the least or the largest is told, and not the sum."""
ENDPOINTS = "endpoints"
"""Of a judge, as `EndpointStats` has them."""


def summed(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is neither a number nor an endpoint is the first one's."""
    total: dict[str, Any] = {}
    for found in replicas:
        for name, value in found.items():
            known = total.get(name)
            if name == ENDPOINTS:  # a replica that has just begun knows none
                total[name] = _endpoints([*(known or ()), *(value or ())])
            elif isinstance(value, Mapping) and isinstance(known, Mapping):
                total[name] = summed([known, value])
            elif _is_number(value) and _is_number(known):
                total[name] = OF_SEVERAL.get(name, sum)((known, value))
            else:
                total.setdefault(name, value)
    return total


def _endpoints(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each as all replicas see it: it is up where one of them reaches it."""
    by_address: dict[Any, list[Mapping[str, Any]]] = {}
    for one in told:
        by_address.setdefault((one.get("url"), one.get("model")), []).append(one)
    return [summed(sorted(seen, key=lambda one: not is_up(**one))) for seen in by_address.values()]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
