"""freewheel's rewards as a TRL reward function: for `GRPOTrainer`, and for AsyncGRPO's rollout worker.

    GRPOTrainer           its event loop, in a thread ─┐
    AsyncRolloutWorker    its child's event loop      ─┴▶ await JudgeReward(prompts, completions, …) ─▶ [8.0, None, …]
                                                               │ texts ─▶ rules (a thread) ─▶ gate
                                                               └ Judge (a separate engine) ─▶ verdicts ─▶ combine

A failed verdict is `None`, as TRL expects it: a row for which every function returns `None` is left out of its group's
mean and gets no advantage. This module does not import TRL.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from freewheel.errors import ConfigError, FreewheelError
from freewheel.judge import Judge, JudgeRequest
from freewheel.judge.config import KEYLESS, Secret
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Verdict
from freewheel.rewards.config import LengthPenaltyConfig, OnFailure, as_config
from freewheel.rewards.rules import rule_for, rule_score
from freewheel.rewards.scoring import (
    JUDGE_OFF,
    ComputeScore,
    Rewards,
    Sample,
    apply_rules,
    combine,
    describe_failures,
    judge_requests,
    rule_value,
)

log = logging.getLogger("freewheel.rewards")

NO_RULE = Scored(0.0)
NO_TRUTH = "the row has no ground truth"
NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""Arguments that TRL passes next to the dataset's columns."""
ONLY_WITH_RULE = ("penalty_scale", "max_penalty", "peak_ratio", "outer_ratio", "judge_gate")
"""Settings that have no effect without a rule."""
MISCONFIGURED = {Reason.AUTH.value: "api_key", Reason.NOT_FOUND.value: "model_name"}
"""Failures that no retry can fix, and the setting to check. If a judge starts with them, the run has no rewards."""


