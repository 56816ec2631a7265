"""The `freewheel` command. Each package registers its own; nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

import freewheel
from freewheel.dashboard import command as dashboard_command
from freewheel.gateway import commands as gateway_commands
from freewheel.judge import commands as judge_commands
from freewheel.plan import command as plan_command
from freewheel.runtime import commands as runtime_commands
from freewheel.runtime import inspect_command, trace_command
from freewheel.runtime.doctor import command as doctor_command

app = typer.Typer(
    name="freewheel",
    help=(freewheel.__doc__ or "").removeprefix("freewheel: ").capitalize(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        from freewheel.judge.commands.console import print_text

        print_text(f"freewheel {freewheel.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


judge_commands.register(app)
gateway_commands.register(app)
runtime_commands.register(app)
inspect_command.register(app)
dashboard_command.register(app)
trace_command.register(app)
plan_command.register(app)
doctor_command.register(app)


def main() -> None:
    from freewheel.judge.commands.console import guarded_stdout

    with guarded_stdout():
        app(prog_name="freewheel")


if __name__ == "__main__":
    main()
