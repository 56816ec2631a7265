"""The model of the native engine: one prefill per prompt, then one decode step per token for all slots.

    prefill(prompts) ─▶ Prefilled ──place(slots)──▶ KV, token, position, parameters of the slot
    step(): forward of all rows ─▶ sample_tokens ─▶ log of the last tokens ─▶ which slots ended, and why
    take(slots) ─▶ SlotOutput(tokens, logprobs, versions)

A prompt's last token is not prefilled: it is the first input of the decode loop, so every token of a response comes
from the same step at the same shapes.

All shapes depend only on the sequence and the configuration: decoding always runs all slots over pages of one size; a
prefill has shape [rows(bucket), bucket(prompt)]. A draw is a function of (seed, token index) only. On a CPU the results
are therefore bit-identical in any batch.

`check_supported` reads the model's configuration. Architectures also differ in what they pass to their attention, and a
new one may do something that no flag shows. So `check_agreement` compares one decode step with the model's own forward
pass before the engine serves anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from freewheel.data.group import Array, Finish
from freewheel.rollout.engine import EngineError, SamplingParams
from freewheel.rollout.native.cache import ATTENTION, PromptKV, PromptRead, SlotCache

ROW_TILE = 16
"""The number of rows is a multiple of this: matrix kernels treat the rows of a partial last tile differently."""
PREFILL_WORK = 100_000_000
"""Parameters x tokens below which call overhead dominates a prefill, so it may as well be larger."""
PREFILL_TOKENS_MOST = 512
"""Beyond this even a tiny model is limited by arithmetic."""
SEED_BITS = 64
FULL_ATTENTION = "full_attention"
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Position embeddings that depend on the longest sequence of the batch: a sequence's numbers would depend on it too."""
PROMPT_TOKENS = 12
"""Length of the test prompt. A wrong mask or position shows at each token."""
FULL_PRECISION_GAP = 1e-3
HALF_PRECISION_GAP = 0.25
"""Far above rounding, far below the effect of a wrong mask or position."""
NAMES_SHOWN = 3

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants as signed 64-bit integers: torch wraps around
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_DRAW_BITS = 48
"""Bits used of 64. With 53, a draw times the sum of the probabilities could round up to the sum itself, past the last
token."""

_TOKEN, _POSITION, _COUNT, _ACTIVE, _SEED, _TOP_K, _GREEDY = range(7)
_INT_COLUMNS = 7
_TEMPERATURE, _TOP_P = range(2)
_FLOAT_COLUMNS = 2
_NO_TOKEN = -1


@dataclass(frozen=True)
class Prefilled:
    """One prompt's keys and values: a row of its prefill."""

    batch: PromptKV | None
    """None for a prompt of one token."""
    row: int


@dataclass(frozen=True)
class Placing:
    """A sample that enters a slot."""

    slot: int
    prompt: Array
    prefilled: Prefilled
    params: SamplingParams


@dataclass(frozen=True)
class SlotOutput:
    """The tokens of a slot's sample."""

    tokens: Array
    logprobs: Array
    versions: Array
    sound: bool
    """Whether all log-probabilities are finite."""


def prompt_bucket(tokens: int) -> int:
    """Return the prefill length for a number of tokens: 16, 32, 48, 64, 96, 128, 192, …"""
    if tokens <= 0:
        return 0
    power = ROW_TILE
    while power < tokens:
        power *= 2
    three_quarters = power * 3 // 4
    return three_quarters if three_quarters >= tokens and three_quarters % ROW_TILE == 0 else power


