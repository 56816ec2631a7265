"""Names of metrics, values that can be recorded, sample ages, and alerts. Pure.

`METRICS` lists every metric with unit and component. `docs/metrics.md` is generated from this table, and the
Prometheus sink takes its help texts from it. Metrics of users' hooks need no entry.

`plain` turns what a component or hook returns into plain values. Numbers of numpy and torch are recognised by their
methods (`item`, `tolist`), so neither is imported.

`freshness` computes the ages of a step's samples, for the trainer.

`Alerts` compares rows with thresholds and reports each crossing once; the recorder logs the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Metric:
    name: str
    what: str
    unit: str
    component: str


def _of(component: str, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, what, unit, component) for name, unit, what in rows)


COMPONENTS = ("trainer", "rollouter", "queue", "sync")
"""The components in `Component Statistics`, in this order."""

METRICS = (
    *_of(
        "trainer",
        ("global_steps", "steps", "training steps done, those before a resume included"),
        ("processed_samples", "responses", "responses trained on"),
        ("current_param_version", "version", "weight version that the trainer has"),
        ("param_sync_count", "syncs", "weight versions submitted for the engines"),
    ),
    *_of(
        "rollouter",
        ("total_generated_samples", "responses", "responses generated"),
        ("dropped_stale_samples", "responses", "responses dropped because they lagged more than max_staleness_allowed"),
        ("generation_errors", "groups", "failed attempts at a group, in generation (timeouts included) or in scoring"),
        ("param_sync_requests", "requests", "requests to an engine to take a weight version, retries included"),
    ),
    *_of(
        "freshness",
        ("avg_sample_age", "versions", "mean lag of the step's samples: trainer's version minus oldest token's"),
        ("max_sample_age", "versions", "largest lag among the step's samples"),
        ("avg_sample_age_s", "s", "mean age of the step's samples since their generation started"),
        ("max_sample_age_s", "s", "largest such age"),
        ("stale_samples_ratio", "share", "share of the step's samples with a lag above staleness_threshold"),
        ("sample_age_counts", "groups", "a list: how many of the step's groups lag by 0 versions, by 1, and so on"),
    ),
    *_of(
        "queue",
        ("queue_size", "groups", "groups that are ready to be trained on"),
        ("total_produced", "groups", "groups put into the queue"),
        ("total_consumed", "groups", "groups trained on"),
        ("dropped_samples", "groups", "groups dropped for any reason (dropped_by_reason has each)"),
        ("memory_bytes", "bytes", "memory used by queued groups"),
    ),
    *_of(
        "sync",
        ("sync_failures", "attempts", "transfers of a version to an engine that failed, were refused or timed out"),
        ("last_sync_s", "s", "time of the last sync, from the first transfer to the last confirmation"),
        ("mean_sync_s", "s", "mean time of a sync"),
        ("longest_sync_s", "s", "time of the longest sync"),
    ),
    *_of(
        "rollout",
        ("rollout/reward_mean", "reward", "mean reward of the step's scored responses"),
        ("rollout/reward_std", "reward", "their standard deviation"),
        ("rollout/raw_reward_mean", "reward", "the same before shaping (length penalty and the like)"),
        ("rollout/masked_ratio", "share", "share of the step's responses whose scoring failed: masked, not zero"),
        ("rollout/skipped_ratio", "share", "share of the step's responses that the function left unscored"),
        ("rollout/zero_variance_ratio", "share", "share of the step's groups whose responses all have the same reward"),
        ("rollout/response_length_mean", "tokens", "mean length of the step's responses without tool tokens"),
        ("rollout/response_length_max", "tokens", "length of the longest response"),
        ("rollout/truncation_ratio", "share", "share of the step's responses that were cut off at max_new_tokens"),
        ("rollout/logprob_gap_mean", "nats", "mean gap between engine's and trainer's log-probability of a token"),
        ("rollout/logprob_gap_max", "nats", "largest such gap"),
    ),
    *_of(
        "actor",
        ("actor/loss", "", "the policy's loss"),
        ("actor/lr", "", "learning rate of the step"),
        ("actor/grad_norm", "", "norm of the gradient before clipping"),
        ("actor/skipped_nonfinite", "updates", "updates skipped because the loss or gradient was not finite"),
        ("actor/clip_ratio_low", "share", "tokens clipped at 1 − clip_low"),
        ("actor/clip_ratio_high", "share", "tokens clipped at 1 + clip_high"),
        ("actor/kl", "nats", "mean log-ratio of the sampling policy to the trained policy: how far it has moved"),
        ("actor/kl_k3", "nats", "the same with an estimator that is never negative"),
        ("actor/kl_reference", "nats", "divergence from the reference model, if kl_coef is above 0"),
        ("actor/entropy", "nats", "mean entropy of the policy at the trained tokens"),
        ("actor/ess", "share", "effective sample size of the importance weights per token; 1 is on-policy"),
        ("actor/ess_sequence", "share", "the same with one weight per response"),
        ("actor/importance_weight", "", "mean importance weight, if a correction is on"),
        ("actor/importance_masked", "share", "tokens that the correction left out"),
        ("actor/ratio_max", "", "largest probability ratio of the step"),
    ),
    *_of(
        "critic",
        ("critic/loss", "", "the critic's loss (ppo)"),
        ("critic/lr", "", "the critic's learning rate"),
        ("critic/grad_norm", "", "norm of the critic's gradient before clipping"),
        ("critic/skipped_nonfinite", "updates", "critic updates skipped because loss or gradient was not finite"),
        ("critic/value", "reward", "mean predicted value"),
        ("critic/return", "reward", "mean return"),
        ("critic/error", "reward²", "mean squared error of the prediction"),
        ("critic/clip_ratio", "share", "share of values that the value clip limits"),
    ),
    *_of(
        "evaluation",
        ("eval/reward", "reward", "mean reward on held-out prompts; the accuracy, if a right answer is worth 1"),
        ("eval/reward_se", "reward", "its standard error over prompts"),
        ("eval/prompts", "prompts", "held-out prompts of the evaluation"),
        ("eval/failed", "responses", "held-out responses not generated or not scored; not in the mean"),
        ("eval/response_length_mean", "tokens", "mean length of the held-out responses"),
        ("eval/truncation_ratio", "share", "share of the held-out responses that were cut off at max_new_tokens"),
        ("eval/version_min", "version", "oldest weight version that generated for the evaluation"),
        ("eval/version_max", "version", "newest such version; weights may change during an evaluation"),
    ),
)


def describe() -> dict[str, Metric]:
    """Return every metric with a fixed meaning, by name."""
    return {metric.name: metric for metric in METRICS}


DEEPEST = 8
"""Levels of nesting that are kept. Statistics have three; a structure that contains itself must end somewhere."""


def plain(value: Any, *, levels: int = DEEPEST) -> Any:
    """Return `value` as dictionaries with text keys, lists, numbers, text, booleans and None. Never raises: other
    objects become their text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if not levels:
        return _text(value)
    if isinstance(value, Mapping):
        return {str(name): plain(inner, levels=levels - 1) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner, levels=levels - 1) for inner in value]
    for method in ("item", "tolist"):  # an array or tensor with one number, then with several
        try:
            return plain(getattr(value, method)(), levels=levels - 1)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # a user's class may raise anything from __str__
        return f"<{type(value).__name__}>"


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers in plain values with their path (`queue/queue_size`). Booleans, text and lists are skipped."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, as_float(value)


