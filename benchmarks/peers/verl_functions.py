"""Custom reward functions for verl, which loads this file by path in any process: it imports no sibling.

The judge's address is in `JUDGE_URL`, wall seconds per second of the judge in `JUDGE_TIME_SCALE`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp

ASK = "Rate the answer from 1 to 10. Reply with the integer alone."
TRIES, FIRST_PAUSE_S = 3, 2.0
"""Those of verl's recipe for a remote judge (`genrm_remote`)."""


async def judge_as_documented(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """As on verl's page about the reward loop: one session per call, and any reply counts as an answer."""
    content = f"{extra_info['question']}\n\nAnswer:\n{solution_str}\n\n{ASK}"
    payload = {"model": "mock-judge", "messages": [{"role": "user", "content": content}], "temperature": 0.0}
    async with aiohttp.ClientSession() as session, session.post(os.environ["JUDGE_URL"], json=payload) as reply:
        result = await reply.json()
    return {"score": int(result["choices"][0]["message"]["content"].strip().split("\n")[-1])}


async def judge_with_retries(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """The same with the three tries of verl's recipe, 2 s and 4 s apart."""
    for attempt in range(TRIES):
        try:
            return await judge_as_documented(data_source, solution_str, ground_truth, extra_info)
        except Exception:  # as in the recipe
            if attempt == TRIES - 1:
                raise
            await asyncio.sleep(FIRST_PAUSE_S * 2**attempt * float(os.environ["JUDGE_TIME_SCALE"]))
    raise AssertionError("the last try returns or raises")


def nothing(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """No rule score, so that our manager's reward is the judge's score alone, like the others'."""
    return 0.0