class JudgeReward:
    """A reward function for TRL: picklable, asynchronous, and a failed judgement is never a number.

    Without `rule` it is the judge's quality alone, for use next to other functions. With `rule` it is the whole reward:
    rule + quality − length penalty, as configured by `LengthPenaltyConfig`.

    Safe for any number of threads and event loops. The engine starts with the first call in each process, and all calls
    of that process share it. A judge that fails gives `None` and an error in the log. A configuration that cannot work
    raises a `ConfigError`, here or at the first call.
    """

    def __init__(
        self,
        config: LengthPenaltyConfig | Mapping[str, Any] | Any = None,
        *,
        rule: ComputeScore | str | None = None,
        ground_truth: str | None = None,
        data_source: str = "data_source",
        group: str | None = None,
        on_failure: OnFailure | str | Mapping[str, float] | None = None,
        name: str | None = None,
    ) -> None:
        """`rule`: a data source with a registered rule (`openai/gsm8k`), or a function like verl's `compute_score`.
        `ground_truth`: the dataset's column with the right answer. The rule needs it, and the judge sees it.
        `data_source`: the column that is passed as `data_source` to a `rule` which is a function, if it exists.
        `group`: a column whose values identify the groups. None: rows with equal prompts are a group.
        `on_failure`: a number for failed rows (`group_mean`, `rule_only`, `fallback: -1`), or `raise`.
        `name`: the name in TRL's metrics. None: `judge`, or `freewheel` if there is a rule.
        """
        self.config = as_config(config)
        self.rule = rule
        self.ground_truth = ground_truth
        self.data_source = data_source
        self.group = group
        self._masks = on_failure is None
        self.__name__ = name or ("judge" if rule is None else "freewheel")
        self._check()
        if on_failure is not None:
            self.config.on_failure = OnFailure.parse(on_failure)
            if rule is None and self.config.on_failure.kind == "rule_only":
                raise ConfigError("on_failure", "rule_only", "without a rule this would be 0; choose another")
        if rule is None:
            self.config.enable, self.config.judge_gate = False, "off"
        self._ready()
        self._open()

    def _check(self) -> None:
        if isinstance(self.rule, str):
            rule_for(self.rule)
        elif not (self.rule is None or callable(self.rule)):
            raise ConfigError("rule", self.rule, "give a function, or a data source such as 'openai/gsm8k'")
        if self.rule is not None and self.ground_truth is None:
            raise ConfigError("ground_truth", None, "name the dataset's column that holds the rule's right answers")
        if self._masks and self.config.failure_policy.kind != OnFailure().kind:
            raise ConfigError(
                "on_failure",
                self.config.failure_policy.kind,
                "TRL leaves a failed row out; to give it a number instead, pass on_failure to JudgeReward",
            )
        if self.rule is None:
            for key in ONLY_WITH_RULE:
                if (value := getattr(self.config, key)) != getattr(LengthPenaltyConfig, key):
                    raise ConfigError(key, value, "it has no effect without a rule; give a rule too")

    # -- the judge of this process ------------------------------------------------------------------------------------

    def _ready(self) -> None:
        self._lock = threading.Lock()
        self._judge: Judge | None = None
        self._works = False
        """A judge of this process has answered before."""
        self._warned: set[str] = set()

    def _open(self) -> Judge | None:
        """Return this process's judge; None if it is off. The engine starts when it is first used."""
        with self._lock:
            if self._judge is None and self._is_on():
                self._judge = Judge(self.config.judge_config())
            return self._judge

    def _is_on(self) -> bool:
        config = self.config
        if config.judges:
            return True
        if config.enable_openai_reward is False:
            if self.rule is None:
                raise ConfigError("enable_openai_reward", False, "without a rule there is no other reward; give a rule")
            return False
        if config.api_key is not None:
            raise self._key_error()
        if self.rule is None or config.enable_openai_reward:
            raise ConfigError(
                "api_key",
                None,
                f"the judge needs a key: set {self.config.key_variable} and name api_endpoint, or give api_key "
                f"('{KEYLESS}' for a server that needs none)",
            )
        self._warn_once("no key for the judge is given: the reward is rule score and length penalty only")
        return False

    def _key_error(self) -> ConfigError:
        return ConfigError(
            "api_key",
            self.config.api_key,
            "a key given as text is not sent to another process such as AsyncGRPO's worker: leave api_key "
            f"out, name api_endpoint, and set {self.config.key_variable} in the environment",
        )

    def _warn_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s: %s", self.__name__, what)

    def close(self) -> None:
        """End this process's engine. The next call starts another. The engine also ends with the process."""
        with self._lock:
            judge, self._judge = self._judge, None
        if judge is not None:
            judge.close()

    def __getstate__(self) -> dict[str, Any]:
        state = {
            key: value for key, value in self.__dict__.items() if key not in ("_lock", "_judge", "_works", "_warned")
        }
        key = self.config.api_key
        travels = not key or pickle.loads(pickle.dumps(key)) or Secret.from_env(self.config.key_variable)
        if not travels:
            if get_spawning_popen() is not None:
                # A child process has this environment and would have no key. Raise before it starts.
                raise self._key_error()
            log.warning(
                "%s is pickled, and its api_key stays here: another process needs %s in its environment",
                self.__name__,
                self.config.key_variable,
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ready()

    # -- the call -----------------------------------------------------------------------------------------------------

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Return one reward per row, in order. `None` for a failed verdict, or without a ground truth for the rule."""
        if not prompts:
            return []
        judge = self._open()
        columns = {
            key: values
            for key, values in kwargs.items()
            if key not in NOT_COLUMNS and isinstance(values, list | tuple) and len(values) == len(prompts)
        }
        samples = self._samples(prompts, completions, completion_ids, columns)
        ruled = [self.rule is not None and sample.ground_truth is not None for sample in samples]
        rules: list[Verdict] = [NO_RULE] * len(samples)
        if any(ruled):
            # Off the loop: AsyncGRPO generates on it, and a rule may be slow.
            rules = await asyncio.to_thread(self._rules, samples, ruled)
        requests = judge_requests(
            [_as_judged(sample, completion) for sample, completion in zip(samples, completions, strict=True)],
            rules,
            self.config,
        )
        if self.rule is not None:
            requests = [
                request if known else JudgeRequest(response=request.response, skip=NO_TRUTH)
                for request, known in zip(requests, ruled, strict=True)
            ]
        verdicts = await self._verdicts(judge, requests)
        rewards = combine(samples, rules, verdicts, self.config)
        self._report(rewards, kwargs)
        unknown = self._unknown(samples, rewards.verdicts, ruled)
        return [None if hidden else float(reward) for reward, hidden in zip(rewards.reward, unknown, strict=True)]

    def _samples(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None,
        columns: Mapping[str, Any],
    ) -> list[Sample]:
        if completion_ids is None and self.config.enable:
            # Counting words or characters instead would be a different penalty.
            raise ConfigError(
                "completion_ids",
                None,
                "the length penalty counts tokens, and this trainer gives none; set enable: false",
            )
        truths = self._column("ground_truth", self.ground_truth, columns) if self.ground_truth else None
        groups = [_key(one) for one in (self._column("group", self.group, columns) if self.group else prompts)]
        if self.config.enable and len(prompts) > 1 and len(set(groups)) == len(prompts):
            self._warn_once(
                "no two prompts of a batch are equal, so no length is penalised; name the column with group="
            )
        sources = columns.get(self.data_source)
        return [
            Sample(
                response=answer_of(completion),
                length=len(completion_ids[row]) if completion_ids is not None else 0,
                group=groups[row],
                data_source=self.rule if isinstance(self.rule, str) else str(sources[row]) if sources else "",
                ground_truth=truths[row] if truths is not None else None,
                question=transcript_of(prompt),
                extra_info={key: values[row] for key, values in columns.items()},
            )
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]

    def _column(self, option: str, column: str, columns: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
        if column not in columns:
            raise ConfigError(option, column, f"the dataset has no such column; it has {', '.join(columns) or 'none'}")
        return columns[column]

    def _rules(self, samples: Sequence[Sample], ruled: Sequence[bool]) -> list[Verdict]:
        rule = self.rule if callable(self.rule) else rule_score
        scores = iter(apply_rules(rule, [sample for sample, known in zip(samples, ruled, strict=True) if known]))
        return [next(scores) if known else NO_RULE for known in ruled]

    async def _verdicts(self, judge: Judge | None, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        if judge is None:
            return [Skipped(request.skip) if request.skip else JUDGE_OFF for request in requests]
        try:
            await asyncio.to_thread(judge.start)  # starts a thread and a process, once
            verdicts = await judge.score(requests)
        except ConfigError:
            raise
        except (FreewheelError, OSError) as error:
            log.error(
                "%s: the judge's engine broke, so %d rows have no reward; the next call starts another: %s",
                self.__name__,
                sum(not request.skip for request in requests),
                error,
            )
            with self._lock:
                if self._judge is judge:
                    self._judge = None
            gone = Failed(Reason.ENGINE.value, 0, str(error))
            return [Skipped(request.skip) if request.skip else gone for request in requests]
        self._report_failures(verdicts)
        return verdicts

    def _report_failures(self, verdicts: Sequence[Verdict]) -> None:
        """Log the failures. Raises a `ConfigError` if the judge has never answered and refuses everything."""
        failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
        self._works = self._works or any(isinstance(verdict, Scored) for verdict in verdicts)
        if not failed:
            return
        first = failed[0]
        if not self._works and all(one.reason in MISCONFIGURED for one in failed):
            key = MISCONFIGURED[first.reason]
            value = self.config.model_name if key == "model_name" else self.config.key
            raise ConfigError(key, value, f"the judge at {self.config.api_endpoint} refuses it: {first.detail}")
        is_permanent = any(one.reason in MISCONFIGURED for one in failed)
        level = logging.ERROR if is_permanent else logging.WARNING
        log.log(level, "%s: %s", self.__name__, describe_failures(failed, len(verdicts)))

    def _unknown(self, samples: Sequence[Sample], verdicts: Sequence[Verdict], ruled: Sequence[bool]) -> list[bool]:
        """Return which rows have no reward: without a ground truth for the rule, or failed and without `on_failure`."""
        failed = [isinstance(verdict, Failed) for verdict in verdicts]
        if self.rule is not None:
            return [not known or (lost and self._masks) for known, lost in zip(ruled, failed, strict=True)]
        if self._masks or self.config.failure_policy.kind != "group_mean":
            return [lost and self._masks for lost in failed]
        # Without a rule and without a scored row in the group there is no mean.
        scored = {sample.group for sample, lost in zip(samples, failed, strict=True) if not lost}
        return [lost and sample.group not in scored for sample, lost in zip(samples, failed, strict=True)]

    def _report(self, rewards: Rewards, given: Mapping[str, Any]) -> None:
        """Report to TRL's metrics and its table of completions, if the trainer has them (AsyncGRPO's worker does not).

        Every column is written each time: TRL makes one table of them, and lengths must not differ.
        """
        verdicts, count = rewards.verdicts, len(rewards.verdicts)
        scored = [verdict for verdict in verdicts if isinstance(verdict, Scored)]
        figures = {
            "judge_failed": sum(isinstance(verdict, Failed) for verdict in verdicts) / count,
            "judge_skipped": sum(isinstance(verdict, Skipped) for verdict in verdicts) / count,
            "judge_cached": sum(verdict.cached for verdict in scored) / count,
        }
        if scored:  # TRL sums these numbers: one NaN would hide the others
            figures["judge_score"] = sum(verdict.value for verdict in scored) / len(scored)
        extra: dict[str, list[Any]] = {"judge": [_in_words(verdict) for verdict in verdicts]}
        if self.rule is not None:
            rule = [rule_value(one) for one in rewards.rules]
            figures["rule_score"] = float(np.mean(rule))
            extra |= {"rule": rule, "quality": [None if np.isnan(one) else float(one) for one in rewards.quality]}
        if self.config.enable:
            figures["length_penalty"] = float(rewards.penalty.mean())
            figures["median_length"] = float(rewards.medians.mean())
            extra["penalty"] = rewards.penalty.tolist()
        for name, values in (("log_metric", figures), ("log_extra", extra)):
            if (log_value := given.get(name)) is not None:
                for key, value in values.items():
                    log_value(f"{self.__name__}/{key}", value)


# -- texts of prompts and completions ---------------------------------------------------------------------------------


def answer_of(completion: Any) -> str:
    """Return what the rule reads: the text, or the last assistant message. A tool's output is not an answer."""
    if isinstance(completion, str):
        return completion
    turns = [message for message in completion or () if message.get("role", "assistant") == "assistant"]
    return text_of(turns[-1].get("content")) if turns else ""


