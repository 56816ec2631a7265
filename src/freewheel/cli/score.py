"""`freewheel score` scores a file of responses with an LLM judge; `freewheel cache` manages the stored replies."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import signal
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from freewheel.cli.console import (
    ExitCode,
    fail,
    log_to,
    mute_stdout,
    plain_errors,
    print_json,
    report,
    say,
    writing_stdout,
)
from freewheel.cli.flags import JUDGE_PANEL, argument, flag, flags, judge_from_flags, takes
from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.row_files import Fields, is_stream
from freewheel.utils.files import write_atomically

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from freewheel.judge.cache import Store, StoreStats
    from freewheel.judge.row_files import RowCounts
    from freewheel.judge.scoring import ScoringJob, ScoringProgress, Stopped, Summary

EPILOG = """
Exit codes: 0 every row was scored or skipped; 1 some rows failed or were malformed; 2 a flag, a file or a setting
cannot work; 3 stopped early (key, quota, budget, an outage, a full disk) and can be continued; 130 and 143 stopped by
Ctrl-C or SIGTERM, and can be continued; 141 the reader of stdout is gone.

A run that ended early continues with the same command. Answered rows are cached and are not paid for again.
"""

MALFORMED_SHOWN = 20
"""Malformed lines that are reported one by one: a file of another format would fill the screen."""
TO_CONTINUE = "run the same command again to continue"

_RUN, _SHOW = "Run", "Output"


@flags(
    "Rows",
    flag("response_field", str, "Field with the text to score (response)."),
    flag("prompt_field", str, "Field with the question (prompt)."),
    flag("reference_field", str, "Field with a reference answer (reference)."),
    flag("skip_field", str, "Field with a reason not to score the row (skip)."),
    flag("verdict_field", str, "Field under which the verdict is added (verdict)."),
)
def fields_from_flags(**given: str) -> Fields:
    return Fields(**{name.removesuffix("_field"): field for name, field in given.items()})


@takes(
    argument("source", str, "IN.jsonl", "The rows, one JSON object per line; - is stdin."),
    argument("target", str, "OUT.jsonl", "Where the rows go, each with its verdict; - is stdout."),
    flag("placement", str, "Where the engine runs: process or thread.", panel=JUDGE_PANEL),
    flag("overwrite", bool, "Start over instead of continuing OUT.jsonl.", panel=_RUN),
    flag("retry_failed", bool, "Score the rows that failed again, and keep the others.", panel=_RUN),
    flag("as_json", bool, "The summary as JSON on stdout.", "--json", panel=_SHOW),
    flag("quiet", bool, "No progress.", "--quiet", "-q", panel=_SHOW),
    judge=judge_from_flags,
    fields=fields_from_flags,
)
def score(
    source: str,
    target: str,
    placement: str | None,
    retry_failed: bool,
    as_json: bool,
    quiet: bool,
    judge: JudgeConfig,
    **job_options: Any,
) -> None:
    """Score a file of responses with an LLM judge, and continue where a killed run stopped.

    Each row needs a "response"; "prompt", "reference" and "skip" are optional, and every other field is passed through.
    The output has the rows in the order of the input, each with a "verdict".
    """
    from freewheel.judge.scoring import ScoringJob

    with plain_errors(), contextlib.ExitStack() as stack:
        if as_json and target == "-":
            raise ConfigError("--json", True, "stdout already gets the rows: write the rows to a file")
        settings = judge if placement is None else msgspec.structs.replace(judge, placement=placement)
        reporter = stack.enter_context(make_reporter(quiet=quiet, rows_on_stdout=target == "-"))
        stack.enter_context(log_to(reporter.say))
        job = stack.enter_context(
            ScoringJob(
                source, target, settings, retry_failed=retry_failed, on_progress=reporter.show,
                on_malformed=reporter.show_malformed, **job_options,
            )
        )  # fmt: skip
        signals = stack.enter_context(stop_on_signals(job))
        try:
            summary = job.run()
        except OSError as error:
            reason = f"{source} cannot be read: {error.strerror}; {TO_CONTINUE}"
            raise fail(reason, code=ExitCode.STOPPED) from None
    stopped = summary.stopped
    if stopped is not None and stopped.reason == "pipe":
        mute_stdout()
        raise typer.Exit(ExitCode.BROKEN_PIPE)
    say(describe(summary, malformed_shown=min(MALFORMED_SHOWN, reporter.malformed)))
    code: int = ExitCode.OK
    if stopped is not None:
        say(explain_stop(stopped, target=target, retry_failed=retry_failed, api_key_env=settings.api_key_env))
        code = 128 + signals[0] if signals else ExitCode.STOPPED
    elif summary.tally.failed or summary.tally.malformed:
        code = ExitCode.INCOMPLETE
        if summary.tally.failed:
            say(explain_failed(summary.tally, target=target))
    if as_json:
        print_json(as_plain(summary, exit_code=code))
    raise typer.Exit(code)


@contextlib.contextmanager
def stop_on_signals(job: ScoringJob) -> Iterator[list[int]]:
    """Stop the job in order on Ctrl-C and SIGTERM; a second one ends the program. Yields the received signals."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        job.stop("interrupted")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(summary: Summary, *, malformed_shown: int) -> str:
    """Describe a summary: first how the rows ended, then the cost."""
    tally, calls = summary.tally, summary.calls
    parts = [f"{tally.scored:,} scored", f"{tally.failed:,} failed", f"{tally.skipped:,} skipped"]
    if tally.malformed:
        shown = f" ({malformed_shown} shown)" if tally.malformed > malformed_shown > 0 else ""
        parts.append(f"{tally.malformed:,} malformed{shown}")
    text = ", ".join(parts)
    if summary.before:
        text += f" ({summary.before:,} of them by an earlier run)"
    if tally.reasons:
        text += "; failed by " + ", ".join(f"{reason} {count:,}" for reason, count in sorted(tally.reasons.items()))
    text += f"; {calls.sent:,} calls, {tally.cached:,} from cache, {calls.throttled:,} 429s"
    if calls.cost:
        text += f", cost {calls.cost:.4f}"
    rate = (tally.rows - summary.before) / summary.elapsed_s if summary.elapsed_s else 0.0
    return f"{text}; {summary.elapsed_s:.1f} s, {rate:,.0f} rows/s"


