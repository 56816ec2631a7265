"""The process in which math-verify runs: `python -m freewheel.rewards.math_child REPLIES_FD TIMEOUT_S`, started by
`math_equal`.

    stdin: [7, "answer", "truth"] a line ─▶ compare, under a limit that kills this process ─▶ REPLIES_FD: 7 1 (or 7 0)

Replies have a descriptor of their own, which no print can reach: stdout is stderr from the start. This process ends
with its stdin, and never outlives its parent by more than one comparison.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import resource
import signal
import sys

from freewheel.rewards.math_equal import OUT_OF_MEMORY, READY

MEMORY_BYTES = 2 << 30
"""Address space of this process, ten times what it lives in. `1.5E9999999999` takes 4 GB in seconds."""


def main(replies: int, timeout_s: float) -> None:
    # The signal is left to the kernel, which ends this process whatever it is in the middle of.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(OSError, ValueError):  # a limit of the system's own may be lower
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    math_verify = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own timeouts are off

    def parsed(answer: str) -> object:
        return math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)

    def say(line: str) -> None:
        os.write(replies, f"{line}\n".encode())

    say(READY)
    for line in sys.stdin:
        number, answer, truth = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # CPU time: on a busy machine a second is not always one
        try:
            equal = math_verify.verify(parsed(truth), parsed(answer), timeout_seconds=None)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(f"{number} {int(equal)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
