"""inspect_ai's model API against an OpenAI-compatible endpoint, with its own concurrency and retries, cache off."""

from __future__ import annotations

import asyncio

from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.util import AdaptiveConcurrency
from job import MODEL, Item, Job, Outcome, clock, judge_message, run
from tenacity import wait_exponential_jitter

COOLDOWN_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = AdaptiveConcurrency().cooldown_seconds, 3.0, 1800.0
"""inspect_ai's own values: between two cuts of its limit, and between tries (`model_retry_config`)."""


async def work(job: Job, outcome: Outcome) -> None:
    config = GenerateConfig(
        temperature=0.0,
        max_connections=job.options.get("max_connections"),
        adaptive_connections=AdaptiveConcurrency(cooldown_seconds=COOLDOWN_S * job.time_scale),
    )
    model = get_model(f"openai-api/judge/{MODEL}", base_url=job.base_url, api_key="EMPTY", config=config)
    model.api.retry_wait = lambda: wait_exponential_jitter(
        initial=FIRST_PAUSE_S * job.time_scale, max=LONGEST_PAUSE_S, jitter=FIRST_PAUSE_S * job.time_scale
    )

    async def score(item: Item) -> float:
        output = await model.generate(judge_message(item.prompt, item.response), cache=False)
        return float(output.completion)

    with clock(outcome):
        found = await asyncio.gather(*(score(item) for item in job.items), return_exceptions=True)
        outcome.scores = [None if isinstance(one, BaseException) else one for one in found]


if __name__ == "__main__":
    run(work, ["inspect_ai", "openai"])
