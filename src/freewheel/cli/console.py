"""What the commands share: exit codes, messages on stderr, JSON on stdout."""

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
    """It ran to its end, and something in it failed."""
    USAGE = 2
    """A flag, a file or a setting that cannot work."""
    STOPPED = 3
    """It had to stop early and can be continued."""
    BROKEN_PIPE = 141
    """Nobody reads the output any more: 128 + SIGPIPE, as a shell says it."""


def say(text: str) -> None:
    """One line for a person. A stderr that is closed or full does not matter."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"freewheel: {text}\n")
        sys.stderr.flush()


def print_json(value: object) -> None:
    """One JSON object on stdout, indented."""
    print_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_text(text: str) -> None:
    with writing_stdout():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Ends the program when stdout takes no more: in silence when its reader has gone, else with the reason."""
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
    """stdout for those who write to it without `writing_stdout`: Typer, with its help."""

    def write(self, text: str, /) -> int:
        with writing_stdout():
            return super().write(text)

    def flush(self) -> None:
        with writing_stdout():
            super().flush()


@contextlib.contextmanager
def guarded_stdout() -> Iterator[None]:
    """What is written to stdout within is out at the end, or the program has ended and said why not."""
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
    """So that the interpreter's last flush does not meet the trouble again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """A setting that cannot work ends the program with its message and no traceback."""
    try:
        yield
    except ConfigError as error:
        say(f"error: {error}")
        raise typer.Exit(ExitCode.USAGE) from None
    except JudgeError as error:
        say(f"error: {error}")
        raise typer.Exit(ExitCode.STOPPED) from None
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        say(f"error: {error.filename} cannot be read or written ({error.strerror}): change who may, or name another")
        raise typer.Exit(ExitCode.USAGE) from None


class LogLines(logging.Handler):
    """The library's warnings, each text once: a judge that refuses a key refuses every call in flight."""

    def __init__(self, write: Callable[[str], None] = say) -> None:
        super().__init__(logging.WARNING)
        self._write = write
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
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
