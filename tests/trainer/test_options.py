"""Settings that cannot work are refused, and the others describe what they do together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from freewheel.errors import ConfigError
from freewheel.trainer import options
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig, describe
from freewheel.trainer.torch_backend import lr_factor
from freewheel.utils.registry import Registry

BATCH_BASELINE = {"name": "reinforce_pp", "baseline": "batch"}


REFUSED: dict[str, list[dict[str, Any]]] = {
    "algorithm.name": [{"name": "dpo"}],
    "algorithm.loss": [{"loss": "cispo"}],
    "algorithm.advantage": [{"advantage": "ppo"}],
    "algorithm.normalise": [
        {"normalise": "zscore"},
        {"name": "rloo", "normalise": "std"},
        {"name": "reinforce_pp", "normalise": "none"},
        {"name": "ppo", "normalise": "std"},
        {"advantage": "gae", "normalise": "std"},
    ],
    "algorithm.baseline": [{"baseline": "batch"}],
    "algorithm.clip_low": [{"clip_low": 1.0}],
    "algorithm.clip_high": [{"clip_high": 0}],
    "algorithm.dual_clip": [{"dual_clip": 1.1}],
    "algorithm.aggregation_tokens": [{"aggregation": "constant"}, {"aggregation_tokens": 100}],
    "algorithm.ratio": [{"name": "ppo", "ratio": "sequence"}, {"advantage": "gae", "ratio": "sequence"}],
    "algorithm.importance": [{"importance": "token_truncate"}, {"importance": "sequence_truncate"}],
    "algorithm.importance_floor": [{"importance_floor": 0.5}],
    "algorithm.importance_cap": [{"importance": "token_mask", "importance_floor": 3.0}],
    "algorithm.zero_variance": [{"name": "ppo", "zero_variance": "drop"}, BATCH_BASELINE | {"zero_variance": "drop"}],
    "algorithm.gamma": [{"gamma": 1.01}],
    "algorithm.updates_per_batch": [{"updates_per_batch": 0}],
    "algorithm.mini_batches": [{"mini_batches": 1.5}],
    "algorithm.kl_coef": [{"kl_coef": float("nan")}],
    "optimizer.lr": [{"lr": 0}, {"lr": "fast"}],
    "optimizer.betas": [{"betas": (0.9, 1.0)}, {"betas": (0.9,)}],
    "optimizer.schedule": [{"schedule": "step"}],
    "optimizer.grad_clip": [{"grad_clip": 0}],
    "optimizer.min_lr_ratio": [{"min_lr_ratio": 2}],
    "optimizer.warmup_steps": [{"warmup_steps": -1}],
    "model.lora.rank": [{"rank": 0}],
}
KINDS = {"algorithm": AlgorithmConfig, "optimizer": OptimizerConfig, "model": LoraConfig}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_cannot_work_are_refused_by_key(key) -> None:
    for settings in REFUSED[key]:
        with pytest.raises(ConfigError) as caught:
            KINDS[key.partition(".")[0]](**settings)
        assert caught.value.key == key


def test_built_in_names_are_checked_without_torch() -> None:
    program = (
        "import sys; from freewheel.trainer.options import AlgorithmConfig;"
        "AlgorithmConfig(loss='ppo_clip', advantage='grpo'); print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


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


def test_another_registered_loss_is_described_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = Registry({"ppo_clip": "m:ppo_clip", "cispo": "freewheel.trainer.losses:ppo_clip"}, example="m:loss")
    monkeypatch.setattr(options, "LOSSES", losses)
    assert "the loss is cispo, averaged over tokens" in describe(AlgorithmConfig(loss="cispo"))


def test_a_name_is_a_preset_of_estimator_and_loss_and_separate_keys_win() -> None:
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
        # a run that continues past its end, and one that ends while it warms up
        ({"schedule": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 3}, [1 / 3, 2 / 3, 1, 1, 0.55, 0.1, 0.1]),
        ({"schedule": "linear", "min_lr_ratio": 0.1, "warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(settings, wanted) -> None:
    config = OptimizerConfig(**settings)
    assert [lr_factor(config, step, 5) for step in range(len(wanted))] == pytest.approx(wanted, rel=1e-5)
