"""Exit codes, messages on stderr, text and JSON on stdout, for all commands."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from freewheel.errors import ConfigError, DataError
from freewheel.judge.verdict import JudgeError

if TYPE_CHECKING:
    from rich.console import RenderableType


class ExitCode(IntEnum):
    OK = 0
    INCOMPLETE = 1
    """It ran to the end, but part of it failed."""
    USAGE = 2
    """A flag, a file or a setting cannot work."""
    STOPPED = 3
    """It stopped early and can be continued."""
    BROKEN_PIPE = 141
    """The reader of the output is gone: 128 + SIGPIPE, as in a shell."""


def say(text: str, *, colour: str | None = None) -> None:
    """Write one line to stderr. Ignores a closed or full stderr."""
    with contextlib.suppress(OSError, ValueError):
        typer.secho(f"freewheel: {text}", fg=colour, reset=colour is not None, err=True)


def fail(*errors: object, code: ExitCode = ExitCode.USAGE) -> typer.Exit:
    """Print a line for each error, red on a terminal. Raise what this returns to end the program."""
    for error in errors:
        say(f"error: {error}", colour="red")
    return typer.Exit(code)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with a message and no traceback when a setting, a file or a judge cannot work."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise fail(error) from None
    except JudgeError as error:
        raise fail(error, code=ExitCode.STOPPED) from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        what = f"{error.filename} cannot be read or written ({error.strerror}): change its permissions or path"
        raise fail(what) from None


# -- stdout -----------------------------------------------------------------------------------------------------------


def print_text(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(value: object) -> None:
    """Print one indented JSON object."""
    print_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def report(as_json: bool, value: object, text: str) -> None:
    """Print a result as one JSON object if the user asked for it, else as text."""
    print_json(value) if as_json else print_text(text)


def print_rich(*parts: RenderableType) -> None:
    """Print each part on its own lines, in colour on a terminal, plain elsewhere."""
    from rich.console import Console

    Console(file=sys.stdout, soft_wrap=True, highlight=False, markup=False).print(*parts, sep="\n")


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """End the program when stdout cannot be written: silently when its reader is gone, else with the reason."""
    try:
        yield
    except BrokenPipeError:
        mute_stdout()
        raise typer.Exit(ExitCode.BROKEN_PIPE) from None
    except OSError as error:
        mute_stdout()
        raise fail(f"stdout cannot be written: {error.strerror}", code=ExitCode.STOPPED) from None


def mute_stdout() -> None:
    """Redirect stdout to nowhere, so that the interpreter's last flush does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _GuardedStdout(io.TextIOWrapper):
    """stdout for everything that writes text: the functions above and Typer's help."""

    def write(self, text: str, /) -> int:
        with writing_stdout():
            return super().write(text)

    def flush(self) -> None:
        with writing_stdout():
            super().flush()


@contextlib.contextmanager
def guarded_stdout() -> Iterator[None]:
    """Flush everything written to stdout in the block, or end the program with the reason."""
    plain = sys.stdout
    if not isinstance(plain, io.TextIOWrapper):  # None where it is closed
        yield
        return
    buffering: dict[str, Any] = {"line_buffering": plain.line_buffering, "write_through": plain.write_through}
    sys.stdout = _GuardedStdout(plain.buffer, plain.encoding, plain.errors, **buffering)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except typer.Exit as end:
            sys.exit(end.exit_code)


# -- the log ----------------------------------------------------------------------------------------------------------

REPEAT_S = 60.0
"""A repeated log line is written once in this time: a judge that refuses the key refuses every call in flight."""
MOST_LINES_KEPT = 1000
"""Distinct lines to remember: a gateway runs for weeks, and some of its lines contain numbers."""


class _LogLines(logging.Handler):
    """Writes the library's log, each line once in `REPEAT_S`."""

    def __init__(self, write: Callable[[str], object], pattern: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(pattern))
        self._write = write
        self._said_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text, now = record.getMessage(), time.monotonic()
        if now - self._said_at.get(text, -REPEAT_S) >= REPEAT_S:
            if len(self._said_at) >= MOST_LINES_KEPT:
                self._said_at.clear()
            self._said_at[text] = now
            with contextlib.suppress(OSError, ValueError):  # stderr is closed or full
                self._write(self.format(record))


@contextlib.contextmanager
def log_to(
    write: Callable[[str], object], *, level: int = logging.WARNING, pattern: str = "%(levelname)s: %(message)s"
) -> Iterator[None]:
    logger, handler = logging.getLogger("freewheel"), _LogLines(write, pattern)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