class Runner:
    """The tensors of all slots. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, max_prompt_tokens: int, max_new_tokens: int, version: int
    ) -> None:
        model.train(False)
        model.requires_grad_(False)
        model.set_attn_implementation(ATTENTION)  # the model belongs to the engine from now on
        self.model = model
        self.version = version
        self.rows = -(-slots // ROW_TILE) * ROW_TILE
        self.max_prompt_tokens = max_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.device = model.device
        self.vocabulary = vocabulary_size(model)
        self._decoder = getattr(model, model.base_model_prefix)
        self._dummy_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=self.device)

        cheap_tokens = PREFILL_WORK // max(1, model.num_parameters())
        self._prefill_tokens = max(self.rows, min(PREFILL_TOKENS_MOST, cheap_tokens))
        self._layers: int | None = None
        like = self._forward_prompts([], ROW_TILE)
        self._layers = len(like.kept)
        self._cache = SlotCache(like=like, rows=self.rows, length=max_prompt_tokens + max_new_tokens)

        self._ints = torch.zeros(self.rows, _INT_COLUMNS, dtype=torch.int64, device=self.device)
        self._floats = torch.ones(self.rows, _FLOAT_COLUMNS, dtype=torch.float32, device=self.device)
        self._stops = torch.full((self.rows, 1), _NO_TOKEN, dtype=torch.int64, device=self.device)

        # The last tokens of all rows, one line per step. A sample never has more tokens than there are lines.
        self._log_tokens = torch.zeros(max_new_tokens, self.rows, dtype=torch.int64, device=self.device)
        self._log_logprobs = torch.zeros(max_new_tokens, self.rows, dtype=torch.float32, device=self.device)
        self._step = 0
        self._versions = [(0, version)]  # (first step, version)

        # What the host knows about each row.
        self._started = np.zeros(self.rows, np.int64)
        self._ends = np.full(self.rows, np.iinfo(np.int64).max)
        self._busy = np.zeros(self.rows, bool)
        self._at = np.zeros(self.rows, np.int64)
        self._is_greedy = np.zeros(self.rows, bool)
        self._is_truncated = np.zeros(self.rows, bool)
        self._has_stops = np.zeros(self.rows, bool)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def bucket(self, prompt: Array) -> int:
        """Return the length at which a prompt is read. It depends only on its own length and the configuration."""
        return min(prompt_bucket(len(prompt) - 1), -(-self.max_prompt_tokens // ROW_TILE) * ROW_TILE)

    def prefill_rows(self, bucket: int) -> int:
        """Return how many prompts one prefill takes: together about as many tokens as a decode step has rows."""
        return max(1, self._prefill_tokens // bucket) if bucket else 1

    def prefill(self, prompts: Sequence[Array]) -> list[Prefilled]:
        """Prefill prompts of one bucket, at most `prefill_rows` of them."""
        bucket = self.bucket(prompts[0])
        if not bucket:
            return [Prefilled(None, 0) for _ in prompts]
        assert len(prompts) <= self.prefill_rows(bucket)
        batch = self._forward_prompts(prompts, bucket)
        return [Prefilled(batch, row) for row in range(len(prompts))]

    @torch.inference_mode()
    def _forward_prompts(self, prompts: Sequence[Array], bucket: int) -> PromptKV:
        ids = np.zeros((self.prefill_rows(bucket), bucket), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - 1] = prompt[:-1]
        positions = torch.arange(bucket, device=self.device).clamp_(max=self.max_prompt_tokens - 1)  # padding has none
        kept = PromptKV(layers=self._layers)
        with contextlib.suppress(PromptRead):
            self._decoder(
                input_ids=torch.from_numpy(ids).to(self.device),
                attention_mask=self._dummy_mask,
                position_ids=positions.unsqueeze(0).expand(ids.shape),
                past_key_values=kept,
                use_cache=True,
            )
        return kept

    @torch.inference_mode()
    def place(self, entering: Sequence[Placing]) -> None:
        """Put samples into their slots, all at once."""
        slots = np.array([one.slot for one in entering])
        where = torch.from_numpy(slots).to(self.device)
        self._cache.enter(slots, np.array([len(one.prompt) - 1 for one in entering]))
        for batch in dict.fromkeys(one.prefilled.batch for one in entering):
            if batch is None:
                continue
            placed = [(one.prefilled.row, one.slot) for one in entering if one.prefilled.batch is batch]
            self._cache.place(batch.kept, *np.array(placed).T)

        ints, floats = [], []
        for one in entering:
            params, last = one.params, len(one.prompt) - 1
            seed = params.seed % 2**SEED_BITS
            seed -= 2**SEED_BITS if seed >= 2 ** (SEED_BITS - 1) else 0  # the same bits, in torch's type
            greedy = params.temperature == 0
            ints.append((one.prompt[-1], last, 0, 1, seed, params.top_k or self.vocabulary, greedy))
            floats.append((1.0 if greedy else params.temperature, params.top_p))
        table = np.array(ints, np.int64)
        self._ints[where] = torch.from_numpy(table).to(self.device)
        self._floats[where] = torch.tensor(floats, dtype=torch.float32).to(self.device)
        self._place_stops(entering, where)

        self._busy[slots] = True
        self._started[slots] = self._step
        self._ends[slots] = self._step + np.array([one.params.max_new_tokens for one in entering])
        self._at[slots] = table[:, _POSITION]
        self._is_greedy[slots] = table[:, _GREEDY] != 0
        self._is_truncated[slots] = [one.params.top_p < 1 or one.params.top_k > 0 for one in entering]
        self._has_stops[slots] = [bool(one.params.stop_token_ids) for one in entering]

    def _place_stops(self, entering: Sequence[Placing], where: Tensor) -> None:
        widest = max(len(one.params.stop_token_ids) for one in entering)
        if widest > self._stops.shape[1]:
            grown = torch.full((self.rows, widest), _NO_TOKEN, dtype=torch.int64, device=self.device)
            grown[:, : self._stops.shape[1]] = self._stops
            self._stops = grown
        width = self._stops.shape[1]
        stops = [one.params.stop_token_ids for one in entering]
        self._stops[where] = self._tensor([(*tokens, *[_NO_TOKEN] * (width - len(tokens))) for tokens in stops])

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    # -- tokens -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Finish]]:
        """Make one token for every slot in use. Return the slots whose sample ended, and why."""
        busy = self._busy
        ints, floats = self._ints, self._floats
        mask, pages = self._cache.open(ints[:, _POSITION])
        logits = self.model(
            input_ids=ints[:, _TOKEN : _TOKEN + 1],
            attention_mask=mask,
            position_ids=ints[:, _POSITION : _POSITION + 1],
            past_key_values=self._cache,
            use_cache=True,
            pages=pages,
        ).logits[:, -1]
        greedy = self._is_greedy[busy]
        tokens, logprobs = sample_tokens(
            logits,
            SamplingRows(
                seeds=ints[:, _SEED],
                index=ints[:, _COUNT],
                temperature=floats[:, _TEMPERATURE],
                greedy=ints[:, _GREEDY] != 0,
                top_p=floats[:, _TOP_P],
                top_k=ints[:, _TOP_K],
                any_random=not greedy.all(),
                any_greedy=bool(greedy.any()),
                any_truncated=bool(self._is_truncated[busy].any()),
            ),
        )
        line = self._step % self.max_new_tokens
        self._log_tokens[line] = tokens
        self._log_logprobs[line] = logprobs
        ints[:, _TOKEN] = tokens
        ints[:, _POSITION : _COUNT + 1] += ints[:, _ACTIVE : _ACTIVE + 1]
        self._step += 1
        self._at += busy
        return self._ended(tokens)

    def advance(self) -> None:
        """Prepare the next step, after ended samples have left: rows at the end of a page get another page."""
        used = np.flatnonzero(self._busy)
        self._cache.advance(used, self._at[used])

    def _ended(self, tokens: Tensor) -> list[tuple[int, Finish]]:
        full = self._busy & (self._ends <= self._step)
        if not self._has_stops[self._busy].any():
            return [(slot, "length") for slot in np.flatnonzero(full).tolist()]
        stopped = (tokens.unsqueeze(1) == self._stops).any(dim=1).cpu().numpy() & self._busy
        ended = np.flatnonzero(full | stopped)
        return [(slot, "stop" if stopped[slot] else "length") for slot in ended.tolist()]

    def take(self, slots: Sequence[int]) -> list[SlotOutput]:
        """Copy out the tokens of the slots' samples."""
        if len(slots) == 0:
            return []
        counts = self._step - self._started[slots]
        steps = np.arange(self._step - counts.max(), self._step)
        lines = torch.from_numpy(steps % self.max_new_tokens).to(self.device).unsqueeze(1)
        where = self._tensor(slots)
        tokens = self._log_tokens[lines, where].T.to(torch.int32).cpu().contiguous().numpy()
        logprobs = self._log_logprobs[lines, where].T.cpu().contiguous().numpy()
        versions = self._versions_of(steps)
        sound = bool(np.isfinite(logprobs).all())
        outputs = []
        for row, first in enumerate((len(steps) - counts).tolist()):
            mine = logprobs[row, first:]
            outputs.append(
                SlotOutput(tokens[row, first:], mine, versions[first:].copy(), sound or bool(np.isfinite(mine).all()))
            )
        return outputs

    def _versions_of(self, steps: Array) -> Array:
        if len(self._versions) == 1 or self._versions[-1][0] <= steps[0]:
            return np.full(len(steps), self._versions[-1][1], np.int32)
        firsts = np.array([first for first, _ in self._versions])
        versions = np.array([version for _, version in self._versions], np.int32)
        return versions[np.searchsorted(firsts, steps, side="right") - 1]

    def free(self, slots: Sequence[int]) -> None:
        """Park slots: their rows are still computed, at position 0, and ignored."""
        if len(slots) == 0:
            return
        self._busy[slots] = False
        self._at[slots] = 0
        with torch.inference_mode():
            self._cache.leave(np.array(slots))
            self._ints[self._tensor(slots)] = 0

    def next_token(self, prompt: Array) -> tuple[int, float]:
        """Return the greedy next token and its log-probability, by a prefill and one step. All slots are free
        afterwards."""
        (prefilled,) = self.prefill([prompt])
        self.place([Placing(0, prompt, prefilled, SamplingParams(max_new_tokens=1, seed=0, temperature=0.0))])
        self.advance()
        self.step()
        (found,) = self.take([0])
        self.free([0])
        return int(found.tokens[0]), float(found.logprobs[0])

    def remove_non_finite(self) -> None:
        """Clear what samples with non-finite numbers left in the pages."""
        self._cache.remove_non_finite()

    def set_version(self, version: int) -> None:
        """Set the version of the tokens from the next step on."""
        self.version = version
        oldest = int(self._started[self._busy].min(initial=self._step))
        known = [*self._versions, (self._step, version)]
        while len(known) > 1 and known[1][0] <= oldest:
            known.pop(0)
        self._versions = known


