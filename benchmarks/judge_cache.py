"""What the judge cache costs: microseconds a reply in memory and on disk, and four processes on one file.

python benchmarks/judge_cache.py [--entries 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from freewheel.judge.cache import CACHE_FILE, CachedReply, MemoryCache, Store

TEXT_BYTES = 600
LOOKUP_KEYS = 256
PROCESSES = 4
MIXED_S = 5.0
"""Running time of the four processes."""
MIXED_PUTS = 16
"""Writes of each process between two look-ups of as many keys, so that half of the operations are writes."""
WAITING_BYTES = 32 * 2**20
"""Pause before more than this is waiting for the writer, because it drops replies beyond 64 MiB."""


def reply(number: int) -> CachedReply:
    return CachedReply(f"{number} ".ljust(TEXT_BYTES, "x"), 900, 120)


def timed_us(count: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) / count * 1e6


def memory_figures(keys: list[bytes], replies: list[CachedReply]) -> dict[str, float]:
    cache = MemoryCache(2**30)

    def put() -> None:
        for key, value in zip(keys, replies, strict=True):
            cache.put(key, value)

    def get() -> None:
        for key in keys:
            cache.get(key)

    return {
        "memory put, us": timed_us(len(keys), put),
        "memory put again, us": timed_us(len(keys), put),
        "memory get, us": timed_us(len(keys), get),
    }


def store_figures(path: Path, keys: list[bytes], replies: list[CachedReply]) -> dict[str, float]:
    store = Store(path, max_bytes=2**31, ttl_s=None)
    store.open()
    step = WAITING_BYTES // (TEXT_BYTES + 600)
    caller_s = 0.0
    slowest_put_s = 0.0
    started = time.perf_counter()
    for start in range(0, len(keys), step):
        for key, value in zip(keys[start : start + step], replies[start : start + step], strict=True):
            before = time.perf_counter()
            store.put(key, value)
            took = time.perf_counter() - before
            caller_s += took
            slowest_put_s = max(slowest_put_s, took)
        if not store.flush(60):
            raise SystemExit("the cache could not be written")
    put_us = (time.perf_counter() - started) / len(keys) * 1e6
    store.close()

    order = keys.copy()
    random.Random(1).shuffle(order)
    missing = [os.urandom(32) for _ in range(len(keys) // 4)]
    store = Store(path, max_bytes=2**31, ttl_s=None)
    store.open()

    def lookup(names: list[bytes], by: int) -> int:
        return sum(len(store.get_many(names[start : start + by])) for start in range(0, len(names), by))

    found = 0

    def get_all() -> None:
        nonlocal found
        found = lookup(order, LOOKUP_KEYS)

    figures = {
        "store put: time in the caller, us": caller_s / len(keys) * 1e6,
        "store put: slowest, ms": slowest_put_s * 1e3,
        "store put until on disk, us": put_us,
        f"store get by {LOOKUP_KEYS}, us": timed_us(len(order), get_all),
        "store get one by one, us": timed_us(10_000, lambda: lookup(order[:10_000], 1)),
        f"store miss by {LOOKUP_KEYS}, us": timed_us(len(missing), lambda: lookup(missing, LOOKUP_KEYS)),
        "stats, ms": timed_us(1, store.stats) / 1e3,
        "export, us": timed_us(len(keys), lambda: sum(1 for _ in store.export())),
        "file, MB": store.stats().file_bytes / 1e6,
        "clear, ms": timed_us(1, store.clear) / 1e3,
    }
    store.close()
    if found != len(keys):
        raise SystemExit(f"{len(keys) - found} of {len(keys)} entries are missing")
    return figures


def mixed_worker(path: Path, worker: int) -> None:
    """Write and look up entries. Print operations/s until all is on disk, the slowest look-up, and the entries lost."""
    store = Store(path, max_bytes=2**31, ttl_s=None)
    store.open()
    rng = random.Random(worker)
    mine: list[bytes] = []
    operations = 0
    slowest_s = 0.0
    started = time.perf_counter()
    while time.perf_counter() < started + MIXED_S:
        for _ in range(MIXED_PUTS):
            key = rng.randbytes(32)
            store.put(key, reply(len(mine)))
            mine.append(key)
        before = time.perf_counter()
        store.get_many(rng.choices(mine, k=MIXED_PUTS))
        slowest_s = max(slowest_s, time.perf_counter() - before)
        operations += 2 * MIXED_PUTS
        if len(mine) % (MIXED_PUTS * 512) == 0:
            store.flush(60)
    store.flush(60)
    per_s = operations / (time.perf_counter() - started)
    store.close()
    store = Store(path, max_bytes=2**31, ttl_s=None)
    lost = len(mine) - sum(
        len(store.get_many(mine[start : start + LOOKUP_KEYS])) for start in range(0, len(mine), LOOKUP_KEYS)
    )
    store.close()
    print(json.dumps({"per_s": per_s, "slowest_s": slowest_s, "lost": lost}))


def mixed_figures(path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--worker"]
    started = time.perf_counter()
    workers = [
        subprocess.Popen([*command, str(path), str(worker)], stdout=subprocess.PIPE, text=True)
        for worker in range(PROCESSES)
    ]
    results = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    wall_s = time.perf_counter() - started
    return {
        f"{PROCESSES} processes mixed, operations/s": sum(result["per_s"] for result in results),
        f"{PROCESSES} processes mixed, slowest look-up, ms": max(result["slowest_s"] for result in results) * 1e3,
        f"{PROCESSES} processes mixed, lost": sum(result["lost"] for result in results),
        f"{PROCESSES} processes mixed, wall s": wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        mixed_worker(Path(options.worker[0]), int(options.worker[1]))
        return
    keys = [os.urandom(32) for _ in range(options.entries)]
    replies = [reply(number) for number in range(options.entries)]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        figures |= memory_figures(keys, replies)
        figures |= store_figures(Path(folder) / CACHE_FILE, keys, replies)
        figures |= mixed_figures(Path(folder) / "mixed" / CACHE_FILE)
    print(f"{options.entries:,} entries of {TEXT_BYTES} bytes, SQLite {sqlite3.sqlite_version}, {os.cpu_count()} CPUs")
    for name, value in figures.items():
        print(f"{name:45}{value:12,.2f}")
    if options.json:
        options.json.write_text(json.dumps({"entries": options.entries, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
