"""`within`: a call that may hang, with a limit. For what has none of its own: a name's resolution, a dead network disk.

The thread of a call that is late cannot be ended: it is left behind as a daemon, which no exit waits for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What `work` gives or raises, in a thread; `TimeoutError` when it has not ended by then."""
    ended: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((True, work()))
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            ended.put((False, error))

    threading.Thread(target=run, name="freewheel-within", daemon=True).start()
    try:
        is_answer, found = ended.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None
    if not is_answer:
        assert isinstance(found, BaseException)
        raise found
    return found  # type: ignore[return-value]  # what `work` gave
