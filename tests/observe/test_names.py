"""The names of the metrics: those that were promised, those that are written, and those on the page are the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freewheel.observe.metrics import METRICS, describe

ROOT = Path(__file__).parent.parent.parent

PROMISED = {
    "trainer": {"global_steps", "processed_samples", "current_param_version", "param_sync_count"},
    "rollouter": {"total_generated_samples", "dropped_stale_samples", "generation_errors", "param_sync_requests"},
    "freshness": {"avg_sample_age", "max_sample_age", "stale_samples_ratio"},
    "queue": {"queue_size", "total_produced", "total_consumed", "dropped_samples"},
    "sync": {"sync_failures"},
}


@pytest.mark.parametrize("component", PROMISED)
def test_the_names_that_users_know_are_there(component):
    assert {metric.name for metric in METRICS if metric.component == component} >= PROMISED[component]


def test_a_name_has_one_meaning():
    assert len(describe()) == len(METRICS)
    assert all(metric.what for metric in METRICS)


def test_the_page_has_exactly_these_metrics():
    rows = re.findall(
        r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    assert [tuple(cell.strip() for cell in row) for row in rows] == [
        (metric.name, metric.component, metric.unit, metric.what) for metric in METRICS
    ]


def test_every_metric_with_a_prefix_that_the_code_writes_is_described():
    written = set()
    for path in (ROOT / "src/freewheel").glob("*/*.py"):
        if path.parent.name != "observe":
            written |= set(re.findall(r'"((?:actor|critic|rollout|eval)/\w+)"', path.read_text()))
    assert written == {name for name in describe() if "/" in name}
