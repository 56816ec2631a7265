"""The metrics by name: what each is, in which unit, and which component counts it.

`docs/metrics.md` has this table, and a test compares them; the Prometheus sink takes its help texts from here. Metrics
of users' hooks are recorded like these and need no entry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    name: str
    what: str
    unit: str
    component: str


def _of(component: str, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name, what, unit, component) for name, unit, what in rows)


COMPONENTS = ("trainer", "rollouter", "queue", "sync")
"""What `Component Statistics` covers, in this order."""

METRICS = (
    *_of(
        "trainer",
        ("global_steps", "steps", "training steps done, those before a resume included"),
        ("processed_samples", "responses", "responses trained on"),
        ("current_param_version", "version", "weight version that the trainer has"),
        ("param_sync_count", "syncs", "weight versions handed over for the engines"),
    ),
    *_of(
        "rollouter",
        ("total_generated_samples", "responses", "responses generated"),
        ("dropped_stale_samples", "responses", "responses dropped because they lagged more than max_staleness_allowed"),
        (
            "generation_errors",
            "groups",
            "attempts at a group that failed, whether in generation (generation_timeout among them) or scoring",
        ),
        (
            "param_sync_requests",
            "requests",
            "times that an engine was asked to take a weight version, retries included",
        ),
    ),
    *_of(
        "freshness",
        ("avg_sample_age", "versions", "mean lag of the step's samples: trainer's version less their oldest token's"),
        ("max_sample_age", "versions", "largest lag among the step's samples"),
        ("avg_sample_age_s", "s", "mean time since the generation of the step's samples began"),
        ("max_sample_age_s", "s", "longest time since the generation of a sample of the step began"),
        ("stale_samples_ratio", "share", "of the step's samples, those with a lag over staleness_threshold"),
        ("sample_age_counts", "groups", "of the step's groups, how many lag by 0 versions, by 1, and so on: a list"),
    ),
    *_of(
        "queue",
        ("queue_size", "groups", "groups that are ready to be trained on"),
        ("total_produced", "groups", "groups put into the queue"),
        ("total_consumed", "groups", "groups trained on"),
        ("dropped_samples", "groups", "groups dropped, whatever the reason (by reason in dropped_by_reason)"),
        ("memory_bytes", "bytes", "memory that the queued groups take"),
    ),
    *_of(
        "sync",
        (
            "sync_failures",
            "attempts",
            "attempts to bring a version to an engine that failed, were refused or timed out",
        ),
        ("last_sync_s", "s", "time of the last sync, from the first transfer to the last confirmation"),
        ("mean_sync_s", "s", "mean time of a sync"),
        ("longest_sync_s", "s", "time of the longest sync"),
    ),
    *_of(
        "rollout",
        ("rollout/reward_mean", "reward", "mean reward of the step's scored responses"),
        ("rollout/reward_std", "reward", "their standard deviation"),
        ("rollout/raw_reward_mean", "reward", "the same before shaping (length penalty and the like)"),
        ("rollout/masked_ratio", "share", "of the step's responses, those whose scoring failed: masked, not zero"),
        ("rollout/skipped_ratio", "share", "of the step's responses, those that the function does not score"),
        ("rollout/zero_variance_ratio", "share", "of the step's groups, those whose responses all scored the same"),
        ("rollout/response_length_mean", "tokens", "mean length of the step's responses, tokens of tools not counted"),
        ("rollout/response_length_max", "tokens", "length of the longest"),
        ("rollout/truncation_ratio", "share", "of the step's responses, those cut off at max_new_tokens"),
        (
            "rollout/logprob_gap_mean",
            "nats",
            "mean gap between the engine's and the trainer's log-probability of a token",
        ),
        ("rollout/logprob_gap_max", "nats", "the largest gap"),
    ),
    *_of(
        "actor",
        ("actor/loss", "", "the policy's loss"),
        ("actor/lr", "", "learning rate of the step"),
        ("actor/grad_norm", "", "norm of the gradient before clipping"),
        ("actor/skipped_nonfinite", "updates", "updates of the step left out because loss or gradient was not finite"),
        ("actor/clip_ratio_low", "share", "tokens clipped at 1 − clip_low"),
        ("actor/clip_ratio_high", "share", "tokens clipped at 1 + clip_high"),
        ("actor/kl", "nats", "mean log-ratio of the sampling policy to the trained one: how far it has moved since"),
        ("actor/kl_k3", "nats", "the same by an estimator that is never negative"),
        ("actor/kl_reference", "nats", "divergence from the reference model, where kl_coef is above 0"),
        ("actor/entropy", "nats", "mean entropy of the policy at the trained tokens"),
        ("actor/ess", "share", "effective sample size of the importance weights, a weight a token; 1 is on-policy"),
        ("actor/ess_sequence", "share", "the same with a weight a response"),
        ("actor/importance_weight", "", "mean importance weight, where a correction is on"),
        ("actor/importance_masked", "share", "tokens that the correction left out"),
        ("actor/ratio_max", "", "largest probability ratio of the step"),
    ),
    *_of(
        "critic",
        ("critic/loss", "", "the critic's loss (ppo)"),
        ("critic/lr", "", "its learning rate"),
        ("critic/grad_norm", "", "norm of its gradient before clipping"),
        ("critic/skipped_nonfinite", "updates", "its updates left out because loss or gradient was not finite"),
        ("critic/value", "reward", "mean predicted value"),
        ("critic/return", "reward", "mean return"),
        ("critic/error", "reward²", "mean squared error of the prediction"),
        ("critic/clip_ratio", "share", "values held back by the value clip"),
    ),
    *_of(
        "evaluation",
        ("eval/reward", "reward", "mean reward on held-out prompts; accuracy, where a right answer is worth 1"),
        ("eval/reward_se", "reward", "its standard error; a prompt counts once, whatever its samples"),
        ("eval/prompts", "prompts", "held-out prompts of the evaluation"),
        ("eval/failed", "responses", "responses to them that could not be made or scored; they are not in the mean"),
        ("eval/response_length_mean", "tokens", "mean length of their responses"),
        ("eval/truncation_ratio", "share", "of their responses, those cut off at max_new_tokens"),
        ("eval/version_min", "version", "oldest weight version that generated for the evaluation"),
        ("eval/version_max", "version", "newest one: generation goes on meanwhile"),
    ),
)


def describe() -> dict[str, Metric]:
    """Every metric with a fixed meaning, by name."""
    return {metric.name: metric for metric in METRICS}
