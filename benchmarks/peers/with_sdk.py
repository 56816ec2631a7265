"""`asyncio.gather`, a semaphore and the OpenAI SDK: the script that everyone writes first."""

from __future__ import annotations

import asyncio

import sdk
from job import Item, Job, Outcome, clock, run


async def work(job: Job, outcome: Outcome) -> None:
    client = sdk.client_of(job.base_url)
    semaphore = asyncio.Semaphore(job.options["semaphore"])

    async def score(item: Item) -> float:
        async with semaphore:
            return await sdk.ask(client, item.prompt, item.response)

    with clock(outcome):
        found = await asyncio.gather(*(score(item) for item in job.items), return_exceptions=True)
        outcome.scores = [None if isinstance(one, BaseException) else one for one in found]


if __name__ == "__main__":
    run(work, ["openai"])
