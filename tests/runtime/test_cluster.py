"""A run on two nodes of a Ray cluster, both on this machine: each pool is where it was reserved, and a cluster that
lacks what was asked for says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel.runtime.cluster import check_cluster

pytestmark = pytest.mark.timeout(300)

TWO_NODES = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
SMALL = [
    "trainer.total_steps=3",
    "trainer.groups_per_step=4",
    "rollout.n=4",
    "eval.prompts=0",
    "trainer.device=cpu",
    "rollout.device=cpu",
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster in a process of its own: this one may have joined another."""
    command = [sys.executable, "-c", TWO_NODES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def train(*settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freewheel.fully_async_main", *SMALL, *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def nodes(run_dir: Path) -> dict[str, str]:
    """Which node each part of a run was on."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["role"]: row["node"] for row in rows if "role" in row}


def test_training_and_generation_have_nodes_of_their_own(address: str, tmp_path: Path) -> None:
    pools = ["trainer.nnodes=2", "trainer.world_size=2", "rollout.nnodes=2", "rollout.replicas=2"]
    done = train(f"ray.address={address}", f"run_dir={tmp_path}", *pools)
    assert done.returncode == 0, done.stdout + done.stderr
    where = nodes(tmp_path)
    assert where["rollouter-0"] != where["rollouter-1"]
    assert where["trainer"] != where["rank-1"]
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_a_cluster_is_known_by_how_it_answers(address: str) -> None:
    check_cluster(address, {})


def test_a_cluster_that_is_too_small_says_what_it_has(address: str, tmp_path: Path):
    pools = ["rollout.nnodes=3", "rollout.replicas=3", "ray.room_s=1"]
    done = train(f"ray.address={address}", f"run_dir={tmp_path}", *pools)
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert "rollout.nnodes = 3" in said and "2 CPUs" in said
