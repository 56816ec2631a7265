"""The terminal view: what it shows, where it is silent, and that the terminal is whole afterwards."""

from __future__ import annotations

import io
import logging
import os
import pty
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from freewheel.dashboard.terminal import LiveView, PlainView, duration, panel, plain_line, says_warnings, view
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


def drawn(snapshot, width=100, **options):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(panel(snapshot, width=width, **options))
    return console.export_text()


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_the_panel_answers_what_one_asks_about_a_run():
    text = drawn(RUN)
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


@pytest.mark.parametrize("width", [20, 80])
def test_a_run_that_has_just_begun_can_be_shown_on_any_terminal(width):
    assert "0/0" in drawn(EMPTY, width)


ADDRESS = f"http://127.0.0.1:40113/?token={'a' * 43}"


@pytest.mark.parametrize(("width", "shown"), [(80, True), (73, True), (72, False), (40, False)])
def test_the_address_of_the_page_is_on_a_line_of_its_own_or_not_in_the_panel(width, shown):
    lines = [line.rstrip() for line in drawn(RUN, width, page=ADDRESS).splitlines()]
    assert (ADDRESS in lines) == shown
    assert sum("?token" in line for line in lines) == shown


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_an_address_that_is_said_is_never_broken(width):
    file = io.StringIO()
    LiveView(Console(file=file, force_terminal=True, width=width)).say(f"Dashboard: {ADDRESS}, and this is more of it")
    (whole,) = [line for line in file.getvalue().splitlines() if f"{ADDRESS}," in line]
    assert whole.startswith("http") == (width <= 80), "on a line of its own where there is no room beside it"
    assert max(len(line) for line in file.getvalue().splitlines()) <= max(width, len(whole))


def test_on_a_narrow_terminal_no_number_is_broken_and_nothing_is_wider():
    run = replace(RUN, run_dir="runs/word_problems-fully_async-20261116-151515")
    text = drawn(run, 40)
    assert max(map(len, text.splitlines())) <= 40
    for whole in ("20261116-151515", "12/40   12 s, 1 min 28 s", "18,503 tokens/s", "wait_batch 30%", "0.534  ▅▅"):
        assert whole in text
    assert "━" not in drawn(run, 45) and "━" in drawn(run, 60), "a bar, where there is room for one that can be read"


def test_the_curve_at_the_end_is_as_wide_as_the_terminal():
    file = io.StringIO()
    shown = LiveView(Console(file=file, force_terminal=True, width=40, height=40, color_system=None))
    shown.finish(RUN, "Done.")
    chart = file.getvalue().partition("└")[0].splitlines()[-12:-1]
    for line, label in ((chart[0], "1.00"), (chart[5], "0.50"), (chart[10], "0.00")):
        assert f"{label} ┤" in line
    assert "─" * 33 in file.getvalue() and "─" * 34 not in file.getvalue()


def test_a_plain_line_has_the_same_in_one_line():
    assert plain_line(RUN) == (
        "step 12/40 | reward 0.534 | held out 0.500 at step 10 | queue 18 | age 0.8 versions | "
        "generation-bound: 30% of trainer time waits for responses | 18,503 tokens/s, 121 samples/s | "
        "12 s, 1 min 28 s left | alert: queue_size = 18 is too high"
    )
    assert plain_line(EMPTY) == "step 0/0 | 0 s"


def test_before_both_sides_were_measured_nothing_is_said_of_who_waits():
    begun = replace(EMPTY, waits={"trainer": {"wait_batch": 1.0}})
    assert plain_line(begun) == plain_line(EMPTY) and "verdict" not in drawn(begun, 80)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3600, "1 h 00 min"), (90061, "25 h 01 min"), (-1, "0 s")],
)
def test_durations_are_as_exact_as_one_needs(seconds, text):
    assert duration(seconds) == text
    assert duration(float("inf")) == "unknown"


# -- plain ------------------------------------------------------------------------------------------------------------


def test_plain_lines_come_by_tenths_of_the_run_by_evaluations_and_by_time():
    file, now = io.StringIO(), [0.0]
    shown = PlainView(file, every_s=10, clock=lambda: now[0])

    def lines_after(**changes):
        before = len(file.getvalue().splitlines())
        shown.update(replace(EMPTY, total_steps=100, **changes))
        return len(file.getvalue().splitlines()) - before

    assert lines_after(step=0) == 1
    assert [lines_after(step=step) for step in (1, 5, 9, 10, 11, 35, 39)] == [0, 0, 0, 1, 0, 1, 0]
    assert lines_after(step=39, eval_curve=[(30, 0.5)]) == 1
    assert lines_after(step=39, eval_curve=[(30, 0.5)]) == 0
    now[0] = 10.0
    assert lines_after(step=39, eval_curve=[(30, 0.5)]) == 1
    now[0] = 19.0
    assert lines_after(step=39, eval_curve=[(30, 0.5)]) == 0


