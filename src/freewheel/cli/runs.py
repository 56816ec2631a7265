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
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from freewheel.inspect.prompt import GroupLife, ResponseLife
    from freewheel.inspect.run import JournalFacts, Report
    from freewheel.observe.trace import Event

INSPECT_EPILOG = """
Exit codes: 0 every prompt is accounted for; 1 something is lost, repeated or contradicts itself; 2 there is no run, or
it cannot be read. With --group: 0 or 2.
"""
MB = 1e6
MEANINGS = {
    "trained": "",
    "abandoned": "",
    "ended": "by a checkpoint's word; their own records are gone",
    "taken": "in the step that is being trained",
    "queued": "scored, and safe in the journal",
    "failed": "to be attempted again",
    "open": "in flight, or issued again by a resume",
}


def inspect_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, live or dead. Nothing in it is changed.")],
    group: Annotated[
        int | None,
        typer.Option(help="One prompt's life, by its number: responses, verdicts, versions by token, failed attempts.",
                     metavar="N"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:  # fmt: skip
    """Account for every prompt of a run: trained, abandoned, queued or to be done again, and each once."""
    from freewheel.cli.console import ExitCode, plain_errors, print_json

    with plain_errors():
        from freewheel.inspect.run import find_run, inspect

        found = find_run(run)
        if group is not None:
            from freewheel.inspect.prompt import follow

            life = follow(found, group)
            print_json(life) if as_json else _print(*_life(life))
            return
        report = inspect(found)
        print_json(report) if as_json else _print(*_report(report))
        if report.violations:
            raise typer.Exit(ExitCode.INCOMPLETE)


def _print(*parts: RenderableType) -> None:
    """Print in colour on a terminal, plain elsewhere."""
    from rich.console import Console

    from freewheel.cli.console import writing_stdout

    with writing_stdout():
        Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False).print(*parts, sep="\n")


# -- a run ------------------------------------------------------------------------------------------------------------


def _report(report: Report) -> list[RenderableType]:
    from rich.text import Text

    from freewheel.inspect.run import shown

    head = Text(f"{report.run}: step {report.steps}, version {report.version}", style="bold")
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
    count = len(report.violations)
    wrong = "1 thing is wrong:" if count == 1 else f"{count:,} things are wrong:"
    return [
        head,
        _table(rows),
        Text("Every prompt is accounted for.", style="green") if clean else Text(wrong, style="bold red"),
        *(Text(f"  {shown(text)}", style="red") for text in report.violations),
        *(Text(f"note: {shown(text)}", style="dim") for text in report.notes),
    ]


def _journal(facts: JournalFacts | None) -> str:
    if facts is None:
        return "none"
    steps = f"steps {facts.first_step} to {facts.last_step}" if facts.last_step is not None else "no step yet"
    return f"{facts.bytes / MB:.1f} MB, {steps}, base at step {facts.base}"


def _counts(counts: Mapping[str, int]) -> str:
    from freewheel.inspect.run import shown

    return ", ".join(f"{shown(reason)} {count:,}" for reason, count in sorted(counts.items()))


def _table(rows: list[tuple[str, str, str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, number, words in rows:
        table.add_row(Text(f"  {name}"), Text(number), Text(words, style="dim"))
    return table


# -- one group --------------------------------------------------------------------------------------------------------


def _life(life: GroupLife) -> list[RenderableType]:
    from rich.text import Text

    from freewheel.inspect.run import shown

    head = f"prompt {life.group} of {life.run}: {life.state}"
    if life.step is not None:
        head += f" in step {life.step}" + (f", version {life.version}" if life.version is not None else "")
    if life.abandoned:
        head += f" ({shown(life.abandoned)})"
    lines: list[RenderableType] = [Text(head, style="bold")]
    times = {"created": life.created_s, "scored and stored": life.stored_s}
    times |= {"committed": life.committed_s, "abandoned": life.ended_s}
    lines += [Text(f"  {name}: {_clock(at)}") for name, at in times.items() if at is not None]
    for one in life.failed:
        cost = f"{one.kind} failure" if one.kind else "at no cost"
        lines.append(Text(f"  attempt {one.attempt} failed {_clock(one.wall_s)}: {shown(one.reason)} ({shown(cost)})"))
        lines += [Text(f"    {line}", style="dim") for line in shown(one.detail).splitlines()]
    if life.prompt_tokens:
        lines.append(Text(f"prompt, {len(life.prompt_tokens)} tokens:", style="bold"))
        lines.append(Text(_said(life.prompt, life.prompt_tokens)))
    for number, response in enumerate(life.responses):
        lines += _response(number, response)
    return [*lines, *(Text(f"note: {shown(text)}", style="dim") for text in life.notes)]


def _response(number: int, response: ResponseLife) -> list[RenderableType]:
    from rich.text import Text

    from freewheel.inspect.run import shown

    value = "no reward" if response.value is None else f"reward {response.value:g}"
    raw = "" if response.raw is None or response.raw == response.value else f", raw {response.raw:g}"
    why = f" ({shown(response.reason)})" if response.reason else ""
    parts = "".join(f", {shown(name)} {part:g}" for name, part in response.parts.items())
    runs = ", ".join(
        f"{'v' + str(version) if version >= 0 else 'given'} ×{count}" for version, count in response.versions
    )
    ended = "cut off" if response.finish == "length" else "ended by itself"
    return [
        Text(f"response {number}: {value}{raw}, {response.status}{why}{parts}", style="bold"),
        Text(f"  {len(response.tokens)} tokens, {ended}; {runs}", style="dim"),
        Text(_said(response.text, response.tokens)),
    ]


def _said(text: str | None, tokens: list[int]) -> str:
    """Indent the text, so that no response looks like a line of this program."""
    from freewheel.inspect.run import shown

    return "\n".join(f"  | {line}" for line in shown(str(tokens) if text is None else text).split("\n"))


def _clock(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))


# -- freewheel trace --------------------------------------------------------------------------------------------------


STANDARD_OUTPUT = Path("-")
ZIPPED = ".gz"
"""A file with this ending is compressed; Perfetto opens it as it is."""
LEVEL = 3
"""Compression level: a trace already shrinks by nine tenths, and a higher level takes many times as long."""
NAMED = 4
"""Most files that a message names."""

TRACE_EPILOG = """
Exit codes: 0 it is written; 2 there is no run, nothing was traced, or the file cannot be written.
"""


def trace_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, live or dead. Nothing in it is changed.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The file to write; it is compressed where its name ends with .gz. "
                     "With - it is standard output.", metavar="FILE"),
    ] = Path("trace.json"),
) -> None:  # fmt: skip
    """Write one trace of what every part of a run did when, and of the life of each group.

    Open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing.
    """
    from freewheel.cli.console import plain_errors, print_text, say

    with plain_errors():
        from freewheel.errors import ConfigError
        from freewheel.inspect.run import find_run

        folder, no_events = find_run(run).folder, Counter[Path]()
        events = _some(run, folder, no_events)
        try:
            count = _write(output, events)
        except OSError as error:
            raise ConfigError("--output", str(output), f"it cannot be written ({error.strerror})") from error
        where, tell = ("standard output", say) if output == STANDARD_OUTPUT else (output, print_text)
        tell(f"{where}: {count:,} events. Open it at https://ui.perfetto.dev or in chrome://tracing")
        if no_events:
            say(f"warning: {_left_out(no_events)}")


