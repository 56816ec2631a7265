"""How the policy learns: the settings of `algorithm` and `optimizer`, and a description of their combination in words.

The schema of a run embeds these settings (`freewheel.runtime.config`), and backends use them directly. A combination
that cannot work is refused when it is constructed, with the key, the value and the remedy. Does not import torch.

To add a loss or an advantage estimator, write the function and add a line to `LOSSES` or `ADVANTAGES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from freewheel.errors import ConfigError
from freewheel.utils.checks import Count, CountOrZero, NotNegative, Positive, Share, check_fields
from freewheel.utils.registry import Registry

Algorithm = Literal["grpo", "ppo", "rloo", "reinforce_pp"]
Normalise = Literal["auto", "std", "batch_std", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlKind = Literal["k1", "k2", "k3"]
Importance = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

LOGITS_AT_A_TIME = 1 << 27
"""Half a GiB of float32. A larger product of tokens and vocabulary is computed in parts, and again for gradients.
Defined here because memory estimates use it without torch."""

LOSSES: Registry[Any] = Registry({"ppo_clip": "freewheel.trainer.losses:ppo_clip"}, example="my_losses:cispo")
"""Values of `algorithm.loss`: functions from `LossInputs` to `LossOutputs`."""
ADVANTAGES: Registry[Any] = Registry(
    {
        "grpo": "freewheel.trainer.advantages:grpo",
        "rloo": "freewheel.trainer.advantages:rloo",
        "reinforce_pp": "freewheel.trainer.advantages:reinforce_pp",
        "gae": "freewheel.trainer.advantages:gae",
    },
    example="my_advantages:best_of_group",
)
"""Values of `algorithm.advantage`: functions from `AdvantageInputs` to an array per group. Only `gae` is different: it
needs a critic, and returns an advantage per token."""

_ESTIMATORS: dict[Algorithm, str] = {"grpo": "grpo", "ppo": "gae", "rloo": "rloo", "reinforce_pp": "reinforce_pp"}
"""The estimator that each `algorithm.name` selects."""
_NORMALISATIONS: dict[str, tuple[Normalise, ...]] = {
    "grpo": ("std", "batch_std", "none"),
    "gae": ("batch_std", "none"),
    "rloo": ("none", "batch_std"),
    "reinforce_pp": ("batch_std",),
}
"""The values of `normalise` that each built-in estimator supports. The first one is its `auto`."""


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become a loss."""

    name: Algorithm = "grpo"
    """A preset of advantage estimator and loss. `grpo`: a reward against its group's mean. `rloo`: against the mean of
    the group's other rewards. `reinforce_pp` (REINFORCE++): against a mean, then normalised over the batch. `ppo`: a
    critic and GAE."""
    loss: str = "auto"
    """The loss: `ppo_clip`, or `module:name` of your own function. `auto`: the one that `name` selects."""
    advantage: str = "auto"
    """The advantage estimator: `grpo`, `rloo`, `reinforce_pp`, `gae` (with a critic), or `module:name` of your own
    function. `auto`: the one that `name` selects."""
    normalise: Normalise = "auto"
    """What advantages are divided by. `std`: the standard deviation of the group's rewards. `batch_std`: for grpo, the
    standard deviation of all rewards of the batch; for rloo, reinforce_pp and gae, that of the batch's advantages (gae:
    one per token), after subtracting their mean. `none`: nothing. `auto`: std for grpo, none for rloo, else
    batch_std."""
    baseline: Literal["group", "batch"] = "group"
    """For reinforce_pp: the mean of the group, or of the whole batch."""
    clip_low: Positive = 0.2
    """A ratio below 1 − clip_low gets no gradient if the advantage is negative."""
    clip_high: Positive = 0.28
    """A ratio above 1 + clip_high gets no gradient if the advantage is positive. A value above clip_low keeps
    exploration alive."""
    dual_clip: float | None = None
    """Bound of the loss at a negative advantage, in multiples of it: above 1 + clip_high, usually 3. None: no bound."""
    ratio: Literal["token", "sequence"] = "token"
    """`sequence` (GSPO): the geometric mean of a response's token ratios, for all of its tokens."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: each token counts the same. `sequence_mean`: each response does. `constant`: a response's sum is
    divided by `aggregation_tokens`, whatever its length; with `normalise: none` that is Dr. GRPO."""
    aggregation_tokens: Count | None = None
    """For `aggregation: constant`: the length to divide by, usually `rollout.max_new_tokens`."""
    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """What the ratio is clipped against: `behaviour`, the engine's own log-probabilities; `recomputed` (decoupled PPO),
    those of the trainer's weights when the step began. `importance` then corrects for the engine's policy."""
    importance: Importance = "none"
    """Weights from the engine's policy to the proximal one, per token or per response (their product). `truncate`
    limits them to `importance_cap`, `mask` leaves out weights outside `importance_floor` … `importance_cap`."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    importance_floor: NotNegative = 0.0
    """Smallest importance weight that is not masked."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence from the model as it was at the start of the run. 0: no reference model is kept."""
    kl_kind: KlKind = "k3"
    """Estimator of that KL. `k1`: `kl_coef` times log π − log π_ref of a token is subtracted from its advantage after
    normalisation, so GAE and the critic do not see it (in the loss, its mean gradient would be 0). `k2`, `k3`: added to
    the loss."""
    entropy_coef: NotNegative = 0.0
    """Weight of an entropy bonus."""
    gamma: Share = 1.0
    """For gae: discount per token."""
    lam: Share = 0.95
    """For gae: λ."""
    value_clip: Positive | None = 0.2
    """For gae: how far a value may move from its value when the step began. None: no clipping."""
    updates_per_batch: Count = 1
    """Passes over a step's batch."""
    mini_batches: Count = 1
    """Optimizer steps per pass. A mini-batch holds whole groups."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """A group whose rewards are all equal teaches nothing under a group baseline: `keep` trains on it anyway, `drop`
    takes another group in its place (DAPO)."""

    def __post_init__(self) -> None:
        check_fields(self, "algorithm.")
        for key, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
            if getattr(self, key) != "auto":
                registry.check(f"algorithm.{key}", getattr(self, key))
        for key, remedy in self._find_conflicts():
            raise ConfigError(f"algorithm.{key}", getattr(self, key), remedy)

    def _find_conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the keys whose values do not go with the others, each with what to do."""
        called = self.name if self.advantage == "auto" else self.advantage
        allowed = _NORMALISATIONS.get(self.estimator)
        if self.clip_low >= 1:
            yield "clip_low", "a ratio is never below 0: give a number below 1"
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield "dual_clip", "it must be above 1 + clip_high"
        if self.importance_cap <= self.importance_floor:
            yield "importance_cap", "it must be above importance_floor"
        if allowed and self.normalise not in ("auto", *allowed):
            yield "normalise", f"{called} takes {' or '.join(allowed)}, or auto"
        if allowed and self.estimator != "reinforce_pp" and self.baseline != "group":
            yield "baseline", "only reinforce_pp has a choice: leave it out"
        if (self.aggregation == "constant") != (self.aggregation_tokens is not None):
            yield "aggregation_tokens", "only aggregation 'constant' uses it, and needs it: give both or neither"
        if self.ratio == "sequence" and self.uses_critic:
            yield "ratio", f"a critic gives every token its own advantage: use 'token' with {called}"
        if self.proximal == "behaviour" and self.importance.endswith("_truncate"):
            remedy = "set proximal to 'recomputed', or importance to 'none' or a mask"
            yield "importance", f"the ratio to the behaviour policy is already the importance weight: {remedy}"
        if self.importance_floor > 0 and not self.importance.endswith("_mask"):
            yield "importance_floor", "only a mask has a floor: set importance to one"
        if self.zero_variance == "drop" and (self.uses_critic or self.baseline == "batch"):
            learner = called if self.uses_critic else "a batch baseline"
            yield "zero_variance", f"{learner} learns from such groups: use 'keep'"

    @property
    def estimator(self) -> str:
        """`advantage`, with `auto` resolved."""
        return _ESTIMATORS[self.name] if self.advantage == "auto" else self.advantage

    @property
    def uses_critic(self) -> bool:
        return self.estimator == "gae"

    @property
    def compares_responses(self) -> bool:
        """Whether the estimator needs at least two responses per group."""
        return self.estimator in ADVANTAGES and not self.uses_critic and self.baseline == "group"

    @property
    def normalisation(self) -> Normalise:
        """`normalise`, with `auto` resolved."""
        if self.normalise != "auto":
            return self.normalise
        return _NORMALISATIONS.get(self.estimator, ("none",))[0]

    def find_loss(self) -> Any:
        """Return the loss function. Raises `ConfigError`."""
        return _find("algorithm.loss", LOSSES, "ppo_clip" if self.loss == "auto" else self.loss)

    def find_estimator(self) -> Any:
        """Return the advantage estimator. Raises `ConfigError`."""
        return _find("algorithm.advantage", ADVANTAGES, self.estimator)


