"""Names of metrics, plain values, sample ages and alerts."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.observe.metrics import (
    METRICS,
    Alerts,
    age_counts,
    describe,
    freshness,
    numbers,
    plain,
    without_nonfinite,
)

ROOT = Path(__file__).parent.parent.parent

# -- names ------------------------------------------------------------------------------------------------------------

PROMISED = {
    "trainer": {"global_steps", "processed_samples", "current_param_version", "param_sync_count"},
    "rollouter": {"total_generated_samples", "dropped_stale_samples", "generation_errors", "param_sync_requests"},
    "freshness": {"avg_sample_age", "max_sample_age", "stale_samples_ratio"},
    "queue": {"queue_size", "total_produced", "total_consumed", "dropped_samples"},
    "sync": {"sync_failures"},
}


def test_promised_names_exist_and_each_name_has_one_meaning():
    for component, names in PROMISED.items():
        assert {metric.name for metric in METRICS if metric.component == component} >= names
    assert len(describe()) == len(METRICS)


def test_every_metric_with_a_prefix_that_the_code_writes_is_described_and_the_reverse():
    code = "\n".join(
        path.read_text() for path in (ROOT / "src/freewheel").glob("*/*.py") if path.parent.name != "observe"
    )
    written = set(re.findall(r'"((?:actor|critic|rollout|eval)/\w+)"', code))
    both = set(re.findall(r'f"\{[\w\[\]]+\}(/\w+)"', code))  # the same name for actor and critic
    described = {name for name in describe() if "/" in name}
    assert written <= described
    assert {name for name in described - written if name[name.index("/") :] not in both} == set()


# -- plain values -----------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(np.float32, st.floats(width=32)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(ANYTHING)
def test_every_value_can_be_written_as_json_that_all_readers_take(value):
    finite, _ = without_nonfinite(plain({"x": value}))
    assert json.loads(json.dumps(finite, allow_nan=False)) == finite


def test_numpy_and_torch_numbers_become_numbers_and_other_objects_their_text():
    import torch

    class Odd:
        def __str__(self):
            raise RuntimeError("no")

    given = {"a": np.float32(0.5), "b": np.arange(3), "c": torch.tensor(2), "d": torch.tensor([1.5, 2.5])}
    found = plain({**given, "e": np.bool_(True), "odd": Odd(), "kind": ValueError("x")})
    assert found == {"a": 0.5, "b": [0, 1, 2], "c": 2, "d": [1.5, 2.5], "e": True, "odd": "<Odd>", "kind": "x"}
    assert type(found["e"]) is bool
    nested: dict = {}
    nested["self"] = nested
    assert json.dumps(plain(nested)).startswith('{"self": {"self": '), "it ends"


def test_numbers_have_paths_and_nonfinite_ones_are_named_by_them():
    values = {"queue": {"queue_size": 3, "full": True, "why": "x"}, "reward": 0.5, "huge": 10**400, "list": [1]}
    assert dict(numbers(values)) == {"queue/queue_size": 3.0, "reward": 0.5, "huge": math.inf}
    found = without_nonfinite({"a": math.nan, "b": {"c": math.inf, "d": 1.0}, "e": [1.0, -math.inf]})
    assert found == ({"a": None, "b": {"c": None, "d": 1.0}, "e": [1.0, None]}, ["a", "b/c", "e"])


# -- ages -------------------------------------------------------------------------------------------------------------


def test_ages_of_a_batch_by_hand():
    # lags 0, 1, 3, 4: (0 + 1 + 3 + 4) / 4 = 2; over the threshold of 3 is one of four. Ages: (1 + 2 + 3 + 6) / 4 = 3.
    expected = {"avg_sample_age": 2.0, "max_sample_age": 4.0, "avg_sample_age_s": 3.0, "max_sample_age_s": 6.0}
    found = freshness(np.array([0, 1, 3, 4]), np.array([1, 2, 3, 6], np.float32), staleness_threshold=3)
    assert found == expected | {"stale_samples_ratio": 0.25}
    assert all(type(value) is float for value in found.values())
    assert {*found, "sample_age_counts"} == {one.name for one in METRICS if one.component == "freshness"}
    assert freshness([], [], staleness_threshold=3) == {}, "an empty batch has no age"


def test_groups_are_counted_by_their_lag():
    assert age_counts([0, 2, 2, 0, 0]) == [3, 0, 2]
    assert age_counts([]) == []
    assert all(type(count) is int for count in age_counts([1]))


# -- alerts -----------------------------------------------------------------------------------------------------------

W, I = [logging.WARNING], [logging.INFO]  # noqa: E741


def limits(above: float | None = None, below: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(above=above, below=below)


@pytest.mark.parametrize(
    ("threshold", "values", "levels"),
    [
        (limits(above=5.0), [4, 5, 6, 7, 6, 5, 4, 8], [[], [], W, [], [], I, [], W]),
        (limits(above=1.0, below=-1.0), [1, -1, 2, -2, -3, 0], [[], [], W, W, [], I]),
        (limits(above=10.0), [math.nan, math.nan, 1.0, math.inf], [W, [], I, W]),
    ],
    ids=["one side", "both sides", "not a number"],
)
def test_a_crossing_is_reported_once_and_so_is_the_return(threshold, values, levels):
    alerts = Alerts({"x": threshold})
    assert [[level for level, _ in alerts.check({"x": value})] for value in values] == levels


def test_the_message_names_metric_value_key_and_bound_and_is_active_until_the_metric_is_back():
    alerts = Alerts({"stale_samples_ratio": limits(above=0.5)})
    ((_, text),) = alerts.check({"stale_samples_ratio": 0.75})
    assert text == "stale_samples_ratio = 0.75 is too high (observe.alerts.stale_samples_ratio: above 0.5)"
    assert alerts.check({"other": 0}) == [] and alerts.active == [text], "a row without the metric changes nothing"
    ((_, text),) = alerts.check({"stale_samples_ratio": 0.25})
    assert text == "stale_samples_ratio = 0.25 is back within observe.alerts.stale_samples_ratio (above 0.5)"
    assert alerts.active == []


def test_a_bare_name_watches_each_component_separately_and_a_path_only_one():
    values = {"rollouter-0": {"errors": 5}, "rollouter-1": {"errors": 0}}
    bare = Alerts({"errors": limits(above=1)})
    assert [text.split()[0] for _, text in bare.check(values)] == ["rollouter-0/errors"]
    assert [text.split()[0] for _, text in bare.check({"rollouter-1": {"errors": 2}})] == ["rollouter-1/errors"]
    path = Alerts({"rollouter-1/errors": limits(above=1), "misspelt": limits(above=1)})
    assert path.check(values) == [] and path.unseen == ["misspelt"]
