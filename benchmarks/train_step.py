"""One training step of a 1.5B decoder on one GPU: tokens per second, MFU and memory, against plain torch.

    python benchmarks/train_step.py [--json FILE] [--steps N] [--variants] [--quick]

    plain      transformers' model, bfloat16 autocast over float32 weights, SDPA, all logits at once, one micro-batch
    freewheel  `TorchBackend.step` on `PromptGroup`s, as in a run

Both take the same 16 sequences of 128 + 1,024 tokens (2 prompts with 8 responses each), the same loss, gradient
clipping and fused AdamW on float32 weights, one after the other in one process. The model is a Qwen2 with 1.5B's sizes
and random weights. `plain` leaves out the entropy, which freewheel reports.

On both sides tokens are those of the sequences, with a prompt counted for each of its responses. MFU counts the
operations that a step needs (6 per weight and token, causal attention, the head at response tokens only), not those
done twice, and a shared prompt once. `unshared` is the same backend with a prompt for each response: the work of
`plain`. Peak memory is the allocator's, weights, moments and gradients included. The error of the log-probabilities is
each side's distance from float32. `--variants` also measures other settings.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common import (
    Promise,
    at_least,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    median,
    parser,
    promise_table,
    write_json,
)
from freewheel.data.group import Prompt, PromptGroup, Response, Ticket
from freewheel.judge.verdict import Scored
from freewheel.trainer.advantages import estimate
from freewheel.trainer.batching import MicroBatch, TrainingSample, micro_batches, mini_batches
from freewheel.trainer.losses import apply_loss, ppo_clip
from freewheel.trainer.options import AlgorithmConfig, OptimizerConfig
from freewheel.trainer.torch_backend import Optimizer, TorchBackend

PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200, by the datasheet."""
GROUPS, RESPONSES, PROMPT_TOKENS, RESPONSE_TOKENS = 2, 8, 128, 1024
MICRO_BATCH_TOKENS = 16384
LR = 1e-6
STEPS, WARM_UPS = 8, 2
CHECKED_SEQUENCES = 4
"""Number of sequences whose log-probabilities are compared with float32."""
SPEED_BOUND, MEMORY_BOUND, NORM_BOUND = 1.25, 0.55, 0.02
ERROR_BOUND = 1.25
"""Our distance from float32 over autocast's distance: both round to bfloat16, in different places."""
MFU_GOAL = 0.50


@dataclass(frozen=True)
class Size:
    """Size of the model and the batch."""

    hidden: int = 1536
    layers: int = 28
    heads: int = 12
    kv_heads: int = 2
    inner: int = 8960
    vocabulary: int = 151_936
    prompt: int = PROMPT_TOKENS
    response: int = RESPONSE_TOKENS

    @property
    def tokens(self) -> int:
        return GROUPS * RESPONSES * (self.prompt + self.response)

    def flops(self, *, shared: bool) -> float:
        """Operations of forward and backward, from tokens, pairs that attend to each other, and response tokens."""
        kv = self.hidden // self.heads * self.kv_heads
        weights = self.layers * (2 * self.hidden**2 + 2 * self.hidden * kv + 3 * self.hidden * self.inner)
        sequences, prompts = GROUPS * RESPONSES, GROUPS if shared else GROUPS * RESPONSES
        tokens = prompts * self.prompt + sequences * self.response
        of_prompt = self.prompt**2 / 2
        of_response = self.response * self.prompt + self.response**2 / 2
        pairs = prompts * of_prompt + sequences * of_response
        head = self.hidden * self.vocabulary * sequences * self.response
        return 6 * (weights * tokens + head) + 12 * self.layers * self.hidden * pairs


TINY = Size(hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocabulary=512, prompt=8, response=24)


