"""`freewheel doctor`: check this machine for a run. Prints lines, or JSON.

Exit code 1 where a run would fail. The command imports only what a configuration names, and torch where there is a GPU,
to see whether torch can use it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.cli.flags import ConfigNameFlag, ConfigPathFlag, KeyVariableFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from freewheel.judge.config import JudgeConfig
    from freewheel.utils.findings import Finding

EPILOG = """
Exit codes: 0 nothing stands in the way of a run; 1 something does; 2 a flag cannot work.
"""
_JUDGE = "Judge"
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the run that is meant, as `freewheel train` takes "
                       "them; resume=RUN too. Without any: the default run.", show_default=False),
    ] = None,
    config_path: ConfigPathFlag = None,
    config_name: ConfigNameFlag = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="A judge that is not in the configuration, by its base URL: it is asked one short question. "
                     "Give it again for further ones.", metavar="URL", rich_help_panel=_JUDGE),
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(help="The model's name there ($OPENAI_MODEL, else deepseek-v3).", rich_help_panel=_JUDGE),
    ] = None,
    api_key_env: KeyVariableFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as one JSON object.")] = False,
) -> None:  # fmt: skip
    """Look for what would stand in a run's way on this machine, and say which command mends it.

    A judge that the configuration names is asked one short question, which costs what one judgement costs.
    """
    from freewheel.cli.console import ExitCode, plain_errors, print_json
    from freewheel.doctor.run import list_checks
    from freewheel.runtime.start import find_local_modules
    from freewheel.utils.findings import State, run_checks

    with plain_errors():
        find_local_modules()
        judges = _read_judges(judge or [], judge_model, api_key_env)
        with _show_current(quiet=as_json) as begun:
            findings = run_checks(list_checks(overrides or [], config_path, config_name, judges), begun=begun)
        counts = Counter(str(finding.state) for finding in findings)
        print_json(_as_json(findings, counts)) if as_json else _print(findings, counts)
        if counts[State.PROBLEM]:
            raise typer.Exit(ExitCode.INCOMPLETE)


def _read_judges(urls: list[str], model: str | None, key_variable: str | None) -> list[JudgeConfig]:
    from freewheel.doctor.judge import at_url
    from freewheel.errors import ConfigError
    from freewheel.rewards.compute_score import MODEL
    from freewheel.rewards.config import DEFAULT_MODEL

    for flag, given in (("--judge-model", model), ("--api-key-env", key_variable)):
        if given is not None and not urls:
            raise ConfigError(flag, given, "it says how to ask a judge that --judge names: give that too")
    if key_variable is not None and not os.environ.get(key_variable):
        raise ConfigError("--api-key-env", key_variable, "that variable is not set in the environment")
    name = model or os.environ.get(MODEL) or DEFAULT_MODEL
    return [at_url(url, name, key_variable) for url in urls]


@contextmanager
def _show_current(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current check on a terminal, on a line that disappears at the end."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what: None
        return
    with console.status("looking") as status:
        yield lambda what: status.update(f"looking at {what}")


def _print(findings: list[Finding], counts: Counter[str]) -> None:
    """Print a line for each finding, one for its remedy, and the summary."""
    from rich.text import Text

    from freewheel.cli.console import print_rich
    from freewheel.utils.findings import count_of

    width = max(len(one.what) for one in findings)
    lines: list[Text] = []
    for one in findings:
        lines.append(Text.assemble((f"{one.state:<9}", STYLES[one.state]), f"{one.what:<{width}}  {one.detail}"))
        if one.remedy:
            lines.append(Text.assemble(" " * (9 + width + 2), (one.remedy, "bold cyan")))
    problems, warnings = counts["problem"], counts["warning"]
    summary, style = "Nothing stands in the way of a run.", STYLES["ok"]
    if problems:
        summary = f"{count_of(problems, 'problem')}, {count_of(warnings, 'warning')}: a run would fail."
        style = STYLES["problem"]
    elif warnings:
        summary, style = f"{count_of(warnings, 'warning')}: a run may work.", STYLES["warning"]
    print_rich(*lines, Text(summary, style=style))


def _as_json(findings: list[Finding], counts: Counter[str]) -> dict[str, Any]:
    import freewheel

    return {
        "freewheel": freewheel.__version__,
        "ok": not counts["problem"],
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "findings": findings,
    }
