"""What verl 0.9.1's own managers do with a row that fails: the reason for ours. Red here means that verl got better."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from transformers import PreTrainedTokenizerFast
from verl.experimental.reward_loop import RewardLoopManager

from .stage import Answer, reward_loop, rollouts, scores, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

FUNCTIONS = Path(__file__).with_name("scoring_functions.py")


@pytest.fixture(scope="module", params=["naive", "rate_limited"])
def named(request: pytest.FixtureRequest, ray_session: None, tokenizer_path: Path) -> Iterator[tuple[str, object]]:
    config = verl_config(
        tokenizer_path,
        f"reward.reward_manager.name={request.param}",
        f"reward.custom_reward_function.path={FUNCTIONS}",
        "reward.custom_reward_function.name=moody",
    )
    with reward_loop(config) as loop:
        yield request.param, loop


def test_verls_own_managers_end_the_run_or_give_zero_where_a_row_fails(
    named: tuple[str, RewardLoopManager], tokenizer: PreTrainedTokenizerFast
) -> None:
    name, loop = named
    batch = rollouts(tokenizer, [Answer("x #### 4", "a"), Answer("x boom", "a")])
    if name == "naive":
        with pytest.raises(ray.exceptions.RayTaskError, match="the user's function broke"):
            loop.compute_rm_score(batch)
    else:
        assert scores(loop.compute_rm_score(batch)) == [1.0, 0.0]


def test_verls_own_managers_end_the_run_where_rows_have_different_keys(
    named: tuple[str, RewardLoopManager], tokenizer: PreTrainedTokenizerFast
) -> None:
    name, loop = named
    # "dict" gives more keys than a plain number; a failed row of `rate_limited` has "error", which no other has.
    first = Answer("x dict #### 4", "a") if name == "naive" else Answer("x boom", "a")
    with pytest.raises(KeyError):
        loop.compute_rm_score(rollouts(tokenizer, [first, Answer("x #### 4", "a")]))