@dataclass
class Found:
    """Figures of one side."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    start_s: float = 0.0
    """Construction and the first step: mostly compilation."""
    logp: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    grad_norm: float = 0.0
    """Of the first step."""


def make_model(size: Size, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.inner,
        vocab_size=size.vocabulary,
        tie_word_embeddings=True,
    )
    with device:
        return Qwen2ForCausalLM(config).eval()


def make_groups(size: Size) -> list[PromptGroup]:
    rng = np.random.default_rng(0)

    def response() -> Response:
        n, tokens, reward = size.response, rng.integers(0, size.vocabulary, size.response), float(rng.normal())
        return Response(
            tokens=tokens.astype(np.int32),
            logprobs=np.full(n, -np.log(size.vocabulary), np.float32),
            versions=np.zeros(n, np.int32),
            mask=np.ones(n, np.uint8),
            finish="length",
            verdict=Scored(reward),
            reward=reward,
            raw_reward=reward,
        )

    def group(ordinal: int) -> PromptGroup:
        prompt = rng.integers(0, size.vocabulary, size.prompt).astype(np.int32)
        row = {"data_source": "bench"}
        responses = [response() for _ in range(RESPONSES)]
        return PromptGroup.of(Ticket(ordinal, ordinal), Prompt(tokens=prompt, row=row), responses, created_s=0.0)

    return [group(ordinal) for ordinal in range(GROUPS)]


def samples_of(groups: list[PromptGroup]) -> list[TrainingSample]:
    (samples,) = mini_batches(groups, estimate(groups, AlgorithmConfig()), AlgorithmConfig())
    return samples


def by_key(batch: MicroBatch, logp: Tensor) -> dict[tuple[int, int], Tensor]:
    return {key: logp.detach()[batch.sequence == place].float().cpu() for place, key in enumerate(batch.keys)}


class Plain:
    """A training loop without freewheel's optimisations."""

    def __init__(self, model: Any, groups: list[PromptGroup], device: torch.device) -> None:
        self.model, self.device = model, device
        (batch,) = micro_batches(samples_of(groups), 1 << 40)
        self.batch = batch.to(device)
        self.optimizer = Optimizer(dict(model.named_parameters()), OptimizerConfig(lr=LR))

    def logp(self, batch: MicroBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(**batch.inputs, use_cache=False).logits
        following = batch.inputs["input_ids"].roll(-1, dims=1)
        logp = -cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="none")
        return logp[batch.positions]

    def step(self) -> float:
        logp = self.logp(self.batch)
        inputs = self.batch.loss_inputs(logp, torch.zeros_like(logp), AlgorithmConfig())
        loss, tally = apply_loss(ppo_clip, inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        norm, _ = self.optimizer.step(LR, loss.detach())
        tally.values()
        return float(norm)


def timed(found: Found, step: Callable[[], float], steps: int, device: torch.device, began: float) -> None:
    for number in range(WARM_UPS + steps):
        settle(device)
        start = time.perf_counter()
        norm = step()
        settle(device)
        if number == 0:
            found.start_s, found.grad_norm = time.perf_counter() - began, norm
        if number == WARM_UPS - 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if number >= WARM_UPS:
            found.seconds.append(time.perf_counter() - start)
    found.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def checked(groups: list[PromptGroup]) -> list[TrainingSample]:
    return samples_of(groups)[:CHECKED_SEQUENCES]


def run_plain(size: Size, groups: list[PromptGroup], steps: int, device: torch.device) -> Found:
    forget(device)
    found, began = Found(), time.perf_counter()
    side = Plain(make_model(size, device), groups, device)
    (batch,) = micro_batches(checked(groups), 1 << 40)
    with torch.no_grad():
        found.logp = by_key(batch, side.logp(batch.to(device)))
    timed(found, side.step, steps, device, began)
    return found


def run_freewheel(size: Size, groups: list[PromptGroup], steps: int, device: torch.device, **settings: Any) -> Found:
    forget(device)
    found, began = Found(), time.perf_counter()
    backend = TorchBackend(
        make_model(size, device),
        optimizer=OptimizerConfig(lr=LR),
        device=device,
        **{"dtype": "bfloat16", "micro_batch_tokens": MICRO_BATCH_TOKENS, "compile": device.type == "cuda", **settings},
    )
    with torch.no_grad():
        for batch in backend._micro_batches(checked(groups)):
            batch = batch.to(device)
            found.logp |= by_key(batch, backend.policy.logprobs(batch)[0])
    taken = iter(range(1 << 30))

    def step() -> float:
        return backend.step(groups, version=0, step=next(taken), total_steps=1 << 30)["actor/grad_norm"]

    timed(found, step, steps, device, began)
    return found


@torch.no_grad()
def reference(size: Size, groups: list[PromptGroup], device: torch.device) -> dict[tuple[int, int], Tensor]:
    """Log-probabilities in float32, one sequence at a time."""
    forget(device)
    model, found = make_model(size, device), {}
    for sample in checked(groups):
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]).astype(np.int64))[None].to(device)
        log_p = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
        found[sample.key] = log_p.gather(-1, ids[0, len(sample.prompt) :, None]).squeeze(-1).cpu()
    return found


def errors(found: Found, wanted: dict[tuple[int, int], Tensor]) -> dict[str, float]:
    gaps = torch.cat([(found.logp[key] - wanted[key]).abs() for key in wanted])
    return {"logp_error_mean": float(gaps.mean()), "logp_error_max": float(gaps.max())}


