"""Responses with numbers that a test can predict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from freewheel.data.group import NO_VERSION, Response
from freewheel.judge.verdict import Failed, Scored


def response(
    tokens: list[int], *, version: int = 3, mask: list[int] | None = None, value: float = 1.0, verdict: Any = None
) -> Response:
    """The log-probabilities are -1, -2, …; a value of NaN is a failure."""
    made = np.array(mask or [1] * len(tokens), np.uint8)
    return Response(
        tokens=np.array(tokens, np.int32),
        logprobs=np.where(made, -np.arange(1, len(tokens) + 1), 0).astype(np.float32),
        versions=np.where(made, version, NO_VERSION).astype(np.int32),
        mask=made,
        finish="stop",
        verdict=verdict or (Failed("test") if math.isnan(value) else Scored(value)),
        reward=value,
        raw_reward=value,
    )