def _find(key: str, registry: Registry[Any], name: str) -> Any:
    found = registry.find(key, name)
    if not callable(found):
        raise ConfigError(key, name, "it cannot be called: name a function")
    return found


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW and its learning rate."""

    lr: Positive | Literal["auto"] = "auto"
    """Highest learning rate. `auto`: 3e-4 for the embedded model, 1e-6 for any other."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the means of gradients and of their squares."""
    eps: Positive = 1e-8
    """AdamW's ε, added to the root of the second mean."""
    weight_decay: NotNegative = 0.0
    """On matrices; biases and norms have none."""
    grad_clip: Positive | None = 1.0
    """Largest norm of the gradient. None: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the highest rate to `min_lr_ratio` of it over the run."""
    min_lr_ratio: Share = 0.0
    """Where `linear` and `cosine` end, as a share of `lr`."""
    warmup_steps: CountOrZero = 0
    """Steps of linear growth to the highest rate."""
    critic_lr: Positive | None = None
    """For gae. None: ten times `lr`, because the critic's head starts at zero."""

    def __post_init__(self) -> None:
        check_fields(self, "optimizer.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("optimizer.betas", self.betas, "give two numbers from 0 to below 1, such as [0.9, 0.95]")


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters through peft. The base model is frozen, and engines receive the merged weights.

    There is no dropout: with it, training would see different log-probabilities than the engine sampled with.
    """

    rank: Count = 16
    """Rank of an adapter's two matrices."""
    alpha: Positive = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """The modules that get adapters, in peft's notation."""

    def __post_init__(self) -> None:
        check_fields(self, "model.lora.")


def describe(config: AlgorithmConfig) -> str:
    """Describe in a few sentences how these settings work together. Logged at the start of a run."""
    c = config
    advantage = {
        "grpo": "each reward against its group's mean",
        "rloo": "each reward against the mean of its group's others",
        "reinforce_pp": f"each reward against its {c.baseline}'s mean",
        "gae": f"a critic's token-level GAE (gamma {c.gamma:g}, lambda {c.lam:g})",
    }.get(c.estimator, f"advantages from {c.estimator}")
    if c.estimator in ADVANTAGES and c.normalisation != "none":
        advantage += f", divided by the {'group' if c.normalisation == 'std' else 'batch'}'s standard deviation"
    mean = {
        "token_mean": "averaged over tokens",
        "sequence_mean": "averaged over responses",
        "constant": f"summed over a response's tokens and divided by {c.aggregation_tokens}",
    }[c.aggregation]
    if c.loss not in ("auto", "ppo_clip"):
        return f"{c.name}: {advantage}; the loss is {c.loss}, {mean}."
    unit = "a response's geometric-mean ratio" if c.ratio == "sequence" else "each token's ratio"
    whom = "the engine's policy" if c.proximal == "behaviour" else "the trainer's policy when the step began"
    bound = f" and bounded at {c.dual_clip:g} where the advantage is negative" if c.dual_clip is not None else ""
    clip = f"{unit} to {whom} is clipped to [{1 - c.clip_low:g}, {1 + c.clip_high:g}]{bound}"
    said = [f"{c.name}: {advantage}; {clip}, {mean}.", *_describe_weights(c)]
    if c.kl_coef:
        where = "subtracted from the advantage" if c.kl_kind == "k1" else "added to the loss"
        said.append(f"{c.kl_coef:g} times the KL divergence from the starting model ({c.kl_kind}) is {where}.")
    if c.entropy_coef:
        said.append(f"{c.entropy_coef:g} times the entropy is subtracted from the loss.")
    return " ".join(said)


def _describe_weights(c: AlgorithmConfig) -> Iterator[str]:
    unit, _, kind = c.importance.partition("_")
    bounds = f"{c.importance_floor:g} to {c.importance_cap:g}"
    if c.proximal == "recomputed":
        whose = {"none": "", "token": "a token's, ", "sequence": "a whole response's, "}[unit]
        cap = f"truncated at {c.importance_cap:g}"
        how = {"": "not bounded", "truncate": cap, "mask": f"and 0 outside {bounds}"}[kind]
        yield f"The loss is weighted by the ratio of that policy's probabilities to the engine's ({whose}{how})."
        if c.updates_per_batch * c.mini_batches == 1:
            yield "With one update per batch the first ratio is 1 and nothing is clipped: only the weight acts."
    elif kind == "mask":
        units = "Tokens" if unit == "token" else "Responses"
        yield f"{units} whose importance weight is outside {bounds} are left out of the loss."
