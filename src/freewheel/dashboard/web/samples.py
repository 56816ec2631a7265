"""The recorded samples of a run, newest first.

samples/*.jsonl ─ Folder ─▶ a card per group (with the position of the rest) ─▶ a page, or one group in full
"""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from freewheel.observe.lines import Folder, Identity, decode_line, open_regular
from freewheel.observe.run_folder import SAMPLES

PAGE = 40
"""Cards per page."""
PROMPT_CHARS = 300
"""Characters of a prompt that a list shows and a search looks through."""
MOST_CARDS = 50_000
"""Cards in memory; the oldest are dropped."""


class _Response(msgspec.Struct, gc=False):
    value: float | None = None
    status: str = ""
    tokens: int = 0
    finish: str = ""


class _Sample(msgspec.Struct, gc=False):
    time: float
    ordinal: int
    prompt: str = ""
    replica: str | int = ""
    attempt: int = 0
    responses: list[_Response] = []


class Card(msgspec.Struct, gc=False):
    """A group in a list."""

    key: str
    time: float
    ordinal: int
    replica: str
    attempt: int
    prompt: str
    responses: int
    mean: float | None
    best: float | None
    worst: float | None
    failed: int
    skipped: int
    cut_off: int
    tokens: int


class _Place(NamedTuple):
    file: Identity
    offset: int
    length: int


class Samples:
    """All recorded groups of a run, kept up with its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = Folder(folder / SAMPLES)
        self._cards: dict[str, Card] = {}
        self._places: dict[str, _Place] = {}
        self._told = 0

    def look(self) -> None:
        for identity, blocks in self._folder.look(self._forget):
            for block in blocks:
                offset = block.offset
                for line in block.lines:
                    self._take(identity, offset, line)
                    offset += len(line) + 1
        over = max(0, len(self._cards) - MOST_CARDS)
        for card in heapq.nsmallest(over, self._cards.values(), key=lambda card: card.time):
            del self._cards[card.key], self._places[card.key]

    def __len__(self) -> int:
        return len(self._cards)

    @property
    def recorded(self) -> bool:
        return self._folder.exists

    def _forget(self, identity: Identity) -> None:
        for key in [key for key, place in self._places.items() if place.file == identity]:
            del self._cards[key], self._places[key]

    def _take(self, identity: Identity, offset: int, line: bytes) -> None:
        sample = decode_line(_SAMPLES, line)
        if sample is None:
            return
        self._told += 1
        key = str(self._told)
        self._cards[key] = _card(key, sample)
        self._places[key] = _Place(identity, offset, len(line))

    def page(self, *, find: str = "", only: str = "", before: float | None = None) -> dict[str, Any]:
        """Return cards, newest first, from before a time. `find`: text in the prompt, or `#` and its ordinal. `only`:
        groups with `failed`, `skipped` or `cut_off` responses, or with `mixed` rewards."""
        text = find.strip().lower()
        cards = [card for card in self._cards.values() if _matches(card, text, only)]
        cards = [card for card in cards if before is None or card.time < before]
        cards.sort(key=lambda card: -card.time)
        return {"recorded": self.recorded, "total": len(self), "found": len(cards), "cards": cards[:PAGE]}

    def read(self, key: str) -> dict[str, Any] | None:
        """Return one group in full; None if it is gone."""
        place = self._places.get(key)
        tail = self._folder.tails.get(place.file) if place is not None else None
        fd = open_regular(tail.path) if tail is not None else None
        if fd is None or place is None:
            return None
        try:
            return decode_line(_WHOLE, os.pread(fd, place.length, place.offset))
        except OSError:
            return None
        finally:
            os.close(fd)


def _card(key: str, sample: _Sample) -> Card:
    values = [one.value for one in sample.responses if one.value is not None]
    return Card(
        key=key,
        time=sample.time,
        ordinal=sample.ordinal,
        replica=str(sample.replica),
        attempt=sample.attempt,
        prompt=sample.prompt[:PROMPT_CHARS],
        responses=len(sample.responses),
        mean=sum(values) / len(values) if values else None,
        best=max(values, default=None),
        worst=min(values, default=None),
        failed=sum(one.status == "failed" for one in sample.responses),
        skipped=sum(one.status == "skipped" for one in sample.responses),
        cut_off=sum(one.finish == "length" for one in sample.responses),
        tokens=sum(one.tokens for one in sample.responses),
    )


def _matches(card: Card, find: str, only: str) -> bool:
    if only in ("failed", "skipped", "cut_off") and not getattr(card, only):
        return False
    if only == "mixed" and (card.best is None or card.best == card.worst):
        return False
    if find.startswith("#"):
        return find[1:] == str(card.ordinal)
    return not find or find in card.prompt.lower()


_SAMPLES = msgspec.json.Decoder(_Sample)
_WHOLE = msgspec.json.Decoder(dict[str, Any])
