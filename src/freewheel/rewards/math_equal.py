"""Whether two LaTeX answers mean the same, according to the `math-verify` library. The math rules call `equal`.

    equal ─▶ in the cache? ─▶ a question to the child process (`serve`) ─▶ its reply, or its death

math-verify limits its time with SIGALRM, which works only in a main thread and cannot interrupt C code, and it does not
limit its memory: `1.5E9999999999` blocked the interpreter and took 4 GB. Models do write such answers, so the
comparison runs in a process that the kernel ends when its time is over. The next question starts another process.

A comparison without a result is one of two things:

- The answer's fault: it used up its CPU time, or crashed or ran out of memory in two processes. It would do so again,
  so this result is cached and raised as `NotComparable`. The rules score it 0.
- Anything else: the process was killed twice, did not start, or got no CPU time on a busy machine. This says nothing
  about the answer, so it is not cached and is raised as `ComparisonFailed`. The row has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from freewheel.judge.verdict import JudgeError
from freewheel.utils.processes import start_child

log = logging.getLogger("freewheel.rewards")

TIMEOUT_S = 3.0
"""CPU time of one comparison. Most take milliseconds; one that takes a second rarely ends."""
WALL_S = 30.0
"""Wall time of one comparison. Only a machine with ten times the load it can handle takes this long."""
START_S = 60.0
"""How long a process may take to start: it imports sympy, perhaps from a slow disk."""
CLOSE_S = 1.0
"""How long `close` waits for a running comparison."""
END_S = 1.0
"""How long a process may take to end after it was killed or its pipe was closed."""
TRIES = 2
"""A question that has ended this many processes is given up. One process may have died by accident."""
REMEMBERED = 1 << 14
"""Cached pairs. Responses to one prompt give the same few answers; also an answer that is not comparable must not be
tried eight times."""
LONGEST_CHARS = 5_000
"""A longer answer is not compared. Up to this, a question fits into the pipe, so sending it never waits."""

OUT_OF_MEMORY = 3
"""The child's exit code after a MemoryError. Python itself uses 1 and 2."""
MEMORY_BYTES = 2 << 30
"""Limit of the child's address space, ten times its normal use."""
TIME_IS_OVER = -signal.SIGPROF
CRASHES = frozenset({OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGFPE})
"""Exit codes that the question itself causes. SIGKILL, for example, comes from outside."""


class NotComparable(JudgeError, ValueError):
    """Comparing the two answers always takes too much time or memory."""


class ComparisonFailed(JudgeError, RuntimeError):
    """The comparison failed for a reason outside the two answers. It may succeed the next time."""


def equal(answer: str, truth: str) -> bool:
    """Return whether the two answers mean the same. Raises `NotComparable` or `ComparisonFailed`; never hangs.

    May be called from any thread. One comparison runs at a time.
    """
    same = _compare(answer, truth)
    if same is None:
        raise NotComparable(f"comparing {answer[:200]!r} with {truth[:200]!r} takes too much time or memory")
    return same


