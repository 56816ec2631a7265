"""The Ray cluster of a run: checked, then joined or started before the run, and released after it.

    ray.address ─▶ find_head: host:port ─▶ a TCP connection ─▶ HTTP/2's first frames ─▶ nothing, or a `ConfigError`
                                                                                └─▶ ray.init ─▶ the run ─▶ ray.shutdown

Ray itself tries a dead address for minutes; `check_cluster` takes seconds and needs no Ray. `make_plan` and `freewheel
doctor` call it, and so does `cluster`, which `FullyAsyncMain` enters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.utils.processes import within

ADDRESS_KEY = "ray.address"
START_COMMAND = "ray start --head --port=6379"
_HEAD = "gcs_server"
"""The process that a cluster cannot exist without."""
_NEEDED = frozenset({"raylet", _HEAD})
"""Ray's processes that start and track actors."""

_CONNECT_S = 5.0
"""Longest time for a host to accept a connection. A slower host is down, or a firewall drops the packets."""
_RESOLVE_S = 5.0
"""Added for name resolution, which has no time limit if the resolver is unreachable."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of an HTTP/2 client (RFC 9113, 3.4), with empty settings: Ray speaks gRPC. With a server of another
kind, Ray would retry for as long as with a dead port."""
_FRAME_BYTES, _KIND_AT, _SETTINGS = 9, 3, 4
"""Length of a frame's header, the place of its kind in it, and the kind that a server sends first."""
_NEW = "local"
"""As an address: start a new cluster."""
_ADDRESS_VARIABLE = "RAY_ADDRESS"
"""The address that `auto` means, if it is set. Otherwise `auto` means the last `ray start` on this machine."""
_CURRENT = "ray/ray_current_cluster"


@contextmanager
def cluster(*, address: str | None, cpus: int) -> Iterator[None]:
    """Join the cluster at `address`, or start one with at least `cpus`; leave it or end it with the run.

    If this process has joined a cluster before (a notebook or a test), the run uses it and does not end it.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    check_cluster(address)
    with _hold_signals() as received, _separate_process_groups():
        try:
            _connect(address, cpus)
        except BaseException:
            ray.shutdown()
            raise
    try:
        if received:
            raise KeyboardInterrupt
        yield
    finally:
        with _hold_signals():
            ray.shutdown()


@contextmanager
def _hold_signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM without acting on them: if Ray is interrupted, it leaves processes behind."""
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _separate_process_groups() -> Iterator[None]:
    """Start Ray's processes in their own process groups.

    A SIGTERM to our group (from `timeout` or a service manager) is then for the run alone, which saves and ends Ray.
    Ray itself only keeps Ctrl-C from its processes.
    """
    import ray._private.services

    services: Any = ray._private.services
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:  # another version of Ray; only this feature is missing
        yield
        return
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def lost_processes() -> list[str]:
    """Return the essential processes that died of the Ray that this process started. A joined cluster has none here."""
    from ray._private import worker

    node: Any = worker._global_node
    dead = [] if node is None else node.dead_processes()
    return sorted({kind for kind, _ in dead} & _NEEDED)


def _connect(address: str | None, cpus: int) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let any other process slow down training
    # One environment for all actors: Ray starts workers ahead of time for the job's. Actors set torch's threads.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    try:
        ray.init(
            address=address or _NEW,
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
        raise ConfigError(ADDRESS_KEY, address, remedy) from error


# -- is a cluster there? ----------------------------------------------------------------------------------------------


def check_cluster(address: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise a `ConfigError` if no cluster accepts connections at `address`. None: the run starts one."""
    if address is None or address == _NEW:
        return
    head = find_head(address, environ)
    if head is None:
        if not _has_head():
            remedy = f"no Ray cluster is known on this machine: start one with {START_COMMAND}"
            raise ConfigError(ADDRESS_KEY, address, remedy)
        return
    shown = f"{address} ({head})" if head != address else address
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(ADDRESS_KEY, shown, "give 'auto' or host:port, such as 10.0.0.5:6379")
    uses_tls = environ.get("RAY_USE_TLS") == "1"
    try:
        within(_RESOLVE_S + 2 * _CONNECT_S, lambda: _greet(host.strip("[]"), int(port), uses_tls=uses_tls))
    except _NotRay as error:
        raise ConfigError(ADDRESS_KEY, shown, f"{error}: give the address that `ray start --head` printed") from None
    except OSError as error:
        if address == "auto" and not environ.get(_ADDRESS_VARIABLE) and _has_head():
            return  # the recorded address is old; Ray finds the running cluster among the processes
        why = error.strerror or str(error) or type(error).__name__
        remedy = f"nobody takes a connection there ({why}): start a cluster with {START_COMMAND}, correct the address, "
        raise ConfigError(ADDRESS_KEY, shown, remedy + "or leave it out") from None


def find_head(address: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the `host:port` that `address` means; None if `auto` has nothing to go by."""
    if address == "auto":
        address = environ.get(_ADDRESS_VARIABLE, "") or _last_started(environ)
    return address.removeprefix("ray://").partition("/")[0] or None


def _last_started(environ: Mapping[str, str]) -> str:
    """Return the address that the last `ray start` on this machine recorded."""
    folder = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / _CURRENT).read_text(encoding="utf-8").strip()
    return ""


class _NotRay(Exception):
    """Something else listens there."""


def _greet(host: str, port: int, *, uses_tls: bool) -> None:
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        if uses_tls:  # only Ray's own client has the certificates
            return
        answer = b""
        try:
            connection.sendall(_GREETING)
            while len(answer) < _FRAME_BYTES and (more := connection.recv(_FRAME_BYTES - len(answer))):
                answer += more
        except OSError as error:
            raise _NotRay(f"a server accepts connections there but does not speak Ray's protocol ({error})") from None
    if len(answer) < _FRAME_BYTES or answer[_KIND_AT] != _SETTINGS:
        raise _NotRay("the server there is not a Ray cluster")


def _has_head() -> bool:
    """Whether a cluster's head runs on this machine."""
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # the process has just ended
            if file.read_text(encoding="utf-8", errors="replace").strip() == _HEAD:
                return True
    return False