def explain_failed(tally: RowCounts, *, target: str) -> str:
    """Say what failed first and how to score those rows again. The same command would keep them as they are."""
    text = f"the first that failed: {tally.first_failure}"
    return text if is_stream(target) else f"{text}. Rows that failed are kept: --retry-failed scores them again"


def explain_stop(stopped: Stopped, *, target: str, retry_failed: bool, api_key_env: str | None) -> str:
    """Say why the job stopped, what to do about it, and how to continue."""
    key = api_key_env or "the key"
    remedies = {
        "interrupted": "stopped",
        "output": f"stopped: {target} cannot be written: {stopped.detail}; make room",
        "auth": f"stopped: the judge refuses the key: {stopped.detail}; correct {key}, or name another variable",
        "not_found": f"stopped: the judge has no such model or path: {stopped.detail}; correct --model or --endpoint",
        "quota": f"stopped: the account has no credit left: {stopped.detail}",
        "budget": f"stopped: {stopped.detail}; --max-cost counts one run, and each further run may spend it again",
        "engine": f"stopped: the judge's engine broke: {stopped.detail}",
    }
    outage = f"stopped: the judge does not answer ({stopped.reason}): {stopped.detail}"
    if stopped.reason in ("unparseable", "rejected"):
        outage = f"stopped, because nothing can be scored this way ({stopped.reason}): {stopped.detail}"
    text = remedies.get(stopped.reason, outage)
    if is_stream(target):
        return f"{text}. The first line without a row is {stopped.next_line}"
    if retry_failed:
        return f"{text}. {target} is unchanged; {TO_CONTINUE}"
    return f"{text}. The next line is {stopped.next_line}; {TO_CONTINUE}"


def as_plain(summary: Summary, *, exit_code: int) -> dict[str, object]:
    """Return the summary as one flat JSON object."""
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    tally = plain.pop("tally")
    return {**tally, **plain, "elapsed_s": round(summary.elapsed_s, 3), "exit_code": exit_code}


# -- progress ---------------------------------------------------------------------------------------------------------


LOG_EVERY_S = 10.0
"""Often enough to show that the program is alive, seldom enough for a log that is kept."""
RATE_WINDOW_S = 10.0
"""The rate covers this recent time, so that a resumed start and a burst from the cache drop out of it."""


