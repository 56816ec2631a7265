"""`compute_score`: a rule score, plus a judge's where `TRAIN_WITH_MONITOR=true`, under each of its calling conventions.

    score  = compute_score(response, ground_truth, dataset_name, extra_info)                       # one sample
    scores = compute_score(data_sources=…, solution_strs=…, ground_truths=…, extra_infos=…)        # a batch
    score  = compute_score(data_source=…, solution_str=…, ground_truth=…, extra_info=…)            # verl's single call

verl can use it as its `custom_reward_function` without changes. `compute_score_async` is the same for an event loop.
Further keywords are keys of `LengthPenaltyConfig`; verl passes them as `reward_kwargs`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from freewheel.errors import ConfigError
from freewheel.judge import Handle, Judge
from freewheel.judge.config import Secret
from freewheel.judge.verdict import Failed, JudgeClosed, JudgeDied, Verdict
from freewheel.rewards.config import CACHE_VARIABLE, KEY_VARIABLE, LengthPenaltyConfig, as_config, env_flag
from freewheel.rewards.openai_manager import wait_for
from freewheel.rewards.rules import rule_score
from freewheel.rewards.scoring import Sample, apply_rules, combine, judge_requests, rule_value

_MONITOR = "TRAIN_WITH_MONITOR"
_ENDPOINT = "OPENAI_BASE_URL"
MODEL = "OPENAI_MODEL"
_START = 60
"""Concurrent judge calls at first. The limit adapts from there."""
_IGNORED = ("reward_router_address", "reward_model_tokenizer")
"""Arguments that verl adds when it runs its own reward model. They are ignored."""
_REPORTED = ("original_score", "judge_status", "judge_reason", "reward_mask")
"""Next to `score`, for verl."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_PLAIN = ("response", "ground_truth", "dataset_name", "extra_info")


class _Call(NamedTuple):
    """One call of any convention."""

    samples: list[Sample]
    rules: list[Verdict]
    is_batch: bool
    is_verl: bool
    """verl takes a dict per row. A plain caller and TRL take a number or None."""
    settings: dict[str, Any]

    @property
    def is_judged(self) -> bool:
        return monitors() and self.settings.get("enable_openai_reward") is not False


def compute_score(*args: Any, **kwargs: Any) -> Any:
    """Return the score of one sample or of a batch, by the calling conventions above.

    Without a judge this is the rule's score. With a judge it is rule + quality: a number for a plain call, and for verl
    a dict with `score` and `judge_status`. A failed judgement is never a number for a plain call, which gets None. verl
    gets the mean of the sample's group (the rule's score if the whole group failed), and `judge_status = "failed"`.
    """
    call = _read(args, kwargs)
    if not call.is_judged:
        return _one_or_all(call, [rule_value(rule) for rule in call.rules])
    handle, config = _submit(call)
    return _combine_verdicts(call, wait_for(handle), config)


async def compute_score_async(*args: Any, **kwargs: Any) -> Any:
    """Do the same as `compute_score` without blocking the event loop."""
    call = await asyncio.to_thread(_read, args, kwargs)  # rules take time: comparing formulas takes up to seconds
    if not call.is_judged:
        return _one_or_all(call, [rule_value(rule) for rule in call.rules])
    handle, config = _submit(call)
    try:
        return _combine_verdicts(call, await handle, config)
    finally:
        handle.cancel()


def monitors() -> bool:
    """Return whether `TRAIN_WITH_MONITOR` turns the judge on."""
    return env_flag(_MONITOR, default=False)


def _read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    given = {key: value for key, value in kwargs.items() if key not in _IGNORED}
    is_batch, is_verl = "solution_strs" in given, "solution_strs" in given or "solution_str" in given
    if is_batch:
        rows = _rows(*(given.pop(f"{key}s", None) for key in _VERL))
    elif is_verl:
        rows = [tuple(given.pop(key, None) for key in _VERL)]
    else:
        if len(args) > len(_PLAIN):
            raise TypeError(f"compute_score takes {', '.join(_PLAIN)}; it received {len(args)} values")
        values = {**dict(zip(_PLAIN, args, strict=False)), **{key: given.pop(key) for key in _PLAIN if key in given}}
        for key in _PLAIN[:3]:
            if key not in values:
                raise TypeError(f"compute_score misses {key!r}; its conventions are in its module's docstring")
        rows = [(values["dataset_name"], values["response"], values["ground_truth"], values.get("extra_info"))]
    samples = [_sample(*row) for row in rows]
    return _Call(samples, apply_rules(rule_score, samples), is_batch, is_verl, given)


def _rows(sources: Any, solutions: Any, truths: Any, extras: Any) -> list[tuple[Any, ...]]:
    count = len(solutions)
    extras = extras if extras is not None else [None] * count
    for key, column in (("data_sources", sources), ("ground_truths", truths), ("extra_infos", extras)):
        if column is None or len(column) != count:
            shown = None if column is None else len(column)
            raise ConfigError(f"len({key})", shown, f"give one for each of the {count} solution_strs")
    return list(zip(sources, solutions, truths, extras, strict=True))


