"""Look at runs: `freewheel inspect` accounts for prompts, `trace` writes a timeline, `dashboard` serves a page.

Each reads run directories, live or finished, and changes nothing in them. None imports torch or Ray.
"""

from __future__ import annotations

import gzip
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from freewheel.cli.console import ExitCode, plain_errors, print_json, print_rich, print_text, say, writing_stdout
from freewheel.cli.flags import JSON_FLAG, argument, flag, takes
from freewheel.errors import ConfigError
from freewheel.utils.findings import count_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from freewheel.inspect.prompt import GroupLife, ResponseLife
    from freewheel.inspect.run import JournalFacts, Report
    from freewheel.observe.trace import TraceEvent

INSPECT_EPILOG = """
Exit codes: 0 every prompt is accounted for; 1 a prompt is lost, repeated or recorded inconsistently; 2 there is no
run, or it cannot be read. With --group: 0 or 2.
"""
MB = 1e6
RUN_HELP = "A run's folder, live or finished. It is not changed."
MEANINGS = {
    "trained": "",
    "abandoned": "",
    "ended": "according to a checkpoint; the journal no longer has them",
    "taken": "in the step that is being trained",
    "queued": "scored and in the journal",
    "failed": "waiting for another attempt",
    "open": "in flight; a resume issues them again",
}


@takes(
    argument("run", str, "RUN", RUN_HELP),
    flag("group", int, "Show one prompt by its number: responses, verdicts, versions per token, failed attempts.",
         metavar="N"),
    JSON_FLAG,
)  # fmt: skip
def inspect_run(run: str, group: int | None, as_json: bool) -> None:
    """Account for every prompt of a run: trained, abandoned, queued or open, each exactly once."""
    with plain_errors():
        from freewheel.inspect.run import find_run, inspect

        found = find_run(run)
        if group is not None:
            from freewheel.inspect.prompt import follow

            life = follow(found, group)
            print_json(life) if as_json else print_rich(*_life(life))
            return
        report = inspect(found)
        print_json(report) if as_json else print_rich(*_report(report))
        if report.violations:
            raise typer.Exit(ExitCode.INCOMPLETE)


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style)


# -- a run ------------------------------------------------------------------------------------------------------------


def _report(report: Report) -> list[RenderableType]:
    from freewheel.inspect.run import escape_controls

    head = _line(f"{report.run}: step {report.steps}, version {report.version}", style="bold")
    kept = ", ".join(f"step {one.step}" + (" (damaged)" if one.damaged else "") for one in report.checkpoints)
    rows = [("prompts", f"{sum(report.states.values()):,}", "")]
    for state, count in report.states.items():
        if count or state == "trained":
            reasons = _counts(report.abandoned) if state == "abandoned" else ""
            rows.append((state, f"{count:,}", reasons or MEANINGS[state]))
    rows.append(("failed attempts", f"{sum(report.failures.values()):,}", _counts(report.failures)))
    rows += [("journal", "", _journal(report.journal)), ("checkpoints", str(len(report.checkpoints)), kept)]
    rows += [("lost", str(report.lost), ""), ("repeated", str(report.repeated), "")]
    rows.append(("trained too old", str(report.stale_trained), ""))
    clean = not report.violations
    wrong = f"{count_of(len(report.violations), 'violation')}:"
    return [
        head,
        _table(rows),
        _line("Every prompt is accounted for.", style="green") if clean else _line(wrong, style="bold red"),
        *(_line(f"  {escape_controls(text)}", style="red") for text in report.violations),
        *(_line(f"note: {escape_controls(text)}", style="dim") for text in report.notes),
    ]


def _journal(facts: JournalFacts | None) -> str:
    if facts is None:
        return "none"
    steps = f"steps {facts.first_step} to {facts.last_step}" if facts.last_step is not None else "no step yet"
    return f"{facts.bytes / MB:.1f} MB, {steps}, base at step {facts.base}"


def _counts(counts: Mapping[str, int]) -> str:
    from freewheel.inspect.run import escape_controls

    return ", ".join(f"{escape_controls(reason)} {count:,}" for reason, count in sorted(counts.items()))


