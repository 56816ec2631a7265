"""The processes that a harness started and their descendants, found by their session, which outlives a parent."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

AGAIN_S = 0.1


class Family:
    """A session's processes. Only its members are signalled."""

    def __init__(self) -> None:
        self._sessions: list[int] = []

    def adopt(self, leader: int) -> None:
        """All processes in the session of `leader`, now and later."""
        self._sessions.append(leader)

    def has(self, pid: int) -> bool:
        """Whether `pid` is a live member."""
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getsid(pid) in self._sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False

    def members(self) -> list[int]:
        return [pid for pid in psutil.pids() if self.has(pid)]

    def below(self, pid: int, title: str) -> list[int]:
        """Return members below `pid` with `title` in their command line."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = {child.pid for child in psutil.Process(pid).children(recursive=True)}
            return [child for child in children if title in _title(child) and self.has(child)]
        return []

    def titles(self) -> list[str]:
        return [f"{pid} {_title(pid)[:60]}" for pid in self.members()]

    def end(self) -> None:
        for _ in range(3):  # one that was starting another meanwhile is found the next time
            members = self.members()
            signal_all(members, signal.SIGKILL)
            if not members:
                return
            time.sleep(AGAIN_S)


def signal_all(pids: list[int], *numbers: signal.Signals) -> None:
    for number in numbers:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _title(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(psutil.Process(pid).cmdline()).strip()
    return ""
