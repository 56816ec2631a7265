"""Throughput of the queue: groups/s at saturation, and the latency of a put at half that rate.

    python benchmarks/message_queue.py [--json FILE] [--quick]

    4 producers ── admit ──▶ QueueActor      the real actor, client and protocol: a ticket for every group, blocks of
                ── put ────▶     ▲  ▲        256 groups of about 10 KB, batches of 256 that are committed and published
    1 consumer ── take, commit ──┘  └── published

Puts at half the rate are open loop: calls start at Poisson moments, whether or not earlier ones have ended, and a
latency counts from the scheduled moment, waiting for tickets included. Producers send the same encoded group again and
again, and the consumer decodes none: encoding is a rollouter's work, decoding a trainer's. The baseline of the same run
is `ray.util.queue` with the same producers and its own calls for batches of 256. It keeps no tickets, no order and no
bound on staleness.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: other programs would distort the figures

import numpy as np
import psutil
import ray
from ray.util.queue import Empty, Full, Queue

from common import (
    at_least,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    write_json,
)
from freewheel.data.group import EncodedGroup, EncodedGroups, Prompt, PromptGroup, Response, Ticket
from freewheel.judge.verdict import Scored
from freewheel.queue.client import QueueClient, Taken
from freewheel.queue.journal import CheckpointMark
from freewheel.runtime.actors import MAX_CALLS, QueueActor
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import to_config
from freewheel.runtime.remote import ActorDirectory, remote_queue

PROMISED_SAMPLES_PER_S = 20_000
PROMISED_PUT_P99_MS = 50.0

PRODUCERS = 4
BLOCK_GROUPS = 256
RESPONSES, RESPONSE_TOKENS, PROMPT_TOKENS = 8, 92, 64
"""A group of these is about 10 KB encoded."""
STEPS_PER_VERSION = PRODUCERS
"""A version then makes room for one block of each producer, and a block needs one admission."""
THRESHOLD = 7
"""Thirty-two batches alive, about 80 MB. Producers hold tickets for a third of them, so that admission is no part of a
put's latency."""
ALIVE_GROUPS = (THRESHOLD + 1) * STEPS_PER_VERSION * BLOCK_GROUPS
WARM_UP_S = 1.0
POLL_S = 0.001
"""`ray.util.queue` has no batch call that waits."""
PATIENCE_S = 5.0
"""Longest wait inside a call; reaching it ends the run."""
BLOCKS_AHEAD = 2
"""Future blocks for which a producer holds tickets: generation has tickets long before it puts."""


def config() -> TrainConfig:
    """In memory, because journal.py measures the journal with the same protocol."""
    return to_config(
        {
            "trainer": {"groups_per_step": BLOCK_GROUPS, "total_steps": 10**6},
            "async_training": {
                "sync_every_steps": STEPS_PER_VERSION,
                "staleness_threshold": THRESHOLD,
                "max_staleness_allowed": THRESHOLD + 4,
                "max_queue_size": ALIVE_GROUPS,
            },
            "journal": {"enabled": False},
        }
    )


def encoded_group() -> bytes:
    rng = np.random.default_rng(0)
    responses = [
        Response(
            tokens=rng.integers(0, 32_000, RESPONSE_TOKENS, dtype=np.int32),
            logprobs=rng.normal(size=RESPONSE_TOKENS).astype(np.float32),
            versions=np.zeros(RESPONSE_TOKENS, np.int32),
            mask=np.ones(RESPONSE_TOKENS, np.uint8),
            finish="stop",
            verdict=Scored(0.5),
            reward=0.5,
            raw_reward=0.5,
        )
        for _ in range(RESPONSES)
    ]
    prompt = Prompt(
        tokens=rng.integers(0, 32_000, PROMPT_TOKENS, dtype=np.int32), row={"data_source": "openai/gsm8k", "uid": "1"}
    )
    return PromptGroup.of(Ticket(0, 0), prompt, responses, created_s=0.0).encode()


def client(queue: Any) -> QueueClient:
    actors = ActorDirectory()
    actors.update({"queue": queue})
    return remote_queue(actors)


