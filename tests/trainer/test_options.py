"""Settings that cannot work are refused, and the others describe what they do together."""

from __future__ import annotations

import msgspec
import pytest

from freewheel.errors import ConfigError
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig, describe
from freewheel.trainer.torch_backend import lr_factor

BATCH_BASELINE = {"name": "reinforce_pp", "baseline": "batch"}


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        (AlgorithmConfig, {"name": "dpo"}, "algorithm.name"),
        (AlgorithmConfig, {"normalise": "zscore"}, "algorithm.normalise"),
        (AlgorithmConfig, {"name": "rloo", "normalise": "std"}, "algorithm.normalise"),
        (AlgorithmConfig, {"name": "reinforce_pp", "normalise": "none"}, "algorithm.normalise"),
        (AlgorithmConfig, {"name": "ppo", "normalise": "std"}, "algorithm.normalise"),
        (AlgorithmConfig, {"baseline": "batch"}, "algorithm.baseline"),
        (AlgorithmConfig, {"clip_low": 1.0}, "algorithm.clip_low"),
        (AlgorithmConfig, {"clip_high": 0}, "algorithm.clip_high"),
        (AlgorithmConfig, {"dual_clip": 1.1}, "algorithm.dual_clip"),
        (AlgorithmConfig, {"aggregation": "constant"}, "algorithm.aggregation_tokens"),
        (AlgorithmConfig, {"aggregation_tokens": 100}, "algorithm.aggregation_tokens"),
        (AlgorithmConfig, {"name": "ppo", "ratio": "sequence"}, "algorithm.ratio"),
        (AlgorithmConfig, {"importance": "token_truncate"}, "algorithm.importance"),
        (AlgorithmConfig, {"importance": "sequence_truncate"}, "algorithm.importance"),
        (AlgorithmConfig, {"importance_floor": 0.5}, "algorithm.importance_floor"),
        (AlgorithmConfig, {"importance": "token_mask", "importance_floor": 3.0}, "algorithm.importance_cap"),
        (AlgorithmConfig, {"name": "ppo", "zero_variance": "drop"}, "algorithm.zero_variance"),
        (
            AlgorithmConfig,
            {"name": "reinforce_pp", "baseline": "batch", "zero_variance": "drop"},
            "algorithm.zero_variance",
        ),
        (AlgorithmConfig, {"gamma": 1.01}, "algorithm.gamma"),
        (AlgorithmConfig, {"updates_per_batch": 0}, "algorithm.updates_per_batch"),
        (AlgorithmConfig, {"mini_batches": 1.5}, "algorithm.mini_batches"),
        (AlgorithmConfig, {"kl_coef": float("nan")}, "algorithm.kl_coef"),
        (AlgorithmConfig, {"loss": "cispo"}, "algorithm.loss"),
        (AlgorithmConfig, {"advantage": "ppo"}, "algorithm.advantage"),
        (AlgorithmConfig, {"advantage": "gae", "normalise": "std"}, "algorithm.normalise"),
        (AlgorithmConfig, {"advantage": "gae", "ratio": "sequence"}, "algorithm.ratio"),
        (OptimizerConfig, {"lr": 0}, "optimizer.lr"),
        (OptimizerConfig, {"lr": "fast"}, "optimizer.lr"),
        (OptimizerConfig, {"betas": (0.9, 1.0)}, "optimizer.betas"),
        (OptimizerConfig, {"betas": (0.9,)}, "optimizer.betas"),
        (OptimizerConfig, {"schedule": "step"}, "optimizer.schedule"),
        (OptimizerConfig, {"grad_clip": 0}, "optimizer.grad_clip"),
        (OptimizerConfig, {"min_lr_ratio": 2}, "optimizer.min_lr_ratio"),
        (OptimizerConfig, {"warmup_steps": -1}, "optimizer.warmup_steps"),
        (LoraConfig, {"rank": 0}, "model.lora.rank"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(kind, settings, key) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert caught.value.key == key


def test_settings_are_converted_from_plain_values() -> None:
    config = msgspec.convert({"name": "rloo", "clip_low": 0.1}, AlgorithmConfig)
    assert (config.name, config.clip_low, config.normalisation) == ("rloo", 0.1, "none")
    assert msgspec.convert({"betas": [0.9, 0.99]}, OptimizerConfig).betas == (0.9, 0.99)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"clip": 0.1}, AlgorithmConfig)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ["grpo", "standard deviation", "each token's ratio to the engine's policy", "[0.8, 1.28]", "over tokens"]),
        ({"dual_clip": 3.0}, ["bounded at 3"]),
        ({"ratio": "sequence", "aggregation": "sequence_mean"}, ["geometric-mean", "averaged over responses"]),
        ({"name": "ppo"}, ["critic", "lambda 0.95"]),
        ({"aggregation": "constant", "aggregation_tokens": 64, "normalise": "none"}, ["divided by 64"]),
        ({"proximal": "recomputed"}, ["when the step began", "not bounded", "nothing is clipped"]),
        (
            {"proximal": "recomputed", "importance": "token_truncate", "mini_batches": 4},
            ["a token's, truncated at 2"],
        ),
        ({"importance": "sequence_mask"}, ["Responses whose importance weight is outside 0 to 2"]),
        ({"kl_coef": 0.01}, ["0.01 times the KL", "(k3)", "added to the loss"]),
        ({"kl_coef": 0.01, "kl_kind": "k1"}, ["subtracted from the advantage"]),
        ({"entropy_coef": 0.1}, ["entropy"]),
        (
            {"advantage": "mine:best", "loss": "mine:cispo"},
            ["advantages from mine:best; the loss is mine:cispo, averaged"],
        ),
    ],
)
def test_a_combination_of_settings_is_described(settings, wanted) -> None:
    said = describe(AlgorithmConfig(**settings))
    assert [part for part in wanted if part not in said] == []
    assert ("nothing is clipped" in said) is (settings == {"proximal": "recomputed"}), "only with one update per batch"


