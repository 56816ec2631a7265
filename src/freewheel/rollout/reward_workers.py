"""Where reward functions that are not async run: threads of this process, each with a child process if so wished.

    submit ─▶ queue ─▶ thread (─▶ its child ─▶) verdict ─▶ done ─ one wake for all that is ready ─▶ on_done, on the loop

Threads are daemons of our own and not a `ThreadPoolExecutor`: a function that never returns must hold up neither the
next response nor the end of the process. Its thread is written off and another takes its place; a child is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal, NoReturn

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Failed, Verdict
from freewheel.rollout.reward_functions import Call, RewardFunction, failed, from_exception

log = logging.getLogger("freewheel.rollout")

Executor = Literal["thread", "process"]

START_S = 120.0
"""For a child to import the function's module: it may bring torch along, from a cold disk that others read too."""
CLOSE_S = 2.0
"""As long as `close` lets a call go on that is under way."""
PARENT_CHECK_S = 1.0
"""How often a child looks whether its parent is there."""
TRIES = 2
"""Children that a call may end before one knows that it was no accident."""


@dataclass(eq=False)
class Job:
    """One call of the function: a response, or a batch."""

    calls: Sequence[Call]
    done: Callable[[list[Verdict]], None]
    """Called on the loop."""


@dataclass(eq=False)
class _Worker:
    thread: threading.Thread | None = None
    job: Job | None = None
    started_at: float | None = None
    """None while there is no job, or while its child starts."""
    written_off: bool = False
    child: _Child | None = None


RECRUIT_S = 0.01
"""One thread is woken for what comes, and tells of it when all is done; only what it has not done by then is shared by
all, and what it has done is told: a rule takes microseconds, and every wake for it takes the interpreter from the
engine beside it."""


class Workers:
    """Runs jobs on up to `count` threads, started as they are needed. All methods belong to one event loop's thread."""

    def __init__(self, function: RewardFunction, *, count: int, executor: Executor, timeout_s: float) -> None:
        self._function = function
        self._count = count
        self._timeout_s = timeout_s
        self._payload = _pickled(function) if executor == "process" else None
        self._lock = threading.Condition()
        self._queue: deque[Job] = deque()
        self._finished: deque[tuple[Job, list[Verdict]]] = deque()
        self._workers: list[_Worker] = []
        self._idle = 0
        self._wake_sent = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._recruiting: asyncio.TimerHandle | None = None
        self.written_off = 0
        """Threads whose call did not return in time."""
        self.process_deaths = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hands jobs over and returns at once."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        with self._lock:
            self._queue.extend(jobs)
            self._staff(1)
            self._lock.notify(1)
            if len(self._queue) > 1 and self._recruiting is None:
                self._recruiting = self._loop.call_later(RECRUIT_S, self._recruit)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._watch)

    def _recruit(self) -> None:
        """What one thread has not done in a moment is shared by all."""
        with self._lock:
            self._recruiting = None
            self._staff(len(self._queue))
            self._lock.notify(len(self._queue))
        self._deliver()

    def _staff(self, wanted: int) -> None:
        """Under the lock: threads that could take so many jobs now, up to the bound."""
        while wanted > self._idle and len(self._workers) < self._count:
            worker = _Worker()
            worker.thread = threading.Thread(target=self._run, args=(worker,), name="freewheel-reward", daemon=True)
            self._workers.append(worker)
            self._idle += 1
            worker.thread.start()

    async def close(self) -> None:
        """Ends the threads and their children. What is under way for longer than a moment is left behind or killed."""
        for timer in (self._timer, self._recruiting):
            if timer is not None:
                timer.cancel()
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._lock.notify_all()
            workers = list(self._workers)
        await in_thread(lambda: _end(workers, time.monotonic() + CLOSE_S))

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        self._wake_sent = False  # before the look: what comes after it sends a wake of its own
        while self._finished:
            job, verdicts = self._finished.popleft()
            job.done(verdicts)

    def _watch(self) -> None:
        """Gives up on calls whose time is over, and looks again when the next one's may be."""
        assert self._loop is not None
        now = time.monotonic()
        late: list[tuple[_Worker, Job]] = []
        with self._lock:
            for worker in list(self._workers):
                if worker.job is None or worker.started_at is None or now - worker.started_at < self._timeout_s:
                    continue
                late.append((worker, worker.job))
                worker.written_off, worker.job = True, None
                self._workers.remove(worker)
            self.written_off += len(late)
            self._staff(len(self._queue))
            self._lock.notify(len(self._queue))
            running = [w.started_at or now for w in self._workers if w.job is not None]
            again = bool(running or self._queue)
        self._timer = None
        if again and not self._closed:
            due_in = min(running, default=now) + self._timeout_s - now
            self._timer = self._loop.call_later(max(due_in, 0.0), self._watch)
        for worker, job in late:
            if worker.child is not None:
                worker.child.kill()
            job.done([timed_out(self._timeout_s)] * len(job.calls))

    # -- in a thread --------------------------------------------------------------------------------------------------

    def _run(self, worker: _Worker) -> None:
        try:
            while (job := self._next(worker)) is not None:
                try:
                    verdicts = self._execute(worker, job)
                except Exception as error:  # noqa: BLE001  # no process could be started, say: the job must end
                    verdicts = [from_exception(error)] * len(job.calls)
                if not self._finish(worker, job, verdicts):
                    return
        finally:
            if worker.child is not None:
                worker.child.close()

    def _next(self, worker: _Worker) -> Job | None:
        with self._lock:
            while not self._queue and not self._closed:
                self._lock.wait()
            self._idle -= 1
            if self._closed:
                return None
            worker.job = self._queue.popleft()
            worker.started_at = time.monotonic() if self._payload is None else None
            return worker.job

    def _finish(self, worker: _Worker, job: Job, verdicts: list[Verdict]) -> bool:
        with self._lock:
            if worker.written_off:
                return False
            worker.job = worker.started_at = None
            self._idle += 1
            self._finished.append((job, verdicts))
            told_later = self._queue and self._recruiting is not None  # with the rest, or by `_recruit`
            wake = not told_later and not self._wake_sent
            self._wake_sent |= wake
        if wake and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)
        return True

    def _execute(self, worker: _Worker, job: Job) -> list[Verdict]:
        if self._payload is None:
            return self._function.score(job.calls)
        why = ""
        for _ in range(TRIES):
            worker.started_at = None
            try:
                if worker.child is None:
                    worker.child = _Child(self._payload)
                    worker.child.start()
                worker.started_at = time.monotonic()
                return worker.child.ask(job.calls)
            except _ChildDied as death:
                worker.child = None
                why = str(death)
                if worker.written_off or self._closed:
                    break
                self._say_died(why)
        return [failed("process", f"the process that scored it ended: {why}", infra=True)] * len(job.calls)

    def _say_died(self, why: str) -> None:
        """The first time, the tenth and so on."""
        with self._lock:
            self.process_deaths += 1
            count = self.process_deaths
        if str(count).strip("0") == "1":
            log.warning("A reward process ended while it scored (%s), the %d. time; another takes over", why, count)


