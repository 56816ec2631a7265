"""Reward functions as users write them, good and bad. verl loads them from this file by its path."""

from __future__ import annotations

import time
from typing import Any


def moody(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
    """A number for some rows, a dict for others, an exception for the rest."""
    if "boom" in solution_str:
        raise ZeroDivisionError("the user's function broke")
    if "nan" in solution_str:
        return float("nan")
    right = float(solution_str.endswith(f"#### {ground_truth}"))
    if "dict" in solution_str:
        return {"score": right, "acc": bool(right), "pred": solution_str[-1], "steps": [1] * len(solution_str)}
    return right


async def blocking(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """An `async def` that stops its event loop: a common mistake."""
    if "block" in solution_str:
        time.sleep(1.0)
    return float(solution_str.endswith(f"#### {ground_truth}"))
