"""What a new version of the weights costs generation: the gap in the tokens of 64 streams while vLLM loads it.

    python benchmarks/weight_sync.py [--json FILE] [--shape 1.5B] [--syncs N] [--quick]

    a trainer's process: cast, DevicePacker ─ handles ─▶ this process: VllmEngine.update_weights ─▶ vLLM, same GPU
                                                          64 streams, a timestamp a token

A Qwen2 of that shape with random weights in bfloat16. The trainer's process holds them in float32, changes them before
each version and keeps the last two versions, as in a run. Streams generate without end.

`pause_ms`: the largest gap between two consecutive tokens of any stream around a sync (from its start to a second after
its end). `quiet_gap_ms`: the same in as much time without a sync. The first sync opens the trainer's memory and is
verified against what was sent; the last one is verified too. Those between are not verified, and the promise is about
them. Bytes/s: of the calls that load, against a copy of as many bytes within the GPU, measured in the trainer's process
before streams start.

Without a GPU (`--quick` only): a tiny model through shared memory, to check that the script works.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

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
    scratch_dir,
    write_json,
)
from freewheel.rollout.engine import Engine, EngineError, GenerationRequest, SamplingParams, generate_all
from shapes import SHAPES, VOCABULARY, write_model

PROMISED_PAUSE_MS = 100.0
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 2048
SYNCS, QUICK_SYNCS = 8, 3
APART_S = 3.0
"""Time between two syncs: a second after the first, and as much time without any."""
AFTER_S, QUIET_S = 1.0, 1.5
"""How long after a sync still counts as around it, and how much quiet time follows before the next."""
MEMORY_SHARE = 0.5
COPIES = 10
POLL_S = 0.0005
"""Resolution of the measured pauses."""
TINY = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
PHASES = ("pause", "start_update", "update", "finish_update", "resume")
"""The engine's calls to vLLM, in order."""


# -- the trainer's process --------------------------------------------------------------------------------------------


