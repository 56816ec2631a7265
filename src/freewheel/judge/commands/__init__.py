"""The judge's commands: `freewheel score`, `freewheel cache`, `freewheel mock-judge`.

These modules hold signatures and words. What does the work is imported by a command when it runs, so that
`freewheel --help` need not load it.
"""

import typer

from freewheel.judge.commands.cache import cache_app
from freewheel.judge.commands.mock_judge import mock_judge
from freewheel.judge.commands.score import EPILOG, score


def register(app: typer.Typer) -> None:
    app.command("score", epilog=EPILOG)(score)
    app.add_typer(cache_app, name="cache")
    app.command("mock-judge")(mock_judge)