def figures_of(found: Found, size: Size, wanted: dict[tuple[int, int], Tensor], *, shared: bool) -> dict[str, Any]:
    seconds = median(found.seconds)
    return {
        "step_s": seconds,
        "steps_s": [round(one, 4) for one in found.seconds],
        "start_s": found.start_s,
        "tokens_per_s": size.tokens / seconds,
        "mfu": size.flops(shared=shared) / seconds / PEAK_FLOPS,
        "peak_gb": found.peak_bytes / 1e9,
        "grad_norm": found.grad_norm,
        **errors(found, wanted),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "without compile": {"compile": False},
    "with recomputed layers": {"activation_checkpointing": True},
    "micro-batches of 32,768": {"micro_batch_tokens": 32768},
}


def measure(size: Size, steps: int, device: torch.device, variants: bool) -> dict[str, dict[str, Any]]:
    groups = make_groups(size)
    wanted = reference(size, groups, device)
    sides: dict[str, dict[str, Any]] = {}

    def add(name: str, found: Found, shared: bool) -> None:
        sides[name] = figures_of(found, size, wanted, shared=shared)
        said = {key: round(value, 4) for key, value in sides[name].items() if isinstance(value, float)}
        print(name, said, flush=True)

    add("plain", run_plain(size, groups, steps, device), False)
    add("freewheel", run_freewheel(size, groups, steps, device), True)
    add("freewheel, unshared", run_freewheel(size, groups, steps, device, share_prompts=False), False)
    for name, settings in VARIANTS.items() if variants else ():
        add(f"freewheel, {name}", run_freewheel(size, groups, steps, device, **settings), True)
    return sides


def promised(sides: dict[str, dict[str, Any]]) -> tuple[dict[str, float], list[Promise]]:
    plain, ours, equal = sides["plain"], sides["freewheel"], sides["freewheel, unshared"]
    ratios = {
        "speed_ratio": ours["tokens_per_s"] / plain["tokens_per_s"],
        "speed_ratio_unshared": equal["tokens_per_s"] / plain["tokens_per_s"],
        "memory_ratio": ours["peak_gb"] / max(plain["peak_gb"], 1e-9),
        "memory_ratio_unshared": equal["peak_gb"] / max(plain["peak_gb"], 1e-9),
    }
    return ratios, [
        at_least("speed_ratio_unshared", ratios["speed_ratio_unshared"], SPEED_BOUND),
        at_most("memory_ratio_unshared", ratios["memory_ratio_unshared"], MEMORY_BOUND),
        at_least("speed_ratio", ratios["speed_ratio"], SPEED_BOUND),
        at_most("memory_ratio", ratios["memory_ratio"], MEMORY_BOUND),
        at_most("logp_error_ratio", ours["logp_error_mean"] / plain["logp_error_mean"], ERROR_BOUND),
        at_most("grad_norm_gap", abs(ours["grad_norm"] / plain["grad_norm"] - 1), NORM_BOUND),
    ]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=STEPS, help="timed steps of each side")
    options.add_argument(
        "--variants",
        action="store_true",
        help="also with other settings",
    )
    args = options.parse_args()
    if not torch.cuda.is_available() and not args.quick:
        print("no GPU here: nothing to measure (--quick shows on a CPU that it works)")
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = machine_facts()
    facts["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    facts["torch"] = str(torch.__version__)
    print(f"{machine_line(facts)}; {facts['device']}, torch {facts['torch']}\n")
    sides = measure(TINY if args.quick else Size(), 1 if args.quick else args.steps, device, args.variants)
    ratios, promises = promised(sides)
    head = ("side", "step, s", "tokens/s", "MFU", "peak, GB", "log π error", "most", "start, s")
    rows = [
        (
            name,
            f"{one['step_s']:.3f}",
            f"{one['tokens_per_s']:,.0f}",
            f"{one['mfu']:.3f}",
            f"{one['peak_gb']:.1f}",
            f"{one['logp_error_mean']:.4f}",
            f"{one['logp_error_max']:.3f}",
            f"{one['start_s']:.0f}",
        )
        for name, one in sides.items()
    ]
    print("\n" + markdown_table(head, rows))
    print(f"\nMFU {sides['freewheel']['mfu']:.3f} (goal {MFU_GOAL:.2f})\n\n{promise_table(promises)}")
    write_json(args.json, {"machine": facts, "sides": sides, **ratios})
    return exit_code(promises, quick=args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
