"""Describes the life of one prompt: its attempts, its group with each response, and how it ended.

    journal: step ─ abandoned ─ failures ─ group ─▶ GroupLife, decoded with the run's own tokenizer

Used by `freewheel inspect RUN --group N` and the dashboard. Needs neither torch nor ray.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from freewheel.data.group import Array, PromptGroup
from freewheel.errors import ConfigError
from freewheel.inspect.run import RunFolder, open_journal, read_checkpoints
from freewheel.observe.run_folder import BEST, FINAL, JOURNAL, saved_steps
from freewheel.queue.audit import audit
from freewheel.queue.journal import Stored

TOKENIZER = "tokenizer.json"
"""The file of a fast tokenizer: tables, no code."""


class ResponseLife(msgspec.Struct, frozen=True, kw_only=True):
    text: str | None
    """The text of the response. None: no tokenizer was found."""
    tokens: list[int]
    finish: str
    value: float | None
    """The reward that is trained on; None if scoring failed."""
    raw: float | None
    status: str
    reason: str
    parts: dict[str, float]
    versions: list[tuple[int, int]]
    """Weight version, and how many consecutive tokens it made; -1 for tokens that no engine made."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt."""

    attempt: int
    reason: str
    kind: str | None
    """The budget that it cost; None for none."""
    detail: str
    wall_s: float


class GroupLife(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one prompt. Times are wall-clock seconds; None if they are not recorded."""

    run: str
    group: int
    state: str
    step: int | None
    version: int | None
    """The weight version after that step."""
    committed_s: float | None
    abandoned: str
    """Why it was abandoned; empty if it was not."""
    ended_s: float | None
    failed: list[Attempt]
    sequence: int | None
    created_s: float | None
    stored_s: float | None
    prompt: str | None
    prompt_tokens: list[int]
    row: dict[str, Any]
    responses: list[ResponseLife]
    notes: list[str]


def follow(run: RunFolder, ordinal: int) -> GroupLife:
    """Return one prompt's life. Raises `ConfigError` if nothing is known about it."""
    with open_journal(run) as journal:
        if journal is None:
            raise ConfigError(
                "--group", ordinal, f"{run.folder} has no {JOURNAL}: nothing is known about single groups"
            )
        known = audit(journal, checkpoints=read_checkpoints(run.folder)[1])
        highest = sum(known.states.values()) - 1
        if not 0 <= ordinal <= highest:
            raise ConfigError("--group", ordinal, f"prompts 0 to {highest} have been seen in this run")
        step = next(
            (one for one in journal.steps(after=0) if any(ticket.ordinal == ordinal for ticket in one.tickets)), None
        )
        abandoned = next((one for one in journal.abandoned() if one.ordinal == ordinal), None)
        failures = list(journal.failures(ordinal))
        stored = journal.group(ordinal)
        base = journal.base()
    group, notes = _decode_group(stored)
    covered = ordinal < base.frontier.low or ordinal in base.frontier.ended
    if step is not None and step.version is not None:
        state = "trained"
    elif abandoned is not None:
        state = "abandoned"
    elif covered:
        state = "ended"
    else:
        state = "taken" if step else "queued" if stored else "failed" if failures else "open"
    if group is None and state in ("trained", "ended"):
        notes.append(
            "its data is dropped, because a checkpoint covers it: only step, version and time are known "
            "(journal.keep_groups says how many of the last groups are kept)"
        )
    if group is None and state in ("abandoned", "failed"):
        notes.append("its responses were not kept: the journal keeps only those of groups that will be trained on")
    text, why = _texts(run) if group is not None else (None, "")
    return GroupLife(
        run=str(run.folder),
        group=ordinal,
        state=state,
        step=step.step if step else None,
        version=step.version if step else None,
        committed_s=(step.wall_s or None) if step else None,
        abandoned=abandoned.reason if abandoned else "",
        ended_s=abandoned.wall_s if abandoned else None,
        failed=[
            Attempt(attempt=one.ticket.attempt, reason=one.reason, kind=one.kind, detail=one.detail, wall_s=one.wall_s)
            for one in failures
        ],
        sequence=stored.ticket.sequence if stored else None,
        created_s=group.created_s if group else None,
        stored_s=stored.wall_s if stored else None,
        prompt=text(group.prompt) if group and text else None,
        prompt_tokens=group.prompt.tolist() if group else [],
        row=dict(group.row) if group else {},
        responses=_responses(group, text) if group else [],
        notes=[*notes, *([why] if why else [])],
    )


def _decode_group(stored: Stored | None) -> tuple[PromptGroup | None, list[str]]:
    if stored is None:
        return None, []
    try:
        return PromptGroup.decode(stored.data), []
    except (msgspec.DecodeError, ValueError) as error:
        return None, [f"its data cannot be read: {error}"]


def _responses(group: PromptGroup, text: Callable[[Array], str] | None) -> list[ResponseLife]:
    lives = []
    for response in map(group.response, range(len(group))):
        verdict = response.verdict
        assert verdict is not None
        lives.append(
            ResponseLife(
                text=text(response.tokens) if text else None,
                tokens=response.tokens.tolist(),
                finish=response.finish,
                value=_finite(response.reward),
                raw=_finite(response.raw_reward),
                status=verdict.status,
                reason=verdict.summary,
                parts=dict(verdict.parts),
                versions=[(one, len([*same])) for one, same in itertools.groupby(response.versions.tolist())],
            )
        )
    return lives


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _texts(run: RunFolder) -> tuple[Callable[[Array], str] | None, str]:
    """Return a decoder from the run's tokenizer file, or why there is none. No code of a model is executed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "token ids are shown: the text needs the package tokenizers (pip install 'freewheel[train]')"
    tokenizer: Any = None
    for file in _tokenizer_files(run):
        with suppress(Exception):  # the library raises bare exceptions
            tokenizer = Tokenizer.from_file(str(file))
            break
    if tokenizer is None:
        return None, f"token ids are shown: no {TOKENIZER} was found in the run or on this machine"
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False)), ""


def _tokenizer_files(run: RunFolder) -> Iterator[Path]:
    """Yield the run's own tokenizer first: it was trained with it."""
    saved = reversed(saved_steps(run.folder).values())
    folders = [*itertools.chain.from_iterable(saved), run.folder / FINAL, run.folder / BEST]
    if run.config is not None and run.config.model.tokenizer is not None:
        folders.append(Path(run.config.model.tokenizer).expanduser())
    elif run.config is not None:
        from freewheel.runtime.model_size import find_folder

        folders += filter(None, [find_folder(run.config)])
    return (file for folder in folders if (file := folder / TOKENIZER).is_file())