class Reporter:
    """Reports a job on stderr: by a bar on a terminal, by an occasional line in a log, or not at all."""

    def __init__(self, *, quiet: bool, bar: RichProgress | None = None) -> None:
        self.malformed = 0
        self._quiet = quiet
        self._bar = bar
        self._samples: deque[tuple[float, int, int]] = deque()
        self._said_s = 0.0

    def say(self, text: str) -> None:
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(f"freewheel: {text}", markup=False, highlight=False, soft_wrap=True)

    def show_malformed(self, line: int, detail: str) -> None:
        self.malformed += 1
        if self.malformed <= MALFORMED_SHOWN:
            self.say(f"line {line} is malformed: {detail}")

    def show(self, progress: ScoringProgress) -> None:
        text = self._describe(progress)
        if self._bar is not None:
            task = self._bar.tasks[0].id
            self._bar.update(task, total=progress.bytes_total, completed=progress.bytes_done, words=text)
        elif not self._quiet and progress.elapsed_s - self._said_s >= LOG_EVERY_S:
            self._said_s = progress.elapsed_s
            say(text)

    def _describe(self, progress: ScoringProgress) -> str:
        samples, tally, calls = self._samples, progress.tally, progress.calls
        samples.append((progress.elapsed_s, progress.decided, progress.bytes_done))
        while samples[0][0] < progress.elapsed_s - RATE_WINDOW_S:
            samples.popleft()
        began_s, rows, size = samples[0]
        took_s = (progress.elapsed_s - began_s) or float("inf")
        parts = [f"{progress.decided:,} rows", f"{(progress.decided - rows) / took_s:,.0f}/s"]
        bytes_per_s = (progress.bytes_done - size) / took_s
        if progress.bytes_total is not None and bytes_per_s > 0:
            left_s = round((progress.bytes_total - progress.bytes_done) / bytes_per_s)
            parts.append(f"ETA {datetime.timedelta(seconds=left_s)}")
        parts += [f"{progress.in_flight}/{progress.limit} in flight", f"{calls.throttled:,} 429s"]
        parts.append(f"{tally.failed + tally.malformed:,} failed")
        if calls.cost:
            parts.append(f"cost {calls.cost:.4f}")
        return "  ".join(parts)


@contextlib.contextmanager
def make_reporter(*, quiet: bool, rows_on_stdout: bool) -> Iterator[Reporter]:
    if quiet or not sys.stderr.isatty() or (rows_on_stdout and sys.stdout.isatty()):
        yield Reporter(quiet=quiet)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.fields[words]}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("", total=None, words="starting")
        yield Reporter(quiet=False, bar=bar)


# -- the cache --------------------------------------------------------------------------------------------------------


cache_app = typer.Typer(help="The replies that were paid for once: show, clear or export them.", no_args_is_help=True)

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_NO_BOUND_BYTES = sys.maxsize
"""These commands store nothing, so they never remove anything to keep a bound."""

CACHE_DIR_FLAG = flag("cache_dir", str, "Folder of the cache, if not $FREEWHEEL_CACHE_DIR or ~/.cache.", metavar="DIR")
REPORT_FLAG = flag("as_json", bool, "The report as JSON on stdout.", "--json")


@cache_app.command("stats")
@takes(CACHE_DIR_FLAG, REPORT_FLAG)
def stats(cache_dir: str | None, as_json: bool) -> None:
    """Show how many replies there are, and how much room they take."""
    with plain_errors(), _store(cache_dir) as (store, path):
        found = store.stats() if path.exists() else None
        known = msgspec.to_builtins(found) if found is not None else {"path": str(path), "entries": 0}
        report(as_json, known, _describe(found) if found is not None else f"{path}: there is no cache yet")


