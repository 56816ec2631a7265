"""Reward functions as users write them, good and bad. verl loads them from this file by its path."""

from __future__ import annotations

import re
import threading
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


def unpicklable(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Its dict holds what the user finds handy, and no pickle takes."""
    found = re.search(r"#### (.*)", solution_str)
    return {"score": float(found is not None), "acc": 0.5, "match": found, "lock": threading.Lock()}
