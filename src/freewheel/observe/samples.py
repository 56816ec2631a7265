"""Samples of a run: a prompt with its responses now and then, as text, with what each was worth and who made it.

    a scored group ─▶ due? (so many a second) ─▶ text, by versions ─▶ Lines ─▶ RUN/samples/NAME-PID.jsonl

A rollouter's process calls `attach_samples`; where it has not, no group is ever due. The beginning of a run is kept
beside the newest. The dashboard shows them; `docs/dashboard.md` has the format.
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
"""What a tokenizer says for a character of which it has not seen all tokens."""


class Samples:
    """At most `per_s` groups a second, whatever a run makes. Never raises and never waits."""

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
        self._said = False

    def offer(self, sample: Callable[[], Mapping[str, Any]]) -> None:
        """`sample` is made only if it is due. What it raises is said once: it is no reason to lose a group."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + self._gap_s
        try:
            self.lines.add(sample())
        except Exception as error:  # noqa: BLE001  # a tokenizer of a user's may raise anything
            if not self._said:
                self._said = True
                log.warning("Samples are not recorded: %s: %s. Training goes on", type(error).__name__, error)


def segments(decode: Callable[[Any], str], tokens: Any, versions: Any) -> list[tuple[int, str]]:
    """A response's text, cut where the version changes: (version, text), which joined give `decode(tokens)`.

    A piece is what its tokens add to the text before them: tokenizers put spaces between words, and characters out of
    several tokens. Such a character belongs to the version that completed it.
    """
    runs = [(int(version), len(list(same))) for version, same in itertools.groupby(versions)]
    whole = decode(tokens)
    found: list[tuple[int, str]] = []
    said = end = 0
    for place, (version, count) in enumerate(runs):
        end += count
        upto = len(whole)
        if place < len(runs) - 1:
            upto = max(said, _common(whole, decode(tokens[:end]).rstrip(HALF)))
        found.append((version, whole[said:upto]))
        said = upto
    return found


def _common(one: str, other: str) -> int:
    """How many characters they begin with alike."""
    if one.startswith(other):
        return len(other)
    differs = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def read_samples(run_dir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The samples of a run, a file after the other, while it runs or after."""
    for file in files_of(Path(run_dir) / SAMPLES):
        for sample in read_lines(file.path):
            if isinstance(sample, dict):
                yield sample


# -- the process's own ------------------------------------------------------------------------------------------------

_samples: Samples | None = None


def attach_samples(run_dir: str | os.PathLike[str], component: str, *, per_s: float, most_bytes: int) -> None:
    """Keeps samples of this process from now on. `per_s` or `most_bytes` of 0: none."""
    global _samples
    detach_samples()
    if per_s > 0 and most_bytes > 0:
        _samples = Samples(run_dir, component, per_s=per_s, most_bytes=most_bytes)


def detach_samples() -> None:
    """Writes the rest, and ends what `attach_samples` began. Without effect where nothing is attached."""
    global _samples
    ended, _samples = _samples, None
    if ended is not None:
        ended.lines.close()


def offer(sample: Callable[[], Mapping[str, Any]]) -> None:
    if _samples is not None:
        _samples.offer(sample)
