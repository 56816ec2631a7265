"""Run a program to its end."""

from __future__ import annotations

import subprocess
from typing import Any

WAIT_S = 250.0
"""Longer than anything takes on a busy machine."""

Done = subprocess.CompletedProcess[str]


def run_program(*words: object, code: int = 0, **options: Any) -> Done:
    """Run a program without input and check its exit code. `options`: of `subprocess.run`."""
    options = {"stdin": subprocess.DEVNULL, "timeout": WAIT_S, **options}
    if "input" in options:
        del options["stdin"]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done
