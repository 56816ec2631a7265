"""A judge to test against: an OpenAI-compatible server on loopback, as slow, crowded or broken as you configure it.

async with MockJudge(JudgeProfile(latency_s=0.2, knee=60, reject_above=80)) as judge:
    ...                          # send to judge.url
    assert judge.counts().most_received == 1
"""

from freewheel.judge.testing.mock import MockJudge, RecordedRequest, RunningJudge, serve
from freewheel.judge.testing.profile import ContentCount, Counts, JudgeProfile, expected_score

__all__ = [
    "ContentCount",
    "Counts",
    "JudgeProfile",
    "MockJudge",
    "RecordedRequest",
    "RunningJudge",
    "expected_score",
    "serve",
]