# -- sampling ----------------------------------------------------------------------------------------------------------


def splitmix64(seeds: Tensor, index: Tensor) -> Tensor:
    """Return the `index`-th output of splitmix64 for each seed, as int64 bit patterns."""
    x = seeds + (index + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, index: Tensor) -> Tensor:
    """Return a float64 in [0, 1) for each (seed, index)."""
    return _shift_right(splitmix64(seeds, index), 64 - _DRAW_BITS).double() * 2.0**-_DRAW_BITS


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right. torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of each row; vectors of one length."""

    seeds: Tensor
    index: Tensor
    """Index of the token to sample in its response."""
    temperature: Tensor
    """1 in greedy rows."""
    greedy: Tensor
    """bool: take the most likely token."""
    top_p: Tensor
    top_k: Tensor
    """The vocabulary size if it is off."""
    any_random: bool
    any_greedy: bool
    any_truncated: bool
    """Whether any row has top_p or top_k. Without one the sort is skipped, which changes no bit of other rows."""


def sample_tokens(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Return tokens (int64) and their log-probabilities (float32) at the row's temperature, before top_p and top_k."""
    scores = logits.float()
    if rows.any_random:
        scores = scores / rows.temperature.unsqueeze(1)
    logprobs = torch.log_softmax(scores, dim=-1)
    if rows.any_random:
        probs = logprobs.exp()
        if rows.any_truncated:
            probs = probs.masked_fill(_mask_tail(probs, rows.top_p, rows.top_k), 0.0)
        tokens = _inverse_cdf(probs, uniform(rows.seeds, rows.index))
        if rows.any_greedy:
            tokens = torch.where(rows.greedy, scores.argmax(dim=-1), tokens)
    else:
        tokens = scores.argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _inverse_cdf(probs: Tensor, draws: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the draw, never one of probability zero."""
    summed = probs.cumsum(dim=-1, dtype=torch.float64)
    wanted = draws * summed[:, -1]
    found = torch.searchsorted(summed, wanted.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=probs.shape[-1] - 1)  # only a row of NaN gets there


def _mask_tail(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return which tokens top_k, and then top_p over the rest, remove. The likeliest token always stays."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    beyond_k = rank >= top_k.unsqueeze(1)
    ordered = ordered.masked_fill(beyond_k, 0.0).double()
    before = ordered.cumsum(dim=-1) - ordered
    total = ordered.sum(dim=-1, keepdim=True)
    gone = beyond_k | (before >= top_p.unsqueeze(1) * total)
    gone[:, 0] = False
    gone &= ~((top_p >= 1.0) & (top_k >= probs.shape[-1])).unsqueeze(1)  # rounding must not affect other rows
    return torch.zeros_like(gone).scatter_(1, order, gone)


# -- which models ------------------------------------------------------------------------------------------------------


class UnsupportedModel(EngineError, ValueError):
    """The native engine cannot run this architecture. Another engine may."""

    def __init__(self, model: PreTrainedModel, reason: str) -> None:
        super().__init__(
            f"{type(model).__name__}: the native engine cannot run it, because {reason}; use another engine"
        )


def check_supported(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` unless all layers of the decoder attend to everything before them."""
    config: Any = model.config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(model, "it is an encoder-decoder")
    if not model._can_compile_fullgraph or not model._supports_attention_backend:
        raise UnsupportedModel(model, "it does not support a static KV cache with the caller's attention")
    kinds = sorted(_layer_kinds(config) - {FULL_ATTENTION})
    if kinds:
        raise UnsupportedModel(model, f"it has layers of the kind {', '.join(kinds)}")
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModel(model, "its layers share keys and values")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        raise UnsupportedModel(model, f"its position embedding ({rope['rope_type']}) depends on the longest of a batch")


def _layer_kinds(config: Any) -> set[str]:
    named = getattr(config, "layer_types", None)
    if named is not None:
        return set(named)
    if getattr(config, "sliding_window", None) is not None:  # configurations older than `layer_types`
        return {"sliding_attention"}
    return {"chunked_attention"} if getattr(config, "attention_chunk_size", None) is not None else {FULL_ATTENTION}


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding, which may be larger than the tokenizer's vocabulary."""
    return int(cast(Tensor, model.get_input_embeddings().weight).shape[0])


# -- its numbers ------------------------------------------------------------------------------------------------------


def compute_logprobs(model: PreTrainedModel, max_prompt_tokens: int) -> tuple[Array, Tensor]:
    """A test prompt, and the distribution over its next token by the model's own forward pass."""
    vocabulary = vocabulary_size(model)
    prompt = (np.arange(1, 1 + min(PROMPT_TOKENS, max_prompt_tokens)) * 7 % vocabulary).astype(np.int32)
    ids = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0).to(model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1]
    return prompt, torch.log_softmax(logits.float(), dim=-1)


