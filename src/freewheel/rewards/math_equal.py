"""Whether two LaTeX answers mean the same, by the `math-verify` library. The math rules call `equal`.

    equal ─▶ remembered? ─▶ one numbered line to the child (`math_child`) ─▶ its reply, or its death

math-verify bounds its time with SIGALRM, which works in a main thread only and cannot interrupt a call into C, and it
does not bound its memory: `1.5E9999999999` held the interpreter for longer than anybody waited, and took 4 GB. A model
boxes such things sooner or later, so the comparison runs in a process that the kernel ends when its time is over. The
next question starts another.

What becomes of a comparison without a result depends on whose fault it is:

- The question's: it used up its CPU time, or crashed or ran out of memory in two processes. It would do so again, so
  this is remembered, and raised as `NotComparable`; the rules score it 0, since nobody can tell what was answered.
- Anything else: a process that was killed (twice, for a fresh one gets a second try), that does not start, that starves
  on a busy machine or says what it should not. That tells nothing of the answer, so it is not remembered, and is raised
  as `ComparisonFailed`: the row has failed, and is not a 0.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import NoReturn

from freewheel.judge.verdict import JudgeError

log = logging.getLogger("freewheel.rewards")

TIMEOUT_S = 3.0
"""CPU time of one comparison. Ordinary ones take milliseconds; those that take a second hardly ever come to an end."""
WALL_S = 30.0
"""For one comparison by the clock: only a machine with ten times the work it can do takes as long."""
START_S = 60.0
"""For a process to start: it imports sympy, perhaps from a cold disk that others read too."""
CLOSE_S = 1.0
"""As long as `close` lets a comparison go on that is under way."""
END_S = 1.0
"""For a process to be gone that was killed, or closed its pipe. Only the kernel can take longer."""
TRIES = 2
"""Processes that a question may end, before one knows that it was no accident, or gives up."""
REMEMBERED = 1 << 14
"""Pairs whose result is kept, monsters included: the responses to one prompt give the same few answers, and a group
that boxes one and the same monster must not pay for it eight times."""

READY = "ready"
"""The child's first line."""
OUT_OF_MEMORY = 3
"""The child's exit code where not even math-verify survived the limit. 1 and 2 are Python's own."""
TIME_IS_OVER = -signal.SIGPROF
CRASHES = frozenset({OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGFPE})
"""Exit codes that a process brings upon itself, by what it was asked. SIGKILL, say, comes from outside."""


class NotComparable(JudgeError, ValueError):
    """Comparing the two takes more time or memory than there is, now and ever again."""


class ComparisonFailed(JudgeError, RuntimeError):
    """The comparison came to no result, for a reason that is not in the two answers. It may succeed the next time."""


def equal(answer: str, truth: str) -> bool:
    """True if the two mean the same. Raises `NotComparable` or `ComparisonFailed`; never hangs.

    Callable from any thread; one comparison runs at a time.
    """
    same = _compared(answer, truth)
    if same is None:
        raise NotComparable(f"comparing {answer[:200]!r} with {truth[:200]!r} takes too much time or memory")
    return same


