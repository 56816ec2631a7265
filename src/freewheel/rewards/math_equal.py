"""Whether two LaTeX answers mean the same, by the `math-verify` library. The math rules call `equal`.

    equal ─▶ remembered? ─▶ one line to the child (`math_child`) ─▶ its reply, or its death

math-verify bounds its time with SIGALRM, which works in a main thread only and cannot interrupt a call into C, and it
does not bound its memory: `1.5E9999999999` held the interpreter for longer than anybody waited, and took 4 GB. A model
boxes such things sooner or later, so the comparison runs in a process that the kernel ends when its time is over. The
next question starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading

log = logging.getLogger("freewheel.rewards")

TIMEOUT_S = 3.0
"""For one comparison. Ordinary ones take milliseconds; those that take a second hardly ever come to an end."""
REMEMBERED = 1 << 14
"""Pairs whose result is kept, failures included: the responses to one prompt give the same few answers, and a group
that boxes one and the same monster must not pay for it eight times."""


@functools.lru_cache(maxsize=REMEMBERED)
def equal(answer: str, truth: str) -> bool:
    """True if the two mean the same. False too where the comparison fails or takes too long; never hangs.

    Callable from any thread; one comparison runs at a time.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "math answers are compared by math-verify, which is not installed: pip install 'freewheel[math]'",
            name="math_verify",
        )
    return answer == truth or _comparer.ask(answer, truth)


def close() -> None:
    """Ends the child, if there is one. The next comparison starts another."""
    _comparer.close()


class _Comparer:
    """Owns the one child of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def ask(self, answer: str, truth: str) -> bool:
        with self._lock:
            child = self._living()
            try:
                reply = _exchange(child, json.dumps([answer, truth]))
            except BaseException:  # Ctrl-C, say: the reply still to come would be taken for that to the next question
                child.kill()
                self._end()
                raise
            if not reply:
                log.debug("comparing %.200r with %.200r ended its process (exit code %s)", answer, truth, self._end())
        return reply.strip() == "1"

    def close(self) -> None:
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a forked process: the child is the parent's, and the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        if self._child is not None:
            _close_pipes(self._child)
            self._child.returncode = 0  # not ours to wait for
            self._child = None

    def _living(self) -> subprocess.Popen[str]:
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            self._child = _start()
        return self._child

    def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        _close_pipes(child)
        return child.wait()


def _start() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "freewheel.rewards.math_child", str(TIMEOUT_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # It looks for modules where this process does.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)},
        start_new_session=True,  # Ctrl-C is for the parent, which may want to finish its batch
    )
    assert child.stdout is not None
    if not child.stdout.readline():
        _close_pipes(child)
        raise RuntimeError(f"the process for math-verify did not start (exit code {child.wait()}); stderr says why")
    return child


def _exchange(child: subprocess.Popen[str], question: str) -> str:
    """The child's reply, or nothing if it died over the question."""
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(question + "\n")
        child.stdin.flush()
        return child.stdout.readline()
    return ""


def _close_pipes(child: subprocess.Popen[str]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it was not sent, it needs no more
                pipe.close()


_comparer = _Comparer()
atexit.register(close)
os.register_at_fork(after_in_child=_comparer.forget)
