"""Keeps samples of a run as text: some prompts with their responses, rewards and weight versions.

    a scored group ─▶ due? (at most so many per second) ─▶ text, by version ─▶ Lines ─▶ RUN/samples/NAME-PID.jsonl

A rollouter's process calls `attach_samples`; otherwise no group is ever due. The start of a run is kept next to the
newest samples. The dashboard shows them, and `docs/dashboard.md` has the format.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from freewheel.observe.lines import Lines, files_of, read_lines
from freewheel.observe.run_folder import SAMPLES

log = logging.getLogger("freewheel.observe")

HALF = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer returns this for a character whose tokens are incomplete."""


class SampleWriter:
    """Keeps at most `per_s` groups per second. Never raises and never waits."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        component: str,
        *,
        per_s: float,
        most_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lines = Lines(Path(run_dir) / SAMPLES, component, most_bytes=most_bytes, keeps_head=True)
        self._gap_s = 1 / per_s
        self._clock = clock
        self._next_s = clock()
        self._warned = False

    def offer(self, sample: Callable[[], Mapping[str, Any]]) -> None:
        """`sample` is built only if it is due. An exception in it is logged once; it must not cost a group."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + self._gap_s
        try:
            self.lines.add(sample())
        except Exception as error:  # noqa: BLE001  # a tokenizer of a user's may raise anything
            if not self._warned:
                self._warned = True
                log.warning("Samples are not recorded: %s: %s. Training continues", type(error).__name__, error)


def segments(decode: Callable[[Any], str], tokens: Any, versions: Any) -> list[tuple[int, str]]:
    """Split a response's text where the version changes: (version, text) pairs that join to `decode(tokens)`.

    A piece is what its tokens add to the text before them, because tokenizers insert spaces and spread characters over
    several tokens. Such a character belongs to the version that completed it.
    """
    runs = [(int(version), len(list(same))) for version, same in itertools.groupby(versions)]
    whole = decode(tokens)
    found: list[tuple[int, str]] = []
    done = end = 0
    for place, (version, count) in enumerate(runs):
        end += count
        upto = len(whole)
        if place < len(runs) - 1:
            upto = max(done, _count_common(whole, decode(tokens[:end]).rstrip(HALF)))
        found.append((version, whole[done:upto]))
        done = upto
    return found


def _count_common(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    if one.startswith(other):
        return len(other)
    differs = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def read_samples(run_dir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a run, file by file, during or after it."""
    for file in files_of(Path(run_dir) / SAMPLES):
        for sample in read_lines(file.path):
            if isinstance(sample, dict):
                yield sample


# -- the process's own ------------------------------------------------------------------------------------------------

_samples: SampleWriter | None = None


def attach_samples(run_dir: str | os.PathLike[str], component: str, *, per_s: float, most_bytes: int) -> None:
    """Keep samples of this process from now on. `per_s` or `most_bytes` of 0: none."""
    global _samples
    detach_samples()
    if per_s > 0 and most_bytes > 0:
        _samples = SampleWriter(run_dir, component, per_s=per_s, most_bytes=most_bytes)


def detach_samples() -> None:
    """Write the rest and undo `attach_samples`. Does nothing if it was not called."""
    global _samples
    ended, _samples = _samples, None
    if ended is not None:
        ended.lines.close()


def offer(sample: Callable[[], Mapping[str, Any]]) -> None:
    if _samples is not None:
        _samples.offer(sample)
