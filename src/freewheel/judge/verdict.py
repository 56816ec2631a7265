"""How a judgement ends: scored, failed or skipped, three different things that are never mixed up.

A failure has no number, so nothing downstream can take it for one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from freewheel.errors import FreewheelError


class JudgeError(FreewheelError):
    """Anything that stops the engine itself."""


class JudgeClosed(JudgeError, RuntimeError):
    """The judge was closed, or belongs to another process (a handle does not survive a fork)."""


class EngineDied(JudgeError, RuntimeError):
    """The engine's process kept dying. The message says how it ended; its last output is on stderr."""


class Reason(StrEnum):
    """Why a request has no score. The detail beside it says what was seen."""

    UNPARSEABLE = "unparseable"
    """The judge replied, and the reply holds no score that the rubric allows."""
    DEADLINE = "deadline"
    """The request's or the batch's time was over; the detail holds the last thing that went wrong."""
    THROTTLED = "throttled"
    """The judge asked for a wait (429, Retry-After) that would outlast the deadline."""
    UNAVAILABLE = "unavailable"
    """5xx, broken connections or time-outs, more often than `max_attempts` allows."""
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
    """The handle was cancelled, or the judge closed, before there was an answer."""
    ENGINE = "engine"
    """The engine itself broke (a bug, or its process kept dying)."""


TOKENS_MAX = 1 << 53
"""Token counts are a server's word; this bounds them to what every reader of JSON can hold."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the judge says it used, all asks of this request together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """The judge answered and the answer reads as a score."""

    value: float
    raw: str = ""
    """The reply as it came."""
    usage: Usage = Usage()
    parts: dict[str, float] = {}
    """Each criterion's score, for rubrics that have several."""
    cached: bool = False
    """True if no call was made for it: it came from the cache."""
    attempts: int = 1

    status = "scored"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """There is no score. It must not be read as one."""

    reason: str
    attempts: int = 0
    detail: str = ""
    usage: Usage = Usage()

    status = "failed"


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """The caller chose not to have this one judged; no call was made."""

    reason: str

    status = "skipped"


Verdict = Scored | Failed | Skipped