def transcript_of(conversation: Any) -> str:
    """Return what the judge reads: the text, or all messages and tool calls, each under its role."""
    if isinstance(conversation, str):
        return conversation
    messages = list(conversation or ())
    if len(messages) == 1 and not messages[0].get("tool_calls"):
        return text_of(messages[0].get("content"))
    return "\n\n".join(f"[{_speaker(message)}]\n{_turn(message)}" for message in messages)


def text_of(content: Any) -> str:
    """Return a message's content as text. Other kinds of content are named."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(
        str(part.get("text") or "") if part.get("type") == "text" else f"[{part.get('type')}]" for part in content
    )


def _speaker(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "assistant"))
    return f"{role} {message['name']}" if message.get("name") else role


def _turn(message: Mapping[str, Any]) -> str:
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    lines = [f"calls {call.get('name')}({_plain_json(call.get('arguments'))})" for call in calls]
    return "\n".join(filter(None, [text_of(message.get("content")), *lines]))


def _as_judged(sample: Sample, completion: Any) -> Sample:
    """Return the sample with the whole completion as its response, and with a text reference."""
    truth = sample.ground_truth
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool)
    return replace(sample, response=transcript_of(completion), ground_truth=str(truth) if is_number else truth)


def _key(of: Any) -> str:
    """Return a key that is equal for equal prompts, or equal values of the groups' column."""
    return of if isinstance(of, str) else _plain_json(of)


def _plain_json(value: Any) -> str:
    # An image is decoded again for each row of a group, so only its type is compared.
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=lambda other: type(other).__name__)


def _in_words(verdict: Verdict) -> str:
    return verdict.status if isinstance(verdict, Scored) else f"{verdict.status}: {verdict.reason}"
