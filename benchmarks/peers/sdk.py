"""The reward function that people write around the OpenAI SDK: one client, one call an answer, everything gathered."""

from __future__ import annotations

import asyncio

from job import MODEL, judge_message
from openai import AsyncOpenAI


def client_of(base_url: str) -> AsyncOpenAI:
    """With the SDK's defaults: two retries, `Retry-After` heeded."""
    return AsyncOpenAI(base_url=base_url, api_key="EMPTY")


async def ask(client: AsyncOpenAI, prompt: str, response: str) -> float:
    reply = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": judge_message(prompt, response)}], temperature=0.0
    )
    return float(reply.choices[0].message.content or "")


class SdkReward:
    """An asynchronous reward function as TRL calls it."""

    __name__ = "judge"

    def __init__(self, base_url: str, *, forgiving: bool = False) -> None:
        """`forgiving`: a call that fails is None, which TRL leaves out, and the others' scores are kept."""
        self._client = client_of(base_url)
        self._forgiving = forgiving

    async def __call__(self, prompts: list[str], completions: list[str], **kwargs: object) -> list[float | None]:
        calls = [ask(self._client, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        found = await asyncio.gather(*calls, return_exceptions=self._forgiving)
        return [None if isinstance(score, BaseException) else score for score in found]
