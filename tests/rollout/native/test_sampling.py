"""The sampler: the right distribution, whatever is in the other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freewheel.rollout.native.runner import SamplingRows, sample_tokens, splitmix64, uniform

VOCABULARY = 8
CRITICAL = 24.32
"""Chi-square with 7 degrees of freedom at 0.1%; seeds are fixed, so a right sampler passes or fails for good."""
LOGITS = torch.tensor([1.5, -0.5, 0.0, 2.0, 0.7, -2.0, 1.0, 0.3])


def rows(count: int, **given: Any) -> SamplingRows:
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": VOCABULARY, "greedy": False, "index": 0}
    found = {name: torch.as_tensor(given.get(name, value)).expand(count) for name, value in usual.items()}
    return SamplingRows(
        seeds=given.get("seeds", torch.arange(count)),
        any_random=not bool(found["greedy"].all()),
        any_greedy=bool(found["greedy"].any()),
        any_truncated=bool((found["top_p"] < 1).any() or (found["top_k"] < VOCABULARY).any()),
        **found,
    )


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(tokens)
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *(({"temperature": temperature}, range(VOCABULARY)) for temperature in (0.5, 1.0, 1.7)),
        ({"seeds": torch.full((40_000,), 7), "index": torch.arange(40_000)}, range(VOCABULARY)),
        ({"top_k": 3}, [3, 0, 6]),
        ({"top_p": 0.7}, [3, 0, 6]),
        *(({"top_p": top_p}, [3]) for top_p in (1e-6, 1e-50)),  # the latter is 0 in float32
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_and_have_the_log_probability_before_truncation(given: Any, kept: Any) -> None:
    tokens, logprobs = sample_tokens(LOGITS.expand(40_000, -1), rows(40_000, **given))
    whole = torch.softmax(LOGITS.double() / given.get("temperature", 1.0), dim=-1)
    probs = torch.zeros_like(whole)
    probs[list(kept)] = whole[list(kept)] / whole[list(kept)].sum()
    assert sorted(set(tokens.tolist())) == sorted(kept)
    assert chi_square(tokens, probs) < CRITICAL
    torch.testing.assert_close(logprobs.double(), whole.log()[tokens], atol=1e-5, rtol=0)


def test_a_row_is_the_same_to_the_bit_next_to_rows_of_any_kind() -> None:
    count = 64
    torch.manual_seed(0)
    logits = torch.randn(count, VOCABULARY)
    alone_tokens, alone_logprobs = sample_tokens(logits, rows(count))
    kinds = torch.arange(count) % 6
    mixed = rows(
        count,
        greedy=kinds % 3 == 1,
        top_k=torch.where(kinds % 3 == 2, 2, VOCABULARY),
        top_p=torch.where(kinds == 2, 0.5, 1.0),
    )
    tokens, logprobs = sample_tokens(logits, mixed)
    plain = kinds % 3 == 0
    assert torch.equal(tokens[plain], alone_tokens[plain])
    assert torch.equal(logprobs[plain], alone_logprobs[plain])


def test_greedy_takes_the_likeliest_token_and_gives_its_log_probability_at_temperature_one() -> None:
    tokens, logprobs = sample_tokens(LOGITS.expand(2, -1), rows(2, greedy=True))
    assert tokens.tolist() == [3, 3]
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[3].expand(2))


def test_splitmix64_gives_its_published_numbers() -> None:
    found = splitmix64(torch.full((3,), 1234567), torch.arange(3)) & (2**63 - 1)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert found.tolist() == [number % 2**63 for number in published]


def test_draws_lie_in_the_unit_interval_and_differ_between_seeds_and_indices() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63)]).repeat_interleave(1000)
    draws = uniform(seeds, torch.arange(1000).repeat(5))
    assert draws.min() >= 0 and draws.max() < 1
    assert len(draws.unique()) == len(draws)
