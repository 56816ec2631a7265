"""How the policy learns: the settings of `algorithm` and `optimizer`, with what they do together in words.

The schema of a run embeds them (`freewheel.runtime.config`); backends take them as they are. A combination that cannot
mean anything is refused when it is made, with the key, the value and the remedy. Needs no torch.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from freewheel.errors import ConfigError
from freewheel.utils.checks import check_choice, check_integer, check_number, check_share

Algorithm = Literal["grpo", "ppo", "rloo", "reinforce_pp"]
Normalise = Literal["auto", "std", "batch_std", "none"]
Baseline = Literal["group", "batch"]
Ratio = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlKind = Literal["k1", "k2", "k3"]
Importance = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Proximal = Literal["behaviour", "recomputed"]
Schedule = Literal["constant", "linear", "cosine"]

LOGITS_AT_A_TIME = 1 << 27
"""Half a GiB of float32. Where tokens times vocabulary are more, they are made in parts, and again for gradients. Here,
because estimates of memory go by it and have no torch."""

NORMALISATIONS: dict[Algorithm, tuple[Normalise, ...]] = {
    "grpo": ("std", "batch_std", "none"),
    "ppo": ("batch_std", "none"),
    "rloo": ("none", "batch_std"),
    "reinforce_pp": ("batch_std",),
}
"""What `normalise` may be for each algorithm; the first is what `auto` means."""


class AlgorithmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From rewards to a loss."""

    name: Algorithm = "grpo"
    """`grpo`: a reward against its group's mean. `rloo`: against the mean of the group's others. `reinforce_pp`
    (REINFORCE++): against a mean, then normalised over the batch. `ppo`: a critic and GAE."""
    normalise: Normalise = "auto"
    """What advantages are divided by. `std`: the standard deviation of the group's rewards. `batch_std`: for grpo that
    of all rewards of the batch; for rloo, reinforce_pp and ppo that of the batch's advantages (ppo: a token each),
    whose mean is subtracted first. `none`: nothing. `auto`: std for grpo, none for rloo, else batch_std."""
    baseline: Baseline = "group"
    """For reinforce_pp: the mean of the group, or of the whole batch."""
    clip_low: float = 0.2
    """A ratio below 1 − clip_low gets no gradient where the advantage is negative."""
    clip_high: float = 0.28
    """A ratio above 1 + clip_high gets none where it is positive. Higher than clip_low keeps exploration alive."""
    dual_clip: float | None = None
    """Bound of the loss at a negative advantage, in multiples of it: above 1 + clip_high, usually 3. None: no bound."""
    ratio: Ratio = "token"
    """`sequence` (GSPO): the geometric mean of a response's token ratios, for all of its tokens."""
    aggregation: Aggregation = "token_mean"
    """`token_mean`: each token counts the same. `sequence_mean`: each response does. `constant`: a response's sum is
    divided by `aggregation_tokens`, whatever its length; with `normalise: none` that is Dr. GRPO."""
    aggregation_tokens: int | None = None
    """For `aggregation: constant`: the length to divide by, usually `rollout.max_new_tokens`."""
    proximal: Proximal = "behaviour"
    """What the ratio is clipped against: `behaviour`, the engine's own log-probabilities; `recomputed` (decoupled PPO),
    those of the trainer's weights when the step began, and `importance` weighs what the engine sampled."""
    importance: Importance = "none"
    """Weights from the engine's policy to the proximal one, by token or by response (their product). `truncate` cuts
    them at `importance_cap`, `mask` leaves out what is outside `importance_floor` … `importance_cap`."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    importance_floor: float = 0.0
    """Smallest importance weight that is not masked."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the model as it was at the start of the run. 0: no reference model is kept."""
    kl_kind: KlKind = "k3"
    """Estimator of that KL. `k1`: log π − log π_ref of a token, times `kl_coef`, is taken from that token's advantage
    after normalisation: GAE and the critic do not see it (as a loss its mean gradient would be 0). `k2`, `k3`: in the
    loss."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    gamma: float = 1.0
    """For ppo: discount a token."""
    lam: float = 0.95
    """For ppo: GAE's λ."""
    value_clip: float | None = 0.2
    """For ppo: how far a value may move from what it was when the step began. None: no clipping."""
    updates_per_batch: int = 1
    """How often a step goes over its batch."""
    mini_batches: int = 1
    """Optimizer steps for each time it does. A mini-batch holds whole groups."""
    zero_variance: Literal["keep", "drop"] = "keep"
    """A group whose rewards are all the same teaches nothing under a group baseline: `keep` trains on it all the same,
    `drop` takes another group in its place (DAPO)."""

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            check_choice(f"algorithm.{key}", getattr(self, key), choices)
        for key in ("clip_low", "clip_high"):
            check_number(f"algorithm.{key}", getattr(self, key), above=0)
        check_number("algorithm.value_clip", self.value_clip, above=0, optional=True)
        for key in ("kl_coef", "entropy_coef", "importance_floor"):
            check_number(f"algorithm.{key}", getattr(self, key), low=0)
        for key in ("gamma", "lam"):
            check_share(f"algorithm.{key}", getattr(self, key))
        for key in ("updates_per_batch", "mini_batches"):
            check_integer(f"algorithm.{key}", getattr(self, key), low=1)
        check_integer("algorithm.aggregation_tokens", self.aggregation_tokens, low=1, optional=True)
        check_number("algorithm.importance_cap", self.importance_cap, above=self.importance_floor)
        check_number("algorithm.dual_clip", self.dual_clip, above=1 + self.clip_high, optional=True)
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.clip_low >= 1:
            raise ConfigError("algorithm.clip_low", self.clip_low, "a ratio is never below 0: give a number below 1")
        allowed = NORMALISATIONS[self.name]
        if self.normalise != "auto" and self.normalise not in allowed:
            known = " or ".join(allowed)
            raise ConfigError("algorithm.normalise", self.normalise, f"{self.name} takes {known}, or auto")
        if self.baseline != "group" and self.name != "reinforce_pp":
            raise ConfigError("algorithm.baseline", self.baseline, "only reinforce_pp has a choice: leave it out")
        if (self.aggregation == "constant") != (self.aggregation_tokens is not None):
            raise ConfigError(
                "algorithm.aggregation_tokens",
                self.aggregation_tokens,
                "aggregation 'constant' needs it, and no other uses it: give both or neither",
            )
        if self.ratio == "sequence" and self.name == "ppo":
            raise ConfigError(
                "algorithm.ratio", self.ratio, "a critic gives every token its own advantage: use 'token' with ppo"
            )
        if self.proximal == "behaviour" and self.importance.endswith("_truncate"):
            raise ConfigError(
                "algorithm.importance",
                self.importance,
                "the ratio against the behaviour policy is the importance weight already: set proximal to "
                "'recomputed', or importance to 'none' or a mask",
            )
        if self.importance_floor and not self.importance.endswith("_mask"):
            raise ConfigError(
                "algorithm.importance_floor", self.importance_floor, "only a mask has a floor: set importance to one"
            )
        if self.zero_variance == "drop" and (self.name == "ppo" or self.baseline == "batch"):
            raise ConfigError(
                "algorithm.zero_variance",
                self.zero_variance,
                "ppo and a batch baseline learn from such groups too: use 'keep'",
            )

    @property
    def normalisation(self) -> Normalise:
        """`normalise`, with `auto` resolved."""
        return NORMALISATIONS[self.name][0] if self.normalise == "auto" else self.normalise


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW, and how its learning rate goes."""

    lr: float | Literal["auto"] = "auto"
    """Highest learning rate. `auto`: 3e-4 for the embedded model, 1e-6 for any other."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's: how slowly the means of gradients and of their squares move."""
    eps: float = 1e-8
    """AdamW's, added to the root of the second mean."""
    weight_decay: float = 0.0
    """On matrices; biases and norms have none."""
    grad_clip: float | None = 1.0
    """Largest norm of the gradient. None: no clipping."""
    schedule: Schedule = "constant"
    """From the highest rate to `min_lr_ratio` of it over the run."""
    min_lr_ratio: float = 0.0
    """Where `linear` and `cosine` end, as a share of `lr`."""
    warmup_steps: int = 0
    """Steps of linear growth to the highest rate."""
    critic_lr: float | None = None
    """For ppo. None: ten times `lr`, for its head starts from nothing."""

    def __post_init__(self) -> None:
        if self.lr != "auto":
            check_number("optimizer.lr", self.lr, above=0)
        check_choice("optimizer.schedule", self.schedule, get_args(Schedule))
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise ConfigError("optimizer.betas", self.betas, "give two numbers, such as [0.9, 0.95]")
        for beta in self.betas:
            check_number("optimizer.betas", beta, low=0)
            if beta >= 1:
                raise ConfigError("optimizer.betas", self.betas, "each must be below 1")
        check_number("optimizer.eps", self.eps, above=0)
        check_number("optimizer.weight_decay", self.weight_decay, low=0)
        check_number("optimizer.grad_clip", self.grad_clip, above=0, optional=True)
        check_number("optimizer.critic_lr", self.critic_lr, above=0, optional=True)
        check_share("optimizer.min_lr_ratio", self.min_lr_ratio)
        check_integer("optimizer.warmup_steps", self.warmup_steps, low=0)


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters through peft: the base stays as it is, engines get the merged weights.

    There is no dropout: training would then see other log-probabilities than the engine sampled with.
    """

    rank: int = 16
    """Of the two matrices of an adapter."""
    alpha: float = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """As peft takes them."""

    def __post_init__(self) -> None:
        check_integer("model.lora.rank", self.rank, low=1)
        check_number("model.lora.alpha", self.alpha, above=0)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "name": get_args(Algorithm),
    "normalise": get_args(Normalise),
    "baseline": get_args(Baseline),
    "ratio": get_args(Ratio),
    "aggregation": get_args(Aggregation),
    "proximal": get_args(Proximal),
    "importance": get_args(Importance),
    "kl_kind": get_args(KlKind),
    "zero_variance": ("keep", "drop"),
}


def describe(config: AlgorithmConfig) -> str:
    """What these settings do together, in a few sentences. Said at the start of a run."""
    c = config
    against = {
        "grpo": "each reward against its group's mean",
        "rloo": "each reward against the mean of its group's others",
        "reinforce_pp": f"each reward against its {c.baseline}'s mean",
        "ppo": f"a critic's token-level GAE (gamma {c.gamma:g}, lambda {c.lam:g})",
    }[c.name]
    scaled = {
        "std": ", divided by the group's standard deviation",
        "batch_std": ", divided by the batch's standard deviation",
        "none": "",
        "auto": "",
    }[c.normalisation]
    unit = "a response's geometric-mean ratio" if c.ratio == "sequence" else "each token's ratio"
    whom = "the engine's policy" if c.proximal == "behaviour" else "the trainer's policy when the step began"
    clip = f"{unit} to {whom} is clipped to [{1 - c.clip_low:g}, {1 + c.clip_high:g}]"
    if c.dual_clip is not None:
        clip += f" and bounded at {c.dual_clip:g} where the advantage is negative"
    mean = {
        "token_mean": "averaged over tokens",
        "sequence_mean": "averaged over responses",
        "constant": f"summed over a response's tokens and divided by {c.aggregation_tokens}",
    }[c.aggregation]
    said = [f"{c.name}: {against}{scaled}; {clip}, {mean}.", *_describe_weights(c)]
    if c.kl_coef:
        where = "taken from the advantage" if c.kl_kind == "k1" else "added to the loss"
        said.append(f"{c.kl_coef:g} times the KL divergence from the starting model ({c.kl_kind}) is {where}.")
    if c.entropy_coef:
        said.append(f"{c.entropy_coef:g} times the entropy is taken from the loss.")
    return " ".join(said)


def _describe_weights(c: AlgorithmConfig) -> list[str]:
    unit, _, kind = c.importance.partition("_")
    whose = "a token's" if unit == "token" else "a whole response's"
    bounds = f"{c.importance_floor:g} to {c.importance_cap:g}"
    if c.proximal == "recomputed":
        how = {
            "": "not bounded",
            "truncate": f"{whose}, truncated at {c.importance_cap:g}",
            "mask": f"{whose}, and 0 outside {bounds}",
        }[kind]
        text = f"The loss is weighted by how much likelier that policy makes the sample than the engine's did ({how})."
        if c.updates_per_batch * c.mini_batches == 1:
            text += " With one update a batch the ratio is 1 and nothing is clipped: that weight does all the work."
        return [text]
    if kind == "mask":
        what = "tokens" if unit == "token" else "responses"
        return [f"{what.capitalize()} whose importance weight is outside {bounds} are left out of the loss."]
    return []
