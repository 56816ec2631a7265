"""`FunctionRunner`: runs a reward function, and gives up on a call that takes too long.

    score(calls) ─▶ async function: a task on this event loop ───────────────────────────┐
                 ─▶ plain function: queue ─▶ thread (─▶ its child process) ─▶ one wake-up ┴▶ [Verdict, …]

The reward stage and the evaluation use it. All public methods belong to the thread of one event loop.

The threads are daemons and not a `ThreadPoolExecutor`: a function that never returns must delay neither the next
response nor the end of the process. Its thread is abandoned and another one takes its place. A child is killed.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal, Self

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Verdict
from freewheel.rollout.reward_functions import Call, RewardFunction, failed, from_exception
from freewheel.utils.processes import end_with

log = logging.getLogger("freewheel.rollout")

Executor = Literal["thread", "process"]

START_S = 120.0
"""How long a child may take to import the function's module: it may import torch from a slow disk."""
CLOSE_S = 2.0
"""How long `close` waits for running calls."""
TRIES = 2
"""A call that has ended this many children has failed. One child may have died by accident."""
RECRUIT_S = 0.01
"""A call wakes one thread, and that thread reports when the queue is empty. After this time all threads share the rest
of the queue, and finished calls are reported. A rule takes microseconds, and each wake-up takes the interpreter away
from the engine."""


def is_power_of_ten(count: int) -> bool:
    """Whether to log this occurrence of something that may happen at every call."""
    return str(count).strip("0") == "1"


async def in_thread(work: Callable[[], None]) -> None:
    """Run blocking work in a thread that ends with it. The loop's own pool may be full, and its threads stay."""
    with ThreadPoolExecutor(1, thread_name_prefix="freewheel-reward-close") as pool:
        await asyncio.get_running_loop().run_in_executor(pool, work)


@dataclass(eq=False)
class _Job:
    """One call of the function: with one response, or with a batch."""

    calls: Sequence[Call]
    answer: asyncio.Future[list[Verdict]]
    """Used on the event loop only."""

    def finish(self, verdicts: list[Verdict]) -> None:
        if not self.answer.done():  # cancelled, or given up on
            self.answer.set_result(verdicts)


class _Worker(threading.Thread):
    def __init__(self, work: Callable[[_Worker], None]) -> None:
        super().__init__(name="freewheel-reward", daemon=True)
        self._work = work
        self.job: _Job | None = None
        self.started_at: float | None = None
        """None if there is no job, or while its child starts."""
        self.abandoned = False
        self.child: _Child | None = None

    def run(self) -> None:
        self._work(self)