def check_agreement(runner: Runner, prompt: Array, expected: Tensor) -> None:
    """Raise `UnsupportedModel` if the engine's own numbers differ from `compute_logprobs`."""
    token, logprob = runner.next_token(prompt)
    gap = abs(logprob - float(expected[token]))
    full = runner.model.dtype in (torch.float32, torch.float64)
    if not gap <= (FULL_PRECISION_GAP if full else HALF_PRECISION_GAP):
        raise UnsupportedModel(runner.model, f"its log-probabilities there are {gap:.3g} away from its forward pass")


# -- its weights ------------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copy `weights` into a running model; returns the model's own tensors under the same names.

    A tied parameter may come under one of its names or under all of them. All weights are checked before the first one
    is copied: a ValueError leaves the model unchanged.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    _check_weights(own, weights)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in own.values()):
        torch.cuda.synchronize()  # the source may be freed or overwritten after this call
    return {name: own[name] for name in weights}


def _check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Any]) -> None:
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise ValueError(f"weights: {_list_names(unknown)} not in the model; send what its state_dict names")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != tuple(own[name].shape):
            raise ValueError(
                f"weights: {name} has the shape {tuple(tensor.shape)}, the model's has {tuple(own[name].shape)}"
            )
    given = {own[name].data_ptr(): name for name in weights}
    missing = sorted(name for name, tensor in own.items() if tensor.numel() and tensor.data_ptr() not in given)
    if missing:
        raise ValueError(f"weights: {_list_names(missing)} missing; send all parameters (tied ones once)")
    for name, tensor in weights.items():
        twin = given[own[name].data_ptr()]
        if twin != name and not torch.equal(_bytes(tensor), _bytes(weights[twin])):
            raise ValueError(
                f"weights: {name} and {twin} are one tensor in the model, and differ here; send one of them"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)  # NaN equals NaN here


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