class Producer:
    """A rollouter's side of the protocol, with groups that are ready at once."""

    def __init__(self, name: str, queue: Any) -> None:
        self.name = name
        self.queue = client(queue)
        self.data = encoded_group()
        self.held: set[int] = set()

    async def admitted(self) -> list[Ticket]:
        """Return tickets for a whole block."""
        tickets: list[Ticket] = []
        while len(tickets) < BLOCK_GROUPS:
            want = BLOCK_GROUPS - len(tickets)
            asked = self.queue.admit(self.name, want=want, load=len(tickets), wait_s=PATIENCE_S, holding=self.held)
            tickets += (await asked).tickets
            self.held |= {ticket.sequence for ticket in tickets}
        return tickets

    async def put(self, tickets: list[Ticket]) -> None:
        assert await self.queue.put(
            EncodedGroups(EncodedGroup(ticket, 0, self.data) for ticket in tickets), wait_s=PATIENCE_S
        )
        self.held -= {ticket.sequence for ticket in tickets}

    async def saturate(self, until_s: float) -> None:
        """Put as fast as admission allows, until the wall clock reaches `until_s`."""
        while time.time() < until_s:
            await self.put(await self.admitted())

    async def open_loop(self, start_s: float, seconds: float, blocks_per_s: float, seed: int) -> list[float]:
        """Return latencies in seconds of puts at Poisson moments, counted from those moments."""
        rng = random.Random(seed)
        moments, moment = [], 0.0
        while (moment := moment + rng.expovariate(blocks_per_s)) < seconds:
            moments.append(start_s + moment)
        ahead: asyncio.Queue[list[Ticket]] = asyncio.Queue(maxsize=BLOCKS_AHEAD)

        async def ask() -> None:
            for _ in moments:
                await ahead.put(await self.admitted())

        async def put_at(moment_s: float) -> float:
            await asyncio.sleep(moment_s - time.time())
            await self.put(await ahead.get())
            return time.time() - moment_s

        latencies = await asyncio.gather(ask(), *map(put_at, moments))
        return latencies[1:]

    async def fill(self, queue: Any, until_s: float) -> None:
        """Fill `ray.util.queue` in blocks, by its own batch calls."""
        while time.time() < until_s:
            try:
                await queue.actor.put_nowait_batch.remote([self.data] * BLOCK_GROUPS)
            except Full:
                await asyncio.sleep(POLL_S)


class Consumer:
    """A trainer's side of the protocol: it requests the next batch while one is being committed."""

    def __init__(self, queue: Any) -> None:
        self.queue = client(queue)
        self.step = 0

    async def consume(self, until_s: float) -> list[float]:
        """Return the time of each commit. Ends when no batch arrives after `until_s`."""
        moments: list[float] = []
        ahead = asyncio.create_task(self.queue.take(self.step + 1, wait_s=1.0))
        while isinstance(taken := await ahead, Taken) or time.time() < until_s:
            if not isinstance(taken, Taken):
                ahead = asyncio.create_task(self.queue.take(self.step + 1, wait_s=1.0))
                continue
            assert len(taken.groups) == BLOCK_GROUPS
            self.step += 1
            ahead = asyncio.create_task(self.queue.take(self.step + 1, wait_s=1.0))
            version = await self.queue.commit(self.step, wait_s=PATIENCE_S)
            assert version is not None
            if self.step % STEPS_PER_VERSION == 0:
                await self.queue.confirm_published(version)
            moments.append(time.time())
        return moments

    async def empty(self, queue: Any, until_s: float) -> int:
        count = 0
        while time.time() < until_s:
            try:
                count += len(await queue.actor.get_nowait_batch.remote(BLOCK_GROUPS))
            except Empty:
                await asyncio.sleep(POLL_S)
        return count


