"""`FunctionRunner`: runs a reward function, and gives up on a call that takes too long.

    score(calls) ─▶ async function:    a task on this event loop ────────┬─▶ [Verdict, …]
                 ─▶ executor thread:   one of `workers` threads ─────────┤
                 ─▶ executor process:  one of `workers` child processes ─┘

The reward stage and the evaluation use it. All public methods belong to one event loop.

A function that never returns must delay neither the next response nor the end of the process. So the threads are
daemons and not a `ThreadPoolExecutor`: a late call's thread is abandoned, and another one replaces it. A late call's
child is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

from freewheel.errors import ConfigError
from freewheel.judge.verdict import Verdict
from freewheel.rollout.reward_functions import Call, RewardFunction, failed
from freewheel.utils.processes import end_with, start_child

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
        self._payload = _pickle(function) if executor == "process" and not function.is_async else None
        self._tasks: set[asyncio.Task[Verdicts]] = set()
        self._permits = asyncio.Semaphore(workers)
        self._workers: set[_Thread | _Child] = set()
        self._idle: list[_Thread | _Child] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def score(self, calls: Sequence[Call]) -> Verdicts:
        """Return a verdict for each call. Only a batch function may be given more than one call."""
        if self.function.is_async:
            return await self._call_on_loop(calls)
        # A cancelled caller must not leave a worker in the middle of a call.
        return await asyncio.shield(self._start_task(self._call_worker(calls)))

    async def close(self) -> None:
        """End threads, child processes and tasks. Calls that are not done never return."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        workers, self._workers = self._workers, set()
        self._idle.clear()
        for worker in workers:
            worker.hang_up()
        if workers:
            await in_thread(lambda: _wait_for_ends(workers))

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

    # -- threads and child processes ----------------------------------------------------------------------------------

    async def _call_worker(self, calls: Sequence[Call]) -> Verdicts:
        why = ""
        async with self._permits:
            for _ in range(TRIES):
                worker = self._idle.pop() if self._idle else self._make_worker()
                try:
                    await worker.start()
                    async with asyncio.timeout(self._timeout_s):
                        verdicts = await worker.ask(calls)
                except TimeoutError:
                    self._drop(worker)
                    self.lost_threads += isinstance(worker, _Thread)
                    return self._time_out(calls)
                except _ChildDied as death:
                    self._drop(worker)
                    why = str(death)
                    self._count_death(why)
                else:
                    self._idle.append(worker)
                    return verdicts
        return [failed("process", f"the process that scored it ended: {why}", infra=True)] * len(calls)

    def _make_worker(self) -> _Thread | _Child:
        worker = _Thread(self.function) if self._payload is None else _Child(self._payload)
        self._workers.add(worker)
        return worker

    def _drop(self, worker: _Thread | _Child) -> None:
        self._workers.discard(worker)
        worker.kill()

    def _count_death(self, why: str) -> None:
        self.process_deaths += 1
        if is_power_of_ten(self.process_deaths):
            log.warning("A reward process ended (%s), %d so far; it is replaced", why, self.process_deaths)


def _wait_for_ends(workers: Iterable[_Thread | _Child]) -> None:
    until_s = time.monotonic() + CLOSE_S
    for worker in workers:
        worker.wait(max(0.0, until_s - time.monotonic()))


class _Thread:
    """A thread that holds the function and answers one call at a time."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._calls: queue.SimpleQueue[tuple[Sequence[Call], asyncio.Future[Verdicts]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="freewheel-reward", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        pass

    async def ask(self, calls: Sequence[Call]) -> Verdicts:
        answer: asyncio.Future[Verdicts] = asyncio.get_running_loop().create_future()
        self._calls.put((calls, answer))
        return await answer

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            calls, answer = job
            verdicts = self._function.score(calls)
            with contextlib.suppress(RuntimeError):  # the loop has closed: its callers are gone
                answer.get_loop().call_soon_threadsafe(_finish, answer, verdicts)

    def hang_up(self) -> None:
        """Tell the thread to end after its current call."""
        self._calls.put(None)

    kill = hang_up
    """A thread cannot be killed."""

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("A reward function did not return within %g s of the end; its thread keeps running", CLOSE_S)


def _finish(answer: asyncio.Future[Verdicts], verdicts: Verdicts) -> None:
    if not answer.done():  # otherwise the call was given up
        answer.set_result(verdicts)


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

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._socket, theirs = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid())]
            self._process = start_child(
                "-m", "freewheel.rollout.reward_workers", *arguments, pass_fds=[theirs.fileno()]
            )

    async def start(self) -> None:
        """Return when the process has imported the function."""
        if self._streams is not None:
            return
        self._streams = await asyncio.open_connection(sock=self._socket)
        try:
            async with asyncio.timeout(START_S):
                problem = await self._exchange(self._payload)
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
            raise _ChildDied(f"exit code {self._process.returncode}") from None

    def hang_up(self) -> None:
        """Tell the process to end after its current call."""
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._socket.close()

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        self.hang_up()
        self._process.kill()
        self._process.wait()


def _serve(stream: io.BufferedRWPair) -> None:
    """Run in the child: receive the function, then calls, until the parent closes the pipe."""

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
    end_with(parent_pid)  # the pipe of a killed parent closes, but a busy child does not notice
    with contextlib.suppress(EOFError, OSError), socket.socket(fileno=file).makefile("rwb") as stream:
        _serve(stream)


if __name__ == "__main__":
    _main()
