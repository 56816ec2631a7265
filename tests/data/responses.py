"""Responses with numbers that a test can predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from freewheel.data.group import NO_VERSION, Response
from freewheel.judge.verdict import Failed, Scored


def response(
    tokens: Sequence[int],
    *,
    value: float = 1.0,
    logprobs: Sequence[float] | float | None = None,
    mask: Sequence[int] | None = None,
    version: int = 3,
    finish: Any = "stop",
    verdict: Any = None,
) -> Response:
    """`value`: the reward; NaN is a failure. `logprobs`: by default -1, -2, …"""
    made = np.array([1] * len(tokens) if mask is None else mask, np.uint8)
    given = -np.arange(1, len(tokens) + 1) if logprobs is None else np.asarray(logprobs)
    return Response(
        tokens=np.array(tokens, np.int32),
        logprobs=np.where(made, given, 0).astype(np.float32),
        versions=np.where(made, version, NO_VERSION).astype(np.int32),
        mask=made,
        finish=finish,
        verdict=verdict or (Failed("test") if math.isnan(value) else Scored(value)),
        reward=value,
        raw_reward=value,
    )