def _table(rows: list[tuple[str, str, str]]) -> RenderableType:
    from rich.table import Column, Table

    table = Table.grid("", Column(justify="right"), "", padding=(0, 2, 0, 0))
    for name, number, words in rows:
        table.add_row(_line(f"  {name}"), _line(number), _line(words, style="dim"))
    return table


# -- one group --------------------------------------------------------------------------------------------------------


def _life(life: GroupLife) -> list[RenderableType]:
    from freewheel.inspect.run import escape_controls

    head = f"prompt {life.group} of {life.run}: {life.state}"
    if life.step is not None:
        head += f" in step {life.step}" + (f", version {life.version}" if life.version is not None else "")
    if life.abandoned:
        head += f" ({escape_controls(life.abandoned)})"
    lines: list[RenderableType] = [_line(head, style="bold")]
    times = {"created": life.created_s, "scored and stored": life.stored_s}
    times |= {"committed": life.committed_s, "abandoned": life.ended_s}
    lines += [_line(f"  {name}: {_clock(at)}") for name, at in times.items() if at is not None]
    for one in life.failed:
        cost = f"{one.kind} failure" if one.kind else "does not count against its budget"
        why = f"{escape_controls(one.reason)} ({escape_controls(cost)})"
        lines.append(_line(f"  attempt {one.attempt} failed {_clock(one.wall_s)}: {why}"))
        lines += [_line(f"    {line}", style="dim") for line in escape_controls(one.detail).splitlines()]
    if life.prompt_tokens:
        lines.append(_line(f"prompt, {len(life.prompt_tokens)} tokens:", style="bold"))
        lines.append(_line(_indent_text(life.prompt, life.prompt_tokens)))
    for number, response in enumerate(life.responses):
        lines += _response(number, response)
    return [*lines, *(_line(f"note: {escape_controls(text)}", style="dim") for text in life.notes)]


def _response(number: int, response: ResponseLife) -> list[RenderableType]:
    from freewheel.inspect.run import escape_controls

    value = "no reward" if response.value is None else f"reward {response.value:g}"
    raw = "" if response.raw is None or response.raw == response.value else f", raw {response.raw:g}"
    why = f" ({escape_controls(response.reason)})" if response.reason else ""
    parts = "".join(f", {escape_controls(name)} {part:g}" for name, part in response.parts.items())
    runs = ", ".join(
        f"{'v' + str(version) if version >= 0 else 'given'} ×{count}" for version, count in response.versions
    )
    ended = "cut off" if response.finish == "length" else "finished"
    return [
        _line(f"response {number}: {value}{raw}, {response.status}{why}{parts}", style="bold"),
        _line(f"  {len(response.tokens)} tokens, {ended}; {runs}", style="dim"),
        _line(_indent_text(response.text, response.tokens)),
    ]


def _indent_text(text: str | None, tokens: list[int]) -> str:
    """Indent the text, so that no response looks like a line of this program."""
    from freewheel.inspect.run import escape_controls

    return "\n".join(f"  | {line}" for line in escape_controls(str(tokens) if text is None else text).split("\n"))


def _clock(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))


# -- freewheel trace --------------------------------------------------------------------------------------------------


STANDARD_OUTPUT = Path("-")
ZIPPED = ".gz"
"""A file with this suffix is compressed. Perfetto opens it directly."""
LEVEL = 3
"""Compression level: a trace already shrinks by nine tenths, and a higher level takes many times as long."""
NAMED = 4
"""A message names at most this many files."""

TRACE_EPILOG = """
Exit codes: 0 the trace was written; 2 there is no run, it has no trace, or the file cannot be written.
"""


@takes(
    argument("run", str, "RUN", RUN_HELP),
    flag("output", Path, "The file to write: compressed if its name ends with .gz; - is standard output.", "--output",
         "-o", metavar="FILE", default=Path("trace.json")),
)  # fmt: skip
def trace_run(run: str, output: Path) -> None:
    """Write one trace with a timeline of every part of a run and of each group.

    Open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing.
    """
    with plain_errors():
        from freewheel.inspect.run import find_run

        folder, no_events = find_run(run).folder, Counter[Path]()
        events = _find_events(run, folder, no_events)
        try:
            count = _write(output, events)
        except OSError as error:
            raise ConfigError("--output", str(output), f"it cannot be written ({error.strerror})") from error
        where, tell = ("standard output", say) if output == STANDARD_OUTPUT else (output, print_text)
        tell(f"{where}: {count:,} events. Open it at https://ui.perfetto.dev or in chrome://tracing")
        if no_events:
            say(f"warning: {_describe_skipped(no_events)}")