def _sample(source: Any, response: Any, truth: Any, extra: Any) -> Sample:
    if not isinstance(response, str):
        raise ConfigError("solution_str", response, "give the response as text")
    info: Mapping[str, Any] = dict(extra) if extra else {}
    question = info.get("question")
    return Sample(
        response=response,
        length=0,
        group=_group(source, truth, info),
        data_source=str(source),
        ground_truth=truth,
        question=question if isinstance(question, str) else "",
        extra_info=info,
    )


def _group(source: Any, truth: Any, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a key that is equal for rows of the same prompt, from the best column that the row has."""
    for key in ("uid", "index", "question"):
        if info.get(key) is not None:
            return (key, str(source), str(info[key]))
    return ("", str(source), str(truth))


def _one_or_all(call: _Call, rows: list[Any]) -> Any:
    return rows if call.is_batch else rows[0]


def _combine_verdicts(call: _Call, verdicts: Sequence[Verdict], config: LengthPenaltyConfig) -> Any:
    rewards = combine(call.samples, call.rules, verdicts, config)
    scores: list[Any] = rewards.reward.tolist()
    if not call.is_verl:
        if config.failure_policy.kind == "group_mean":  # there is no group here
            scores = [
                None if isinstance(verdict, Failed) else score for verdict, score in zip(verdicts, scores, strict=True)
            ]
        return _one_or_all(call, scores)
    # verl collates the rows into columns and takes means, so every row needs the same keys with plain values. A part
    # that a failed row does not have cannot be reported.
    extra = rewards.extra_info()
    columns = {"score": scores, **{key: extra[key] for key in _REPORTED}}
    return _one_or_all(call, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


# -- the judge of this process ----------------------------------------------------------------------------------------

_judges: dict[str, tuple[Judge, LengthPenaltyConfig]] = {}
_lock = threading.Lock()


def _judge_for(settings: Mapping[str, Any]) -> tuple[Judge, LengthPenaltyConfig]:
    """Return the judge for these settings. It is made at the first call and keeps its connections and its limit."""
    names = (KEY_VARIABLE, CACHE_VARIABLE, _ENDPOINT, MODEL, str(settings.get("judge", {}).get("api_key_env", "")))
    key = settings.get("api_key")
    key = key.reveal() if isinstance(key, Secret) and key else key  # two Secrets print alike
    identifying = ([os.environ.get(name, "") for name in names], sorted(settings.items(), key=str), key)
    identity = hashlib.sha256(repr(identifying).encode()).hexdigest()  # a hash, because a key must not stay as text
    with _lock:
        found = _judges.get(identity)
        if found is None:
            config = _config(settings)
            found = _judges[identity] = (Judge(config.judge_config()), config)
        return found


def _submit(call: _Call) -> tuple[Handle, LengthPenaltyConfig]:
    judge, config = _judge_for(call.settings)
    requests = judge_requests(call.samples, call.rules, config)
    try:
        return judge.submit(requests), config
    except (JudgeDied, JudgeClosed):  # this judge has ended for good: take a new one
        with _lock:
            for identity in [identity for identity, (known, _) in _judges.items() if known is judge]:
                del _judges[identity]
        judge.close()
        return _judge_for(call.settings)[0].submit(requests), config


def shutdown_judges() -> None:
    """End the judges that `compute_score` started. The next call starts one again. They also end with the process."""
    with _lock:
        ended = [judge for judge, _ in _judges.values()]
        _judges.clear()
    for judge in ended:
        judge.close()


def _after_fork() -> None:
    """Reset the lock in a forked process: a thread that does not exist there may hold it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _config(settings: Mapping[str, Any]) -> LengthPenaltyConfig:
    values: dict[str, Any] = {"enable": False, **settings}
    if os.environ.get(_ENDPOINT):
        values.setdefault("api_endpoint", os.environ[_ENDPOINT])
    if os.environ.get(MODEL):
        values.setdefault("model_name", os.environ[MODEL])
    values["judge"] = {"concurrency_start": _START, **values.get("judge", {})}
    config = as_config(values)
    if config.key is not None:
        return config
    if os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            "api_endpoint",
            None,
            f"{KEY_VARIABLE} is set, but no endpoint: a key goes only where its owner sends it. Set {_ENDPOINT}, "
            f"as in export {_ENDPOINT}=https://api.openai.com/v1, and {MODEL}; or give api_endpoint and model_name",
        )
    raise ConfigError(
        KEY_VARIABLE,
        None,
        f"{KEY_VARIABLE} not found: {_MONITOR} is on and needs it. Set it, as in export {KEY_VARIABLE}=sk-…  "
        f"(EMPTY for a server without keys), or unset {_MONITOR}",
    )
