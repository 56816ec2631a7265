"""The result of scoring one response: `Scored`, `Failed` or `Skipped`.

The judge, rules and reward functions all give a `Verdict`. A failure has no number, so no caller can mistake it for a
score.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, ClassVar, Literal

import msgspec

from freewheel.errors import FreewheelError


class JudgeError(FreewheelError):
    """Base class of the errors of the judge and the rewards. A judgement that fails is a `Failed` verdict instead."""


class JudgeClosed(JudgeError, RuntimeError):
    """The judge was closed, or belongs to another process (a handle does not survive a fork)."""


class JudgeDied(JudgeError, RuntimeError):
    """The engine's process kept dying. The message says how it ended; its last output is on stderr."""


class Reason(StrEnum):
    """Why a request has no score. The verdict's detail says what was seen."""

    UNPARSEABLE = "unparseable"
    """The judge replied, but its reply holds no score that the rubric allows."""
    DEADLINE = "deadline"
    """The deadline of the request or of its batch passed. The detail holds the last failure."""
    THROTTLED = "throttled"
    """The judge asked for a wait (429, Retry-After) that would exceed the deadline."""
    UNAVAILABLE = "unavailable"
    """More 5xx, broken connections or time-outs than `max_attempts` allows."""
    REJECTED = "rejected"
    """The judge refuses this very request (400, 413, 422, a context too long)."""
    AUTH = "auth"
    """401: the key is wrong or missing. Nothing more is sent with it."""
    NOT_FOUND = "not_found"
    """404: no such model or no such path. Nothing more is sent there."""
    QUOTA = "quota"
    """The account has no credit left."""
    BUDGET = "budget"
    """`max_cost` is reached."""
    CANCELLED = "cancelled"
    """The handle was cancelled, or the judge was closed, before there was an answer."""
    ENGINE = "engine"
    """The engine itself broke (a bug, or its process kept dying)."""


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

TOKENS_MAX = 1 << 53
"""Cap on reported token counts. A server may report any number; every JSON reader can hold this one."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the judge reports, summed over all calls of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)


class Scored(msgspec.Struct, frozen=True, tag="scored", omit_defaults=True):
    """The response has a score."""

    value: float
    raw: str = ""
    """The judge's reply, unchanged."""
    usage: Usage = Usage()
    parts: dict[str, float] = {}
    """The parts of the score, by name: a rubric's criteria, or the other numbers of a reward function."""
    cached: bool = False
    """True if the score came from the cache and no call was made."""
    attempts: int = 1
    format: float = 1.0
    """A rule sets it to 0 when the response does not have the required form. `judge_gate: format` reads it."""

    status: ClassVar[Literal["scored"]] = "scored"
    summary: ClassVar[str] = ""


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """Scoring failed, so there is no score."""

    reason: str
    """The kind of failure: a `Reason` of the judge, or the type of a reward function's exception."""
    attempts: int = 0
    detail: str = ""
    usage: Usage = Usage()
    infra: bool = False
    """True if a service or a process failed, not the response: another try may succeed. Reward functions set it."""
    parts: dict[str, float] = {}
    """The numbers that are known although the score is not."""
    trace: str = ""
    """The traceback of a reward function, for the log."""

    status: ClassVar[Literal["failed"]] = "failed"

    @property
    def summary(self) -> str:
        """Reason and detail on one line."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Skipped(msgspec.Struct, frozen=True, tag="skipped", omit_defaults=True):
    """The response was left out on purpose: the judge was not called, or the reward function gave None."""

    reason: str
    parts: dict[str, float] = {}
    """The numbers that are known although there is no score."""

    status: ClassVar[Literal["skipped"]] = "skipped"

    @property
    def summary(self) -> str:
        return self.reason


Verdict = Scored | Failed | Skipped

_SHOWN = {
    Scored: ("value", "raw", "cached", "parts", "attempts", "usage"),
    Failed: ("reason", "detail", "attempts", "usage"),
    Skipped: ("reason",),
}


def plain_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return the status and the fields that files and replies show, as plain values. `parts` is left out if it is
    empty."""
    fields = {name: getattr(verdict, name) for name in _SHOWN[type(verdict)]}
    if not fields.get("parts", True):
        del fields["parts"]
    if "usage" in fields:
        fields["usage"] = msgspec.structs.asdict(fields["usage"])
    return {"status": verdict.status, **fields}


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate by U+FFFD: UTF-8 cannot carry one."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)