def _find_events(run: str, folder: Path, no_events: Counter[Path]) -> Iterator[TraceEvent]:
    """Return the events of a run. A run without any is refused before a file is touched."""
    from freewheel.observe.lines import files_of
    from freewheel.observe.run_folder import TRACE
    from freewheel.observe.trace import METADATA

    events = _events(run, folder, no_events)
    first: list[TraceEvent] = []
    for event in events:
        first.append(event)
        if event["ph"] != METADATA:
            return chain(first, events)
    found = [file.path for file in files_of(folder / TRACE)]
    if not found:
        raise ConfigError("RUN", run, "it has no trace: train with observe.trace_mb above 0")
    what = f"there is no event in {_join_paths(found)}"
    if no_events:
        what += f" ({no_events.total():,} lines are not events)"
    raise ConfigError("RUN", run, f"{what}: copy the run's folder again, or train with observe.trace_mb above 0")


def _describe_skipped(no_events: Counter[Path]) -> str:
    count = no_events.total()
    skipped = f"skipped {count:,} lines that are not events" if count > 1 else "skipped a line that is not an event"
    return f"{skipped}, in {_join_paths(sorted(no_events))}"


def _join_paths(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more


def _events(run: str, folder: Path, no_events: Counter[Path]) -> Iterator[TraceEvent]:
    from freewheel.observe.trace import merge_traces

    try:
        yield from merge_traces(folder, refused=lambda path: no_events.update([path]))
    except OSError as error:
        which = error.filename or "a file of its trace"
        raise ConfigError("RUN", run, f"{which} cannot be read ({error.strerror})") from error


def _write(output: Path, events: Iterable[TraceEvent]) -> int:
    """Write a file that only this user can read: a trace shows parts of a run."""

    from freewheel.observe.trace import write_json
    from freewheel.utils.files import open_private

    if output == STANDARD_OUTPUT:
        with writing_stdout():
            count = write_json(events, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return count
    with os.fdopen(open_private(output, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        if output.suffix != ZIPPED:
            return write_json(events, file)
        with gzip.open(file, "wb", compresslevel=LEVEL) as zipped:
            return write_json(events, zipped)


# -- freewheel dashboard ----------------------------------------------------------------------------------------------


DASHBOARD_EPILOG = """
It serves until Ctrl-C. A live run already serves its own page and prints the address at its start.
"""


@takes(
    argument("runs", list[str], "RUN...", "Folders of runs, or folders that contain runs (runs/). They are not "
             "changed."),
    flag("port", int, "Port to listen on; 0 takes a free one.", default=0, min=0, max=65535),
    flag("host", str, "Address to listen on. Any other than loopback shows the runs, unencrypted, to anyone with the "
         "token.", default="127.0.0.1"),
    flag("open_browser", bool, "Open the page in this machine's browser.", "--open"),
)  # fmt: skip
def dashboard(runs: list[str], port: int, host: str, open_browser: bool) -> None:
    """Look at runs in a browser: curves, waits, judge, weights, timeline, samples, ledger, comparisons."""
    import time
    import webbrowser

    from freewheel.dashboard.web.runs import Runs
    from freewheel.dashboard.web.server import make_token, serve
    from freewheel.utils.http import address, is_loopback, listen_or_say

    with plain_errors():
        found = Runs(runs, clock=time.monotonic)
        token = make_token()
        with listen_or_say(host, port) as listening:
            url = address(listening, token)
            if not is_loopback(host):
                say(
                    f"warning: {host} can be reached from other machines: anyone with the address, or on the network "
                    "path, sees prompts and responses. An SSH tunnel to 127.0.0.1 is safer"
                )

            def ready() -> None:
                print_text(f"the page is at {url}")
                if open_browser:
                    webbrowser.open(url)

            serve(found, listening, token, ready=ready)
