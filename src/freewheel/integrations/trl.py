"""freewheel's rewards as a TRL reward function: for `GRPOTrainer`, and for AsyncGRPO's rollout worker.

    GRPOTrainer           its event loop, in a thread ─┐
    AsyncRolloutWorker    its child's event loop      ─┴▶ await JudgeReward(prompts, completions, …) ─▶ [8.0, None, …]
                                                               │ texts ─▶ rules (a thread) ─▶ gate
                                                               └ Judge (an engine of its own) ─▶ verdicts ─▶ combine

A failed verdict is `None`, which TRL knows: a row for which every function says `None` has no part in its group's mean
and gets no advantage. Nothing here imports TRL.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from freewheel.errors import ConfigError, FreewheelError
from freewheel.judge import Judge, JudgeRequest
from freewheel.judge.config import Secret
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Verdict
from freewheel.rewards.config import LengthPenaltyConfig, OnFailure, as_config
from freewheel.rewards.rules import rule_for, rule_score
from freewheel.rewards.scoring import ComputeScore, Rewards, Sample, apply_rules, combine, judge_requests, rule_value

log = logging.getLogger("freewheel.rewards")

NO_RULE = Scored(0.0)
NO_TRUTH = "the row has no ground truth"
KEYLESS = "EMPTY"
"""The usual key for servers that need none. It is no secret, so it may travel where a key may not."""

NOT_COLUMNS = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL passes beside the dataset's columns."""
ONLY_WITH_RULE = ("penalty_scale", "max_penalty", "peak_ratio", "outer_ratio", "judge_gate")
"""Keys of the config that say nothing about the judge's quality alone."""
MISCONFIGURED = {Reason.AUTH.value: "api_key", Reason.NOT_FOUND.value: "model_name"}
"""Failures that no retry cures, and the key to look at. If a judge begins with them, the run would train on nothing."""


