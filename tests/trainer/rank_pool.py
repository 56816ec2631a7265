"""Real training processes that meet over gloo, kept for many tests: starting one takes longer than most tests.

    ranks(2).run(task, …) ─▶ each rank: task(world, …) ─▶ their answers, in the order of ranks

One pool of each size serves all tests of a session.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

ANSWER_S = 120.0
"""Longer than any task takes on a busy machine."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([f"{__package__}.rank_tasks"])  # torch and transformers are imported once


_POOLS: dict[int, RankPool] = {}


class RankFailed(AssertionError):
    """A rank raised, died or gave no answer."""


def ranks(size: int) -> RankPool:
    """Return the pool of this size, which is kept for all tests."""
    if size not in _POOLS or _POOLS[size].closed:
        _POOLS[size] = RankPool(size)
    return _POOLS[size]


class RankPool:
    """Processes that have joined one group. A failed pool is closed, because its ranks are in the middle of a task."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.closed = False
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(size):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(there, rank, size), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        meeting = self._answer(0)
        for _, connection in self._ranks[1:]:
            connection.send(meeting)
        for rank in range(size):
            self._answer(rank)

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for _, connection in self._ranks:
            connection.send((task, args, kwargs))
        return [self._answer(rank) for rank in range(self.size)]

    def close(self) -> None:
        self.closed = True
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()

    def _answer(self, rank: int) -> Any:
        _, connection = self._ranks[rank]
        if not connection.poll(ANSWER_S):
            self.close()
            raise RankFailed(f"rank {rank} of {self.size} gave no answer within {ANSWER_S:g} s")
        try:
            error, answer = connection.recv()
        except EOFError:
            error, answer = "it died", None
        if error is not None:
            self.close()
            raise RankFailed(f"rank {rank} of {self.size}:\n{error}")
        return answer


def _serve(connection: Connection, rank: int, size: int) -> None:
    import torch

    from freewheel.trainer.fsdp import LOCAL_HOST, Host, join

    torch.set_num_threads(1)
    host = None
    if rank == 0:
        host = Host(LOCAL_HOST, size)
        connection.send((None, host.meeting))
    meeting = host.meeting if host else connection.recv()
    world = join(meeting, rank=rank, device="cpu", host=host)
    connection.send((None, None))
    while True:
        try:
            task, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, task(world, *args, **kwargs)))
        except BaseException:  # noqa: BLE001  # the test reports whatever it is
            connection.send((traceback.format_exc(), None))
