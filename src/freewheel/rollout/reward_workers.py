"""`FunctionRunner`: runs a reward function, and gives up on a call that takes too long.

    score(calls) ─▶ async function:    a task on this event loop ────────┬─▶ [Verdict, …]
                 ─▶ executor thread:   queue ─▶ one of `workers` threads ┤
                 ─▶ executor process:  one of `workers` child processes ─┘

The reward stage and the evaluation use it. All public methods belong to one event loop.

The threads are daemons and not a `ThreadPoolExecutor`: a function that never returns must delay neither the next
response nor the end of the process. Its thread is abandoned and another one takes its place. A child is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Self

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Verdict
from freewheel.rollout.reward_functions import Call, RewardFunction, failed
from freewheel.utils.processes import end_with

log = logging.getLogger("freewheel.rollout")

Executor = Literal["thread", "process"]
Verdicts = list[Verdict]

START_S = 120.0
"""How long a child may take to import the function's module: it may import torch from a slow disk."""
CLOSE_S = 2.0
"""How long `close` waits for running calls."""
TRIES = 2
"""A call that has ended this many children has failed. One child may have died by accident."""
LENGTH_BYTES = 8
"""A child's answer starts with its length."""


def is_power_of_ten(count: int) -> bool:
    """Whether to log this occurrence of something that may happen at every call."""
    return str(count).strip("0") == "1"


async def in_thread(work: Callable[[], None]) -> None:
    """Run blocking work in a thread that ends with it. The loop's own pool may be full, and its threads stay."""
    with ThreadPoolExecutor(1, thread_name_prefix="freewheel-reward-close") as pool:
        await asyncio.get_running_loop().run_in_executor(pool, work)


@dataclass(eq=False)
class _Job:
    """One call of the function in a thread: with one response, or with a batch."""

    calls: Sequence[Call]
    answer: asyncio.Future[Verdicts]
    """Used on the event loop only."""
    started_s: float = 0.0

    def finish(self, verdicts: Verdicts) -> None:
        if not self.answer.done():  # otherwise its caller was cancelled
            self.answer.set_result(verdicts)


