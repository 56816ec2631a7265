"""The trainer as a program: `python -m freewheel.fully_async_main` is the same as `freewheel train`."""

from __future__ import annotations

import typer

from freewheel.cli import train as commands

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.command(epilog=commands.TRAIN_EPILOG)(commands.train)


def main() -> None:
    from freewheel.cli.console import guarded_stdout

    with guarded_stdout():
        app(prog_name="fully_async_main.py")


if __name__ == "__main__":
    main()
