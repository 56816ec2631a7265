"""vLLM's processes end with the rollouter that started them, also when that is killed: else its successor would find
the GPU's memory taken.

    rollouter: FREEWHEEL_ROLLOUTER=its number ─▶ engine core ─▶ worker: a thread waits for the rollouter's end ─▶ exit

A worker's end ends the engine core, which has no work without it; on one GPU they are the same process.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import MutableMapping

ROLLOUTER = "FREEWHEEL_ROLLOUTER"
"""The variable with the number of the process whose end is awaited."""
ORPHANED = 4
"""What a process ends with whose rollouter is gone."""


def claim(environ: MutableMapping[str, str] = os.environ) -> None:
    """In the rollouter: what is started from now on ends with this process."""
    environ[ROLLOUTER] = str(os.getpid())


def end_with_rollouter(environ: MutableMapping[str, str] = os.environ) -> threading.Thread | None:
    """In a process of vLLM's, once. None: it has no rollouter, as under `vllm serve`, or the system cannot tell."""
    number = environ.get(ROLLOUTER)
    if number is None or int(number) == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    thread = threading.Thread(target=_wait, args=(int(number),), name="freewheel-orphan", daemon=True)
    thread.start()
    return thread


def _wait(process: int) -> None:
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(ORPHANED)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)  # readable when it has ended
    waiting.poll()
    os._exit(ORPHANED)
