"""`ScoringJob`: score a file of rows with a judge into a file of verdicts, in order and in constant memory.

    read_lines ─▶ RowFormat.read ─▶ Judge.submit ─▶ open batches ─▶ verdicts ─▶ StopRule ─▶ RowOutput, on_progress
                                    (a window of rows and bytes)     (oldest first)

Rows are written in the order of the input, so the last row of an output says where a later run continues. Answers
beyond it are in the judge's cache and are not paid for again. There is no terminal here: progress and malformed lines
go to callbacks. The command is `freewheel.cli.score`.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import time
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from freewheel.errors import ConfigError, FreewheelError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.judge import Judge
from freewheel.judge.outcome import INFRA
from freewheel.judge.request import JudgeRequest
from freewheel.judge.row_files import (
    MALFORMED,
    REMEDY,
    AddedFields,
    Fields,
    FileOutput,
    Line,
    MalformedRowError,
    Replacement,
    RowCounts,
    RowFormat,
    RowOutput,
    is_stream,
    read_lines,
)
from freewheel.judge.stats import EndpointStats, JudgeStats
from freewheel.judge.tracker import Handle
from freewheel.judge.verdict import Failed, Reason, Scored, Verdict

OUTAGE_ROWS = 64
"""If this many consecutive rows are lost to an outage, the judge counts as down, even if its endpoint still answers
some calls."""
FIRST_FAILURES = 256
"""If this many rows fail and none is scored, the setup is wrong (rubric, model, a proxy's page), not the rows. The job
stops, so that the rest of a large file is not paid for."""
_WINDOW_ROWS = 8192
"""Rows in flight, as many as the engine accepts, so that the judge's limit never lacks work."""
_WINDOW_BYTES = 64 << 20
"""Text in flight, so that long rows take no more memory than short ones."""
_BATCH_ROWS = 64
"""Rows per submit. A row is written when its batch is done; a larger batch would lose more after a kill without a
cache."""
_BATCH_BYTES = 1 << 20
_TICK_S = 0.1
"""While nothing arrives, a stop request is noticed after at most this time."""
_PROGRESS_EVERY_S = 0.25
"""How often progress is reported: smooth to the eye, and no load for the engine."""

_FATAL = frozenset({Reason.AUTH, Reason.NOT_FOUND, Reason.QUOTA, Reason.BUDGET, Reason.ENGINE, Reason.CANCELLED})
"""Reasons that would make every other row fail too."""
_OUTAGE = frozenset({Reason.UNAVAILABLE, Reason.DEADLINE, Reason.THROTTLED})
"""Reasons that may be due to an outage of the judge, not to the row."""
_SILENCE = frozenset(kind.value for kind in INFRA)
"""Kinds of failed calls that do not show that the endpoint works."""


# -- when to stop -----------------------------------------------------------------------------------------------------


class Ruling(Enum):
    """What to do with a row."""

    WRITE = "write"
    """Its verdict is final."""
    HOLD = "hold"
    """The judge may be down: wait for the next rows before this one counts as failed."""
    STOP = "stop"
    """This row and all held rows stay undecided; a later run asks for them again."""


class StopRule:
    """Decides about each judged row, in order. `why` is the verdict that stopped the job, or the last one that was
    held."""

    def __init__(self, is_down: Callable[[], bool]) -> None:
        self._is_down = is_down
        self._outage_rows = 0
        self._failures = 0
        self._scores = 0
        self.why: Failed | None = None

    def judge(self, verdict: Verdict) -> Ruling:
        if isinstance(verdict, Scored):
            self._scores += 1
            self._outage_rows = 0
        if not isinstance(verdict, Failed):
            return Ruling.WRITE
        if verdict.reason in _FATAL:
            return self._stop(verdict)
        if verdict.reason in _OUTAGE:
            self._outage_rows += 1
            if self._outage_rows >= OUTAGE_ROWS or (self._outage_rows == 1 and self._is_down()):
                return self._stop(verdict)
            self.why = verdict
            return Ruling.HOLD
        self._outage_rows = 0
        self._failures += 1
        if not self._scores and self._failures >= FIRST_FAILURES:
            detail = f"{self._failures} rows failed and none was scored; the last: {verdict.detail}"
            return self._stop(Failed(verdict.reason, verdict.attempts, detail))
        return Ruling.WRITE

    def end(self) -> Ruling:
        """Decide about the held rows after the last row: STOP if the judge is down, else their failures are final."""
        return Ruling.STOP if self._outage_rows and self._is_down() else Ruling.WRITE

    def _stop(self, verdict: Failed) -> Ruling:
        self.why = verdict
        return Ruling.STOP


def is_down(stats: JudgeStats) -> bool:
    """Whether no endpoint works now.

    An endpoint that has been silent since the first call does not work either: a row or two make too few calls to open
    its breaker.
    """

    def is_silent(endpoint: EndpointStats) -> bool:
        return not (endpoint.answered or endpoint.throttled or endpoint.faults.keys() - _SILENCE)

    up = [endpoint for endpoint in stats.endpoints if endpoint.up]
    asked = [endpoint for endpoint in up if endpoint.sent]
    return bool(stats.endpoints) and (not up or (bool(asked) and all(map(is_silent, asked))))


# -- what a job reports -----------------------------------------------------------------------------------------------


class Calls(msgspec.Struct, kw_only=True):
    """This run's calls to the judge."""

    sent: int = 0
    throttled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    restarts: int = 0


class CallsMeter:
    """Adds up the counts of an engine and its restarts, each of which counts from 0. `JudgeStats.cost` does this for
    the cost."""

    _SUMS = ("sent", "throttled", "prompt_tokens", "completion_tokens")

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self._latest: Counter[str] = Counter()

    def update(self, stats: JudgeStats) -> Calls:
        counts = Counter({name: sum(getattr(one, name) for one in stats.endpoints) for name in self._SUMS})
        if counts["sent"] < self._latest["sent"]:  # counters only grow, so lower ones belong to a new engine
            self._before += self._latest
        self._latest = counts
        return Calls(cost=stats.cost, restarts=stats.restarts, **(self._before + counts))


class ScoringProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is."""

    tally: RowCounts
    """Rows written, including those of an earlier run."""
    decided: int
    """Rows with a verdict, written or waiting for an earlier row."""
    bytes_done: int
    """Input bytes of the decided rows; newlines and the share of an open batch are estimates."""
    bytes_total: int | None
    elapsed_s: float
    calls: Calls
    in_flight: int
    limit: int
    """Calls in flight now, and how many the judge's limiter allows."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job ended before its input did."""

    reason: str
    """A verdict's reason (`auth`, `budget`, `unavailable`, …), `interrupted`, `output` or `pipe`."""
    detail: str
    next_line: int
    """The first input line without a row."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job."""

    tally: RowCounts
    before: int
    blank: int
    elapsed_s: float
    calls: Calls
    stopped: Stopped | None = None


# -- the job ----------------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """One input line on its way to its row. `entry` and `row` are known at once if it needs no judge."""

    line: Line
    key: str = ""
    entry: AddedFields | None = None
    row: bytes = b""


class _Batch(NamedTuple):
    slots: list[_Slot]
    requests: list[JudgeRequest]
    size: int


class ScoringJob:
    """Runs once. `stop` may be called from anywhere, including a signal handler."""

    def __init__(
        self,
        source: str,
        target: str,
        config: JudgeConfig,
        *,
        fields: Fields | None = None,
        overwrite: bool = False,
        retry_failed: bool = False,
        on_progress: Callable[[ScoringProgress], None] = lambda progress: None,
        on_malformed: Callable[[int, str], None] = lambda line, detail: None,
    ) -> None:
        """Score the rows of `source` into `target`; `-` is stdin or stdout. Raises `ConfigError` if either cannot be
        used."""
        if retry_failed and (overwrite or is_stream(target) or not Path(target).exists()):
            raise ConfigError("retry_failed", True, "it needs an output file of an earlier run, and no --overwrite")
        self._rows = RowFormat(config, fields or Fields())
        with contextlib.ExitStack() as stack:
            self._source, self._source_bytes = _open_source(source, stack)
            self._output = self._open_output(source, target, stack, overwrite=overwrite, retry_failed=retry_failed)
            self._judge = stack.enter_context(Judge(config))
            self._opened = stack.pop_all()
        self._on_progress = on_progress
        self._on_malformed = on_malformed
        self._tally = self._output.tally
        self._before = self._tally.rows
        self._blank = 0
        self._next_line = self._output.last_line + 1
        self._bytes_done = 0
        self._meter = CallsMeter()
        self._rule = StopRule(lambda: is_down(self._judge.stats()))
        self._started_at = self._reported_at = time.monotonic()
        self._stop_reason = ""
        self._blocks = read_lines(self._source, max(1, self._output.last_line))
        self._has_found_last = not self._output.last_line
        self._unsent: deque[_Batch] = deque()
        """Batches that were read and wait for room in the window."""
        self._open: deque[tuple[_Batch, Handle]] = deque()
        """Submitted batches, oldest first. Each is removed when its rows are written."""
        self._is_fed = False
        """The input has ended, or cannot be read any further."""
        self._error: Exception | None = None
        """Why the input cannot be read any further. It is raised after the rows before the failure are written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def _open_output(
        self, source: str, target: str, stack: contextlib.ExitStack, *, overwrite: bool, retry_failed: bool
    ) -> RowOutput:
        if is_stream(target):
            out = sys.stdout.fileno() if target == "-" else _open("output", target, os.O_WRONLY, stack)
            return RowOutput(out, target)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._source), Path(target).stat()):
                raise ConfigError("output", target, "it is the input file itself; give another output file")
        file = FileOutput(Path(target))
        stack.callback(file.close)
        if overwrite:
            file.cut(0)
        file.scan(self._rows)
        if file.last_line and self._source_bytes is None:
            raise ConfigError("input", source, f"a pipe cannot be continued, and {target} has rows; {REMEDY}")
        return Replacement(file) if retry_failed else file

    def stop(self, reason: str = "interrupted") -> None:
        """End the job soon: submit nothing more, and write the finished rows that come before the first unfinished
        one."""
        self._stop_reason = self._stop_reason or reason

    def run(self) -> Summary:
        """Run until the input ends or the job has to stop. Raises `ConfigError` if the output belongs to another
        input."""
        is_complete = False
        try:
            stopped = self._score()
            if self._error is not None:
                raise self._error
            is_complete = stopped is None
        finally:
            try:
                self._output.finish(is_complete=is_complete)
            finally:
                self._cancel_all()
                self._judge.close()
        return Summary(
            tally=self._tally,
            before=self._before,
            blank=self._blank,
            elapsed_s=time.monotonic() - self._started_at,
            calls=self._meter.update(self._judge.stats()),
            stopped=stopped,
        )

    # -- rows in ------------------------------------------------------------------------------------------------------

    def _feed(self) -> bool:
        """Read a block and submit the batches that fit into the window. Returns whether more can be read at once."""
        try:
            if not self._unsent and not self._is_fed:
                if not select.select([self._source], [], [], 0 if self._open else _TICK_S)[0]:
                    return False  # a pipe without new data
                self._read_block()
            while self._unsent and self._has_room(self._unsent[0]):
                batch = self._unsent.popleft()
                self._open.append((batch, self._judge.submit(batch.requests, deadline_s=None)))
        except (OSError, FreewheelError) as error:
            self._error, self._is_fed = error, True
            self._unsent.clear()
        return not (self._unsent or self._is_fed)

    def _has_room(self, batch: _Batch) -> bool:
        rows = sum(len(one.slots) for one, _ in self._open) + len(batch.slots)
        size = sum(one.size for one, _ in self._open) + batch.size
        return not self._open or (rows <= _WINDOW_ROWS and size <= _WINDOW_BYTES)

    def _read_block(self) -> None:
        """Read some lines and divide them into batches."""
        last, earlier = self._output.last_line, self._output.earlier
        block = next(self._blocks, None)
        if block is None:
            self._is_fed = True
            if not self._has_found_last or (earlier is not None and next(earlier, None) is not None):
                remedy = f"the input ends before the line of its last row; {REMEDY}"
                raise ConfigError("output", self._output.name, remedy)
            return
        batch = _Batch([], [], 0)
        for line in block:
            if line.number == 1:
                line = line._replace(text=line.text.removeprefix(BOM_UTF8))
            if line.number == last:
                if self._key_of(line) != self._output.last_key:
                    raise self._other_input(line.number)
                self._bytes_done = line.end
                self._has_found_last = True
                continue
            if not line.is_too_long and not line.text.strip():
                self._blank += 1
                continue
            batch.slots.append(self._make_slot(line, batch.requests))
            batch = batch._replace(size=batch.size + len(line.text))
            if len(batch.slots) == _BATCH_ROWS or batch.size >= _BATCH_BYTES:
                self._unsent.append(batch)
                batch = _Batch([], [], 0)
        if batch.slots:
            self._unsent.append(batch)

    def _other_input(self, line: int) -> ConfigError:
        remedy = f"its row of line {line} was written for another input, rubric or model; {REMEDY}"
        return ConfigError("output", self._output.name, remedy)

    def _key_of(self, line: Line) -> str:
        try:
            return self._rows.key(self._rows.read(line))
        except MalformedRowError as error:
            return self._rows.malformed_entry(line, str(error)).key

    def _make_slot(self, line: Line, requests: list[JudgeRequest]) -> _Slot:
        """Decide what to do with a line. If it needs a judge, its request joins `requests`."""
        earlier = next(self._output.earlier, None) if self._output.earlier is not None else None
        entry = self._rows.read_written(earlier.text) if earlier is not None else None
        if entry is not None and entry.line != line.number:
            raise self._other_input(line.number)
        try:
            request = self._rows.read(line)
        except MalformedRowError as error:
            self._on_malformed(line.number, str(error))
            malformed = self._rows.malformed_entry(line, str(error))
            return _Slot(line, entry=malformed, row=self._rows.write(line, malformed))
        key = self._rows.key(request)
        if entry is not None and earlier is not None and entry.reason != MALFORMED:
            if entry.key != key:
                raise self._other_input(line.number)
            if entry.status != "failed":
                return _Slot(line, entry=entry, row=earlier.text + b"\n")
        requests.append(request)
        return _Slot(line, key)

    # -- rows out -----------------------------------------------------------------------------------------------------

    def _score(self) -> Stopped | None:
        held: list[_Slot] = []
        while self._open or not (self._stop_reason or (self._is_fed and not self._unsent)):
            may_read = not self._stop_reason and self._feed()
            self._report()
            if self._stop_reason:
                self._cancel_all()
            if not self._open or not self._open[0][1].wait(0 if may_read else _TICK_S):
                continue
            batch, handle = self._open[0]
            ready: list[_Slot] = []
            verdicts = iter(handle.result())
            ruling = Ruling.WRITE
            for slot in batch.slots:
                if slot.entry is None:
                    verdict = next(verdicts)
                    ruling = self._rule.judge(verdict)
                    if ruling is Ruling.STOP:
                        break
                    entry = AddedFields.of(slot.line.number, slot.key, verdict)
                    held.append(slot._replace(entry=entry, row=self._rows.write(slot.line, entry)))
                else:
                    ruling = Ruling.WRITE
                    held.append(slot)
                if ruling is Ruling.WRITE:
                    ready += held
                    held = []
            if (problem := self._write(ready)) is not None:
                return problem
            if ruling is Ruling.STOP:
                return self._stopped()
            self._open.popleft()
        if self._error is None and self._rule.end() is Ruling.STOP:
            return self._stopped()
        if (problem := self._write(held)) is not None:
            return problem
        return self._stopped() if self._stop_reason else None

    def _write(self, ready: list[_Slot]) -> Stopped | None:
        if not ready:
            return None
        try:
            self._output.append(b"".join(slot.row for slot in ready))
        except OSError as error:
            reason = "pipe" if isinstance(error, BrokenPipeError) else "output"
            return Stopped(reason=reason, detail=str(error.strerror), next_line=self._next_line)
        for slot in ready:
            assert slot.entry is not None
            self._tally.count(slot.entry)
        last = ready[-1].line
        self._next_line, self._bytes_done = last.number + 1, last.end
        return None

    def _stopped(self) -> Stopped:
        why = self._rule.why or Failed("engine")
        if self._stop_reason:
            why = Failed(self._stop_reason)
        return Stopped(reason=why.reason, detail=why.detail, next_line=self._next_line)

    def _cancel_all(self) -> None:
        for _, handle in reversed(self._open):  # the oldest holds the slots: nothing may be left that could take them
            handle.cancel()

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < _PROGRESS_EVERY_S:
            return
        self._reported_at = now
        open_batches = [(batch.size, handle.progress()) for batch, handle in self._open]
        stats = self._judge.stats()
        self._on_progress(
            ScoringProgress(
                tally=self._tally,
                decided=self._tally.rows + sum(progress.done for _, progress in open_batches),
                bytes_done=self._bytes_done + sum(round(size * progress.share) for size, progress in open_batches),
                bytes_total=self._source_bytes,
                elapsed_s=now - self._started_at,
                calls=self._meter.update(stats),
                in_flight=stats.in_flight,
                limit=stats.limit,
            )
        )


def _open_source(source: str, stack: contextlib.ExitStack) -> tuple[int, int | None]:
    """Return the descriptor, and the size if the source is a regular file."""
    if source == "-":
        return sys.stdin.fileno(), None
    fd = _open("input", source, os.O_RDONLY, stack)
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError("input", source, "it is a folder; give a file of JSON lines")
    return fd, status.st_size if stat.S_ISREG(status.st_mode) else None


def _open(key: str, path: str, flags: int, stack: contextlib.ExitStack) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(key, path, f"it cannot be opened: {error.strerror}") from None
    stack.callback(os.close, fd)
    return fd
