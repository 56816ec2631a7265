"""freewheel: `Judge` with its default configuration and an empty cache, without information about the judge."""

from __future__ import annotations

import time

from job import MODEL, Job, Outcome, clock, run

from freewheel.judge import Judge, JudgeConfig, JudgeRequest, Scored

READY_S = 60.0


def work(job: Job, outcome: Outcome) -> None:
    requests = [JudgeRequest(prompt=item.prompt, response=item.response) for item in job.items]
    with Judge(JudgeConfig(endpoint=job.url, model=MODEL)) as judge:
        judge.start()  # before the clock, like the others' imports
        until = time.monotonic() + READY_S
        while not judge.stats().endpoints:  # stats() itself waits, and gives zeros if no engine answered
            if time.monotonic() > until:
                raise TimeoutError(f"the engine was not ready within {READY_S:g} s")
        with clock(outcome):
            verdicts = judge.submit(requests).result()
            outcome.scores = [float(one.value) if isinstance(one, Scored) else None for one in verdicts]


if __name__ == "__main__":
    run(work, ["freewheel", "aiohttp", "uvloop"])
