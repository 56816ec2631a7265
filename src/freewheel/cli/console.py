"""Exit codes, messages on stderr and JSON on stdout, for all commands."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from enum import IntEnum

import msgspec
import typer

from freewheel.errors import ConfigError
from freewheel.judge.verdict import JudgeError


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


def say(text: str) -> None:
    """Write one line to stderr. A stderr that is closed or full does not matter."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"freewheel: {text}\n")
        sys.stderr.flush()


def print_json(value: object) -> None:
    """Print one indented JSON object."""
    print_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_text(text: str) -> None:
    with writing_stdout():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


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
        say(f"error: stdout cannot be written: {error.strerror}")
        raise typer.Exit(ExitCode.STOPPED) from None


class GuardedStdout(io.TextIOWrapper):
    """stdout for code that writes without `writing_stdout`: Typer's help."""

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
    sys.stdout = GuardedStdout(
        plain.buffer,
        plain.encoding,
        plain.errors,
        line_buffering=plain.line_buffering,
        write_through=plain.write_through,
    )
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except typer.Exit as end:
            sys.exit(end.exit_code)


def mute_stdout() -> None:
    """Redirect stdout to nowhere, so that the interpreter's last flush does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with a message and no traceback when a setting cannot work."""
    try:
        yield
    except ConfigError as error:
        say(f"error: {error}")
        raise typer.Exit(ExitCode.USAGE) from None
    except JudgeError as error:
        say(f"error: {error}")
        raise typer.Exit(ExitCode.STOPPED) from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        say(f"error: {error.filename} cannot be read or written ({error.strerror}): change its permissions or path")
        raise typer.Exit(ExitCode.USAGE) from None


class LogLines(logging.Handler):
    """Writes the library's warnings, each text once: a judge that refuses a key refuses every call in flight."""

    def __init__(self, write: Callable[[str], None] = say) -> None:
        super().__init__(logging.WARNING)
        self._write = write
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._seen:
            self._seen.add(text)
            self._write(f"{record.levelname.lower()}: {text}")


@contextlib.contextmanager
def log_to(write: Callable[[str], None]) -> Iterator[None]:
    logger, handler = logging.getLogger("freewheel"), LogLines(write)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
