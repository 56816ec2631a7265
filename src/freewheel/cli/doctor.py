"""`freewheel doctor`: check this machine for a run. Prints lines, or JSON.

Exit code 1 where a run would fail. The command imports only what a configuration names, and torch where there is a GPU,
to see whether torch can use it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from freewheel.cli.flags import CONFIG_FLAGS, JUDGE_PANEL, KEY_FLAG, argument, flag, read_variable, takes

if TYPE_CHECKING:
    from collections.abc import Callable

    from freewheel.judge.config import JudgeConfig
    from freewheel.utils.findings import Finding

EPILOG = """
Exit codes: 0 nothing stands in the way of a run; 1 something does; 2 a flag cannot work.
"""
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@takes(
    argument("overrides", list[str], "[KEY=VALUE]...", "Settings of the run, as `freewheel train` takes them; "
             "resume=RUN too. Without any: the default run."),
    *CONFIG_FLAGS,
    flag("judge", list[str], "A judge that is not in the configuration, by its base URL: it is asked one short "
         "question. Repeat it for several.", metavar="URL", panel=JUDGE_PANEL),
    flag("judge_model", str, "The model's name there ($OPENAI_MODEL, else deepseek-v3).", panel=JUDGE_PANEL),
    KEY_FLAG,
    flag("as_json", bool, "The findings as one JSON object.", "--json"),
)  # fmt: skip
def doctor(
    overrides: list[str] | None,
    config_path: str | None,
    config_name: str | None,
    judge: list[str] | None,
    judge_model: str | None,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Check what would prevent a run on this machine, and print the command that fixes it.

    A judge that the configuration names is asked one short question, which costs as much as one judgement.
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

    for name, given in (("--judge-model", model), ("--api-key-env", key_variable)):
        if given is not None and not urls:
            raise ConfigError(name, given, "it says how to ask a judge that --judge names: give that too")
    if key_variable is not None:
        read_variable("--api-key-env", key_variable)
    model = model or os.environ.get(MODEL) or DEFAULT_MODEL
    return [at_url(url, model, key_variable) for url in urls]


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