def timed_out(timeout_s: float) -> Failed:
    return failed("timeout", f"no score within reward.timeout_s = {timeout_s:g} s", infra=True)


async def in_thread(work: Callable[[], None]) -> None:
    """Runs what blocks in a thread that ends with it: the loop's own pool would outlive us."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

    thread = threading.Thread(target=run, name="freewheel-reward-close", daemon=True)
    thread.start()
    await done.wait()
    thread.join()


def _end(workers: Sequence[_Worker], until: float) -> None:
    for worker in workers:
        if worker.thread is not None:
            worker.thread.join(max(0.0, until - time.monotonic()))
    for worker in workers:
        if worker.thread is not None and worker.thread.is_alive():
            if worker.child is not None:
                worker.child.kill()
                worker.thread.join(CLOSE_S)
            else:
                log.warning("A reward function did not return within %g s of the end; its thread is left", CLOSE_S)


# -- a child process --------------------------------------------------------------------------------------------------


class _ChildDied(Exception):
    """The message says how."""


def _pickled(function: RewardFunction) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:  # pickle raises what it likes
        raise ConfigError(
            "reward.executor",
            "process",
            f"{function.name} cannot be sent to another process ({error}): name it as module:name, or choose thread",
        ) from error


@dataclass(eq=False)
class _Child:
    """A process that holds the function. Belongs to one thread; `kill` may come from another."""

    payload: bytes
    _process: subprocess.Popen[bytes] | None = None
    _pipe: Connection[Any, Any] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _killed: bool = False

    def start(self) -> None:
        """Returns when the function is imported there."""
        ours, theirs = Pipe()
        with theirs, self._lock:
            # The child looks for modules where this process does; `-P` keeps its own folder out of that.
            path = os.pathsep.join(entry or "." for entry in sys.path)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "freewheel.rollout.reward_workers",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
            self._pipe = ours
            if self._killed:
                self._process.kill()
        self._send(self.payload)
        if not ours.poll(START_S):
            self.kill()
            self._died(f"it did not start within {START_S:g} s")
        problem = self._receive()
        if problem:
            self.close()
            raise _ChildDied(problem)

    def ask(self, calls: Sequence[Call]) -> list[Verdict]:
        self._send(pickle.dumps(calls))
        found: list[Verdict] = self._receive()
        return found

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """It ends by itself when its pipe does, unless it is busy."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _send(self, data: bytes) -> None:
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(data)
        except OSError:
            self._died("it closed its pipe")

    def _receive(self) -> Any:
        assert self._pipe is not None
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._died("it closed its pipe")

    def _died(self, otherwise: str) -> NoReturn:
        self.close()
        code = self._process.returncode if self._process is not None else None
        raise _ChildDied(f"exit code {code}" if code is not None else otherwise)


def _serve(pipe: Connection[Any, Any]) -> None:
    """The child's life: a function, then calls, until the pipe ends."""
    try:
        function: RewardFunction = pickle.loads(pipe.recv_bytes())
    except Exception as error:  # noqa: BLE001  # a user's module may raise anything
        pipe.send(f"the function could not be loaded there: {type(error).__name__}: {error}")
        return
    pipe.send("")
    while True:
        calls: Sequence[Call] = pickle.loads(pipe.recv_bytes())
        pipe.send(function.score(calls))


def _end_with(parent_pid: int) -> None:
    """A parent that was killed closes the pipe, which a child that is busy does not see."""
    while os.getppid() == parent_pid:
        time.sleep(PARENT_CHECK_S)  # the system tells of the death of children only
    os._exit(1)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group, they are the parent's affair
    file, parent_pid = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError), Connection(file) as end:
        _serve(end)


if __name__ == "__main__":
    _main()
