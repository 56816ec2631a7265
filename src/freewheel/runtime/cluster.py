"""Ray as a whole: joined or started before a run, let go after it. Called by `FullyAsyncMain`."""

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

NEEDED = frozenset({"raylet", "gcs_server"})
"""Ray's names for what starts actors, and for what knows them."""


@contextmanager
def cluster(*, address: str | None, cpus: int) -> Iterator[None]:
    """A cluster at `address`, or one of our own with at least `cpus`, that ends with the run. One that this process has
    joined before (a notebook's, or a test's) is ours to use and theirs to end."""
    import ray

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
    import ray

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


ADDRESS_KEY = "ray.address"
CONNECT_S = 5.0
"""For a host to take a connection. One that does not by then is down, or behind a wall that drops what it is sent."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of HTTP/2 begins (RFC 9113, 3.4), with empty settings: Ray speaks gRPC. A server of another kind would
keep Ray trying as long as a dead port does."""
FRAME_BYTES, KIND_AT, SETTINGS = 9, 3, 4
"""Of the head of a frame, its kind within it, and the kind that a server begins with."""
RESOLVE_S = 5.0
"""On top of it for the host's name: a resolver that is out of reach has no limit of its own."""
CLIENT = "ray://"
NEW = "local"
"""As an address: a cluster of the run's own."""
VARIABLE = "RAY_ADDRESS"
"""What `auto` means, where it is set; else what the last `ray start` on this machine wrote down."""
CURRENT = "ray/ray_current_cluster"
ENCRYPTED = "RAY_USE_TLS"
HEAD = "gcs_server"
"""The process without which there is no cluster."""
START_COMMAND = "ray start --head --port=6379"


def check_cluster(address: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raises where nobody takes a connection at `address`. None: the run starts one itself."""
    if address is None or address == NEW:
        return
    place = joined_at(address, environ)
    if place is None:
        if not _has_head():
            raise ConfigError(
                ADDRESS_KEY, address, f"no Ray cluster is known on this machine: start one with {START_COMMAND}"
            )
        return
    said = f"{address} ({place})" if place != address else address
    host, port = _split(said, place)
    try:
        within(RESOLVE_S + 2 * CONNECT_S, lambda: _greet(host, port, secret=environ.get(ENCRYPTED) == "1"))
    except NotRay as error:
        raise ConfigError(ADDRESS_KEY, said, f"{error}: give the address that `ray start --head` printed") from None
    except OSError as error:
        if address == "auto" and not environ.get(VARIABLE) and _has_head():
            return  # one that nobody wrote down: Ray looks for it among the processes
        why = error.strerror or str(error) or type(error).__name__
        remedy = f"nobody takes a connection there ({why}): start a cluster with {START_COMMAND}, correct the address, "
        remedy += "or leave it out"
        raise ConfigError(ADDRESS_KEY, said, remedy) from None


def joined_at(address: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """`host:port`; None where `auto` has nothing to go by."""
    if address == "auto":
        address = environ.get(VARIABLE, "") or _current(environ)
    return address.removeprefix(CLIENT).partition("/")[0] or None


def _current(environ: Mapping[str, str]) -> str:
    """The address that the last `ray start` on this machine left."""
    folder = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / CURRENT).read_text(encoding="utf-8").strip()
    return ""


def _split(said: str, place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(ADDRESS_KEY, said, "give 'auto' or host:port, such as 10.0.0.5:6379")
    return host.strip("[]"), int(port)


class NotRay(Exception):
    """Somebody else listens there."""


def _greet(host: str, port: int, *, secret: bool) -> None:
    """`secret`: the cluster wants TLS, and its own client has the certificates."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        if secret:
            return
        answer = b""
        try:
            connection.sendall(GREETING)
            while len(answer) < FRAME_BYTES and (more := connection.recv(FRAME_BYTES - len(answer))):
                answer += more
        except OSError as error:
            raise NotRay(f"somebody takes connections there, and does not speak as Ray does ({error})") from None
    if len(answer) < FRAME_BYTES or answer[KIND_AT] != SETTINGS:
        raise NotRay("what answers there is no Ray cluster")


def _has_head() -> bool:
    """Whether a cluster's head runs on this machine."""
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if file.read_text(encoding="utf-8", errors="replace").strip() == HEAD:
                return True
    return False
