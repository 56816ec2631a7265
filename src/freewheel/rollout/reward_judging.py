"""From rule scores to rewards: an LLM judge's verdicts and a length penalty on top, where a run has them.

    rule known ─▶ ask ─ all of one tick as a batch ─▶ Judge ─▶ verdict ─▶ then(verdict)
    whole group ─▶ compose: rule + coefficient × verdict − penalty ─▶ Response, Response, …

`RewardStage` calls it. The arithmetic is that of `freewheel.rewards.scoring`; but where its trainers cannot mask a row,
ours can: a failed verdict is NaN here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from freewheel.data.group import Response
from freewheel.errors import ConfigError
from freewheel.judge.judge import Judge
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import EngineDied, Failed, JudgeClosed, Reason, Scored, Skipped, Verdict
from freewheel.rewards.config import as_config
from freewheel.rewards.scoring import JUDGE_OFF, Sample, combine, judge_requests, rule_value
from freewheel.rollout.reward_workers import in_thread

log = logging.getLogger("freewheel.rollout")

Then = Callable[[Verdict], None]

TOTALS = ("sent", "throttled", "faults", "in_flight", "limit", "cache_hits", "cost")
"""What is told of all endpoints together, beside each one's own."""


class Judging:
    """One judge for all groups. Nothing is started before the first request."""

    def __init__(self, settings: Any, *, timeout_s: float) -> None:
        """`settings`: a `LengthPenaltyConfig` in any of its forms."""
        config = as_config(settings)
        self._rule_only = config.failure_policy.kind == "rule_only"
        if config.failure_policy.kind in ("raise", "fallback"):
            raise ConfigError(
                "reward.judge.on_failure",
                config.failure_policy.kind,
                "reward.on_failure says it for the whole reward: set that, and leave this out or at rule_only",
            )
        # What `combine` would fill in for a trainer that cannot mask is not looked at, so it must only not raise.
        self.config = replace(config, on_failure="group_mean", num_async_workers=None)
        self._deadline_s = min(timeout_s, config.batch_timeout_s)
        self._asked: list[tuple[JudgeRequest, Then]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._judge = Judge(config.judge_config()) if config.judges else None
        if config.lacks_key:
            log.warning(config.lacks_key)

    @property
    def asks(self) -> bool:
        """False: only the length penalty is on."""
        return self._judge is not None

    def ask(self, sample: Sample, rule: Verdict, then: Then) -> None:
        """`then` gets the verdict, on the loop. What becomes ready in one tick of the loop goes out together."""
        if not self.asks:
            then(JUDGE_OFF)
            return
        (request,) = judge_requests([sample], [rule], self.config)
        if request.skip:
            then(Skipped(request.skip))
            return
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._send)
        self._asked.append((request, then))

    def _send(self) -> None:
        asked, self._asked = self._asked, []
        task = asyncio.get_running_loop().create_task(self._collect(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(self, asked: list[tuple[JudgeRequest, Then]]) -> None:
        assert self._judge is not None
        requests = [request for request, _ in asked]
        try:
            handle = self._judge.submit(requests, deadline_s=self._deadline_s)
        except (EngineDied, JudgeClosed) as error:
            self._renew(error)
            try:
                handle = self._judge.submit(requests, deadline_s=self._deadline_s)
            except (EngineDied, JudgeClosed) as again:
                for _, then in asked:
                    then(Failed(Reason.ENGINE.value, 0, str(again)))
                return
        try:
            async for index, verdict in handle.as_completed():
                asked[index][1](verdict)
        finally:
            handle.cancel()

    def _renew(self, error: Exception) -> None:
        """The judge's process kept dying. Later responses may fare better with another."""
        assert self._judge is not None
        log.error("The judge broke down, and another one is started: %s", error)
        broken, self._judge = self._judge, Judge(self._judge.config)
        broken.close(timeout_s=0.0)  # its process is gone already

    def stats(self) -> dict[str, Any]:
        """The judge's own numbers, as it last gave them; empty before its first request, and where there is none."""
        if self._judge is None or not self._judge.running:
            return {}
        found = self._judge.recent_stats()
        return {**found.to_dict(), **{name: getattr(found, name) for name in TOTALS}}

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._judge is not None:
            await in_thread(self._judge.close)

    def compose(
        self,
        samples: Sequence[Sample],
        responses: Sequence[Response],
        rules: Sequence[Verdict],
        verdicts: Sequence[Verdict],
    ) -> list[Response]:
        """Return the responses of a whole group with their rewards: the penalty needs the group's median length."""
        made = combine(samples, rules, verdicts, self.config)
        rewarded = []
        for index, (response, rule, verdict) in enumerate(zip(responses, rules, verdicts, strict=True)):
            parts = {
                **rule.parts,
                "rule": rule_value(rule),
                "quality": float(made.quality[index]),
                "length_penalty": float(made.penalty[index]),
                "judged": float(isinstance(verdict, Scored)),
            }
            parts = {name: value for name, value in parts.items() if not math.isnan(value)}
            reward, raw = float(made.reward[index]), float(made.raw[index])
            if not isinstance(rule, Scored):
                reward, raw, verdict = math.nan, math.nan, msgspec.structs.replace(rule, parts=parts)
            elif isinstance(verdict, Failed):
                raw = rule.value if self._rule_only else math.nan
                reward = raw - float(made.penalty[index])
                verdict = msgspec.structs.replace(verdict, parts=parts)
            else:
                verdict = Scored(raw, parts=parts)
            rewarded.append(replace(response, verdict=verdict, reward=reward, raw_reward=raw))
        return rewarded


def with_plain_reward(response: Response, rule: Verdict) -> Response:
    """Return the response with the function's own score as its reward."""
    return replace(response, verdict=rule, reward=rule_value(rule), raw_reward=rule_value(rule))