@cache_app.command("clear")
@takes(
    flag("older_than", str, "Only replies stored longer ago: 90s, 30m, 12h, 7d, 2w.", metavar="AGE"),
    flag("yes", bool, "Do not ask.", "--yes", "-y"),
    CACHE_DIR_FLAG,
    REPORT_FLAG,
)
def clear(older_than: str | None, yes: bool, cache_dir: str | None, as_json: bool) -> None:
    """Remove replies. They will be asked for, and paid for, again."""
    with plain_errors(), _store(cache_dir) as (store, path):
        age_s = parse_age_s(older_than) if older_than is not None else None
        removed = 0
        if path.exists():
            if not yes:
                if not sys.stdin.isatty():
                    raise ConfigError("--yes", False, "there is no terminal to ask on; add --yes to remove replies")
                which = f"replies older than {older_than}" if older_than else f"all {store.stats().entries:,} replies"
                typer.confirm(f"Remove {which} from {path}?", abort=True, err=True)
            removed = store.clear(older_than_s=age_s)
        report(as_json, {"path": str(path), "removed": removed}, f"{path}: {removed:,} replies removed")


@cache_app.command("export")
@takes(
    argument("target", str, "FILE", "Where the JSON lines go; - is stdout."),
    flag("overwrite", bool, "Replace FILE where it exists."),
    CACHE_DIR_FLAG,
    REPORT_FLAG,
)
def export(target: str, overwrite: bool, cache_dir: str | None, as_json: bool) -> None:
    """Write every reply, however old, as a JSON line: key, text, tokens, times."""
    with plain_errors(), _store(cache_dir) as (store, path):
        if as_json and target == "-":
            raise ConfigError("--json", True, "stdout already gets the replies: write the replies to a file")
        numbers = itertools.count()
        lines = (_as_line(entry) for entry, _ in zip(store.export() if path.exists() else (), numbers, strict=False))
        if target == "-":
            with writing_stdout():
                sys.stdout.buffer.writelines(lines)
                sys.stdout.flush()
            return
        try:
            _write_file(Path(target), lines, overwrite=overwrite)
        except OSError as error:
            raise ConfigError("FILE", target, f"it cannot be written: {error.strerror}") from None
    count = next(numbers)
    if as_json:
        print_json({"path": str(path), "exported": count, "file": target})
    else:
        say(f"{count:,} replies written to {target}")


def _write_file(target: Path, lines: Iterator[bytes], *, overwrite: bool) -> None:
    """Write lines to a file for this user only, whole or not at all. A device or a FIFO is written as it is.

    A link is followed: its target is replaced, and the link stays.
    """
    if target.exists() and not target.is_file():
        with target.open("wb") as stream:
            stream.writelines(lines)
        return
    if target.exists() and not overwrite:
        raise ConfigError("FILE", str(target), "it exists already; give another file, or --overwrite to replace it")
    write_atomically(target.resolve(), lines)


def _as_line(entry: dict[str, object]) -> bytes:
    # A judge may have sent lone surrogates, which UTF-8 cannot encode.
    text = str(entry["text"]).encode("utf-8", "replace").decode()
    return msgspec.json.encode({**entry, "text": text}) + b"\n"


def parse_age_s(text: str) -> float:
    """Convert an age such as `7d` to seconds."""
    try:
        age_s = float(text[:-1]) * _UNITS_S[text[-1:]]
    except (ValueError, KeyError):
        raise ConfigError("--older-than", text, "give a number and s, m, h, d or w, as in 7d") from None
    if not 0 <= age_s < float("inf"):
        raise ConfigError("--older-than", text, "give an age of 0 or more")
    return age_s


@contextlib.contextmanager
def _store(configured: str | None) -> Iterator[tuple[Store, Path]]:
    from freewheel.judge.cache import CACHE_FILE, Store, cache_dir

    path = cache_dir(configured) / CACHE_FILE
    store = Store(path, max_bytes=_NO_BOUND_BYTES, ttl_s=None)
    try:
        yield store, path
    finally:
        store.close()


def _describe(found: StoreStats) -> str:
    def when(at: float | None) -> str:
        return datetime.datetime.fromtimestamp(at).isoformat(" ", "seconds") if at is not None else "-"

    lines = [
        ("file", found.path),
        ("replies", f"{found.entries:,}"),
        ("text", f"{found.payload_bytes / 1e6:,.1f} MB"),
        ("on disk", f"{found.file_bytes / 1e6:,.1f} MB"),
        ("stored", f"{when(found.oldest_at)} to {when(found.newest_at)}"),
        *(("set aside", name) for name in found.set_aside),
    ]
    return "\n".join(f"{name:<10}{value}" for name, value in lines)
