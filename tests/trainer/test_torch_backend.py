"""Steps on tiny models: which inputs change the weights, which must not, and that the policy learns."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.data.group import PromptGroup, Response
from freewheel.judge.verdict import Failed, Scored, Skipped
from freewheel.trainer.backend import NonFiniteLoss
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.trainer.torch_backend import TorchBackend, rollout_metrics

from .groups import CUSTOM, VOCABULARY, make_group, make_response, random_group, tiny_gpt2, tiny_qwen, without

NAN = float("nan")
GROUPS = [random_group(ordinal, holes=True) for ordinal in range(4)]


def make_backend(model: Any = None, *, lr: float = 1e-2, **options: Any) -> TorchBackend:
    algorithm = AlgorithmConfig(**options.pop("algorithm", {}))
    optimizer = OptimizerConfig(lr=lr, **options.pop("optimizer", {}))
    return TorchBackend(
        model or tiny_qwen(), algorithm=algorithm, optimizer=optimizer, **{"micro_batch_tokens": 16384, **options}
    )


def trained(backend: TorchBackend, groups: list[PromptGroup], steps: int = 1, start: int = 0) -> dict[str, float]:
    found: dict[str, float] = {}
    for step in range(start, start + steps):
        found = backend.step(groups, version=step, step=step, total_steps=10)
    return found


def copied(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights().items()}


def held(backend: TorchBackend) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend._named_state().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"name": "rloo", "aggregation": "sequence_mean"},
    {"name": "reinforce_pp", "dual_clip": 3.0},
    {"name": "ppo"},
    {"ratio": "sequence", "kl_coef": 0.1, "entropy_coef": 0.01},
    {"proximal": "recomputed", "importance": "sequence_truncate", "updates_per_batch": 2, "mini_batches": 2},
    {"normalise": "none", "aggregation": "constant", "aggregation_tokens": 16, "importance": "token_mask"},
    CUSTOM,
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_only_the_scored_responses_decide_an_update_and_neither_their_order_nor_the_token_budget(algorithm) -> None:
    def learn(groups: list[PromptGroup], budget: int = 16384) -> tuple[dict[str, float], dict[str, Tensor]]:
        backend = make_backend(algorithm=algorithm, micro_batch_tokens=budget, optimizer={"eps": 1e-3})
        return trained(backend, groups, steps=2), copied(backend)

    failing = [random_group(ordinal, failed=(1, 3), holes=True) for ordinal in range(4)]
    wanted, weights = learn(failing)
    reordered, its_weights = learn(failing[::-1])
    assert reordered == pytest.approx(wanted) and equal(its_weights, weights)
    clean, its_weights = learn([without(group, (1, 3)) for group in failing])
    assert clean["actor/loss"] == wanted["actor/loss"] and equal(its_weights, weights)
    assert (wanted["rollout/masked_ratio"], clean["rollout/masked_ratio"]) == (0.5, 0)
    for budget in (12, 40):
        found, its_weights = learn(failing, budget)
        assert found == pytest.approx(wanted, rel=2e-3, abs=1e-5)
        for name, tensor in its_weights.items():
            torch.testing.assert_close(tensor, weights[name], atol=2e-4, rtol=0)


def test_a_tool_reply_is_seen_and_not_trained_on() -> None:
    def group(hole: int, logp: float) -> PromptGroup:
        good = make_response([5, hole, 6], value=1.0, logprobs=[-2, logp, -2], mask=[1, 0, 1])
        return make_group(0, [good, make_response([7], value=0.0)])

    backends = [make_backend() for _ in range(3)]
    for backend, holed in zip(backends, [group(9, 0.0), group(9, -1.0), group(10, 0.0)], strict=True):
        trained(backend, [holed])
    first, logp_changed, token_changed = map(copied, backends)
    assert equal(first, logp_changed)
    assert not equal(first, token_changed)


def test_groups_without_rewards_change_nothing() -> None:
    backend = make_backend()
    before = copied(backend)
    found = trained(backend, [random_group(0, failed=range(4))])
    assert equal(copied(backend), before)
    assert found["rollout/masked_ratio"] == 1
    assert "actor/loss" not in found and "rollout/reward_mean" not in found


def poisoned(group: PromptGroup) -> PromptGroup:
    """Return the group with a log-probability that is NaN."""
    bad = [group.response(i) for i in range(len(group))]
    logprobs = bad[0].logprobs.copy()
    logprobs[0] = NAN
    bad[0] = replace(bad[0], logprobs=logprobs)
    return make_group(group.ordinal, bad, prompt=group.prompt.tolist())


def test_losses_that_are_not_finite_change_nothing_and_three_in_a_row_end_the_run_with_a_remedy() -> None:
    backend = make_backend()
    trained(backend, GROUPS)
    before, bad = held(backend), [poisoned(GROUPS[0]), *GROUPS[1:]]
    for count in (1, 2):
        found = trained(backend, bad)
        assert found["actor/skipped_nonfinite"] == 1 and backend.state().values["nonfinite"] == count
        assert "actor/loss" not in found and all(map(math.isfinite, found.values()))
    with pytest.raises(NonFiniteLoss, match=r"3 updates in a row.*optimizer\.lr"):
        trained(backend, bad)
    assert equal(held(backend), before) and backend.updates_applied == 1
    trained(backend, GROUPS)
    assert backend.state().values["nonfinite"] == 0


def test_a_poisoned_mini_batch_does_not_spoil_the_others() -> None:
    backend = make_backend(algorithm={"mini_batches": 2})
    before = copied(backend)
    found = trained(backend, [poisoned(GROUPS[0]), *GROUPS[1:]])
    assert found["actor/skipped_nonfinite"] == 1
    assert "actor/loss" in found and all(map(math.isfinite, found.values()))
    assert not equal(copied(backend), before)


SETUPS: list[dict[str, Any]] = [
    {},
    {"algorithm": {"name": "ppo"}},
    {"lora": LoraConfig(rank=2)},
    {"lora": LoraConfig(rank=2), "algorithm": {"name": "ppo", "kl_coef": 0.1}},
    {"algorithm": {"kl_coef": 0.1, "mini_batches": 2, "updates_per_batch": 3}},
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_resumed_backend_continues_bit_for_bit(tmp_path: Path, setup) -> None:
    torch.manual_seed(1)  # peft draws its first adapters, from the backend's seed and not from this one
    whole = make_backend(**setup)
    trained(whole, GROUPS, steps=2)
    state = whole.state()
    file = tmp_path / state.write(tmp_path)
    values = json.loads(json.dumps(dict(state.values)))
    wanted = trained(whole, GROUPS, start=2)

    torch.manual_seed(2)
    resumed = make_backend(**setup)
    resumed.load_files([file], values)
    assert trained(resumed, GROUPS, start=2) == wanted
    assert equal(copied(resumed), copied(whole))


@pytest.mark.parametrize("other", [tiny_gpt2(), tiny_qwen(hidden_size=32)])
def test_a_state_of_another_model_is_refused_and_changes_nothing(tmp_path: Path, other) -> None:
    backend = make_backend()
    before = copied(backend)
    with pytest.raises(ValueError, match="resume with the model and the settings"):
        backend.load_files([tmp_path / make_backend(other).state().write(tmp_path)], {"nonfinite": 0})
    assert equal(copied(backend), before)


@pytest.mark.parametrize("algorithm", [{}, {"mini_batches": 2}, {"name": "ppo", "updates_per_batch": 2}], ids=str)
def test_a_backend_reports_how_many_updates_reached_the_weights(
    algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is retried only if no part of its batch would be trained on twice."""
    backend = make_backend(algorithm=algorithm)
    assert backend.updates_applied == 0
    trained(backend, GROUPS)
    a_step = backend.updates_applied
    assert a_step == algorithm.get("mini_batches", 1) * (4 if algorithm.get("name") == "ppo" else 1)
    before, calls = copied(backend), 0
    logprobs = backend.policy.logprobs

    def short_of_memory(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == last:
            raise torch.OutOfMemoryError
        return logprobs(*args, **kwargs)

    monkeypatch.setattr(backend.policy, "logprobs", short_of_memory)
    for last in (1, 2) if a_step > 1 else (1,):
        calls, applied = 0, backend.updates_applied
        with pytest.raises(torch.OutOfMemoryError):
            trained(backend, GROUPS)
        assert (backend.updates_applied == applied) == equal(copied(backend), before) == (last == 1)


def test_the_metrics_of_a_step_have_these_names() -> None:
    found = trained(make_backend(algorithm={"name": "ppo", "kl_coef": 0.1}), GROUPS)
    actor = "loss grad_norm lr kl kl_k3 kl_reference entropy clip_ratio_low clip_ratio_high ess ess_sequence ratio_max"
    rollout = "reward_mean reward_std raw_reward_mean response_length_mean response_length_max truncation_ratio"
    wanted = {f"actor/{name}" for name in (*actor.split(), "skipped_nonfinite")}
    wanted |= {f"rollout/{name}" for name in (*rollout.split(), "masked_ratio", "skipped_ratio", "zero_variance_ratio")}
    wanted |= {"rollout/logprob_gap_mean", "rollout/logprob_gap_max"}
    critic = "loss grad_norm lr value return error clip_ratio skipped_nonfinite"
    wanted |= {f"critic/{name}" for name in critic.split()}
    assert set(found) == wanted
    assert found["rollout/truncation_ratio"] == 0.25
    assert found["actor/kl_reference"] == 0
    own = [np.count_nonzero(group.response(i).mask) for group in GROUPS for i in range(4)]
    assert found["rollout/response_length_mean"] == pytest.approx(np.mean(own))


def test_the_learning_rate_follows_the_step() -> None:
    backend = make_backend(lr=1e-2, optimizer={"schedule": "linear", "warmup_steps": 2})
    found = [backend.step(GROUPS, version=0, step=step, total_steps=4)["actor/lr"] for step in range(4)]
    assert found == pytest.approx([0.005, 0.01, 0.01, 0.005])


def test_clipping_bounds_the_size_of_an_update() -> None:
    free, held = (make_backend(optimizer={"grad_clip": clip, "eps": 1.0}, lr=1.0) for clip in (None, 1e-3))
    before = copied(free)
    norm = trained(free, GROUPS)["actor/grad_norm"]
    assert norm > 0.01
    assert trained(held, GROUPS)["actor/grad_norm"] == pytest.approx(norm)

    def moved(backend: TorchBackend) -> float:
        return math.sqrt(sum(float((one - before[name]).square().sum()) for name, one in copied(backend).items()))

    assert moved(held) == pytest.approx(1e-3, rel=0.05)
    assert moved(free) > 5 * moved(held)


def test_weight_decay_applies_to_matrices_only() -> None:
    backend = make_backend(optimizer={"weight_decay": 0.5}, lr=0.1)
    before = copied(backend)
    equal_rewards = [make_group(0, [make_response([5], value=1.0), make_response([6], value=1.0)])]
    trained(backend, equal_rewards)
    for name, tensor in copied(backend).items():
        torch.testing.assert_close(tensor, before[name] * (0.95 if tensor.ndim == 2 else 1.0))


GOOD_TOKEN = 5


def sampled(backend: TorchBackend, ordinal: int, version: int, rng: np.random.Generator) -> PromptGroup:
    """Eight responses of three tokens; the reward is the share of good ones."""
    model = backend.policy.plain
    prompt = [1, 2, 3]
    ids = torch.tensor([prompt] * 8)
    logprobs = []
    for _ in range(3):
        with torch.no_grad():
            log_p = model(input_ids=ids).logits[:, -1].log_softmax(-1)
        chosen = torch.tensor([rng.choice(VOCABULARY, p=p / p.sum()) for p in log_p.double().exp().numpy()])
        logprobs.append(log_p.gather(1, chosen[:, None]))
        ids = torch.cat([ids, chosen[:, None]], 1)
    made, logp = ids[:, 3:].numpy(), torch.cat(logprobs, 1).numpy()
    return make_group(
        ordinal,
        [
            make_response(one.tolist(), value=float(np.mean(one == GOOD_TOKEN)), logprobs=p.tolist(), version=version)
            for one, p in zip(made, logp, strict=True)
        ],
        prompt=prompt,
    )


def test_the_gap_to_the_engine_is_measured_on_tokens_of_the_version_in_training() -> None:
    backend, rng = make_backend(lr=1e-9), np.random.default_rng(0)
    exact, off = sampled(backend, 0, 5, rng), sampled(backend, 1, 4, rng)
    off = replace(off, logprobs=off.logprobs + np.float32(0.25))
    gaps = {}
    for version in (5, 4, 6, None):
        found = backend.step([exact, off], version=version, step=0, total_steps=1)
        gaps[version] = [found.get(f"rollout/logprob_gap_{name}") for name in ("mean", "max")]
    assert gaps[5] == pytest.approx([0, 0], abs=1e-4) and gaps[4] == pytest.approx([0.25, 0.25], abs=1e-4)
    assert gaps[6] == gaps[None] == [None, None]


@pytest.mark.parametrize(
    ("setup", "wanted"),
    [
        *(({"algorithm": algorithm}, 0.8) for algorithm in ALGORITHMS),
        ({"lora": LoraConfig(rank=4, alpha=8.0)}, 0.5),  # the embeddings, which are the head as well, stay as they are
    ],
    ids=str,
)
def test_a_bandit_is_learned_in_a_few_steps(setup, wanted) -> None:
    backend, rng = make_backend(**setup), np.random.default_rng(0)
    rewards = []
    for step in range(24):
        groups = [sampled(backend, ordinal, step, rng) for ordinal in range(4)]
        found = backend.step(groups, version=step, step=step, total_steps=24)
        rewards.append(found["rollout/reward_mean"])
        assert found["rollout/logprob_gap_max"] < 1e-4
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > wanted


# -- metrics about rewards ---------------------------------------------------------------------------------------------


def rewarded(value: float = 1.0, **parts: Any) -> Response:
    return replace(make_response([5], value=value), verdict=Scored(value, parts=parts))


def test_parts_of_a_reward_are_averaged_over_the_responses_that_have_them() -> None:
    failed = replace(make_response([5], value=NAN), verdict=Failed("timeout", parts={"rule": 1.0}))
    groups = [
        make_group(0, [rewarded(4, steps=4.0, rule=0.0), rewarded(steps=NAN)]),
        make_group(1, [failed, rewarded()]),
    ]
    found = rollout_metrics(groups)
    assert {name: value for name, value in found.items() if name.startswith("reward/")} == {
        "reward/rule": 0.5,  # with what is known of the response whose judge failed
        "reward/steps": 4.0,  # NaN is no value
    }
    assert found["rollout/reward_mean"] == 2


def test_failed_and_skipped_responses_are_counted_separately() -> None:
    failed = replace(rewarded(), verdict=Failed("timeout"), reward=NAN)
    skipped = replace(rewarded(), verdict=Skipped("none"), reward=NAN)
    responses = [failed, replace(failed, reward=-1.0), skipped, skipped, *[rewarded()] * 4]
    found = rollout_metrics([make_group(0, responses)])
    assert (found["rollout/masked_ratio"], found["rollout/skipped_ratio"]) == (1 / 8, 2 / 8)