def train(folder: str, device: str, transport: str, pipe: Connection) -> None:
    """Send a new version, and the time it took to make, for each request."""
    import torch
    from transformers import Qwen2ForCausalLM

    from freewheel.sync.broadcast import packer_for

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    packer = packer_for(transport)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(work: Callable[[], Any]) -> tuple[Any, float]:
        synchronize()
        since = time.perf_counter()
        found = work()
        synchronize()
        return found, time.perf_counter() - since

    def copied_s(n_bytes: int) -> float:
        source, target = (torch.zeros(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        return median([timed(lambda: target.copy_(source))[1] for _ in range(COPIES)])

    def cast() -> dict[str, Any]:
        return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}

    held: list[Any] = []
    n_bytes = sum(2 * p.numel() for p in model.parameters())
    pipe.send({"bytes": n_bytes, "copy_s": copied_s(n_bytes)})
    for _ in iter(pipe.recv, None):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        tensors, cast_s = timed(cast)
        weights, pack_s = timed(lambda tensors=tensors: packer(tensors))
        del tensors
        held = [*held[-1:], weights]
        pipe.send((weights, {"cast_ms": cast_s * 1e3, "pack_ms": pack_s * 1e3}))


class Trainer:
    """The trainer's process, as the event loop calls it."""

    def __init__(self, folder: str, device: str, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=train, args=(folder, device, transport, theirs), daemon=True)
        self._process.start()

    async def facts(self) -> dict[str, float]:
        found: dict[str, float] = await asyncio.to_thread(self._pipe.recv)
        return found

    async def next(self) -> tuple[Any, dict[str, float]]:
        self._pipe.send("next")
        found: tuple[Any, dict[str, float]] = await asyncio.to_thread(self._pipe.recv)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join()


# -- streams ----------------------------------------------------------------------------------------------------------


class Streams:
    """Keeps requests running, one after the other in each stream, and records when the engine made tokens."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self.gaps: list[tuple[float, float]] = []
        """Gaps between two consecutive moments at which new tokens were seen."""
        self.tokens = 0
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._run(stream)) for stream in range(count)]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _run(self, stream: int) -> None:
        rng = np.random.default_rng(stream)
        while True:
            request = GenerationRequest(
                id=f"stream-{next(self._numbers)}",
                prompt=rng.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32),
                samples=(SamplingParams(max_new_tokens=NEW_TOKENS, seed=stream),),
                timeout_s=60.0,
            )
            await generate_all(self._engine, request)

    async def _watch(self) -> None:
        """Poll the engine's counter, because an engine delivers only whole responses."""
        made, last = self._engine.stats().generated_tokens, time.perf_counter()
        while True:
            await asyncio.sleep(POLL_S)
            found = self._engine.stats().generated_tokens
            if found > made:
                now = time.perf_counter()
                self.gaps.append((last, now))
                self.tokens += found - made
                made, last = found, now

    def largest_ms(self, since: float, until: float) -> float:
        """The largest gap that overlaps the interval."""
        found = [end - begin for begin, end in self.gaps if end > since and begin < until]
        return 1e3 * max(found, default=until - since)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(found, EngineError):
                raise found


class Phases:
    """Duration of each call to vLLM since the last query."""

    def __init__(self, engine: Any) -> None:
        self._spent: dict[str, float] = {}
        for name in PHASES:
            setattr(engine._llm, name, self._timed(name, getattr(engine._llm, name)))

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                self._spent[name] = self._spent.get(name, 0.0) + 1e3 * (time.perf_counter() - since)

        return timed

    def taken(self) -> dict[str, float]:
        found, self._spent = self._spent, {}
        return {f"vllm_{name}_ms": found.get(name, 0.0) for name in PHASES}


# -- the measurement --------------------------------------------------------------------------------------------------


async def start(folder: str, streams: int) -> tuple[Any, str]:
    """Start the engine and the weight transport as a run does."""
    from freewheel.runtime.building import load_engine
    from freewheel.runtime.config_files import to_config
    from freewheel.runtime.placement import Machine
    from freewheel.runtime.run_plan import resolve

    on_gpu = _has_gpu()
    config = to_config(
        {
            "model": {"path": folder, "dtype": "bfloat16"},
            "rollout": {
                "engine": "vllm",
                "slots": streams,
                "max_new_tokens": NEW_TOKENS,
                "gpu_memory_share": MEMORY_SHARE if on_gpu else "auto",
                "vllm": {} if on_gpu else {"enforce_eager": True},
            },
        }
    )
    plan = resolve(config, Machine.here())
    loaded = load_engine(config=config, plan=plan, model_path=folder, longest_tokens=PROMPT_TOKENS)
    return loaded.engine, plan.transport


def _has_gpu() -> bool:
    from freewheel.runtime.placement import Machine

    return bool(Machine.here().gpus)


async def sync(engine: Engine, trainer: Trainer, version: int, *, verify: bool, phases: Phases) -> dict[str, Any]:
    weights, made = await trainer.next()
    phases.taken()
    since = time.perf_counter()
    found = await engine.update_weights(version, weights, verify=verify)
    until = time.perf_counter()
    if verify and found != weights.checksum:
        raise SystemExit(f"version {version}: the engine holds other weights than it was sent")
    return {
        "since": since,
        "until": until,
        "whole_ms": 1e3 * (until - since),
        "verify": verify,
        **made,
        **phases.taken(),
    }


async def measure(folder: str, syncs: int, streams: int) -> dict[str, Any]:
    engine, transport = await start(folder, streams)
    gc.freeze()  # as in a rollouter's process: collecting all imported modules would be another pause
    trainer = Trainer(folder, "cuda" if _has_gpu() else "cpu", transport)
    try:
        facts = await trainer.facts()
        phases = Phases(engine)
        running = Streams(engine, streams)
        await asyncio.sleep(2 * APART_S)  # all streams decode, and graphs are warm
        begun, tokens = time.perf_counter(), running.tokens
        rows: list[dict[str, Any]] = []
        for version in range(1, syncs + 1):
            row = await sync(engine, trainer, version, verify=version in (1, syncs), phases=phases)
            rows.append(row)
            await asyncio.sleep(APART_S)
        rate = (running.tokens - tokens) / (time.perf_counter() - begun)
        await running.close()
        for row in rows:
            since, until = row.pop("since"), row.pop("until")
            quiet = until + AFTER_S
            row["pause_ms"] = running.largest_ms(since, quiet)
            row["quiet_gap_ms"] = running.largest_ms(quiet, quiet + min(QUIET_S, quiet - since))
            row["bytes_per_s"] = facts["bytes"] / (row["vllm_update_ms"] / 1e3)
        return {"transport": transport, "tokens_per_s": rate, **facts, "syncs": rows}
    finally:
        trainer.close()
        await engine.close()


def summary(found: dict[str, Any]) -> dict[str, float]:
    trusted = [row for row in found["syncs"] if not row["verify"]] or found["syncs"]
    names = (
        "pause_ms",
        "quiet_gap_ms",
        "whole_ms",
        "bytes_per_s",
        "cast_ms",
        "pack_ms",
        *(f"vllm_{phase}_ms" for phase in PHASES),
    )
    told = {name: median([row[name] for row in trusted]) for name in names}
    told["longest_pause_ms"] = max(row["pause_ms"] for row in trusted)
    told["first_pause_ms"] = found["syncs"][0]["pause_ms"]
    told["copy_bytes_per_s"] = found["bytes"] / found["copy_s"]
    told["of_copy"] = told["bytes_per_s"] / told["copy_bytes_per_s"]
    return told


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--shape", choices=sorted(SHAPES), default="1.5B")
    options.add_argument("--syncs", type=int, default=SYNCS)
    options.add_argument("--streams", type=int, default=STREAMS)
    args = options.parse_args()
    on_gpu = _has_gpu()
    if not on_gpu and not args.quick:
        print("this needs a GPU; --quick shows on a CPU that it works", file=sys.stderr)
        return 2
    if not on_gpu:
        SHAPES["tiny"] = TINY
    shape = args.shape if on_gpu else "tiny"
    facts = machine_facts()
    print(machine_line(facts))
    with scratch_dir() as scratch:
        folder = str(write_model(Path(scratch) / "model", shape, device="cuda" if on_gpu else "cpu"))
        syncs = QUICK_SYNCS if args.quick else args.syncs
        found = asyncio.run(measure(folder, syncs, args.streams if on_gpu else 4))
    told = summary(found)
    rows = [
        (
            f"{index}{' (compared)' if row['verify'] else ''}",
            f"{row['pause_ms']:.1f}",
            f"{row['quiet_gap_ms']:.1f}",
            f"{row['whole_ms']:.1f}",
            *(f"{row[f'vllm_{name}_ms']:.1f}" for name in PHASES),
            f"{row['cast_ms']:.1f}",
            f"{row['pack_ms']:.1f}",
            f"{row['bytes_per_s'] / 1e9:.0f}",
        )
        for index, row in enumerate(found["syncs"], start=1)
    ]
    head = ("sync", "pause ms", "quiet gap ms", "whole ms", *PHASES, "cast", "pack", "GB/s")
    print(f"{shape}, {found['bytes'] / 1e9:.2f} GB by {found['transport']}, {found['tokens_per_s']:,.0f} tokens/s")
    print(markdown_table(head, rows))
    print(f"a copy within the device: {told['copy_bytes_per_s'] / 1e9:,.0f} GB/s; loading: {told['of_copy']:.2f} of it")
    promises = [at_most("longest_pause_ms", told["longest_pause_ms"], PROMISED_PAUSE_MS)]
    promises.append(at_least("syncs", len(found["syncs"]), syncs))
    print("\n" + promise_table(promises))
    write_json(args.json, {"machine": facts, "shape": shape, **found, **told})
    return exit_code(promises, quick=args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
