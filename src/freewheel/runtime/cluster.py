"""Ray as a whole: joined or started before a run, let go after it. Called by `FullyAsyncMain`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray

from freewheel.errors import ConfigError
from freewheel.runtime.reaching import check_cluster

NEEDED = frozenset({"raylet", "gcs_server"})
"""Ray's names for what starts actors, and for what knows them."""


@contextmanager
def cluster(*, address: str | None, cpus: int) -> Iterator[None]:
    """A cluster at `address`, or one of our own with at least `cpus`, that ends with the run. One that this process has
    joined before (a notebook's, or a test's) is ours to use and theirs to end."""
    if ray.is_initialized():
        yield
        return
    check_cluster(address)  # Ray would try a dead one for minutes
    with _signals_held() as noted, _apart():
        try:
            _connect(address, cpus)
        except BaseException:
            ray.shutdown()
            raise
    try:
        if noted:
            raise KeyboardInterrupt
        yield
    finally:
        with _signals_held():
            ray.shutdown()


@contextmanager
def _signals_held() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, and that is all: what Ray begins it must finish, or processes are left behind."""
    noted: list[int] = []
    here = threading.current_thread() is threading.main_thread()  # elsewhere signals are somebody else's
    numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
    before = {number: signal.signal(number, lambda received, _: noted.append(received)) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _apart() -> Iterator[None]:
    """What Ray starts is in process groups of its own: a SIGTERM to ours (`timeout`, a supervisor) is for the run, and
    that saves before it ends them. Ray itself keeps only Ctrl-C from them."""
    import ray._private.services

    services: Any = ray._private.services
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:  # a Ray that starts them in another way: all else works
        yield
        return
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def lost_processes() -> list[str]:
    """Of the Ray that this process started: those without which no actor lives. A cluster that it joined is watched
    over by others."""
    from ray._private import worker

    node: Any = worker._global_node
    dead = [] if node is None else node.dead_processes()
    return sorted({kind for kind, _ in dead} & NEEDED)


def _connect(address: str | None, cpus: int) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would have training give way to anything else
    # One for all actors: Ray starts workers ahead for the environment of the job. Torch's own number of threads is set
    # by each actor.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        ray.init(
            address=address or "local",
            num_cpus=None if address else max(os.cpu_count() or 1, cpus),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": environment},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address is None:
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"no Ray cluster answers there ({why}): start one, or leave it out. See also RAY_AUTH_MODE"
        raise ConfigError("ray.address", address, remedy) from error