def test_a_name_is_a_preset_of_estimator_and_loss_and_a_key_of_its_own_wins() -> None:
    presets = {"grpo": "grpo", "ppo": "gae", "rloo": "rloo", "reinforce_pp": "reinforce_pp"}
    for name, estimator in presets.items():
        config = AlgorithmConfig(name=name)  # type: ignore[arg-type]
        assert (config.estimator, config.uses_critic) == (estimator, name == "ppo")
        assert config.compares_responses is not config.uses_critic
        assert config.find_loss() is AlgorithmConfig(loss="ppo_clip").find_loss()
    assert (
        AlgorithmConfig(advantage="gae").uses_critic and not AlgorithmConfig(name="ppo", advantage="rloo").uses_critic
    )
    assert AlgorithmConfig(advantage="rloo").normalisation == "none"
    own = AlgorithmConfig(name="ppo", advantage="mine:best", normalise="std", baseline="batch")
    assert (own.normalisation, own.uses_critic, own.compares_responses) == ("std", False, False)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "linear", "min_lr_ratio": 0.5}, [1, 0.9, 0.8, 0.7, 0.6]),
        ({"schedule": "cosine", "warmup_steps": 1}, [1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_follows_its_schedule(settings, wanted) -> None:
    config = OptimizerConfig(**settings)
    assert [lr_factor(config, step, 5) for step in range(5)] == pytest.approx(wanted, rel=1e-5)


def test_a_run_that_continues_past_its_end_keeps_the_last_rate() -> None:
    config = OptimizerConfig(schedule="cosine", min_lr_ratio=0.1, warmup_steps=3)
    assert lr_factor(config, 9, 5) == pytest.approx(0.1)
    assert lr_factor(config, 3, 3) == pytest.approx(0.1)