class Scene:
    """The actors of one run."""

    def __init__(self, folder: str) -> None:
        self.queue = actor(QueueActor, "queue", folder)
        ray.get(self.queue.open.remote(config(), None, CheckpointMark(), None))
        self.producers = [actor(Producer, f"producer-{one}", self.queue) for one in range(PRODUCERS)]
        self.consumer = actor(Consumer, self.queue)
        ray.get([one.__ray_ready__.remote() for one in (*self.producers, self.consumer)])
        self.queue_pid = ray.get(self.queue.__ray_call__.remote(lambda _: os.getpid()))

    def queue_cpu_s(self) -> float:
        """CPU seconds of the queue's process since its start: its cost even if other programs keep the machine busy."""
        times = psutil.Process(self.queue_pid).cpu_times()
        return times.user + times.system

    def saturated(self, seconds: float) -> float:
        """Groups/s that were put, taken and committed, after the warm-up."""
        start_s = time.time() + WARM_UP_S
        until_s = start_s + seconds
        consuming = self.consumer.consume.remote(until_s)
        ray.get([one.saturate.remote(until_s) for one in self.producers])
        moments = [one for one in ray.get(consuming) if start_s <= one < until_s]
        return len(moments) * BLOCK_GROUPS / seconds

    def put_latencies_ms(self, groups_per_s: float, seconds: float) -> np.ndarray[Any, Any]:
        start_s = time.time() + WARM_UP_S
        rate = groups_per_s / BLOCK_GROUPS / PRODUCERS
        consuming = self.consumer.consume.remote(start_s + seconds)
        putting = [one.open_loop.remote(start_s, seconds, rate, seed) for seed, one in enumerate(self.producers)]
        latencies = [one for each in ray.get(putting) for one in each]
        ray.get(consuming)
        return np.array(latencies) * 1e3

    def rays_own(self, seconds: float) -> float:
        queue = Queue(maxsize=ALIVE_GROUPS, actor_options={"num_cpus": 0})
        queue.put(b"")  # returns when the actor is ready
        until_s = time.time() + seconds
        putting = [one.fill.remote(queue, until_s) for one in self.producers]
        count = ray.get(self.consumer.empty.remote(queue, until_s))
        ray.get(putting)
        queue.shutdown(force=True)
        return count / seconds


def actor(kind: type, *args: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0, max_concurrency=MAX_CALLS).remote(*args)


def main() -> int:
    options = parser(__doc__).parse_args()
    rounds, seconds, open_s, baseline_s = (1, 1.0, 2.0, 1.0) if options.quick else (3, 5.0, 15.0, 4.0)
    facts = machine_facts()
    with tempfile.TemporaryDirectory(prefix="fw-") as folder:  # short: Ray's sockets have paths of 107 bytes at most
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        ray.init(
            address="local",
            num_cpus=PRODUCERS,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": environment},
            _temp_dir=folder,
        )
        try:
            scene = Scene(folder)
            before_s = scene.queue_cpu_s()
            saturated = [scene.saturated(seconds) for _ in range(rounds)]
            so_far = ray.get(scene.queue.stats.remote())
            queue_cpu_us = (scene.queue_cpu_s() - before_s) / so_far["total_consumed"] * 1e6
            samples_per_s = median(saturated)
            latencies_ms = scene.put_latencies_ms(samples_per_s / 2, open_s)
            baseline = scene.rays_own(baseline_s)
            stats = ray.get(scene.queue.stats.remote())
        finally:
            ray.shutdown()
    p50, p99, worst = np.percentile(latencies_ms, [50, 99, 100]).tolist()
    figures = {
        "samples_per_s": samples_per_s,
        "put_p99_ms": p99,
        "put_p50_ms": p50,
        "put_max_ms": worst,
        "puts": len(latencies_ms),
        "offered_samples_per_s": samples_per_s / 2,
        "queue_cpu_us_per_sample": queue_cpu_us,
        "rounds_samples_per_s": saturated,
        "ray_queue_samples_per_s": baseline,
        "speedup_vs_ray_queue": samples_per_s / baseline,
        "sample_bytes": len(encoded_group()),
        "block_groups": BLOCK_GROUPS,
        "producers": PRODUCERS,
        "dropped": stats["dropped_samples"],
        "machine": facts,
    }
    print(machine_line(facts), end="\n\n")
    rows = [
        ("groups/s at saturation", f"{samples_per_s:,.0f}"),
        ("its rounds", ", ".join(f"{one:,.0f}" for one in saturated)),
        ("CPU of the queue's process, us a group", f"{queue_cpu_us:.1f}"),
        (f"put of {BLOCK_GROUPS} at half of it, p50, ms", f"{p50:.1f}"),
        ("p99, ms", f"{p99:.1f}"),
        (f"slowest of {len(latencies_ms)}, ms", f"{worst:.1f}"),
        ("`ray.util.queue` by 256, groups/s", f"{baseline:,.0f}"),
        ("times as many", f"{samples_per_s / baseline:.0f}"),
    ]
    print(markdown_table(("figure", "value"), rows), end="\n\n")
    promises = [
        at_least("samples_per_s", samples_per_s, PROMISED_SAMPLES_PER_S),
        at_most("put_p99_ms", p99, PROMISED_PUT_P99_MS),
    ]
    print(promise_table(promises))
    write_json(options.json, figures)
    return exit_code(promises, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
