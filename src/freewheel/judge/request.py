"""What is judged: one response, with the question it answers and, where there is one, a reference answer."""

from __future__ import annotations

import msgspec


class JudgeRequest(msgspec.Struct, frozen=True, array_like=True):
    """One response to judge. Equal content means an equal request, whatever `id` says: it is sent once."""

    response: str
    prompt: str = ""
    reference: str = ""
    id: str = ""
    """Yours; it is not sent and does not take part in the request's hash."""
    skip: str = ""
    """A reason not to judge this one: it ends as `Skipped(reason)`, in its place in the batch."""


def encodable(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD: JSON over UTF-8 cannot carry one, and no judge could read it."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text
