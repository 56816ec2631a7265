"""A run on a Ray cluster of two nodes, and the quick check of a cluster's address."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freewheel.errors import ConfigError
from freewheel.runtime import cluster
from freewheel.runtime.cluster import check_cluster, find_head
from freewheel.utils.processes import within

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


@pytest.fixture
def answers() -> Iterator[Callable[[bytes], str]]:
    """A server that sends this to every client, and then only reads."""
    with contextlib.ExitStack() as stack:

        def serve(first: bytes) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        taken, _ = server.accept()
                        stack.enter_context(taken)
                        taken.sendall(first)

            threading.Thread(target=run, daemon=True).start()
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield serve


@pytest.fixture
def live(answers: Callable[[bytes], str]) -> str:
    """The first frame of a gRPC server."""
    return answers(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 5, 0, 0, 64, 0]))


@pytest.fixture
def no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray head on this machine, whatever else runs here."""
    monkeypatch.setattr(cluster, "_has_head", lambda: False)


def refused(address: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_cluster(address, environ or {})
    assert caught.value.key == "ray.address"
    return str(caught.value)


def test_a_dead_address_is_refused_in_seconds(dead: str) -> None:
    began = time.monotonic()
    text = refused(dead)
    assert time.monotonic() - began < 2.0
    assert f"ray.address = '{dead}': nobody takes a connection there (" in text and "ray start --head" in text
    for address in (f"ray://{dead}", "no-such-host.invalid:6379"):
        assert "nobody takes a connection there (" in refused(address)


def test_a_run_checks_the_address_before_ray_does(dead: str) -> None:
    with pytest.raises(ConfigError, match="nobody takes a connection"), cluster.cluster(address=dead, cpus=1):
        pass


def test_a_reachable_address_is_left_to_ray(live: str) -> None:
    check_cluster(live, {})
    check_cluster(f"ray://{live}", {})
    check_cluster(None, {})
    check_cluster("local", {})


def test_a_server_that_is_not_ray_is_refused(answers: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.3)
    assert "the server there is not a Ray cluster: give the address" in refused(answers(b"HTTP/1.1 400 Bad Request"))
    silent = answers(b"")
    assert "does not speak Ray's protocol (timed out)" in refused(silent)
    check_cluster(silent, {"RAY_USE_TLS": "1"})


def test_auto_means_the_address_that_ray_would_use(tmp_path: Path, dead: str, live: str, no_head: None) -> None:
    environ = {"RAY_TMPDIR": str(tmp_path)}
    assert find_head("auto", environ) is None
    assert "no Ray cluster is known on this machine" in refused("auto", environ)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"{dead}\n")
    assert find_head("auto", environ) == dead
    assert f"ray.address = 'auto ({dead})'" in refused("auto", environ), "what an old cluster left"
    check_cluster("auto", {**environ, "RAY_ADDRESS": live})


def test_an_unrecorded_head_is_left_for_ray_to_find(tmp_path: Path, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_has_head", lambda: True)
    check_cluster("auto", {"RAY_TMPDIR": str(tmp_path)})
    assert "nobody takes" in refused("auto", {"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": dead}), "what was named"


@pytest.mark.parametrize("address", ["host", "host:", ":6379", "host:port"])
def test_an_invalid_address_is_refused(address: str) -> None:
    assert "give 'auto' or host:port" in refused(address)


def test_what_hangs_is_given_up_and_what_fails_is_raised() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    assert within(5, lambda: 3) == 3
