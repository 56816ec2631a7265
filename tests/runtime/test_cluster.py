"""A run on a Ray cluster of two nodes, and the quick check of a cluster's address."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel.errors import ConfigError
from freewheel.runtime import cluster
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
    "trainer.total_steps=1",
    "trainer.groups_per_step=4",
    "rollout.n=4",
    "eval.prompts=0",
    "observe.dashboard=false",
    "trainer.device=cpu",
    "rollout.device=cpu",
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster in a separate process: this one may have joined another. Returns its address."""
    command = [sys.executable, "-c", TWO_NODES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


def train(*settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freewheel.fully_async_main", *SMALL, *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def nodes(run_dir: Path) -> dict[str, str]:
    """Return the node of each component."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["role"]: row["node"] for row in rows if "role" in row}


def test_training_and_generation_run_on_their_reserved_nodes(address: str, tmp_path: Path) -> None:
    pools = ["trainer.nnodes=2", "trainer.world_size=2", "rollout.nnodes=2", "rollout.replicas=2"]
    done = train(f"ray.address={address}", f"run_dir={tmp_path}", *pools)
    assert done.returncode == 0, done.stdout + done.stderr
    check_cluster(address, {})
    where = nodes(tmp_path)
    assert where["rollouter-0"] != where["rollouter-1"]
    assert where["trainer"] != where["rank-1"]
    assert (tmp_path / "final" / "model.safetensors").is_file()


def test_a_cluster_that_is_too_small_reports_its_resources(address: str, tmp_path: Path):
    pools = ["rollout.nnodes=3", "rollout.replicas=3", "ray.room_s=1"]
    done = train(f"ray.address={address}", f"run_dir={tmp_path}", *pools)
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert "rollout.nnodes = 3" in said and "2 CPUs" in said


@pytest.fixture
def dead() -> Iterator[str]:
    """An address without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_live_address_is_left_to_ray_and_a_dead_one_is_refused_in_seconds(
    dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        live = f"127.0.0.1:{server.getsockname()[1]}"
        for address, environ in ((live, {}), (f"ray://{live}", {}), ("auto", {"RAY_ADDRESS": live}), (None, {})):
            check_cluster(address, environ)
    monkeypatch.setattr(cluster, "_has_head", lambda: True)
    check_cluster("auto", {})
    monkeypatch.setattr(cluster, "_has_head", lambda: False)
    began = time.monotonic()
    for address, environ, says in (
        (dead, {}, f"ray.address = '{dead}': nothing accepts connections there ("),
        (dead, {}, "start a cluster with ray start --head"),
        (f"ray://{dead}", {}, "nothing accepts connections there ("),
        ("auto", {"RAY_ADDRESS": dead}, f"ray.address = 'auto ({dead})': nothing accepts connections there ("),
        ("no-such-host.invalid:6379", {}, "nothing accepts connections there ("),
        ("auto", {}, "no Ray cluster runs on this machine: start one with ray start --head"),
        *((invalid, {}, "give 'auto' or host:port") for invalid in ("host", "host:", ":6379", "host:port")),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            check_cluster(address, environ)
    with pytest.raises(ConfigError, match="nothing accepts connections"), cluster.cluster(address=dead, cpus=1):
        pass
    assert time.monotonic() - began < 10.0
