"""`freewheel trace`: the traces of a run's processes as one file, for Perfetto and chrome://tracing.

Nothing heavy is imported before the command runs, and neither torch nor ray while it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from freewheel.observe.trace_files import Event

ZIPPED = ".gz"
"""How a file's name ends that is to be compressed; Perfetto opens those as they are."""
LEVEL = 3
"""Of compression: a trace shrinks by nine tenths already, and more takes many times as long."""

EPILOG = """
Exit codes: 0 it is written; 2 there is no run, nothing was traced, or the file cannot be written.
"""


def register(app: typer.Typer) -> None:
    app.command("trace", epilog=EPILOG)(trace_run)


def trace_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, live or dead. Nothing in it is changed.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The file to write; it is compressed where its name ends with .gz.",
                     metavar="FILE"),
    ] = Path("trace.json"),
) -> None:  # fmt: skip
    """Write one trace of what every part of a run did when, and of the life of each group.

    Open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing.
    """
    from freewheel.judge.commands.console import plain_errors, print_text

    with plain_errors():
        from freewheel.judge.errors import ConfigError
        from freewheel.observe.trace_files import components
        from freewheel.runtime.inspecting import find_run

        folder = find_run(run).folder
        with _reading(run):
            traced = components(folder)
        if not traced:
            raise ConfigError("RUN", run, "nothing was traced in it: train with observe.trace_mb above 0")
        try:
            count = _write(output, _events(run, folder))
        except OSError as error:
            raise ConfigError("--output", str(output), f"it cannot be written ({error.strerror})") from error
        print_text(f"{output}: {count:,} events. Open it at https://ui.perfetto.dev or in chrome://tracing")


def _events(run: str, folder: Path) -> Iterator[Event]:
    from freewheel.observe.trace_files import merged

    with _reading(run):
        yield from merged(folder)


@contextmanager
def _reading(run: str) -> Iterator[None]:
    from freewheel.judge.errors import ConfigError

    try:
        yield
    except OSError as error:
        which = error.filename or "a file of its trace"
        raise ConfigError("RUN", run, f"{which} cannot be read ({error.strerror})") from error


def _write(output: Path, events: Iterable[Event]) -> int:
    """Of the user only: a trace tells what a run was about."""
    import gzip
    import os

    from freewheel.observe.private import open_private
    from freewheel.observe.trace_files import write_json

    with os.fdopen(open_private(output, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        if output.suffix != ZIPPED:
            return write_json(events, file)
        with gzip.open(file, "wb", compresslevel=LEVEL) as zipped:
            return write_json(events, zipped)