class FunctionRunner:
    """Calls a reward function, async or not. A call that takes longer than `timeout_s` fails.

    Threads and child processes start when they are needed, up to `workers`.
    """

    def __init__(self, function: RewardFunction, *, workers: int, executor: Executor, timeout_s: float) -> None:
        self.function = function
        self.lost_threads = 0
        """Threads that were abandoned because their call did not return in time."""
        self.process_deaths = 0
        self._timeout_s = timeout_s
        self._workers = workers
        self._tasks: set[asyncio.Task[Verdicts]] = set()
        self._payload = _pickle(function) if executor == "process" and not function.is_async else None
        self._idle_children: list[_Child] = []
        self._child_permits = asyncio.Semaphore(workers)
        # Shared with the threads, under the lock.
        self._lock = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: dict[threading.Thread, _Job] = {}
        self._finished: deque[tuple[_Job, Verdicts]] = deque()
        self._wake_sent = False
        self._closed = False
        # The event loop's own.
        self._threads: set[threading.Thread] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def score(self, calls: Sequence[Call]) -> Verdicts:
        """Return a verdict for each call. Only a batch function may be given more than one call."""
        if self.function.is_async:
            return await self._call_on_loop(calls)
        if self._payload is not None:  # a cancelled caller must not leave half an answer in the child's stream
            return await asyncio.shield(self._start_task(self._call_in_child(calls, self._payload)))
        return await self._submit(calls)

    async def close(self) -> None:
        """End threads, child processes and tasks. Calls that are not done never return."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        children, self._idle_children = self._idle_children, []
        for child in children:
            child.hang_up()
        if self._threads or children:
            await in_thread(lambda: self._wait_for_ends(children))

    def _wait_for_ends(self, children: Sequence[_Child]) -> None:
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                log.warning("A reward function did not return within %g s of the end; its thread is left", CLOSE_S)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until_s - time.monotonic()))
            child.kill()

    def _start_task(self, work: Coroutine[Any, Any, Verdicts]) -> asyncio.Task[Verdicts]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _time_out(self, calls: Sequence[Call]) -> Verdicts:
        return [failed("timeout", f"no score within reward.timeout_s = {self._timeout_s:g} s", infra=True)] * len(calls)

    # -- an async function --------------------------------------------------------------------------------------------

    async def _call_on_loop(self, calls: Sequence[Call]) -> Verdicts:
        task = self._start_task(self.function.score_async(calls))
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
            if not task.done():
                return self._time_out(calls)
        finally:
            task.cancel()  # and do not wait for it: it may ignore the cancellation
        if task.cancelled():
            return [failed("CancelledError", "the function cancelled itself")] * len(calls)
        return task.result()

    # -- threads ------------------------------------------------------------------------------------------------------

    def _submit(self, calls: Sequence[Call]) -> asyncio.Future[Verdicts]:
        loop = asyncio.get_running_loop()
        job = _Job(calls, loop.create_future())
        with self._lock:
            self._queue.append(job)
            self._lock.notify()
        self._start_threads(loop)
        if self._timer is None:
            self._timer = loop.call_later(self._timeout_s, self._watch, loop)
        return job.answer

    def _start_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        while len(self._threads) < self._workers:
            thread = threading.Thread(target=self._work, args=(loop,), name="freewheel-reward", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run in each thread: score until the runner is closed or gives up on the current call."""
        me = threading.current_thread()
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                job = self._running[me] = self._queue.popleft()
                job.started_s = time.monotonic()
            verdicts = self.function.score(job.calls)
            with self._lock:
                if self._running.pop(me, None) is None:  # too late: another thread has taken its place
                    return
                self._finished.append((job, verdicts))
                must_wake, self._wake_sent = not self._wake_sent, True
            if must_wake:
                with contextlib.suppress(RuntimeError):  # the loop has closed: its callers are gone
                    loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._wake_sent = False  # before reading: a call that finishes from here on sends another wake-up
        while self._finished:
            job, verdicts = self._finished.popleft()
            job.finish(verdicts)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up on calls that take too long, and come back when the next call may be late."""
        now = time.monotonic()
        with self._lock:
            late = {thread: job for thread, job in self._running.items() if now - job.started_s >= self._timeout_s}
            for thread in late:
                del self._running[thread]
            oldest_s = min((job.started_s for job in self._running.values()), default=now)
            is_busy = bool(self._running or self._queue)
        self._threads -= late.keys()
        self.lost_threads += len(late)
        self._start_threads(loop)
        self._timer = loop.call_later(oldest_s + self._timeout_s - now, self._watch, loop) if is_busy else None
        for job in late.values():
            job.finish(self._time_out(job.calls))

    # -- child processes ----------------------------------------------------------------------------------------------

    async def _call_in_child(self, calls: Sequence[Call], payload: bytes) -> Verdicts:
        why = ""
        async with self._child_permits:
            for _ in range(TRIES):
                is_new = not self._idle_children
                child = _Child() if is_new else self._idle_children.pop()
                try:
                    if is_new:
                        await child.start(payload)
                    async with asyncio.timeout(self._timeout_s):
                        verdicts = await child.ask(calls)
                except TimeoutError:
                    child.kill()
                    return self._time_out(calls)
                except _ChildDied as death:
                    child.kill()
                    why = str(death)
                    self._count_death(why)
                except BaseException:
                    child.kill()
                    raise
                else:
                    self._idle_children.append(child)
                    return verdicts
        return [failed("process", f"the process that scored it ended: {why}", infra=True)] * len(calls)

    def _count_death(self, why: str) -> None:
        self.process_deaths += 1
        if is_power_of_ten(self.process_deaths):
            log.warning("A reward process ended (%s), %d so far; it is replaced", why, self.process_deaths)


class _ChildDied(Exception):
    """The message says how the child ended."""


def _pickle(function: RewardFunction) -> bytes:
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
    """A process that holds the function and answers one call at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
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

    async def start(self, payload: bytes) -> None:
        """Return when the process has imported the function."""
        self._streams = await asyncio.open_connection(sock=self._socket)
        try:
            async with asyncio.timeout(START_S):
                problem = await self._exchange(payload)
        except TimeoutError:
            problem = f"the function's module was not imported within {START_S:g} s"
        if problem:
            raise _ChildDied(problem)

    async def ask(self, calls: Sequence[Call]) -> Verdicts:
        verdicts: Verdicts = await self._exchange(pickle.dumps(calls))
        return verdicts

    async def _exchange(self, data: bytes) -> Any:
        assert self._streams is not None
        reader, writer = self._streams
        try:
            writer.write(data)
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            return pickle.loads(await reader.readexactly(length))
        except (EOFError, OSError):
            self.kill()
            raise _ChildDied(f"exit code {self.process.returncode}") from None

    def hang_up(self) -> None:
        """Tell the process to end after its current call."""
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()

    def kill(self) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait()


def _serve(stream: io.BufferedRWPair) -> None:
    """Run in the child: receive the function, then calls, until the parent hangs up."""

    def answer(found: str | Verdicts) -> None:
        data = pickle.dumps(found)
        stream.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        stream.flush()

    try:
        function: RewardFunction = pickle.load(stream)
    except Exception as error:  # noqa: BLE001  # a user's module may raise anything
        return answer(f"the function could not be loaded there: {type(error).__name__}: {error}")
    answer("")
    while True:
        answer(function.score(pickle.load(stream)))


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole process group; the parent handles them
    file, parent_pid = map(int, sys.argv[1:])
    end_with(parent_pid)  # a parent that was killed hangs up, but a busy child does not see that
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=file).makefile("rwb") as stream:
        _serve(stream)


if __name__ == "__main__":
    _main()
