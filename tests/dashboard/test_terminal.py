"""The terminal view: what it shows, how it draws, when it stops writing, and that the terminal is whole afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pty
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from freewheel.dashboard.terminal import (
    LiveView,
    PlainView,
    curve,
    duration,
    panel,
    plain_line,
    says_warnings,
    sparkline,
    view,
)
from freewheel.observe.snapshot import RunSnapshot

RUN = RunSnapshot(
    mode="fully_async",
    step=12,
    total_steps=40,
    reward=0.534,
    reward_curve=[(11, 0.5), (12, 0.534)],
    eval_curve=[(0, 0.125), (10, 0.5)],
    version=12,
    published_version=11,
    queue={"queue_size": 18, "in_progress": 40, "dropped_samples": 2},
    freshness={"avg_sample_age": 0.8, "max_sample_age": 2, "avg_sample_age_s": 1.25, "stale_samples_ratio": 0.0},
    waits={"trainer": {"wait_batch": 0.3, "train": 0.7}, "rollouter": {"generate": 1.0}},
    verdict="generation-bound: 30% of trainer time waits for responses",
    tokens_per_s=18503.2,
    samples_per_s=121.0,
    elapsed_s=12.0,
    eta_s=88.0,
    alerts=["queue_size = 18 is too high"],
    events=["first", "second", "third", "fourth"],
    run_dir="runs/[bold]x",
)
EMPTY = RunSnapshot(mode="sync", step=0, total_steps=0)


def draw(snapshot, width=100, **options):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(panel(snapshot, width=width, **options))
    return console.export_text()


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_the_panel_and_the_plain_line_describe_the_run():
    text = draw(RUN)
    for expected in (
        "freewheel  fully_async  runs/[bold]x",
        "12/40   12 s, 1 min 28 s left",
        "0.534  ▅▅",
        "0.500  ▂▅",
        "version 12, engines at 11",
        "18 groups ready, 40 in progress, 2 dropped",
        "mean 0.8 versions, most 2.0, mean 1.2 s, 0% over the threshold",
        "train 70%  wait_batch 30%",
        "verdict     generation-bound: 30% of trainer time waits for responses",
        "18,503 tokens/s, 121 samples/s",
        "queue_size = 18 is too high",
        "fourth",
    ):
        assert expected in text
    assert "first" not in text, "only the last events are shown"
    assert plain_line(RUN) == (
        "step 12/40 | reward 0.534 | held out 0.500 at step 10 | queue 18 | age 0.8 versions | "
        "generation-bound: 30% of trainer time waits for responses | 18,503 tokens/s, 121 samples/s | "
        "12 s, 1 min 28 s left | alert: queue_size = 18 is too high"
    )


def test_a_young_run_claims_nothing():
    begun = replace(EMPTY, waits={"trainer": {"wait_batch": 1.0}})
    assert plain_line(EMPTY) == plain_line(begun) == "step 0/0 | 0 s"
    for width in (20, 80):
        assert "0/0" in draw(begun, width) and "verdict" not in draw(begun, width)


ADDRESS = f"http://127.0.0.1:40113/?token={'a' * 43}"


@pytest.mark.parametrize(("width", "shown"), [(80, True), (73, True), (72, False), (40, False)])
def test_the_address_of_the_page_is_on_its_own_line_and_never_broken(width, shown):
    lines = [line.rstrip() for line in draw(RUN, width, page=ADDRESS).splitlines()]
    assert (ADDRESS in lines) == shown and sum("?token" in line for line in lines) == shown
    file = io.StringIO()
    LiveView(Console(file=file, force_terminal=True, width=width)).say(f"Dashboard: {ADDRESS}, and this is more of it")
    (whole,) = [line for line in file.getvalue().splitlines() if f"{ADDRESS}," in line]
    assert max(len(line) for line in file.getvalue().splitlines()) <= max(width, len(whole))


def test_a_narrow_terminal_breaks_no_number():
    run = replace(RUN, run_dir="runs/word_problems-fully_async-20261116-151515")
    text = draw(run, 40)
    assert max(map(len, text.splitlines())) <= 40
    for whole in ("20261116-151515", "12/40   12 s, 1 min 28 s", "18,503 tokens/s", "wait_batch 30%", "0.534  ▅▅"):
        assert whole in text
    assert "━" not in draw(run, 45) and "━" in draw(run, 60), "the bar needs room"
    file = io.StringIO()
    LiveView(Console(file=file, force_terminal=True, width=40, height=40, color_system=None)).finish(RUN, "Done.")
    chart = file.getvalue().partition("└")[0].splitlines()[-12:-1]
    assert all(f"{label} ┤" in chart[at] for at, label in ((0, "1.00"), (5, "0.50"), (10, "0.00")))
    assert "─" * 33 in file.getvalue() and "─" * 34 not in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3600, "1 h 00 min"), (90061, "25 h 01 min")],
        *[(-1, "0 s"), (math.inf, "unknown")],
    ],
)
def test_durations_are_as_exact_as_needed(seconds, text):
    assert duration(seconds) == text


# -- charts -----------------------------------------------------------------------------------------------------------


def test_a_curve_marks_measured_points_and_joins_them():
    drawn = [" 1.00 |        o", "      |      ..", " 0.50 |    o.", "      |  ..", " 0.00 |o.", "      +---------"]
    points = [(0, 0.0), (10, 0.5), (20, 1.0)]
    assert curve(points, width=9, height=5, unicode=False) == "\n".join([*drawn, "       0      20"])
    assert curve([points[2], (5, math.nan), *points[:2]]) == curve(points), "neither order nor NaN matters"
    assert curve(points).translate(str.maketrans("●·└┤─", "o.+|-")) == curve(points, unicode=False)
    assert curve([(0, 0.90), (1, 0.91)], unicode=False).startswith(" 1.00 |"), "the scale of accuracies"
    assert curve([(0, -3.0), (1, 5.0)], unicode=False).startswith(" 5.00 |")
    assert curve([]) == curve([(1, math.nan)]) == ""
    assert [curve(few).count("●") for few in ([(7, 0.5)], [(7, 42.0)], [(1, 2.0), (1, 3.0)])] == [1, 1, 2]


@pytest.mark.parametrize(
    ("values", "options", "drawn"),
    [
        ([0.0, 0.5, 1.0], {}, "▁▅█"),
        ([0.90, 0.91], {}, "██"),
        ([0.0, 1.0, 1.0], {"width": 2}, "██"),
        ([0.0, math.nan, 1.0], {"unicode": False}, "_ @"),
        ([-10.0, 0.0, 30.0], {}, "▁▃█"),
        ([5.0, 5.0], {}, "▅▅"),
        ([], {}, ""),
        ([math.nan], {}, " "),
    ],
)
def test_a_sparkline_shows_the_last_values(values, options, drawn):
    assert sparkline(values, **options) == drawn


@given(st.lists(st.tuples(st.integers(0, 50), st.floats()), max_size=6))
def test_every_measurement_can_be_drawn(points):
    """A run that has done its work must not fail for its picture."""
    drawn = curve(points, unicode=False)
    assert drawn.isascii() and all(len(line) <= 80 for line in drawn.splitlines())
    assert "inf" not in drawn and "nan" not in drawn
    assert len(sparkline([value for _, value in points])) == len(points)


# -- plain ------------------------------------------------------------------------------------------------------------


def test_plain_lines_come_with_tenths_of_the_run_evaluations_and_time():
    file, now = io.StringIO(), [0.0]
    shown = PlainView(file, every_s=10, clock=lambda: now[0])

    def lines_after(**changes):
        before = len(file.getvalue().splitlines())
        shown.update(replace(EMPTY, total_steps=100, **changes))
        return len(file.getvalue().splitlines()) - before

    assert lines_after(step=0) == 1
    assert [lines_after(step=step) for step in (1, 5, 9, 10, 11, 35, 39)] == [0, 0, 0, 1, 0, 1, 0]
    evaluated = {"step": 39, "eval_curve": [(30, 0.5)]}
    assert [lines_after(**evaluated) for _ in range(2)] == [1, 0]
    for now[0], lines in ((10.0, 1), (19.0, 0)):
        assert lines_after(**evaluated) == lines


def test_plain_output_has_no_control_characters():
    file = io.StringIO()
    with PlainView(file) as shown:
        shown.update(replace(RUN, alerts=["a\x1b[31mb\rc\nd"]))
        shown.say("\x1b]0;title\x07bell\x1b[2J\ttab")
        shown.finish(RUN, "Done.\n[bold]kept[/bold]")
    text = file.getvalue()
    assert not [c for c in text if ord(c) < 32 and c not in "\n\t"]
    assert "abc d" in text and "[bold]kept[/bold]" in text and "●" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_unicode_gets_ascii(encoding):
    raw = io.BytesIO()
    with PlainView(io.TextIOWrapper(raw, encoding=encoding)) as shown:
        shown.say("Мюллер → ok")
        shown.finish(RUN, "done")
    text = raw.getvalue().decode(encoding)
    assert text.startswith("?????? ? ok\n") and "o" in text and "|" in text
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), force_terminal=True, width=60, height=40)
    with LiveView(console) as shown:
        shown.update(replace(RUN, run_dir="/runs/" + "long/" * 30 + "я", alerts=["the judge says “no”"]))
        shown.say("lr 1e-6 → 2e-6")
        shown.finish(RUN, "done")
        assert not shown.silent
    text = raw.getvalue().decode(encoding)
    assert "~" in text and "long/?" in text and "lr 1e-6 ? 2e-6" in text


def test_only_a_terminal_gets_the_live_view():
    terminal = Console(file=io.StringIO(), force_terminal=True)
    found = [view(Console(file=io.StringIO())), view(terminal, plain=True), view(terminal)]
    assert [type(one) for one in found] == [PlainView, PlainView, LiveView]


class Broken(io.StringIO):
    error: OSError = BrokenPipeError(32, "Broken pipe")

    def write(self, text):
        raise self.error


class Gone(Broken):
    error = OSError(5, "Input/output error")


@pytest.mark.parametrize(
    "make",
    [
        lambda: PlainView(Broken()),
        lambda: PlainView(Gone()),
        lambda: LiveView(Console(file=Gone(), force_terminal=True)),
    ],
)
def test_a_reader_that_leaves_stops_the_view_and_nothing_else(make):
    with make() as shown:
        shown.update(RUN)
        shown.say("x")
        shown.finish(RUN, "done")
        assert shown.silent


# -- live -------------------------------------------------------------------------------------------------------------


def test_the_live_view_redraws_in_place_and_ends_with_curve_and_summary():
    file, now = io.StringIO(), [0.0]
    shown = LiveView(Console(file=file, force_terminal=True, width=100, height=40), clock=lambda: now[0])
    shown.update(RUN)
    at_first = len(file.getvalue())
    shown.update(replace(RUN, step=13))
    assert len(file.getvalue()) == at_first, "nobody reads faster"
    shown.say("[red]checkpoint[/red] \x1b[31msaved")
    now[0] = 1.0
    shown.update(replace(RUN, step=14))
    shown.finish(replace(RUN, step=40), "Learned it.")
    shown.close()
    text = file.getvalue()
    assert "[red]checkpoint[/red] saved" in text and "\x1b[31m" not in text
    assert "14/40" in text and "13/40" not in text
    assert text.index("40/40") < text.index("●") < text.index("Learned it.")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_warnings_of_this_process_are_shown_while_the_view_is_open():
    file = io.StringIO()
    log = logging.getLogger("freewheel.trainer")
    with PlainView(file) as shown, says_warnings(shown):
        log.warning("disk is %s", "full")
        log.info("nothing to see")
    log.warning("afterwards")
    assert file.getvalue() == "WARNING disk is full\n"


CHILD = """
import os, signal, sys, threading, time
from freewheel.dashboard.terminal import LiveView, view
from freewheel.observe.snapshot import RunSnapshot
run = RunSnapshot(mode="sync", step=1, total_steps=2, eval_curve=[(0, 0.5)])
shown = view()
assert isinstance(shown, LiveView)
end = sys.argv[1]
if end == "finish":
    with shown:
        shown.update(run)
        shown.finish(run, "all is well")
elif end == "forgotten":
    shown.update(run)
elif end == "interrupt":
    with shown:
        shown.update(run)
        signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [("finish", 0, ""), ("forgotten", 0, ""), ("interrupt", -signal.SIGINT, "KeyboardInterrupt")],
)
def test_the_cursor_is_back_however_the_run_ends(end, code, error):
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, end], stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment
    )
    os.close(slave)
    data = b""
    with contextlib.suppress(OSError):  # Linux reports EIO when the last writer is gone
        while select.select([master], [], [], 60)[0] and (more := os.read(master, 65536)):
            data += more
    os.close(master)
    errors = child.communicate(timeout=60)[1].decode()
    written = data.decode()
    assert child.returncode == code and error in errors and (error or not errors)
    assert "1/2" in written
    assert written.rindex("\x1b[?25l") < written.rindex("\x1b[?25h"), "the cursor stays hidden"
    assert ("all is well" in written) == (end == "finish")
