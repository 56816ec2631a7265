"""What the length penalty of a batch costs, against the same formula computed group by group.

    python benchmarks/length_penalty.py [--json FILE] [--repeats N] [--quick]

`penalty` is one call of `median_penalty`. `groups` is `group_index` on uids in verl's form, an object array of text.
`loop` takes each group's rows and their median in Python. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from common import (
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
from freewheel.rewards.config import LengthPenaltyConfig
from freewheel.rewards.scoring import group_index, median_penalty

SCENES = ((1_024, 8), (8_192, 16), (65_536, 8))
"""Samples and their group size: the batch of the judge's benchmarks, a large step, and the promise."""
PROMISED_MS = 10.0
"""For 65,536 samples in groups of 8."""
LONGEST_TOKENS = 16_384
SEED = 0
REPEATS = 21
QUICK_REPEATS = 3

CONFIG = LengthPenaltyConfig()


def penalty(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return median_penalty(lengths, groups, CONFIG)[0]


def loop(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The formula, one group at a time."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        rows.setdefault(group, []).append(row)
    found = np.empty(len(lengths))
    for own in rows.values():
        middle = np.median(lengths[own])
        distance = np.abs(lengths[own] - middle) / middle
        rise = np.clip((distance - CONFIG.peak_ratio) / (CONFIG.outer_ratio - CONFIG.peak_ratio), 0, 1)
        found[own] = CONFIG.penalty_scale * CONFIG.max_penalty * rise
    return found


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started_at) * 1000)
    return median(taken)


def measure(samples: int, group_size: int, repeats: int) -> dict[str, Any]:
    draw = np.random.default_rng(SEED)
    names = [str(uuid.UUID(bytes=draw.bytes(16))) for _ in range(samples // group_size)]
    uids = draw.permutation(np.repeat(np.array(names, dtype=object), group_size))  # as an asynchronous batch is
    lengths = draw.integers(1, LONGEST_TOKENS, samples)
    groups = group_index(uids)
    assert np.allclose(penalty(lengths, groups), loop(lengths, groups)), "the two ways differ"
    return {
        "samples": samples,
        "group_size": group_size,
        "penalty_ms": milliseconds(lambda: penalty(lengths, groups), repeats),
        "groups_ms": milliseconds(lambda: group_index(uids), repeats),
        "loop_ms": milliseconds(lambda: loop(lengths, groups), max(3, repeats // 7)),
    }


def run(options: argparse.Namespace) -> int:
    facts = machine_facts()
    print(machine_line(facts), end="\n\n")
    repeats = QUICK_REPEATS if options.quick else options.repeats
    scenes = [measure(samples, group_size, repeats) for samples, group_size in SCENES]
    rows = [
        (
            f"{scene['samples']:,} in groups of {scene['group_size']}",
            *(f"{scene[key]:.2f}" for key in ("penalty_ms", "groups_ms", "loop_ms")),
            f"{scene['loop_ms'] / scene['penalty_ms']:.0f}x",
        )
        for scene in scenes
    ]
    print(markdown_table(("samples", "penalty ms", "groups ms", "loop ms", "loop / penalty"), rows), end="\n\n")
    promises = [at_most("penalty_ms", scenes[-1]["penalty_ms"], PROMISED_MS)]
    print(promise_table(promises))
    write_json(options.json, {"machine": facts, "numpy": np.__version__, "scenes": scenes})
    return exit_code(promises, quick=options.quick)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=REPEATS)
    sys.exit(run(options.parse_args()))