class FunctionRunner:
    """Calls a reward function, async or not. A call that takes longer than `timeout_s` fails.

    An async function runs on the event loop. Another runs on `workers` threads, which start with the first call; with
    the executor `process` each thread has a child process that calls the function.
    """

    def __init__(self, function: RewardFunction, *, workers: int, executor: Executor, timeout_s: float) -> None:
        self.function = function
        self.lost_threads = 0
        """Threads that were abandoned because their call did not return in time."""
        self.process_deaths = 0
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[list[Verdict]]] = set()
        self._count = workers
        self._payload = _pickled(function) if executor == "process" and not function.is_async else None
        self._lock = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._finished: deque[tuple[_Job, list[Verdict]]] = deque()
        self._workers: list[_Worker] = []
        self._wake_sent = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._recruiting: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def score(self, calls: Sequence[Call]) -> list[Verdict]:
        """Return a verdict for each call. Only a batch function may be given more than one call."""
        return await (self._run_task(calls) if self.function.is_async else self._submit(calls))

    async def close(self) -> None:
        """End threads, child processes and tasks. Calls that are not done never return."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for timer in (self._timer, self._recruiting):
            if timer is not None:
                timer.cancel()
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._lock.notify_all()
            workers = list(self._workers)
        if workers:
            await in_thread(lambda: _join(workers, time.monotonic() + CLOSE_S))

    async def _run_task(self, calls: Sequence[Call]) -> list[Verdict]:
        task = asyncio.create_task(self.function.score_async(calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
            if not task.done():
                return self._time_out(calls)
        finally:
            task.cancel()  # and do not wait for it: it may ignore the cancellation
        if task.cancelled():
            return [failed("CancelledError", "the function cancelled itself")] * len(calls)
        return task.result()

    def _time_out(self, calls: Sequence[Call]) -> list[Verdict]:
        return [failed("timeout", f"no score within reward.timeout_s = {self._timeout_s:g} s", infra=True)] * len(calls)

    # -- threads: the event loop's side -------------------------------------------------------------------------------

    def _submit(self, calls: Sequence[Call]) -> asyncio.Future[list[Verdict]]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._start_threads()
        job = _Job(calls, self._loop.create_future())
        with self._lock:
            self._queue.append(job)
            if len(self._queue) == 1:
                self._lock.notify(1)
            elif self._recruiting is None:
                self._recruiting = self._loop.call_later(RECRUIT_S, self._recruit)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._watch)
        return job.answer

    def _start_threads(self) -> None:
        """Start threads until there are enough."""
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self._work))
            self._workers[-1].start()

    def _recruit(self) -> None:
        """Wake all threads for the calls that the first thread has not done yet."""
        with self._lock:
            self._recruiting = None
            self._lock.notify(len(self._queue))
        self._deliver()

    def _deliver(self) -> None:
        self._wake_sent = False  # before reading: a call that finishes from here on sends another wake-up
        while self._finished:
            job, verdicts = self._finished.popleft()
            job.finish(verdicts)

    def _watch(self) -> None:
        """Give up on calls that take too long, and come back when the next call may be late."""
        assert self._loop is not None
        now = time.monotonic()
        with self._lock:
            late = [w for w in self._workers if w.started_at is not None and now - w.started_at >= self._timeout_s]
            for worker in late:
                worker.abandoned = True
                self._workers.remove(worker)
            self.lost_threads += len(late)
            self._start_threads()
            self._lock.notify(len(self._queue))
            running = [worker.started_at or now for worker in self._workers if worker.job is not None]
            is_busy = bool(running or self._queue)
        self._timer = None
        if is_busy and not self._closed:
            wait_s = min(running, default=now) + self._timeout_s - now
            self._timer = self._loop.call_later(max(wait_s, 0.0), self._watch)
        for worker in late:
            if worker.child is not None:
                worker.child.process.kill()
            if worker.job is not None:
                worker.job.finish(self._time_out(worker.job.calls))

    # -- threads: their side ------------------------------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        try:
            while not worker.abandoned and (job := self._next(worker)) is not None:
                try:
                    verdicts = self._execute(worker, job)
                except Exception as error:  # noqa: BLE001  # no process could be started, for example: end the job
                    verdicts = [from_exception(error)] * len(job.calls)
                self._finish(worker, job, verdicts)
        finally:
            if worker.child is not None:
                worker.child.close()

    def _next(self, worker: _Worker) -> _Job | None:
        with self._lock:
            while not self._queue and not self._closed:
                self._lock.wait()
            if self._closed:
                return None
            worker.job = self._queue.popleft()
            worker.started_at = time.monotonic() if self._payload is None else None
            return worker.job

    def _finish(self, worker: _Worker, job: _Job, verdicts: list[Verdict]) -> None:
        with self._lock:
            if worker.abandoned:
                return
            worker.job = worker.started_at = None
            self._finished.append((job, verdicts))
            reported_later = self._queue and self._recruiting is not None  # with the rest, or by `_recruit`
            wake = not reported_later and not self._wake_sent
            self._wake_sent |= wake
        if wake and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: its callers are gone
                self._loop.call_soon_threadsafe(self._deliver)

    def _execute(self, worker: _Worker, job: _Job) -> list[Verdict]:
        if self._payload is None:
            return self.function.score(job.calls)
        why = ""
        for _ in range(TRIES):
            worker.started_at = None
            try:
                if worker.child is None:
                    worker.child = _Child()
                    worker.child.load(self._payload)
                worker.started_at = time.monotonic()
                return worker.child.ask(job.calls)
            except _ChildDied as death:
                worker.child = None
                why = str(death)
                if worker.abandoned or self._closed:
                    break
                with self._lock:
                    self.process_deaths += 1
                    count = self.process_deaths
                if is_power_of_ten(count):
                    log.warning("A reward process ended while scoring (%s), %d so far; it is replaced", why, count)
        return [failed("process", f"the process that scored it ended: {why}", infra=True)] * len(job.calls)


def _join(workers: Sequence[_Worker], until: float) -> None:
    for worker in workers:
        worker.join(max(0.0, until - time.monotonic()))
    for worker in workers:
        if worker.is_alive() and worker.child is not None:
            worker.child.process.kill()
            worker.join(CLOSE_S)
        elif worker.is_alive():
            log.warning("A reward function did not return within %g s of the end; its thread is left", CLOSE_S)


# -- a child process --------------------------------------------------------------------------------------------------


class _ChildDied(Exception):
    """The message says how the child ended."""


def _pickled(function: RewardFunction) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:  # noqa: BLE001  # pickle raises what it likes
        try:
            # It pickles lambdas and the functions of a notebook by value.
            import cloudpickle  # type: ignore[import-untyped]

            return bytes(cloudpickle.dumps(function))
        except Exception:  # noqa: BLE001
            remedy = f"{function.name} cannot be sent to another process ({error}): name it as module:name, or choose "
            raise ConfigError("reward.executor", "process", remedy + "thread") from error


class _Child:
    """A process that holds the function. It belongs to one thread; another thread may kill its process."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            # The child looks for modules where this process does; `-P` keeps its working folder out of that.
            path = os.pathsep.join(entry or "." for entry in sys.path)
            arguments = [str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "freewheel.rollout.reward_workers", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )

    def load(self, payload: bytes) -> None:
        """Return when the process has imported the function."""
        problem = self._exchange(payload, START_S)
        if problem:
            self.close()
            raise _ChildDied(problem)

    def ask(self, calls: Sequence[Call]) -> list[Verdict]:
        found: list[Verdict] = self._exchange(pickle.dumps(calls))
        return found

    def close(self) -> None:
        """Close the pipe and wait for the process to end. A busy process is killed."""
        self._pipe.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _exchange(self, data: bytes, timeout_s: float | None = None) -> Any:
        try:
            self._pipe.send_bytes(data)
            if not self._pipe.poll(timeout_s):
                self.process.kill()
            return self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise _ChildDied(f"exit code {self.process.returncode}") from None


def _serve(pipe: Connection[Any, Any]) -> None:
    """Run in the child: receive the function, then calls, until the pipe ends."""
    try:
        function: RewardFunction = pickle.loads(pipe.recv_bytes())
    except Exception as error:  # noqa: BLE001  # a user's module may raise anything
        pipe.send(f"the function could not be loaded there: {type(error).__name__}: {error}")
        return
    pipe.send("")
    while True:
        calls: Sequence[Call] = pickle.loads(pipe.recv_bytes())
        pipe.send(function.score(calls))


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole process group; the parent handles them
    file, parent_pid = map(int, sys.argv[1:])
    end_with(parent_pid)  # a parent that was killed closes the pipe, but a busy child does not see that
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError), Connection(file) as end:
        _serve(end)


if __name__ == "__main__":
    _main()
