"""Where on a cluster the parts of a run go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Gpu, Machine, place_of, pools
from freewheel.runtime.plan import Plan, resolve

LAPTOP = Machine(cpus=2, memory_bytes=16 << 30)
ONE_GPU = Machine(cpus=16, memory_bytes=128 << 30, gpus=(Gpu(name="NVIDIA H200", memory_bytes=140 << 30),))
CLUSTER = {"ray": {"address": "auto"}}


def plan(where: Machine = LAPTOP, **sections: dict[str, Any]) -> Plan:
    return resolve(to_config(sections), where)


def test_a_run_on_the_cpus_of_one_machine_reserves_nothing():
    assert pools(plan()) == {}


def test_training_and_generation_that_share_a_gpu_share_a_bundle():
    found = pools(plan(ONE_GPU))
    assert found["trainer"] is found["rollout"]
    (bundle,) = found["trainer"].bundles
    assert bundle["GPU"] == 1.0, "the halves of one GPU, not of two"


def test_the_shipped_cluster_has_a_bundle_a_machine():
    found = pools(plan(trainer={"nnodes": 2, "n_gpus_per_node": 4}, rollout={"n_gpus_per_node": 2}, **CLUSTER))
    assert [bundle["GPU"] for bundle in found["trainer"].bundles] == [4.0, 4.0] and found["trainer"].spread
    assert [bundle["GPU"] for bundle in found["rollout"].bundles] == [2.0] and not found["rollout"].spread


def test_an_engine_over_several_gpus_has_them_in_one_bundle():
    rollout = {"engine": "vllm", "nnodes": 2, "n_gpus_per_node": 4, "tensor_parallel_size": 2}
    found = plan(trainer={"n_gpus_per_node": 1}, rollout=rollout, **CLUSTER)
    assert (found.replicas, found.gpus_per_replica) == (4, 2.0)
    assert [bundle["GPU"] for bundle in pools(found)["rollout"].bundles] == [4.0, 4.0]


def test_several_machines_without_a_gpu():
    found = pools(plan(trainer={"nnodes": 2, "world_size": 2, "device": "cpu"}, rollout={"device": "cpu"}, **CLUSTER))
    assert [dict(bundle) for bundle in found["trainer"].bundles] == [{"CPU": 1.0}, {"CPU": 1.0}]


@given(machines=st.integers(1, 8), per_machine=st.integers(1, 8))
def test_neighbours_are_on_one_machine_and_machines_are_equally_full(machines: int, per_machine: int):
    count = machines * per_machine
    places = [place_of(number, count, machines) for number in range(count)]
    assert places == sorted(places)
    assert [places.count(machine) for machine in range(machines)] == [per_machine] * machines


@pytest.mark.parametrize(("count", "machines"), [(1, 3), (2, 3), (5, 3)])
def test_every_process_has_a_machine_that_exists(count: int, machines: int):
    assert all(0 <= place_of(number, count, machines) < machines for number in range(count))
