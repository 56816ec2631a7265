"""What becomes of a group whose responses all have an end: its rewards, another try, or nothing. Pure decisions.

`RewardStage` asks `GroupPolicy.decide` when a group is whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from freewheel.data.group import Response
from freewheel.errors import ConfigError
from freewheel.judge.verdict import Failed
from freewheel.rewards.config import OnFailure
from freewheel.rewards.scoring import RewardFailed

MIN_SCORED = 2
"""Rewards that a group needs to have a baseline; one where it has only one response."""
RETRY_DELAY_S = 0.5
"""Before a group is scored again, doubled each time: what failed all of a group was hardly over in a moment."""


class ScoringFailed(Exception):
    """Too few responses of a group have a reward, after all retries. `reasons` counts why."""

    def __init__(self, message: str, reasons: Mapping[str, int] | None = None, *, is_infra: bool = False) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})
        self.is_infra = is_infra
        """All failed for something beside the responses (a judge that is down, say): the prompt is not to blame."""


class FatalRewardFailure(RewardFailed):
    """A response could not be scored, and `reward.on_failure` is `raise`."""

    ends_the_run = True


@dataclass(frozen=True)
class Again:
    """Score what failed once more, after a pause."""

    delay_s: float


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """The settings `reward.retries` and `reward.on_failure`, and what they mean for a group."""

    retries: int
    fallback: float | None = None
    """For a response that failed; None leaves it out."""
    raises: bool = False

    @classmethod
    def of(cls, on_failure: str | Mapping[str, float], retries: int) -> GroupPolicy:
        """`on_failure`: `mask`, `raise`, or `fallback: NUMBER` as text or as a mapping."""
        if on_failure == "mask":
            return cls(retries=retries)
        try:
            policy = OnFailure.parse(on_failure)
        except ConfigError:
            policy = OnFailure()
        if policy.kind not in ("raise", "fallback"):
            raise ConfigError("reward.on_failure", on_failure, "choose mask, raise, or 'fallback: NUMBER'")
        fallback = policy.value if policy.kind == "fallback" else None
        return cls(retries=retries, fallback=fallback, raises=policy.kind == "raise")

    def decide(self, responses: Sequence[Response], failures: Sequence[Failed], tries: int) -> list[Response] | Again:
        """The responses with the rewards to train on, or another try. `tries`: how often they were scored before.

        Raises `FatalRewardFailure`, or `ScoringFailed` where too few are left for a baseline.
        """
        lost = [_summary(response) for response in responses if _is_lost(response)]
        if self.raises and lost:
            raise FatalRewardFailure(
                f"{len(lost)} of {len(responses)} responses could not be scored, and reward.on_failure is 'raise': "
                f"{lost[0]}"
            )
        usable = sum(not math.isnan(response.reward) for response in responses)
        enough = usable >= min(MIN_SCORED, len(responses))
        if not enough and failures and tries < self.retries:
            return Again(RETRY_DELAY_S * 2**tries)
        if self.fallback is not None:
            responses = [replace(one, reward=self.fallback) if _is_lost(one) else one for one in responses]
            usable += len(lost)
            enough = usable >= min(MIN_SCORED, len(responses))
        if not enough:
            reasons = Counter(_summary(response) for response in responses if math.isnan(response.reward))
            raise ScoringFailed(
                f"{usable} of {len(responses)} responses have a reward after {tries + 1} tries: "
                + "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()),
                reasons,
                is_infra=bool(failures) and all(failure.infra for failure in failures),
            )
        return list(responses)


def _is_lost(response: Response) -> bool:
    """Return whether scoring failed and no other number takes the reward's place."""
    return isinstance(response.verdict, Failed) and math.isnan(response.reward)


def _summary(response: Response) -> str:
    return response.verdict.summary if response.verdict is not None else ""