def _some(run: str, folder: Path, no_events: Counter[Path]) -> Iterator[Event]:
    """Return the events of a run. A run without any is refused before a file is touched."""
    from freewheel.errors import ConfigError
    from freewheel.observe.lines import files_of
    from freewheel.observe.run_folder import TRACE
    from freewheel.observe.trace import EXPLAINS

    with _reading(run):
        found = [file.path for file in files_of(folder / TRACE)]
    if not found:
        raise ConfigError("RUN", run, "nothing was traced in it: train with observe.trace_mb above 0")
    events = _events(run, folder, no_events)
    begun: list[Event] = []
    for event in events:
        begun.append(event)
        if event["ph"] != EXPLAINS:
            return chain(begun, events)
    what = f"no event is in {_named(found)}"
    if no_events:
        what += f" ({no_events.total():,} lines are none)"
    raise ConfigError("RUN", run, f"{what}: copy the run's folder anew, or train with observe.trace_mb above 0")


def _left_out(no_events: Counter[Path]) -> str:
    count = no_events.total()
    of = f"{count:,} lines are no events and are left out" if count > 1 else "a line is no event and is left out"
    return f"{of}, in {_named(sorted(no_events))}"


def _named(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more


def _events(run: str, folder: Path, no_events: Counter[Path]) -> Iterator[Event]:
    from freewheel.observe.trace import merged

    with _reading(run):
        yield from merged(folder, refused=lambda path: no_events.update([path]))


@contextmanager
def _reading(run: str) -> Iterator[None]:
    from freewheel.errors import ConfigError

    try:
        yield
    except OSError as error:
        which = error.filename or "a file of its trace"
        raise ConfigError("RUN", run, f"{which} cannot be read ({error.strerror})") from error


def _write(output: Path, events: Iterable[Event]) -> int:
    """Write a file for this user only: a trace shows what a run was about."""

    from freewheel.cli.console import writing_stdout
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
It serves until Ctrl-C. A run that is going on has a page of its own, whose address it says at its start.
"""


def dashboard(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs' folders, or folders with runs in them (runs/). Nothing is changed "
                       "in them."),
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any that is free.", min=0, max=65535)] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than loopback shows the runs, unencrypted, to who has "
                          "the token.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> None:  # fmt: skip
    """Look at runs in a browser: curves, waits, judge, weights, timeline, samples, ledger, and runs side by side."""
    import time
    import webbrowser

    from freewheel.cli.console import plain_errors, print_text, say
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
                    f"warning: {host} can be reached from other machines: who has the address sees prompts and "
                    "responses, and so does who listens on the way. An SSH tunnel to 127.0.0.1 is safer"
                )

            def ready() -> None:
                print_text(f"the page is at {url}")
                if open_browser:
                    webbrowser.open(url)

            serve(found, listening, token, ready)
