"""Why an attempt at a group failed: said before it crosses a process, because the remedies differ.

`InfraFailure`: something broke beside the prompt (an engine, a process, a time-out). Try again elsewhere.
`DataFailure`: this prompt, or its scoring, is at fault. Trying again will hardly help.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class Kind(StrEnum):
    INFRA = "infra"
    DATA = "data"


BUDGETS = {Kind.INFRA: 5, Kind.DATA: 2}
"""Attempts at one prompt that may fail before it is abandoned. A prompt that kills engines must end somewhere; one that
cannot be rendered or scored fails the same way each time."""

Reason = Literal["engine", "timeout", "lost", "stale", "prompt", "reward", "hook"]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """One failed attempt."""

    kind: Kind
    reason: Reason
    detail: str = ""


def infra(reason: Reason, error: object) -> Failure:
    return Failure(Kind.INFRA, reason, str(error))


def data(reason: Reason, error: object) -> Failure:
    return Failure(Kind.DATA, reason, str(error))
