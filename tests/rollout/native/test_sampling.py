"""The sampler: the right distribution, whatever stands in the other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freewheel.rollout.native.sampling import Rows, sample, splitmix64, uniform

VOCABULARY = 8
CRITICAL = 24.32
"""Chi-square with 7 degrees of freedom at 0.1%; seeds are fixed, so a right sampler passes or fails for good."""


def rows(count: int, **given: Any) -> Rows:
    temperature = torch.as_tensor(given.get("temperature", 1.0)).expand(count)
    top_p = torch.as_tensor(given.get("top_p", 1.0)).expand(count)
    top_k = torch.as_tensor(given.get("top_k", VOCABULARY)).expand(count)
    greedy = torch.as_tensor(given.get("greedy", False)).expand(count)
    return Rows(
        seeds=given.get("seeds", torch.arange(count)),
        index=given.get("index", torch.zeros(count, dtype=torch.int64)),
        temperature=temperature,
        greedy=greedy,
        top_p=top_p,
        top_k=top_k,
        any_random=not bool(greedy.all()),
        any_greedy=bool(greedy.any()),
        any_truncated=bool((top_p < 1).any() or (top_k < VOCABULARY).any()),
    )


LOGITS = torch.tensor([1.5, -0.5, 0.0, 2.0, 0.7, -2.0, 1.0, 0.3])


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(tokens)
    counts = torch.bincount(tokens, minlength=VOCABULARY).double()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("along", ["seeds", "index"])
def test_tokens_follow_the_distribution_over_seeds_and_over_a_responses_tokens(temperature: float, along: str) -> None:
    count = 40_000
    steps = torch.arange(count)
    drawn = {"seeds": steps} if along == "seeds" else {"seeds": torch.full((count,), 7), "index": steps}
    tokens, logprobs = sample(LOGITS.expand(count, -1), rows(count, temperature=temperature, **drawn))
    probs = torch.softmax(LOGITS.double() / temperature, dim=-1)
    assert chi_square(tokens, probs) < CRITICAL
    torch.testing.assert_close(logprobs.double(), probs.log()[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("given", "kept"), [({"top_k": 3}, [3, 0, 6]), ({"top_p": 0.7}, [3, 0, 6]), ({"top_p": 1e-6}, [3])]
)
def test_truncation_keeps_the_likeliest_tokens_and_the_log_probability_of_the_whole(
    given: dict[str, float], kept: list[int]
) -> None:
    count = 20_000
    tokens, logprobs = sample(LOGITS.expand(count, -1), rows(count, **given))
    whole = torch.softmax(LOGITS.double(), dim=-1)
    probs = torch.zeros_like(whole)
    probs[kept] = whole[kept] / whole[kept].sum()
    assert sorted(set(tokens.tolist())) == sorted(kept)
    assert chi_square(tokens, probs) < CRITICAL
    torch.testing.assert_close(logprobs.double(), whole.log()[tokens], atol=1e-5, rtol=0)


def test_a_row_is_the_same_to_the_bit_beside_rows_of_any_kind() -> None:
    count = 64
    torch.manual_seed(0)
    logits = torch.randn(count, VOCABULARY)
    alone_tokens, alone_logprobs = sample(logits, rows(count))
    mixed = rows(
        count,
        greedy=torch.arange(count) % 3 == 1,
        top_k=torch.where(torch.arange(count) % 3 == 2, 2, VOCABULARY),
        top_p=torch.where(torch.arange(count) % 6 == 2, 0.5, 1.0),
    )
    tokens, logprobs = sample(logits, mixed)
    plain = torch.arange(count) % 3 == 0
    assert torch.equal(tokens[plain], alone_tokens[plain])
    assert torch.equal(logprobs[plain], alone_logprobs[plain])


def test_greedy_takes_the_likeliest_token_and_gives_its_untempered_log_probability() -> None:
    tokens, logprobs = sample(LOGITS.expand(2, -1), rows(2, greedy=True))
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


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((5000, VOCABULARY), -torch.inf)
    logits[:, 4] = 0.0
    assert sample(logits, rows(5000))[0].unique().tolist() == [4]