def test_plain_output_has_no_control_characters_whatever_is_said():
    file = io.StringIO()
    with PlainView(file) as shown:
        shown.update(replace(RUN, alerts=["a\x1b[31mb\rc\nd"]))
        shown.say("\x1b]0;title\x07bell\x1b[2J\ttab")
        shown.finish(RUN, "Done.\n[bold]kept[/bold]")
    text = file.getvalue()
    assert not [c for c in text if ord(c) < 32 and c not in "\n\t"]
    assert "abc d" in text and "[bold]kept[/bold]" in text
    assert "●" in text, "the curve stands at the end"


def test_an_ascii_only_output_gets_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with PlainView(file) as shown:
        shown.say("Müller → ok")
        shown.finish(RUN, "done")
    text = raw.getvalue().decode("ascii")
    assert text.startswith("M?ller ? ok\n") and "o" in text and "|" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_is_drawn_on_whatever_the_run_is_called(encoding):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), force_terminal=True, width=60, height=40)
    with LiveView(console) as shown:
        shown.update(replace(RUN, run_dir="/runs/" + "long/" * 30 + "я", alerts=["the judge says “no”"]))
        shown.say("lr 1e-6 → 2e-6")
        shown.finish(RUN, "done")
        assert not shown.silent
    text = raw.getvalue().decode(encoding)
    assert "~" in text and "long/?" in text and "lr 1e-6 ? 2e-6" in text


def test_no_terminal_or_the_wish_for_plain_lines_gives_plain_lines():
    assert isinstance(view(Console(file=io.StringIO())), PlainView)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(view(terminal, plain=True), PlainView)
    assert isinstance(view(terminal), LiveView)


# -- a reader that goes away ------------------------------------------------------------------------------------------


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


class Closed(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("file", [Gone, Closed])
def test_a_reader_that_leaves_silences_the_plain_view_and_nothing_else(file):
    with PlainView(file()) as shown:
        shown.update(RUN)
        shown.say("x")
        shown.finish(RUN, "done")
        assert shown.silent


def test_a_terminal_that_is_gone_silences_the_live_view_and_nothing_else():
    with LiveView(Console(file=Closed(), force_terminal=True)) as shown:
        shown.update(RUN)
        shown.say("x")
        shown.finish(RUN, "done")
        assert shown.silent


# -- live -------------------------------------------------------------------------------------------------------------


def test_the_live_view_redraws_says_above_and_ends_with_curve_and_summary():
    file, now = io.StringIO(), [0.0]
    console = Console(file=file, force_terminal=True, width=100, height=40)
    shown = LiveView(console, clock=lambda: now[0])
    shown.update(RUN)
    at_first = len(file.getvalue())
    shown.update(replace(RUN, step=13))
    assert len(file.getvalue()) == at_first, "drawn more often than anyone can read"
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


def test_warnings_of_this_process_are_said_and_then_no_longer():
    file = io.StringIO()
    log = logging.getLogger("freewheel.trainer")
    with PlainView(file) as shown, says_warnings(shown):
        log.warning("disk is %s", "full")
        log.info("nothing to see")
    log.warning("afterwards")
    assert file.getvalue() == "WARNING disk is full\n"


# -- a real terminal --------------------------------------------------------------------------------------------------

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


def on_a_terminal(end):
    """What `CHILD` wrote to a pseudo-terminal, and how it ended."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, end], stdin=slave, stdout=slave, stderr=subprocess.PIPE, env=environment
    )
    os.close(slave)
    written = b""
    while select.select([master], [], [], 60)[0]:
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux says EIO when the last writer is gone
            break
        if not data:
            break
        written += data
    os.close(master)
    _, errors = child.communicate(timeout=60)
    return written.decode(), errors.decode(), child.returncode


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [("finish", 0, ""), ("forgotten", 0, ""), ("interrupt", -signal.SIGINT, "KeyboardInterrupt")],
)
def test_the_cursor_is_back_however_the_run_ends(end, code, error):
    written, errors, returned = on_a_terminal(end)
    assert returned == code and error in errors and (error or not errors)
    assert "1/2" in written
    assert written.rindex("\x1b[?25l") < written.rindex("\x1b[?25h"), "the cursor stays hidden"
    assert ("all is well" in written) == (end == "finish")
