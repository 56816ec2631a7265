"""What a rollouter writes down of a group: the end of its generation for the trace, and now and then all of it as text.

    responses ─▶ note_generated ─▶ freewheel.observe.trace
    a scored group ─▶ offer_sample ─▶ freewheel.observe.samples: now and then one is due, and only then is text made

Called by `Rollouter`. docs/dashboard.md has both formats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from freewheel.data.group import Array, PromptGroup, Response, Ticket
from freewheel.observe import samples, trace


def note_generated(ticket: Ticket, responses: Sequence[Response], began_s: float) -> None:
    tokens = sum(len(response.tokens) for response in responses)
    trace.phase("generate", ticket.ordinal, began_s, attempt=ticket.attempt, responses=len(responses), tokens=tokens)


def offer_sample(group: PromptGroup, *, replica: str, decode: Callable[[Array], str]) -> None:
    samples.offer(lambda: sample_of(group, replica=replica, decode=decode, wall_s=time.time()))


def sample_of(group: PromptGroup, *, replica: str, decode: Callable[[Array], str], wall_s: float) -> dict[str, Any]:
    return {
        "time": round(wall_s, 3),
        "ordinal": group.ticket.ordinal,
        "sequence": group.ticket.sequence,
        "attempt": group.ticket.attempt,
        "replica": replica,
        "prompt": decode(group.prompt),
        "row": dict(group.row),
        "responses": [_response(group.response(index), decode) for index in range(len(group))],
    }


def _response(response: Response, decode: Callable[[Array], str]) -> dict[str, Any]:
    verdict = response.verdict
    assert verdict is not None
    return {
        "segments": samples.segments(decode, response.tokens, response.versions.tolist()),
        "tokens": len(response.tokens),
        "finish": response.finish,
        "value": response.reward,
        "raw": response.raw_reward,
        "status": verdict.status,
        "reason": verdict.summary,
        "parts": dict(verdict.parts),
    }
