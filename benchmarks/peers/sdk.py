"""The reward function that people write around the OpenAI SDK: one client, one call per answer, `asyncio.gather`."""

from __future__ import annotations

import asyncio

from job import MODEL, judge_message
from openai import AsyncOpenAI


def client_of(base_url: str) -> AsyncOpenAI:
    """A client with the SDK's defaults: two retries that respect `Retry-After`."""
    return AsyncOpenAI(base_url=base_url, api_key="EMPTY")


async def ask(client: AsyncOpenAI, prompt: str, response: str) -> float:
    reply = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": judge_message(prompt, response)}], temperature=0.0
    )
    return float(reply.choices[0].message.content or "")


class SdkReward:
    """An asynchronous reward function in TRL's convention."""

    __name__ = "judge"

    def __init__(self, base_url: str, *, forgiving: bool = False) -> None:
        """`forgiving`: a failed call gives None, which TRL leaves out, and the other scores are kept."""
        self._client = client_of(base_url)
        self._forgiving = forgiving

    async def __call__(self, prompts: list[str], completions: list[str], **kwargs: object) -> list[float | None]:
        calls = [ask(self._client, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        found = await asyncio.gather(*calls, return_exceptions=self._forgiving)
        return [None if isinstance(score, BaseException) else score for score in found]
