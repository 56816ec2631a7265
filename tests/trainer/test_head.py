"""The output head in parts gives the results of whole logits without storing them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from freewheel.trainer import head
from freewheel.trainer.head import head_logprobs


def scene(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, generator=rng, dtype=dtype).requires_grad_()
    weight = torch.randn(17, 6, generator=rng, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(17, (tokens,), generator=rng)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@given(
    tokens=st.integers(1, 12),
    at_once=st.integers(1, 13),
    kept=st.integers(0, 13),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    entropy_grad=st.booleans(),
    frozen=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_whole_logits(
    tokens, at_once, kept, temperature, entropy_grad, frozen, seed
):
    hidden, weight, targets = scene(tokens, seed)
    weight.requires_grad_(not frozen)
    options = {"temperature": temperature, "entropy_grad": entropy_grad, "at_once": at_once, "kept": kept}
    found = head_logprobs(hidden, weight, targets, **options)
    assert found[1].requires_grad is entropy_grad
    wanted = whole(hidden, weight, targets, temperature)
    slopes = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def gradients(logp: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        loss = (slopes[0] * logp).sum() + ((slopes[1] * entropy).sum() if entropy_grad else 0)
        return torch.autograd.grad(loss, [hidden] if frozen else [hidden, weight])

    for one, other in zip([*found, *gradients(*found)], [*wanted, *gradients(*wanted)], strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [0, 3])
def test_only_the_allowed_rows_of_logits_exist_at_a_time(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    made: list[tuple[int, ...]] = []
    product = head._product

    def watched(left: Tensor, right: Tensor) -> Tensor:
        made.append(tuple((found := product(left, right)).shape))
        return found

    monkeypatch.setattr(head, "_product", watched)
    hidden, weight, targets = scene(7)
    logp, _ = head_logprobs(hidden, weight, targets, temperature=1.0, entropy_grad=False, at_once=3, kept=kept)
    logp.sum().backward()
    logits = [shape for shape in made if shape[-1] == len(weight)]
    assert max(rows for rows, _ in logits) <= 3
    assert sum(rows for rows, _ in logits) == 2 * 7 - kept


def test_parts_of_a_weights_gradient_are_added_up_in_float32() -> None:
    """512 parts that are each a hundredth of an ulp of their sum in bfloat16."""
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64)
    logp, _ = head_logprobs(hidden, weight, targets, temperature=1.0, entropy_grad=False, at_once=1)
    logp.sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [256, -256]


KERNELS = """
import torch
from freewheel.trainer import head, kernels
head.find_kernels = lambda device_type: None  # compare with plain torch also on a GPU
torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
    x, targets = (torch.randn(3, 9000) * 3).to(dtype), torch.randint(0, 9000, (3,))
    plain = head._score(x, targets, 0.7)
    for one, other in zip(plain, kernels.score(x, targets, 0.7)):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
    slopes = torch.randn(2, 3)
    for of_entropy in (None, slopes[1]):
        given = (0.7, targets, plain[2], slopes[0], plain[1], of_entropy)
        found, wanted = kernels.slope(x.clone(), *given), head._slope(x, *given)
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    into, more = torch.randn(5000), torch.randn(5000).to(dtype)
    wanted = into + more.float()
    kernels.add_up(into, more, first=False)
    assert torch.equal(into, wanted)
    kernels.add_up(into, more, first=True)
    assert torch.equal(into, more.float())
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for GPUs only")
def test_the_kernels_agree_with_plain_torch() -> None:
    """On a GPU, or by Triton's interpreter where there is none."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNELS], env={**os.environ, **interpreted}, check=True, timeout=120)