@functools.lru_cache(maxsize=REMEMBERED)
def _compare(answer: str, truth: str) -> bool | None:
    """Return None if the two are not comparable. An exception is not cached."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "math answers are compared by math-verify, which is not installed: pip install 'freewheel[math]'",
            name="math_verify",
        )
    if answer == truth:
        return True
    return _comparer.ask(answer, truth) if max(len(answer), len(truth)) <= LONGEST_CHARS else None


def close(timeout_s: float = CLOSE_S) -> None:
    """End the child process. The next comparison starts another.

    A comparison that still runs after `timeout_s` is ended too and raises `ComparisonFailed`.
    """
    _comparer.close(timeout_s)


class _Comparer:
    """Owns the one child process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._interrupted = 0
        """How often `close` ended a comparison."""

    def ask(self, answer: str, truth: str) -> bool | None:
        """Return None if the two are not comparable."""
        with self._lock:
            interrupted = self._interrupted
            ends: list[int | None] = []
            while len(ends) < TRIES and self._interrupted == interrupted:
                if self._child is not None and self._child.process.poll() is not None:
                    self._end()
                child = self._child = self._child or _Child()
                if self._interrupted != interrupted:  # `close` may have missed this child
                    self._end()
                    break
                try:
                    return child.compare(answer, truth)
                except (EOFError, ConnectionError):
                    ends.append(self._end())
                except BaseException:  # no reply in time, or Ctrl-C: it is still busy with this question
                    child.process.kill()
                    self._end()
                    raise
                if ends[-1] == TIME_IS_OVER or (len(ends) == TRIES and CRASHES.issuperset(ends)):
                    log.debug("comparing %.200r with %.200r ended its process (exit code %s)", answer, truth, ends[-1])
                    return None
        how = "was interrupted by close()"
        if self._interrupted == interrupted:
            how = f"ended its processes (exit codes {ends})"
        raise ComparisonFailed(f"comparing {answer[:200]!r} with {truth[:200]!r} {how}")

    def close(self, timeout_s: float) -> None:
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            self._interrupted += 1  # before the kill: `ask` must not try again
            child = self._child
            if child is not None:
                child.process.kill()
            if not self._lock.acquire(timeout=END_S):
                return
        try:
            self._end()
        finally:
            self._lock.release()

    def forget(self) -> None:
        """Reset in a forked process: the child is the parent's, and a thread of the parent may hold the lock."""
        self._lock = threading.Lock()
        if self._child is not None:
            self._child.pipe.close()
            self._child.process.returncode = 0  # not ours to wait for
            self._child = None

    def _end(self) -> int | None:
        child, self._child = self._child, None
        return None if child is None else child.end()


class _Child:
    """One process and its pipe. Every wait has a time limit."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._ready = False
        try:
            self.process = start_child(
                *("-c", _CHILD, str(theirs.fileno()), str(TIMEOUT_S)),
                stdout=2,  # an imported module may print, and this process may use stdout for data
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that Ctrl-C reaches only the parent, which may finish its batch
            )
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()

    def compare(self, answer: str, truth: str) -> bool:
        """Return the child's reply. Raises `EOFError` or `ConnectionError` if the child ended, and `ComparisonFailed`
        if it does not start or reply in time."""
        if not self._ready:
            self._await_start()
        self.pipe.send_bytes(json.dumps([answer, truth]).encode())
        if not self.pipe.poll(WALL_S):
            raise ComparisonFailed(
                f"comparing {answer[:200]!r} with {truth[:200]!r} took {WALL_S:g} s, mostly waiting for a processor"
            )
        return self.pipe.recv_bytes() == SAME

    def end(self) -> int | None:
        """Return the exit code. The process is killed unless it ends by itself."""
        self.pipe.close()
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(END_S)
            self.process.kill()
        log.warning("the process for math-verify (%d) was killed and has not ended yet", self.process.pid)
        return None

    def _await_start(self) -> None:
        if not self.pipe.poll(START_S):
            raise ComparisonFailed(f"the process for math-verify did not start within {START_S:g} s")
        try:
            self.pipe.recv_bytes()
        except (EOFError, ConnectionError):
            code = self.end()
            raise ComparisonFailed(
                f"the process for math-verify did not start (exit code {code}); stderr says why"
            ) from None
        self._ready = True


# -- the child process ------------------------------------------------------------------------------------------------

READY, SAME, DIFFERENT = b"ready", b"same", b"different"
"""What the child sends: once, and after each question."""

_CHILD = "import sys; from freewheel.rewards.math_equal import serve; serve(int(sys.argv[1]), float(sys.argv[2]))"


def serve(descriptor: int, timeout_s: float) -> None:
    """Run in the child: answer each `["answer", "truth"]` that comes through the pipe.

    The child ends when its parent closes the pipe, and outlives its parent by at most one comparison.
    """
    # The kernel must end this process whatever it is doing, so the signal keeps its default action.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(OSError, ValueError):  # the system may have a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    math_verify = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own timeouts are off

    def parse(answer: str) -> object:
        return math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)

    pipe = Connection(descriptor)
    pipe.send_bytes(READY)
    while True:
        try:
            question = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        answer, truth = json.loads(question)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # CPU time, which does not depend on other processes
        try:
            same = math_verify.verify(parse(truth), parse(answer), timeout_seconds=None)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(SAME if same else DIFFERENT)


_comparer = _Comparer()
atexit.register(close)
os.register_at_fork(after_in_child=_comparer.forget)