def as_float(value: int | float) -> float:
    """Convert to a float. Python integers are unbounded, floats are not."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def without_nonfinite(value: Any, path: str = "") -> tuple[Any, list[str]]:
    """Replace NaN and infinities by None, which JSON has, and return their paths."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, [path]
    if isinstance(value, dict):
        inner = {name: without_nonfinite(one, f"{path}/{name}" if path else name) for name, one in value.items()}
        return {name: one for name, (one, _) in inner.items()}, [at for _, found in inner.values() for at in found]
    if isinstance(value, list):
        items = [without_nonfinite(one, path) for one in value]
        return [one for one, _ in items], sorted({at for _, found in items for at in found})
    return value, []


Numbers = Sequence[float] | npt.NDArray[np.number]


def freshness(lags: Numbers, ages_s: Numbers, *, staleness_threshold: int) -> dict[str, float]:
    """Return the age metrics of a step's samples.

    `lags`: for each sample, the trainer's version minus the oldest version among its tokens. `ages_s`: for each sample,
    the seconds since it was generated. `stale_samples_ratio` is the share with a lag above the threshold. A batch
    without samples has no age metrics.
    """
    lag, age = np.asarray(lags, dtype=np.float64), np.asarray(ages_s, dtype=np.float64)
    if not lag.size:
        return {}
    return {
        "avg_sample_age": float(lag.mean()),
        "max_sample_age": float(lag.max()),
        "avg_sample_age_s": float(age.mean()),
        "max_sample_age_s": float(age.max()),
        "stale_samples_ratio": float((lag > staleness_threshold).mean()),
    }


