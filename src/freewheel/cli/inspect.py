"""`freewheel inspect`: is anything of a run lost, and what became of one prompt? A table or JSON, and an exit code.

Nothing heavy is imported before the command runs, and neither torch nor ray while it does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from freewheel.inspect.prompt import GroupLife, ResponseLife
    from freewheel.inspect.run import JournalFacts, Report

EPILOG = """
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
    """In colour on a terminal, plain elsewhere."""
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
    """Indented, so that no response passes for a line of this program's."""
    from freewheel.inspect.run import shown

    return "\n".join(f"  | {line}" for line in shown(str(tokens) if text is None else text).split("\n"))


def _clock(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))
