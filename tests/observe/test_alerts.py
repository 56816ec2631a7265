"""Alerts: once when crossed, once when back."""

from __future__ import annotations

import logging
import math

from freewheel.observe.metrics import Alerts, Limits


def levels(alerts: Alerts, name: str, *values: float) -> list[list[int]]:
    return [[notice.level for notice in alerts.check({name: value})] for value in values]


W, I = [logging.WARNING], [logging.INFO]  # noqa: E741


def test_a_crossing_is_said_once_and_so_is_the_way_back():
    alerts = Alerts({"x": Limits(above=5.0)})
    assert levels(alerts, "x", 4, 5, 6, 7, 6, 5, 4, 8) == [[], [], W, [], [], I, [], W]


def test_both_sides_can_be_watched_and_going_from_one_to_the_other_is_said():
    alerts = Alerts({"x": Limits(above=1.0, below=-1.0)})
    assert levels(alerts, "x", 2, -2, -3, 0) == [W, W, [], I]


def test_a_metric_that_is_not_a_number_is_worth_a_warning():
    alerts = Alerts({"loss": Limits(above=10.0)})
    assert levels(alerts, "loss", math.nan, math.nan, 1.0, math.inf) == [W, [], I, W]


def test_the_message_names_metric_value_key_and_bound():
    alerts = Alerts({"stale_samples_ratio": Limits(above=0.5)})
    (notice,) = alerts.check({"stale_samples_ratio": 0.75})
    assert notice.text == "stale_samples_ratio = 0.75 is too high (observe.alerts.stale_samples_ratio: above 0.5)"
    assert alerts.active == [notice.text]
    (notice,) = alerts.check({"stale_samples_ratio": 0.25})
    assert notice.text == ("stale_samples_ratio = 0.25 is back within observe.alerts.stale_samples_ratio (above 0.5)")
    assert alerts.active == []


def test_a_row_without_the_metric_changes_nothing():
    alerts = Alerts({"x": Limits(above=1.0)})
    alerts.check({"x": 2})
    assert alerts.check({"y": 0}) == []
    assert len(alerts.active) == 1


def test_a_bare_name_watches_each_component_apart_and_a_path_only_one():
    values = {"rollouter-0": {"errors": 5}, "rollouter-1": {"errors": 0}}
    bare = Alerts({"errors": Limits(above=1)})
    assert [notice.name for notice in bare.check(values)] == ["rollouter-0/errors"]
    assert [notice.name for notice in bare.check({"rollouter-1": {"errors": 2}})] == ["rollouter-1/errors"]
    path = Alerts({"rollouter-1/errors": Limits(above=1)})
    assert path.check(values) == []


def test_a_threshold_that_no_metric_has_is_known():
    alerts = Alerts({"queue_sise": Limits(above=1), "queue_size": Limits(above=1)})
    alerts.check({"queue": {"queue_size": 0}})
    assert alerts.unseen == ["queue_sise"]