def age_counts(lags: Sequence[int]) -> list[int]:
    """Count the groups with a lag of 0, 1, and so on. `lags` has one entry per group."""
    return [int(count) for count in np.bincount(np.maximum(np.asarray(lags, dtype=np.int64), 0))]


KEY = "observe.alerts"


class Alerts:
    """Reports each crossing once: a metric out of bounds is silent until it is back, or out on the other side.

    A threshold for `queue_size` watches every metric of this name (such as `queue/queue_size`), each with its own
    state. A threshold for `queue/queue_size` watches only that metric.
    """

    def __init__(self, thresholds: Mapping[str, Any]) -> None:
        """Each threshold has `above` and `below`; None means no bound."""
        self._thresholds = dict(thresholds)
        self._unseen = set(self._thresholds)
        self._active: dict[tuple[str, str], tuple[str, str]] = {}
        """What is wrong with each metric that is out of bounds, and the message about it."""

    def check(self, values: Mapping[str, Any]) -> list[tuple[int, str]]:
        """Return what to log about a row of plain values: WARNING when a threshold is crossed, INFO when the metric is
        back. A metric that is missing in the row keeps its state."""
        found: list[tuple[int, str]] = []
        for path, value in numbers(values):
            for name in dict.fromkeys((path, path.rpartition("/")[2])):
                if name in self._thresholds:
                    self._unseen.discard(name)
                    found += self._look(name, path, value)
        return found

    def _look(self, name: str, path: str, value: float) -> list[tuple[int, str]]:
        threshold, key = self._thresholds[name], f"{KEY}.{name}"
        wrong = _wrong(threshold, value)
        before, _ = self._active.get((name, path), (None, ""))
        if wrong == before:
            return []
        if wrong is None:
            del self._active[name, path]
            return [(logging.INFO, f"{path} = {value:g} is back within {key} ({_bounds(threshold)})")]
        text = f"{path} = {value:g} is {wrong} ({key}: {_bounds(threshold)})"
        self._active[name, path] = wrong, text
        return [(logging.WARNING, text)]

    @property
    def active(self) -> list[str]:
        """Return the last message of each metric that is out of bounds now."""
        return [text for _, text in self._active.values()]

    @property
    def unseen(self) -> list[str]:
        """Return the thresholds that no metric matched so far. They are probably misspelt."""
        return sorted(self._unseen)


def _wrong(threshold: Any, value: float) -> str | None:
    if math.isnan(value):
        return "not a number"
    if threshold.above is not None and value > threshold.above:
        return "too high"
    return "too low" if threshold.below is not None and value < threshold.below else None


def _bounds(threshold: Any) -> str:
    sides = [f"{side} {bound:g}" for side in ("above", "below") if (bound := getattr(threshold, side)) is not None]
    return ", ".join(sides)
