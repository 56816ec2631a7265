"""Advantages and losses against TRL's own code on the same tensors."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="runs in TRL's environment: make env-trl")

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from freewheel.trainer.advantages import AdvantageInputs, grpo, rloo
from freewheel.trainer.losses import LossInputs, apply_loss, importance_weights, ppo_clip, token_weights
from freewheel.trainer.options import AlgorithmConfig

pytestmark = [
    pytest.mark.trl,
    # Torch and transformers have warnings of their own; ours stay errors.
    pytest.mark.filterwarnings("ignore", "error:::freewheel"),
]

GENERATIONS = 4
REWARDS = [0.0, 1.0, 2.5, 1.0, 3.0, None, -1.0, 0.5]
"""Two groups, and one completion that could not be scored."""
LONGEST = 6
LENGTHS = [6, 3, 5, 1]
MASK = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]


def trl_advantages(kind: str, folder: Path, example: Any, tokenizer: Any, **settings: Any) -> list[float]:
    """What TRL's trainer makes of `REWARDS`."""
    config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
    made = trainer(
        model=example.tiny_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: REWARDS[: len(completions)],
        train_dataset=Dataset.from_list([{"prompt": f"{a} + 1 ="} for a in range(4)]),
        args=config(
            output_dir=str(folder),
            max_steps=1,
            num_generations=GENERATIONS,
            per_device_train_batch_size=len(REWARDS),
            max_completion_length=2,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
    )
    made.train()
    return list(made._logs["advantages"])


def our_groups(**settings: str) -> AdvantageInputs:
    values = np.array([np.nan if one is None else one for one in REWARDS])
    return AdvantageInputs(rewards=list(values.reshape(-1, GENERATIONS)), settings=AlgorithmConfig(**settings))


@pytest.mark.parametrize(
    ("scale_rewards", "normalise"), [("group", "std"), ("batch", "batch_std"), ("none", "none")], ids=str
)
def test_grpo_advantages_are_trls(tmp_path, example, tokenizer, scale_rewards, normalise) -> None:
    wanted = trl_advantages("grpo", tmp_path, example, tokenizer, scale_rewards=scale_rewards)
    assert np.concatenate(grpo(our_groups(normalise=normalise))) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("normalise", ["none", "batch_std"])
def test_rloo_advantages_are_trls(tmp_path, example, tokenizer, normalise) -> None:
    settings = {"normalize_advantages": normalise == "batch_std", "beta": 0.0}
    wanted = trl_advantages("rloo", tmp_path, example, tokenizer, **settings)
    assert np.concatenate(rloo(our_groups(name="rloo", normalise=normalise))) == pytest.approx(wanted, abs=1e-5)


def samples() -> dict[str, Tensor]:
    torch.manual_seed(0)
    logps = -3 * torch.rand(len(LENGTHS), LONGEST, dtype=torch.float64)
    noise = 0.6 * torch.randn(3, len(LENGTHS), LONGEST, dtype=torch.float64)
    return {
        "logps": logps,
        "old": logps + noise[0],
        "behaviour": logps + noise[1],
        "reference": logps + noise[2],
        "entropies": torch.rand(len(LENGTHS), LONGEST, dtype=torch.float64),
        "advantages": torch.tensor([1.5, -0.5, -2.0, 0.7], dtype=torch.float64),
    }


class Standing:
    """What `GRPOTrainer._compute_loss` asks of its trainer: the options, and the policy's answer."""

    def __init__(self, given: dict[str, Tensor], logps: Tensor, **options: Any) -> None:
        self.loss_type = options.pop("loss_type")
        self.importance_sampling_level = options.pop("level", "token")
        self.beta = options.pop("beta", 0.0)
        self.use_vllm = self.vllm_importance_sampling_correction = options.pop("corrected", False)
        self.entropy_coef = options.pop("entropy_coef", 0.0)
        self._entropy_bonus_enabled = self.entropy_coef > 0
        self.args = SimpleNamespace(
            delta=options.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1
        )
        assert not options
        self.epsilon_low, self.epsilon_high = 0.2, 0.28
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self.max_completion_length = LONGEST
        self.current_gradient_accumulation_steps = 1
        self.model = SimpleNamespace(training=True)
        self._metrics = {"train": defaultdict(list)}
        self.accelerator = SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        self._given, self._logps = given, logps

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self._logps, self._given["entropies"], None


def by_trl(given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor, dict[str, list[float]]]:
    """Loss, gradient by log-probability, metrics."""
    ratio = options.pop("importance_ratio", None)
    logps = given["logps"].clone().requires_grad_()
    standing = Standing(given, logps, corrected=ratio is not None, **options)
    inputs = {
        "prompt_ids": torch.ones(len(LENGTHS), 2).long(),
        "prompt_mask": torch.ones(len(LENGTHS), 2).long(),
        "completion_ids": torch.ones(len(LENGTHS), LONGEST).long(),
        "completion_mask": MASK.long(),
        "advantages": given["advantages"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["reference"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": MASK.sum(),
    }
    loss = GRPOTrainer._compute_loss(standing, None, inputs)
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad[MASK], standing._metrics["train"]


def by_us(given: dict[str, Tensor], config: AlgorithmConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    weights = token_weights(np.array(LENGTHS), config.aggregation, config.aggregation_tokens)
    logp = given["logps"][MASK].clone().requires_grad_()
    recomputed = config.proximal == "recomputed"
    inputs = LossInputs(
        logprobs=logp,
        entropy=given["entropies"][MASK],
        tokens=torch.zeros(len(logp), dtype=torch.int64),
        settings=config,
        behaviour=given["behaviour" if recomputed else "old"][MASK],
        proximal=given["old"][MASK] if recomputed else None,
        reference=given["reference"][MASK],
        advantages=given["advantages"][sequence],
        weights=torch.tensor(weights)[sequence],
        response=sequence,
        n_responses=len(LENGTHS),
    )
    loss, tally = apply_loss(ppo_clip, inputs)
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, tally.values()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "dapo"}, {}),
        ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
        ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
        ({"loss_type": "dr_grpo"}, {"aggregation": "constant", "aggregation_tokens": LONGEST}),
        ({"loss_type": "grpo", "level": "sequence"}, {"aggregation": "sequence_mean", "ratio": "sequence"}),
        ({"loss_type": "dapo", "delta": 1.5}, {"dual_clip": 1.5}),
        ({"loss_type": "dapo", "beta": 0.1}, {"kl_coef": 0.1}),
        ({"loss_type": "dapo", "entropy_coef": 0.1}, {"entropy_coef": 0.1}),
    ],
    ids=str,
)
def test_losses_gradients_and_clip_ratios_are_trls(theirs, ours) -> None:
    given = samples()
    wanted, wanted_grad, wanted_metrics = by_trl(given, **theirs)
    loss, grad, metrics = by_us(given, AlgorithmConfig(**ours))
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    assert metrics["actor/entropy"] == pytest.approx(wanted_metrics["entropy"][0])
    if "beta" in theirs:
        assert metrics["actor/kl_reference"] == pytest.approx(wanted_metrics["kl"][0])
    if "level" not in theirs:  # TRL counts clipped responses there, and we their tokens
        assert metrics["actor/clip_ratio_low"] == pytest.approx(wanted_metrics["clip_ratio/low_mean"][0])
        assert metrics["actor/clip_ratio_high"] == pytest.approx(wanted_metrics["clip_ratio/high_mean"][0])


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_corrected_loss_is_trls(kind) -> None:
    """TRL's loss with the weights of its vLLM correction, made here as its `_generate_and_score_completions` does."""
    given, cap = samples(), 1.3
    log_ratio = (given["old"] - given["behaviour"]) * MASK
    if kind.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    ratio = ratio.clamp(max=cap) if kind.endswith("truncate") else ratio.masked_fill(ratio > cap, 0.0)
    wanted, wanted_grad, _ = by_trl(given, loss_type="dapo", importance_ratio=ratio)
    config = AlgorithmConfig(proximal="recomputed", importance=kind, importance_cap=cap)
    loss, grad, _ = by_us(given, config)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(grad, wanted_grad)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    weights = importance_weights((given["old"] - given["behaviour"])[MASK], sequence, len(LENGTHS), kind, cap=cap)
    torch.testing.assert_close(weights, ratio.expand(-1, LONGEST)[MASK])
