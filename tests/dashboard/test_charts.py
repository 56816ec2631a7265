"""Charts, compared with what a person would draw."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from freewheel.dashboard.terminal import curve, sparkline


def test_a_curve_marks_what_was_measured_and_joins_it():
    assert curve([(0, 0.0), (10, 0.5), (20, 1.0)], width=9, height=5, unicode=False) == "\n".join(
        [
            " 1.00 |        o",
            "      |      ..",
            " 0.50 |    o.",
            "      |  ..",
            " 0.00 |o.",
            "      +---------",
            "       0      20",
        ]
    )


def test_a_curve_does_not_care_for_order_and_leaves_out_what_is_not_a_number():
    points = [(20, 1.0), (5, math.nan), (0, 0.0), (10, 0.5)]
    assert curve(points) == curve([(0, 0.0), (10, 0.5), (20, 1.0)])


def test_unicode_draws_the_same_picture():
    points = [(0, 0.1), (10, 0.9)]
    drawn = curve(points).translate(str.maketrans("●·└┤─", "o.+|-"))
    assert drawn == curve(points, unicode=False)
    assert curve(points, unicode=False).isascii()


def test_an_accuracy_that_hardly_moves_is_flat_and_other_values_have_their_own_scale():
    assert curve([(0, 0.90), (1, 0.91)], unicode=False).startswith(" 1.00 |")
    assert curve([(0, -3.0), (1, 5.0)], unicode=False).startswith(" 5.00 |")


def test_few_points_are_no_trouble():
    assert curve([]) == "" == curve([(1, math.nan)])
    assert curve([(7, 0.5)]).count("●") == 1
    assert curve([(7, 42.0)]).count("●") == 1
    assert curve([(1, 2.0), (1, 3.0)]).count("●") == 2


def test_a_sparkline_shows_the_last_values_on_the_scale_of_accuracies():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.90, 0.91]) == "██"
    assert sparkline([0.0, 1.0, 1.0], width=2) == "██"
    assert sparkline([0.0, math.nan, 1.0], unicode=False) == "_ @"


def test_a_sparkline_of_other_values_spans_their_range():
    assert sparkline([-10.0, 0.0, 30.0]) == "▁▃█"
    assert sparkline([5.0, 5.0]) == "▅▅"
    assert sparkline([]) == "" and sparkline([math.nan]) == " "


@given(st.lists(st.tuples(st.integers(0, 50), st.floats()), max_size=6))
def test_whatever_was_measured_a_chart_is_drawn(points):
    """A run that has done its work must not fail for its picture."""
    drawn = curve(points, unicode=False)
    assert drawn.isascii() and all(len(line) <= 80 for line in drawn.splitlines())
    assert len(sparkline([value for _, value in points])) == len(points)


def test_equal_values_are_in_the_middle_however_large():
    for value in (42.0, -1e17, 1e300, -1.7e308, 1.7e308):
        drawn = curve([(0, value), (9, value)], height=5, unicode=False)
        assert drawn.count("o") == 2 and "inf" not in drawn and "nan" not in drawn, drawn
        assert drawn.splitlines()[2].count("o") == 2 or abs(value) > 1e308, "where there is nothing above it"
