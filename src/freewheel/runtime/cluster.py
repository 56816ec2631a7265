"""The Ray cluster of a run: checked, then joined or started before the run, and released after it.

    ray.address ─▶ find_head: host:port ─▶ a TCP connection ─▶ ray.init ─▶ Pools: GPUs and machines are reserved
                                                  └─▶ a `ConfigError`           └─▶ the run ─▶ ray.shutdown

Ray itself tries a dead address for minutes; `check_cluster` takes seconds and needs no Ray. `make_plan` and `freewheel
doctor` call it, and so does `cluster`, which `FullyAsyncMain` enters. `Supervisor` reserves the pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freewheel.errors import ConfigError
from freewheel.utils.processes import within

if TYPE_CHECKING:
    from freewheel.runtime.run_plan import RunPlan

ADDRESS_KEY = "ray.address"
START_COMMAND = "ray start --head --port=6379"
_HEAD = "gcs_server"
"""The process without which a cluster cannot exist."""
_NEEDED = frozenset({"raylet", _HEAD})
"""Ray's processes that start and track actors."""

_CONNECT_S = 5.0
"""Longest time for a host to accept a connection. A slower host is down, or a firewall drops the packets."""
_RESOLVE_S = 5.0
"""Added for name resolution, which has no time limit if the resolver is unreachable."""
_NEW = "local"
"""As an address, it means: start a new cluster."""
_ADDRESS_VARIABLE = "RAY_ADDRESS"
"""The address that `auto` means, if it is set. Otherwise Ray finds a cluster among this machine's processes."""


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
    """Of the Ray that this process started, return the essential processes that died. A joined cluster has none
    here."""
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
            remedy = f"no Ray cluster runs on this machine: start one with {START_COMMAND}"
            raise ConfigError(ADDRESS_KEY, address, remedy)
        return
    shown = f"{address} ({head})" if head != address else address
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(ADDRESS_KEY, shown, "give 'auto' or host:port, such as 10.0.0.5:6379")
    try:
        place = (host.strip("[]"), int(port))
        within(_RESOLVE_S + _CONNECT_S, lambda: socket.create_connection(place, timeout=_CONNECT_S).close())
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        remedy = (
            f"nothing accepts connections there ({why}): start a cluster with {START_COMMAND}, correct the address, "
        )
        raise ConfigError(ADDRESS_KEY, shown, remedy + "or leave it out") from None


def find_head(address: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the `host:port` that `address` means; None if `auto` leaves it to Ray."""
    if address == "auto":
        address = environ.get(_ADDRESS_VARIABLE, "")
    return address.removeprefix("ray://").partition("/")[0] or None


def _has_head() -> bool:
    """Whether a cluster's head runs on this machine."""
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # the process has just ended
            if file.read_text(encoding="utf-8", errors="replace").strip() == _HEAD:
                return True
    return False


# -- reservations -----------------------------------------------------------------------------------------------------


Role = Literal["trainer", "rollout"]
Bundle = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Machines that are reserved together."""

    bundles: tuple[Bundle, ...]
    """One per machine."""
    spread: bool
    """Each on a different machine."""


def pools(plan: RunPlan) -> dict[Role, Pool]:
    """Return the reservations. Empty if only the CPUs of one machine are used."""
    t, r = plan.config.trainer, plan.config.rollout
    if not plan.gpus_trainer and not plan.gpus_per_replica and t.nnodes == r.nnodes == 1:
        return {}
    training = _bundles(t.nnodes, plan.world_size, t.threads, plan.gpus_trainer)
    generating = _bundles(r.nnodes, plan.replicas, r.threads, plan.gpus_per_replica)
    if plan.shared_gpu:
        both = {kind: training[0].get(kind, 0) + generating[0].get(kind, 0) for kind in ("CPU", "GPU")}
        one = Pool(bundles=(both,), spread=False)
        return {"trainer": one, "rollout": one}
    return {
        "trainer": Pool(bundles=training, spread=t.nnodes > 1),
        "rollout": Pool(bundles=generating, spread=r.nnodes > 1),
    }


def place_of(number: int, count: int, machines: int) -> int:
    """Return the machine of a process: neighbours share a machine, which suits collectives."""
    return number * machines // count


def _bundles(machines: int, count: int, threads: int, gpus: float) -> tuple[Bundle, ...]:
    """Return what each machine of a pool needs for its share of `count` processes."""
    shares = Counter(place_of(number, count, machines) for number in range(count))
    bundles = ({"CPU": float(threads * share), "GPU": gpus * share} for share in shares.values())
    return tuple({kind: amount for kind, amount in bundle.items() if amount} for bundle in bundles)


class Pools:
    """The reservations of one run."""

    def __init__(self, plan: RunPlan) -> None:
        self._pools = pools(plan)
        self._room_s = plan.config.ray.room_s
        self._counts = {"trainer": plan.world_size, "rollout": plan.replicas}
        self._groups: dict[Pool, Any] = {}

    async def reserve(self) -> None:
        """Reserve everything. Raises what the cluster lacks."""
        from ray.util import placement_group

        for pool in dict.fromkeys(self._pools.values()):  # both roles may share one
            strategy = "STRICT_SPREAD" if pool.spread else "STRICT_PACK"
            self._groups[pool] = placement_group([dict(bundle) for bundle in pool.bundles], strategy=strategy)
        for role, pool in self._pools.items():
            if not await asyncio.to_thread(self._groups[pool].wait, self._room_s):
                self.release()
                raise self._missing(role)

    def options(self, role: Role, number: int) -> dict[str, Any]:
        """Return Ray's options for the placement of a process."""
        if role not in self._pools:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        pool = self._pools[role]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[pool],
            placement_group_bundle_index=place_of(number, self._counts[role], len(pool.bundles)),
            placement_group_capture_child_tasks=False,
        )
        return {"scheduling_strategy": strategy}

    def release(self) -> None:
        from ray.util import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    def _missing(self, role: Role) -> ConfigError:
        import ray

        pool = self._pools[role]
        wanted = " and ".join(_text(bundle) for bundle in pool.bundles)
        known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node["Resources"] for node in known if node["Alive"]]
        have = " and ".join(_text({kind: node.get(kind, 0) for kind in ("CPU", "GPU")}) for node in nodes)
        key, value = (
            ("nnodes", len(pool.bundles)) if pool.spread else ("n_gpus_per_node", pool.bundles[0].get("GPU", 0))
        )
        remedy = (
            f"the cluster had no room for {wanted} on {'as many machines' if pool.spread else 'one machine'} within "
            f"ray.room_s = {self._room_s:g} s; its machines have {have}: give fewer, wait until others are done, or "
            "add machines"
        )
        return ConfigError(f"{role}.{key}", value, remedy)


def _text(resources: Bundle) -> str:
    return ", ".join(f"{amount:g} {kind}s" for kind, amount in sorted(resources.items(), reverse=True)) or "nothing"
