"""`ScoringJob`: score a file of rows with a judge into a file of verdicts, in order and in constant memory.

    feeder thread:  Lines ─▶ RowFormat.read ─▶ Judge.submit ─▶ queue      waits for room in the window
    main thread:    queue ─▶ verdicts ─▶ StopRule ─▶ Output               waits for the oldest batch
    ticker thread:  Judge.stats ─▶ on_progress                           a few times a second

Rows are written in the order of the input, so the last row of an output says where a later run continues. Answers
beyond it are in the judge's cache and are not paid for again. There is no terminal here: progress and malformed lines
go to callbacks. The command is `freewheel.cli.score`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import msgspec

from freewheel.errors import ConfigError, FreewheelError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.judge import Judge
from freewheel.judge.outcome import INFRA
from freewheel.judge.request import JudgeRequest
from freewheel.judge.row_files import (
    MALFORMED,
    REMEDY,
    UTF8_BOM,
    Fields,
    FileOutput,
    Found,
    Line,
    Lines,
    MalformedRowError,
    Output,
    Replacement,
    RowFormat,
    Tally,
    WrittenEntry,
    is_blank,
    is_stream,
)
from freewheel.judge.stats import EndpointStats, JudgeStats
from freewheel.judge.tracker import Handle
from freewheel.judge.verdict import Failed, Reason, Scored, Verdict

OUTAGE_ROWS = 64
"""So many consecutive rows lost to an outage mean that the judge is down, even if its endpoint shows signs of life."""
FIRST_FAILURES = 256
"""So many failures without a single score mean that the setup is wrong (rubric, model, a proxy's page), not the rows.
The rest of a large file must not be paid for."""
WINDOW_ROWS = 8192
"""Rows in flight, as many as the engine accepts, so that the judge's limit never lacks work."""
WINDOW_BYTES = 64 << 20
"""Text in flight, so that long rows take no more memory than short ones."""
BATCH_ROWS = 64
"""Rows per submit. A row is written when its batch is done; a larger batch would lose more after a kill without a
cache."""
BATCH_BYTES = 1 << 20
TICK_S = 0.1
"""How long a stop may go unnoticed while nothing arrives."""
PROGRESS_EVERY_S = 0.25
"""How often progress is reported: smooth to the eye, and no load for the engine."""

_FATAL = frozenset({Reason.AUTH, Reason.NOT_FOUND, Reason.QUOTA, Reason.BUDGET, Reason.ENGINE, Reason.CANCELLED})
"""No other row would fare better."""
_OUTAGE = frozenset({Reason.UNAVAILABLE, Reason.DEADLINE, Reason.THROTTLED})
"""Says as much about the judge as about the row."""
_SILENCE = frozenset(kind.value for kind in INFRA)
"""Failed calls that are no sign of life."""


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
    """Decides about each judged row, in order. `why` is the verdict that stopped it."""

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
        """After the last row, decide whether the held rows failed by themselves."""
        return Ruling.STOP if self._outage_rows and self._is_down() else Ruling.WRITE

    def _stop(self, verdict: Failed) -> Ruling:
        self.why = verdict
        return Ruling.STOP


def is_down(stats: JudgeStats) -> bool:
    """Whether no endpoint works now.

    An endpoint that has been silent since the first call does not work either: a row or two make too few calls to open
    its breaker.
    """
    asked = [endpoint for endpoint in stats.endpoints if endpoint.up and endpoint.sent]
    if asked and all(map(_is_silent, asked)):
        return True
    return bool(stats.endpoints) and not any(endpoint.up for endpoint in stats.endpoints)


def _is_silent(endpoint: EndpointStats) -> bool:
    return not (endpoint.answered or endpoint.throttled or endpoint.faults.keys() - _SILENCE)


# -- what a job reports -----------------------------------------------------------------------------------------------


class Calls(msgspec.Struct, kw_only=True):
    """This run's calls of the judge; `in_flight` and `limit` are of this moment."""

    sent: int = 0
    throttled: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    restarts: int = 0
    in_flight: int = 0
    limit: int = 0


class CallsMeter:
    """Adds up an engine's counts over its restarts, each of which starts at 0. The cost is added up elsewhere."""

    _SUMS = ("sent", "throttled", "prompt_tokens", "completion_tokens")

    def __init__(self) -> None:
        self._before = Calls()
        self._latest = Calls()

    def update(self, stats: JudgeStats) -> Calls:
        sums = {name: sum(getattr(endpoint, name) for endpoint in stats.endpoints) for name in self._SUMS}
        # Counters only grow, so lower ones belong to a new engine.
        if sums["sent"] + self._before.sent < self._latest.sent:
            self._before = self._latest
        for name in self._SUMS:
            sums[name] += getattr(self._before, name)
        self._latest = Calls(
            **sums, cost=stats.cost, restarts=stats.restarts, in_flight=stats.in_flight, limit=stats.limit
        )
        return self._latest


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job is."""

    tally: Tally
    """Rows written, including those of an earlier run."""
    decided: int
    """Rows with a verdict, written or waiting for an earlier row."""
    before: int
    """Of these, the rows that an earlier run wrote."""
    bytes_done: int
    """Input bytes of the decided rows; newlines and the share of an open batch are estimates."""
    bytes_total: int | None
    elapsed_s: float
    calls: Calls


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job ended before its input did."""

    reason: str
    """A verdict's reason (`auth`, `budget`, `unavailable`, …), `interrupted`, `output` or `pipe`."""
    detail: str
    next_line: int
    """The first input line without a row."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job."""

    tally: Tally
    before: int
    blank: int
    elapsed_s: float
    calls: Calls
    stopped: Stopped | None = None


# -- the job ----------------------------------------------------------------------------------------------------------


class _Slot(NamedTuple):
    """One input line on its way to its row."""

    line: Line
    key: str = ""
    row: bytes | None = None
    """The row, if it needs no judge."""
    kept: WrittenEntry | None = None
    """The entry in `row`, if an earlier run wrote it."""


class _Batch(NamedTuple):
    slots: list[_Slot]
    handle: Handle
    size: int


class ScoringJob:
    """Runs once. `stop` may be called from anywhere, including a signal handler."""

    def __init__(
        self,
        *,
        judge: Judge,
        rows: RowFormat,
        source: int,
        source_bytes: int | None,
        output: Output,
        output_name: str = "-",
        found: Found | None = None,
        retry_from: Iterator[Line] | None = None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_malformed: Callable[[int, str], None] = lambda line, detail: None,
    ) -> None:
        """`found`: the content of `output`. `retry_from`: the rows of an earlier output, to keep or to score again."""
        self._judge = judge
        self._rows = rows
        self._lines = Lines(source)
        self._source_bytes = source_bytes
        self._output = output
        self._output_name = output_name
        self._found = found or Found(Tally(), 0, "")
        self._retry_from = retry_from
        self._on_progress = on_progress
        self._on_malformed = on_malformed
        self._tally = self._found.tally
        self._before = self._tally.rows
        self._blank = 0
        self._next_line = self._found.last_line + 1
        self._bytes_done = 0
        self._meter = CallsMeter()
        self._rule = StopRule(lambda: is_down(judge.stats()))
        self._changed = threading.Condition()
        self._queue: deque[_Batch] = deque()
        self._rows_out = 0
        self._bytes_out = 0
        self._fed = False
        self._feed_error: BaseException | None = None
        self._current: _Batch | None = None
        self._stop_reason = ""
        self._ended = threading.Event()

    def stop(self, reason: str = "interrupted") -> None:
        """End the job soon: submit nothing more, and write the rows that are contiguous."""
        self._stop_reason = self._stop_reason or reason

    def run(self) -> Summary:
        """Run to the end of the input or a reason to stop. `ConfigError` if the output belongs to another input."""
        started_at = time.monotonic()
        feeder = threading.Thread(target=self._feed, name="freewheel-score-feeder", daemon=True)
        ticker = threading.Thread(target=self._tick, args=(started_at,), name="freewheel-score-ticker", daemon=True)
        feeder.start()
        ticker.start()
        is_complete = False
        try:
            stopped = self._drain()
            if self._feed_error is not None:
                raise self._feed_error
            is_complete = stopped is None
        finally:
            try:
                if is_complete:
                    self._output.finish()
                else:
                    self._output.abandon()
            finally:
                self._cancel_all()
                self._ended.set()
                ticker.join()
                self._judge.close()
        return Summary(
            tally=self._tally,
            before=self._before,
            blank=self._blank,
            elapsed_s=time.monotonic() - started_at,
            calls=self._meter.update(self._judge.stats()),
            stopped=stopped,
        )

    # -- the feeder's thread ------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        try:
            self._read_all()
        except (OSError, FreewheelError) as error:
            self._feed_error = error
        finally:
            with self._changed:
                self._fed = True
                self._changed.notify_all()

    def _read_all(self) -> None:
        last = self._found.last_line
        has_found_last = not last
        for block in self._lines.blocks(max(1, last)):
            slots: list[_Slot] = []
            requests: list[JudgeRequest] = []
            size = 0
            for line in block:
                if line.number == 1 and line.text.startswith(UTF8_BOM):
                    line = line._replace(text=line.text[len(UTF8_BOM) :])
                if line.number == last:
                    if self._key_of(line) != self._found.last_key:
                        raise self._other_input(line.number)
                    self._bytes_done = line.end  # nothing is submitted yet, so the main thread does not touch it
                    has_found_last = True
                    continue
                if not line.too_long and is_blank(line.text):
                    self._blank += 1
                    continue
                slots.append(self._slot(line, requests))
                size += len(line.text)
                if len(slots) == BATCH_ROWS or size >= BATCH_BYTES:
                    if not self._submit(slots, requests, size):
                        return
                    slots, requests, size = [], [], 0
            if slots and not self._submit(slots, requests, size):
                return
        if not has_found_last or (self._retry_from is not None and next(self._retry_from, None) is not None):
            remedy = f"the input ends before the line of its last row; {REMEDY}"
            raise ConfigError("output", self._output_name, remedy)

    def _other_input(self, line: int) -> ConfigError:
        remedy = f"its row of line {line} belongs to another input, rubric or model than is given now; {REMEDY}"
        return ConfigError("output", self._output_name, remedy)

    def _key_of(self, line: Line) -> str:
        try:
            return self._rows.key(self._rows.read(line))
        except MalformedRowError:
            return self._rows.malformed_key(line)

    def _slot(self, line: Line, requests: list[JudgeRequest]) -> _Slot:
        """Decide what to do with a line. If it needs a judge, its request joins `requests`."""
        earlier = next(self._retry_from, None) if self._retry_from is not None else None
        entry = self._rows.read_written(earlier.text) if earlier is not None else None
        if entry is not None and entry.line != line.number:
            raise self._other_input(line.number)
        try:
            request = self._rows.read(line)
        except MalformedRowError as error:
            self._on_malformed(line.number, str(error))
            return _Slot(line, row=self._rows.write_malformed(line, str(error)))
        key = self._rows.key(request)
        if entry is not None and earlier is not None and entry.reason != MALFORMED:
            if entry.key != key:
                raise self._other_input(line.number)
            if entry.status != "failed":
                return _Slot(line, row=earlier.text + b"\n", kept=entry)
        requests.append(request)
        return _Slot(line, key)

    def _submit(self, slots: list[_Slot], requests: list[JudgeRequest], size: int) -> bool:
        """Submit a batch once the window has room. False: the job stops."""
        with self._changed:
            while not (self._ended.is_set() or self._stop_reason):
                has_room = self._rows_out + len(slots) <= WINDOW_ROWS and self._bytes_out + size <= WINDOW_BYTES
                if has_room or not self._rows_out:
                    handle = self._judge.submit(requests, deadline_s=None)
                    self._queue.append(_Batch(slots, handle, size))
                    self._rows_out += len(slots)
                    self._bytes_out += size
                    self._changed.notify_all()
                    return True
                self._changed.wait(TICK_S)
        return False

    # -- the main thread ----------------------------------------------------------------------------------------------

    def _drain(self) -> Stopped | None:
        held: list[tuple[_Slot, Verdict | None, bytes]] = []
        while (batch := self._next_batch()) is not None:
            ready: list[tuple[_Slot, Verdict | None, bytes]] = []
            verdicts = iter(self._wait_for_verdicts(batch))
            ruling = Ruling.WRITE
            for slot in batch.slots:
                row: tuple[_Slot, Verdict | None, bytes]
                if slot.row is not None:
                    ruling, row = Ruling.WRITE, (slot, None, slot.row)
                else:
                    verdict = next(verdicts)
                    ruling = self._rule.judge(verdict)
                    if ruling is Ruling.STOP:
                        break
                    row = (slot, verdict, self._rows.write(slot.line, slot.key, verdict))
                held.append(row)
                if ruling is Ruling.WRITE:
                    ready += held
                    held = []
            if (problem := self._write(ready)) is not None:
                return problem
            if ruling is Ruling.STOP:
                return self._stopped()
            self._current = None
            with self._changed:
                self._rows_out -= len(batch.slots)
                self._bytes_out -= batch.size
                self._changed.notify_all()
        if self._feed_error is None and self._rule.end() is Ruling.STOP:
            return self._stopped()
        if (problem := self._write(held)) is not None:
            return problem
        return self._stopped() if self._stop_reason else None

    def _next_batch(self) -> _Batch | None:
        """The oldest batch. None at the end of the input, or if the job must stop."""
        with self._changed:
            while not self._queue:
                if self._fed or self._stop_reason:
                    return None
                self._changed.wait(TICK_S)
            self._current = self._queue.popleft()
            return self._current

    def _wait_for_verdicts(self, batch: _Batch) -> list[Verdict]:
        while not batch.handle.wait(TICK_S):
            if self._stop_reason:
                self._cancel_all()
        return batch.handle.result()

    def _write(self, ready: list[tuple[_Slot, Verdict | None, bytes]]) -> Stopped | None:
        if not ready:
            return None
        try:
            self._output.append(b"".join(row for _, _, row in ready))
        except OSError as error:
            reason = "pipe" if isinstance(error, BrokenPipeError) else "output"
            return Stopped(reason=reason, detail=str(error.strerror), next_line=self._next_line)
        for slot, verdict, _ in ready:
            if verdict is not None:
                self._tally.count(verdict, slot.line.number)
            elif slot.kept is not None:
                self._tally.count_written(slot.kept)
            else:
                self._tally.malformed += 1
        last = ready[-1][0].line
        self._next_line, self._bytes_done = last.number + 1, last.end
        return None

    def _stopped(self) -> Stopped:
        if self._stop_reason:
            return Stopped(reason=self._stop_reason, detail="", next_line=self._next_line)
        why = self._rule.why or Failed("engine")
        return Stopped(reason=why.reason, detail=why.detail, next_line=self._next_line)

    def _open_batches(self) -> list[_Batch]:
        with self._changed:
            return [*self._queue, *([self._current] if self._current is not None else [])]

    def _cancel_all(self) -> None:
        for batch in self._open_batches():
            batch.handle.cancel()

    # -- the ticker's thread ------------------------------------------------------------------------------------------

    def _tick(self, started_at: float) -> None:
        while not self._ended.wait(PROGRESS_EVERY_S):
            open_batches = [(batch, batch.handle.progress()) for batch in self._open_batches()]
            waiting = sum(progress.done for _, progress in open_batches)
            waiting_bytes = sum(round(batch.size * progress.share) for batch, progress in open_batches)
            self._on_progress(
                Progress(
                    tally=self._tally,
                    decided=self._tally.rows + waiting,
                    before=self._before,
                    bytes_done=self._bytes_done + waiting_bytes,
                    bytes_total=self._source_bytes,
                    elapsed_s=time.monotonic() - started_at,
                    calls=self._meter.update(self._judge.stats()),
                )
            )


# -- opening a job ----------------------------------------------------------------------------------------------------


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
    """A job from `source` to `target`; `-` is stdin or stdout. `ConfigError` if they cannot work."""
    rows = RowFormat(config, fields or Fields())
    if retry_failed and (overwrite or is_stream(target) or not Path(target).exists()):
        raise ConfigError("retry_failed", True, "it needs an output file of an earlier run, and no --overwrite")
    with contextlib.ExitStack() as stack:
        fd, total = _open_source(source, stack)
        output: Output
        found = earlier = None
        if is_stream(target):
            output = Output(sys.stdout.fileno() if target == "-" else _open("output", target, os.O_WRONLY, stack))
        else:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), Path(target).stat()):
                    raise ConfigError("output", target, "it is the input file itself; give another output file")
            file = output = FileOutput(Path(target))
            stack.callback(file.close)
            if overwrite:
                file.clear()
            found = file.scan(rows)
            if found.last_line and total is None:
                raise ConfigError("input", source, f"a pipe cannot be continued, and {target} has rows; {REMEDY}")
            if retry_failed:
                output, found, earlier = Replacement(file), None, file.read_rows()
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
    """The descriptor, and the length if it is a file that can be read again."""
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