class JudgeReward:
    """A reward function for TRL: picklable, asynchronous, and it never takes a failed judgement for a number.

    Without `rule` it is the judge's quality alone, to stand beside other functions. With `rule` it is the whole reward:
    rule + quality − length penalty, as `LengthPenaltyConfig` says.

    Safe from any number of threads and event loops; the engine starts with the first call in each process, and is
    shared by all of that process's calls. What the judge cannot do becomes `None` and an error in the log; what the
    configuration cannot do is a `ConfigError`, here or at the first call.
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
        """`rule`: a data source whose rule freewheel knows (`openai/gsm8k`), or a function as verl's `compute_score`.
        `ground_truth`: the dataset's column with the right answer; the rule needs it, and the judge sees it.
        `data_source`: the column that a `rule` which is a function gets its `data_source` from, where there is one.
        `group`: a column whose values tell the groups apart. None: equal prompts are a group.
        `on_failure`: a number for failed rows after all (`group_mean`, `rule_only`, `fallback: -1`), or `raise`.
        `name`: what TRL's metrics call it. None: `judge`, with a rule `freewheel`.
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
                "TRL leaves a failed row out by itself; to give it a number after all, pass on_failure to JudgeReward",
            )
        if self.rule is None:
            for key in ONLY_WITH_RULE:
                if (value := getattr(self.config, key)) != getattr(LengthPenaltyConfig, key):
                    raise ConfigError(key, value, "it does nothing for the judge's quality alone; give a rule too")

    # -- the judge of this process ------------------------------------------------------------------------------------

    def _ready(self) -> None:
        self._lock = threading.Lock()
        self._judge: Judge | None = None
        self._works = False
        """Whether a judge of this process has ever answered."""
        self._said: set[str] = set()

    def _open(self) -> Judge | None:
        """This process's judge; None where it is off. The engine itself starts when it is first used."""
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
                raise ConfigError("enable_openai_reward", False, "without a rule there is nothing else; give a rule")
            return False
        if config.api_key is not None:
            raise self._key_stayed()
        if self.rule is None or config.enable_openai_reward:
            raise ConfigError(
                "api_key",
                None,
                f"the judge needs a key: set {self.config.key_variable} and name api_endpoint, or give api_key "
                f"('{KEYLESS}' for a server that needs none)",
            )
        self._say_once("no key for the judge is given: the reward is rule score and length penalty only")
        return False

    def _key_stayed(self) -> ConfigError:
        return ConfigError(
            "api_key",
            self.config.api_key,
            "a key given as text does not travel to another process, as AsyncGRPO's worker is one: leave api_key "
            f"out, name api_endpoint, and set {self.config.key_variable} in the environment",
        )

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning("%s: %s", self.__name__, what)

    def close(self) -> None:
        """Ends this process's engine; the next call starts another. At the process's end this happens by itself."""
        with self._lock:
            judge, self._judge = self._judge, None
        if judge is not None:
            judge.close()

    def __getstate__(self) -> dict[str, Any]:
        state = {
            key: value for key, value in self.__dict__.items() if key not in ("_lock", "_judge", "_works", "_said")
        }
        key = self.config.api_key
        state["keyless"] = keyless = key is not None and bool(key) and key.reveal() == KEYLESS
        travels = not key or keyless or pickle.loads(pickle.dumps(key)) or Secret.from_env(self.config.key_variable)
        if not travels:
            if get_spawning_popen() is not None:
                # A child of this process has this environment, so it would have no key: better said before it starts.
                raise self._key_stayed()
            log.warning(
                "%s is pickled, and its api_key stays here: another process needs %s in its environment",
                self.__name__,
                self.config.key_variable,
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        keyless = state.pop("keyless")
        self.__dict__.update(state)
        if keyless:
            self.config.api_key = Secret(KEYLESS)
        self._ready()

    def __repr__(self) -> str:
        what = "judge quality" if self.rule is None else "rule + judge quality − length penalty"
        return f"<JudgeReward {self.__name__}: {what}>"

    # -- the call -----------------------------------------------------------------------------------------------------

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """One reward a row, in order. A failed verdict and a row without a ground truth for the rule are `None`."""
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
        self._report(rewards, kwargs.get("log_metric"), kwargs.get("log_extra"))
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
            # Words or characters in their place would be another penalty than the one that was configured.
            raise ConfigError(
                "completion_ids",
                None,
                "the length penalty counts tokens, and this trainer gives none; set enable: false",
            )
        truths = self._column("ground_truth", self.ground_truth, columns) if self.ground_truth else None
        groups = [_key(one) for one in (self._column("group", self.group, columns) if self.group else prompts)]
        if self.config.enable and len(prompts) > 1 and len(set(groups)) == len(prompts):
            self._say_once("no two prompts of a batch are equal, so no length is penalised; name the groups' column")
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

    def _column(self, option: str, column: str, columns: Mapping[str, Any]) -> Sequence[Any]:
        if column not in columns:
            raise ConfigError(option, column, f"the dataset has no such column; it has {', '.join(columns) or 'none'}")
        found: Sequence[Any] = columns[column]
        return found

    def _rules(self, samples: Sequence[Sample], ruled: Sequence[bool]) -> list[Verdict]:
        rule = self.rule if callable(self.rule) else rule_score
        scores = iter(apply_rules(rule, [sample for sample, known in zip(samples, ruled, strict=True) if known]))
        return [next(scores) if known else NO_RULE for known in ruled]

    async def _verdicts(self, judge: Judge | None, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        if judge is None:
            return [Skipped(request.skip or "the judge is off") for request in requests]
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
        self._heed(verdicts)
        return verdicts

    def _heed(self, verdicts: Sequence[Verdict]) -> None:
        """Says what failed; a judge that has never answered, and refuses all, is a configuration error."""
        failed = [verdict for verdict in verdicts if isinstance(verdict, Failed)]
        self._works = self._works or any(isinstance(verdict, Scored) for verdict in verdicts)
        if not failed:
            return
        first = failed[0]
        if not self._works and all(one.reason in MISCONFIGURED for one in failed):
            key = MISCONFIGURED[first.reason]
            value = self.config.model_name if key == "model_name" else self.config.key
            raise ConfigError(key, value, f"the judge at {self.config.api_endpoint} refuses it: {first.detail}")
        reasons = Counter(one.reason for one in failed).most_common()
        log.log(
            logging.ERROR if any(one.reason in MISCONFIGURED for one in failed) else logging.WARNING,
            "%s: %d of %d judgements failed (%s), the first with: %s",
            self.__name__,
            len(failed),
            len(verdicts),
            ", ".join(f"{reason} {count}" for reason, count in reasons),
            first.detail,
        )

    def _unknown(self, samples: Sequence[Sample], verdicts: Sequence[Verdict], ruled: Sequence[bool]) -> list[bool]:
        """Which rows have no number: those without a ground truth for the rule, and failed ones unless `on_failure`."""
        failed = [isinstance(verdict, Failed) for verdict in verdicts]
        if self.rule is not None:
            return [not known or (lost and self._masks) for known, lost in zip(ruled, failed, strict=True)]
        if self._masks or self.config.failure_policy.kind != "group_mean":
            return [lost and self._masks for lost in failed]
        # Without a rule and without a scored sibling there is no mean to take.
        scored = {sample.group for sample, lost in zip(samples, failed, strict=True) if not lost}
        return [lost and sample.group not in scored for sample, lost in zip(samples, failed, strict=True)]

    def _report(
        self,
        rewards: Rewards,
        log_metric: Callable[[str, float], None] | None,
        log_extra: Callable[[str, list[Any]], None] | None,
    ) -> None:
        """To TRL's metrics and its table of completions, where the trainer has them (AsyncGRPO's worker has not).

        Every column is written each time: TRL makes one table of them, which fails where lengths differ.
        """
        verdicts, count = rewards.verdicts, len(rewards)
        scored = [verdict for verdict in verdicts if isinstance(verdict, Scored)]
        figures = {
            "judge_failed": sum(isinstance(verdict, Failed) for verdict in verdicts) / count,
            "judge_skipped": sum(isinstance(verdict, Skipped) for verdict in verdicts) / count,
            "judge_cached": sum(verdict.cached for verdict in scored) / count,
        }
        if scored:  # TRL sums what it gets: one NaN would hide the others
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
        if log_metric is not None:
            for key, value in figures.items():
                log_metric(f"{self.__name__}/{key}", value)
        if log_extra is not None:
            for key, values in extra.items():
                log_extra(f"{self.__name__}/{key}", values)


# -- texts of prompts and completions ---------------------------------------------------------------------------------


def answer_of(completion: Any) -> str:
    """What the rule reads: the text, or what the assistant said last. A tool's output is not the model's answer."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion or () if message.get("role", "assistant") == "assistant"]
    return text_of(said[-1].get("content")) if said else ""


def transcript_of(conversation: Any) -> str:
    """What the judge reads: the text; of several messages (and of tool calls) each under its role."""
    if isinstance(conversation, str):
        return conversation
    messages = list(conversation or ())
    if len(messages) == 1 and not messages[0].get("tool_calls"):
        return text_of(messages[0].get("content"))
    return "\n\n".join(f"[{_speaker(message)}]\n{_turn(message)}" for message in messages)


def text_of(content: Any) -> str:
    """A message's content as text; what is not text in it is named."""
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
    """With the whole of the completion as the response, and a reference that is text."""
    truth = sample.ground_truth
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool)
    return replace(sample, response=transcript_of(completion), ground_truth=str(truth) if is_number else truth)


def _key(of: Any) -> str:
    """Equal for equal prompts, or values of the groups' column."""
    return of if isinstance(of, str) else _plain_json(of)


def _plain_json(value: Any) -> str:
    # An image is decoded anew for each row of a group, so its kind must do.
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=lambda other: type(other).__name__)


def _in_words(verdict: Verdict) -> str:
    return verdict.status if isinstance(verdict, Scored) else f"{verdict.status}: {verdict.reason}"
