"""Scores one response or a million with an LLM judge, at the highest speed that the judge allows.

    from freewheel.judge import Judge, JudgeConfig, JudgeRequest

    with Judge(JudgeConfig(endpoint="http://127.0.0.1:8000/v1", model="my-judge")) as judge:
        verdicts = judge.submit([JudgeRequest(response="Paris.", prompt="Capital of France?")]).result()

Each verdict is `Scored`, `Failed` or `Skipped`. Importing this needs no torch, no ray and no transformers.
"""

from freewheel.errors import ConfigError
from freewheel.judge.config import Endpoint, JudgeConfig, Price, Secret
from freewheel.judge.judge import Judge
from freewheel.judge.request import JudgeRequest
from freewheel.judge.rubric import Rubric, load_rubric
from freewheel.judge.stats import EndpointStats, JudgeStats
from freewheel.judge.tracker import Handle, Progress
from freewheel.judge.verdict import Failed, JudgeClosed, JudgeDied, JudgeError, Reason, Scored, Skipped, Usage, Verdict

__all__ = [
    "ConfigError",
    "Endpoint",
    "EndpointStats",
    "Failed",
    "Handle",
    "Judge",
    "JudgeClosed",
    "JudgeConfig",
    "JudgeDied",
    "JudgeError",
    "JudgeRequest",
    "JudgeStats",
    "Price",
    "Progress",
    "Reason",
    "Rubric",
    "Scored",
    "Secret",
    "Skipped",
    "Usage",
    "Verdict",
    "load_rubric",
]
