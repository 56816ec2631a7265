"""`freewheel trace`: the traces of a run's processes as one file, for Perfetto and chrome://tracing.

Nothing heavy is imported before the command runs, and neither torch nor ray while it does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from freewheel.observe.trace import Event

STANDARD_OUTPUT = Path("-")
ZIPPED = ".gz"
"""How a file's name ends that is to be compressed; Perfetto opens those as they are."""
LEVEL = 3
"""Of compression: a trace shrinks by nine tenths already, and more takes many times as long."""
NAMED = 4
"""Files that a message names."""

EPILOG = """
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
    """The trace, in which something happens: else it is refused before a file is touched."""
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
    """Of the user only: a trace tells what a run was about."""
    import gzip
    import os

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
