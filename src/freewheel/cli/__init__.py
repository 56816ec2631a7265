"""The `freewheel` command, one module per group of commands. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

import freewheel
from freewheel.cli import plan, runs, score, servers, train
from freewheel.cli.console import guarded_stdout, print_text

app = typer.Typer(
    name="freewheel",
    help="Asynchronous RL post-training for language models: no GPU waits for work it does not depend on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        print_text(f"freewheel {freewheel.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("score", epilog=score.EPILOG)(score.score)
app.add_typer(score.cache_app, name="cache")
app.command("mock-judge")(servers.mock_judge)
app.command("serve")(servers.serve)
app.command("train", epilog=train.TRAIN_EPILOG)(train.train)
app.command("eval")(train.evaluate)
app.command("inspect", epilog=runs.INSPECT_EPILOG)(runs.inspect_run)
app.command("dashboard", epilog=runs.DASHBOARD_EPILOG)(runs.dashboard)
app.command("trace", epilog=runs.TRACE_EPILOG)(runs.trace_run)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("doctor", epilog=train.DOCTOR_EPILOG)(train.doctor)


def main() -> None:
    with guarded_stdout():
        app(prog_name="freewheel")
