"""The process in which math-verify runs: `python -m freewheel.rewards.math_child TIMEOUT_S`, started by `math_equal`.

    stdin: ["answer", "truth"] a line ─▶ compare, under an alarm that kills this process ─▶ stdout: 1 or 0 a line

It ends with its stdin, and never outlives its parent by more than one comparison.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import resource
import signal
import sys

MEMORY_BYTES = 2 << 30
"""Address space of this process, ten times what it lives in. `1.5E9999999999` takes 4 GB in seconds."""


def main(timeout_s: float) -> None:
    # The alarm is left to the kernel, which ends this process whatever it is in the middle of.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with contextlib.suppress(OSError, ValueError):  # a limit of the system's own may be lower
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    math_verify = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own timeouts are off

    def parsed(answer: str) -> object:
        return math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    say("ready")
    for line in sys.stdin:
        answer, truth = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        equal = math_verify.verify(parsed(truth), parsed(answer), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(str(int(equal)))


if __name__ == "__main__":
    main(float(sys.argv[1]))
