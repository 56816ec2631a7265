"""Puts a job together from two paths: what to read, where to go on, what to keep."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.judge import Judge
from freewheel.judge.scoring.job import Progress, ScoringJob
from freewheel.judge.scoring.lines import Line, Lines
from freewheel.judge.scoring.output import (
    MAX_ROW_BYTES,
    REMEDY,
    FileOutput,
    Output,
    Replacement,
    StreamOutput,
    is_stream,
)
from freewheel.judge.scoring.rows import Fields, RowFormat


@contextlib.contextmanager
def open_job(
    source: str,
    target: str,
    config: JudgeConfig,
    *,
    fields: Fields | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_malformed: Callable[[int, str], None] = lambda line, detail: None,
) -> Iterator[ScoringJob]:
    """A job from `source` to `target` (`-`: stdin, stdout). `ConfigError` where they cannot work."""
    rows = RowFormat(config, fields or Fields())
    if retry_failed and (overwrite or is_stream(target) or not Path(target).exists()):
        raise ConfigError("retry_failed", True, "it needs an output file of an earlier run, and no --overwrite")
    with contextlib.ExitStack() as stack:
        fd, total = _open_source(source, stack)
        output: Output
        found = earlier = None
        if is_stream(target):
            output = StreamOutput(_open_stream(target, stack))
        else:
            _refuse_same_file(fd, target)
            file = output = FileOutput(Path(target))
            stack.callback(file.close)
            if overwrite:
                file.clear()
            found = file.scan(rows)
            if found.last_line and total is None:
                raise ConfigError("input", source, f"a pipe cannot be continued, and {target} has rows; {REMEDY}")
            if retry_failed:
                output, found = Replacement(file), None
                os.lseek(file.fd, 0, os.SEEK_SET)
                earlier = _rows_of(file.fd)
        judge = stack.enter_context(Judge(config))
        yield ScoringJob(
            judge=judge,
            rows=rows,
            source=fd,
            source_bytes=total,
            output=output,
            output_name=target,
            found=found,
            retry_from=earlier,
            on_progress=on_progress,
            on_malformed=on_malformed,
        )


def _open_source(source: str, stack: contextlib.ExitStack) -> tuple[int, int | None]:
    """The descriptor, and its length where it is a file that can be read again."""
    if source == "-":
        return sys.stdin.fileno(), None
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError("input", source, f"it cannot be opened: {error.strerror}") from None
    stack.callback(os.close, fd)
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError("input", source, "it is a folder; give a file of JSON lines")
    return fd, status.st_size if stat.S_ISREG(status.st_mode) else None


def _open_stream(target: str, stack: contextlib.ExitStack) -> int:
    if target == "-":
        return sys.stdout.fileno()
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError("output", target, f"it cannot be opened: {error.strerror}") from None
    stack.callback(os.close, fd)
    return fd


def _refuse_same_file(fd: int, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), Path(target).stat()):
            raise ConfigError("output", target, "it is the input file itself; give another output file")


def _rows_of(fd: int) -> Iterator[Line]:
    """The rows of an earlier output; `FileOutput.scan` has read them before, so they are whole."""
    for block in Lines(fd, max_line_bytes=MAX_ROW_BYTES).blocks():
        yield from block