@functools.lru_cache(maxsize=REMEMBERED)
def _compared(answer: str, truth: str) -> bool | None:
    """None if they are not comparable; an exception is not remembered."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "math answers are compared by math-verify, which is not installed: pip install 'freewheel[math]'",
            name="math_verify",
        )
    return answer == truth or _comparer.ask(answer, truth)


def close(timeout_s: float = CLOSE_S) -> None:
    """Ends the child, if there is one. The next comparison starts another.

    A comparison that is still under way after `timeout_s` is ended too, and raises `ComparisonFailed`.
    """
    _comparer.close(timeout_s)


class _Comparer:
    """Owns the one child of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._broken_off = 0
        """How often `close` did not wait for a comparison."""

    def ask(self, answer: str, truth: str) -> bool | None:
        """None if the two are not comparable."""
        with self._lock:
            broken_off = self._broken_off
            ends: list[int | None] = []
            while len(ends) < TRIES and self._broken_off == broken_off:
                child = self._living()
                if self._broken_off != broken_off:  # meanwhile, and `close` may have missed this child
                    self._end()
                    break
                try:
                    return child.compare(answer, truth)
                except _Ended:
                    ends.append(self._end())
                except BaseException:  # Ctrl-C, say: it is still busy with this question
                    child.process.kill()
                    self._end()
                    raise
                if ends[-1] == TIME_IS_OVER or (len(ends) == TRIES and CRASHES.issuperset(ends)):
                    log.debug("comparing %.200r with %.200r ended its process (exit code %s)", answer, truth, ends[-1])
                    return None
        how = "was broken off by close()"
        if self._broken_off == broken_off:
            how = f"ended its processes (exit codes {ends})"
        raise ComparisonFailed(f"comparing {answer[:200]!r} with {truth[:200]!r} {how}")

    def close(self, timeout_s: float) -> None:
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            self._broken_off += 1  # before the kill: who asks must not try again
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
        """In a forked process: the child is the parent's, and the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        if self._child is not None:
            self._child.close_pipes()
            self._child.process.returncode = 0  # not ours to wait for
            self._child = None

    def _living(self) -> _Child:
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        if self._child is None:
            self._child = _Child()
        return self._child

    def _end(self) -> int | None:
        child, self._child = self._child, None
        return None if child is None else child.end()


class _Ended(Exception):
    """The child ended over a question, or was ended because it did not keep to the protocol."""


class _Child:
    """One process and its pipes. Every wait for it has an end."""

    def __init__(self) -> None:
        replies, replies_of_child = os.pipe()
        self._replies = os.fdopen(replies, "rb", buffering=0)
        self._asked = 0
        self._ready = False
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "freewheel.rewards.math_child", str(replies_of_child), str(TIMEOUT_S)],
                stdin=subprocess.PIPE,
                stdout=2,  # whatever is imported there may print; it must not be taken for a reply
                bufsize=0,
                pass_fds=(replies_of_child,),
                # It looks for modules where this process does.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)},
                start_new_session=True,  # Ctrl-C is for the parent, which may want to finish its batch
            )
        except BaseException:
            self._replies.close()
            raise
        finally:
            os.close(replies_of_child)

    def compare(self, answer: str, truth: str) -> bool:
        """The child's reply. Raises `_Ended`, and `ComparisonFailed` if it did not start or does not reply in time."""
        if not self._ready:
            self._await_start()
        self._asked += 1
        until = time.monotonic() + WALL_S
        try:
            self._say(json.dumps([self._asked, answer, truth]), until)
            heard = self._hear(until)
        except TimeoutError:
            raise ComparisonFailed(
                f"comparing {answer[:200]!r} with {truth[:200]!r} took {WALL_S:g} s, most of it without a processor"
            ) from None
        verdicts = {f"{self._asked} 1": True, f"{self._asked} 0": False}
        if heard not in verdicts:
            self._refuse(heard)
        return verdicts[heard]

    def end(self) -> int | None:
        """Its exit code; it is killed unless it ends by itself."""
        self.close_pipes()
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(END_S)
            self.process.kill()
        log.warning("the process for math-verify (%d) was killed and is not gone yet", self.process.pid)
        return None

    def close_pipes(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._replies.close()

    def _await_start(self) -> None:
        try:
            heard = self._hear(time.monotonic() + START_S)
        except TimeoutError:
            raise ComparisonFailed(f"the process for math-verify did not start within {START_S:g} s") from None
        except _Ended:
            code = self.end()
            raise ComparisonFailed(
                f"the process for math-verify did not start (exit code {code}); stderr says why"
            ) from None
        if heard != READY:
            self._refuse(heard)
        self._ready = True

    def _refuse(self, heard: str) -> NoReturn:
        log.warning("the process for math-verify said %.200r instead of a reply, and is replaced", heard)
        self.process.kill()
        raise _Ended

    def _say(self, line: str, until: float) -> None:
        assert self.process.stdin is not None
        left = memoryview(f"{line}\n".encode())
        while left:
            _wait_for(self.process.stdin.fileno(), select.POLLOUT, until)
            try:
                left = left[os.write(self.process.stdin.fileno(), left[: select.PIPE_BUF]) :]
            except BrokenPipeError:
                raise _Ended from None

    def _hear(self, until: float) -> str:
        """The next line, without its end; all there is, if there are more: nobody asked for those."""
        heard = b""
        while not heard.endswith(b"\n"):
            _wait_for(self._replies.fileno(), select.POLLIN, until)
            some = self._replies.read(select.PIPE_BUF)
            if not some:
                raise _Ended
            heard += some
        return heard[:-1].decode(errors="replace")


def _wait_for(descriptor: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


_comparer = _Comparer()
atexit.register(close)
os.register_at_fork(after_in_child=_comparer.forget)
