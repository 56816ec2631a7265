"""Where on a Ray cluster the parts of a run are put: a pool of machines for training, and one for generation.

    Plan ─▶ pools: bundles, one a machine ─▶ placement groups, reserved whole ─▶ each actor in the bundle of its number

A pool is reserved before anything starts, so that a run has all of its machines or says what is missing; what dies is
started anew where it was. Training and generation that share a GPU share a bundle, and with it the same GPU. A run on
the CPUs of one machine needs no pools. `pools` is pure; `Pools` asks Ray. Used by `Supervisor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan

Role = Literal["trainer", "rollout"]
Bundle = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Machines that are reserved together."""

    bundles: tuple[Bundle, ...]
    """One a machine."""
    spread: bool
    """Each on a machine of its own."""


def pools(plan: Plan) -> dict[Role, Pool]:
    """Nothing where the CPUs of one machine are all that is used."""
    t, r = plan.config.trainer, plan.config.rollout
    if not plan.gpus_trainer and not plan.gpus_per_replica and t.nnodes == r.nnodes == 1:
        return {}
    training = _bundles(t.nnodes, plan.world_size, plan.threads_trainer, plan.gpus_trainer)
    generating = _bundles(r.nnodes, plan.replicas, plan.threads_rollout, plan.gpus_per_replica)
    if plan.shared_gpu:
        both = {kind: training[0].get(kind, 0) + generating[0].get(kind, 0) for kind in ("CPU", "GPU")}
        one = Pool(bundles=(both,), spread=False)
        return {"trainer": one, "rollout": one}
    return {
        "trainer": Pool(bundles=training, spread=t.nnodes > 1),
        "rollout": Pool(bundles=generating, spread=r.nnodes > 1),
    }


def place_of(number: int, count: int, machines: int) -> int:
    """The machine of the process with this number: neighbours are on one, as collectives want it."""
    return number * machines // count


def _bundles(machines: int, count: int, threads: int, gpus: float) -> tuple[Bundle, ...]:
    """What each machine of a pool must have for its share of `count` processes."""
    shares = [0] * machines
    for number in range(count):
        shares[place_of(number, count, machines)] += 1
    return tuple(_without_zero({"CPU": float(threads * share), "GPU": gpus * share}) for share in shares if share)


def _without_zero(resources: Bundle) -> Bundle:
    return {kind: amount for kind, amount in resources.items() if amount}


class Pools:
    """The reservations of one run."""

    def __init__(self, plan: Plan) -> None:
        self._pools = pools(plan)
        self._room_s = plan.config.ray.room_s
        self._counts = {"trainer": plan.world_size, "rollout": plan.replicas}
        self._groups: dict[Role, Any] = {}

    async def reserve(self) -> None:
        """Raises what the cluster lacks."""
        from ray.util import placement_group

        made: dict[int, Any] = {}
        for role, pool in self._pools.items():
            if id(pool) not in made:  # both may share one
                strategy = "STRICT_SPREAD" if pool.spread else "STRICT_PACK"
                made[id(pool)] = placement_group([dict(bundle) for bundle in pool.bundles], strategy=strategy)
            self._groups[role] = made[id(pool)]
        for role, group in self._groups.items():
            if not await asyncio.to_thread(group.wait, self._room_s):
                self.release()
                raise self._missing(role)

    def options(self, role: Role, number: int) -> dict[str, Any]:
        """What Ray is told of where this process of a pool goes."""
        if role not in self._groups:
            return {}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        machines = len(self._pools[role].bundles)
        index = place_of(number, self._counts[role], machines)
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[role],
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=False,
            )
        }

    def release(self) -> None:
        from ray.util import remove_placement_group

        for group in {id(group): group for group in self._groups.values()}.values():
            remove_placement_group(group)
        self._groups.clear()

    def _missing(self, role: Role) -> ConfigError:
        import ray

        pool = self._pools[role]
        wanted = " and ".join(_text(bundle) for bundle in pool.bundles)
        known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node["Resources"] for node in known if node["Alive"]]
        have = " and ".join(_text({kind: node.get(kind, 0) for kind in ("CPU", "GPU")}) for node in nodes)
        where = "on as many machines" if pool.spread else "on one machine"
        remedy = (
            f"the cluster had no room for {wanted} {where} within ray.room_s = {self._room_s:g} s; its machines have "
            f"{have}: "
        )
        key = f"{role}.{'nnodes' if pool.spread else 'n_gpus_per_node'}"
        return ConfigError(key, len(pool.bundles) if pool.spread else pool.bundles[0].get("GPU", 0), remedy + HINT)


HINT = "give fewer, wait until others are done, or add machines"


def _text(resources: Bundle) -> str:
    return ", ".join(f"{amount:g} {kind}s" for kind, amount in sorted(resources.items(), reverse=True)) or "nothing"
