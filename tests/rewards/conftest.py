"""Batches as a trainer holds them, a mock judge, and managers that are shut down with their test."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge
from freewheel.rewards import LengthPenaltyRewardManager, shutdown_judges

WAIT_S = 30.0
"""Longer than anything here takes on a busy machine, shorter than pytest's own limit."""
KEY = "sk-test-0123456789-very-secret"
PROMPT_TOKENS, RESPONSE_TOKENS = 6, 24

Mock = Callable[..., RunningJudge]
MakeManager = Callable[..., LengthPenaltyRewardManager]


class Characters:
    """A tokenizer with one token per character; 0 is padding."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in tokens.tolist() if token or not skip_special_tokens)


@dataclass
class Row:
    """One response of a batch. Its rule score is 1 if the ground truth occurs in it."""

    response: str
    uid: str = "g"
    truth: Any = "yes"
    source: str = "test/words"
    extra: Mapping[str, Any] | None = field(default_factory=dict)


@dataclass
class Proto:
    """A batch with the fields of verl's `DataProto`, without anything of `freewheel.data`."""

    batch: Any
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any] = field(default_factory=dict)


def rule(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    return float(str(ground_truth) in solution_str)


def objects(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = list(values)
    return column


def tokens_of(texts: Sequence[str], width: int, *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the right (or left), and their mask."""
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        assert len(text) <= width, text
        where = slice(width - len(text), width) if left else slice(0, len(text))
        ids[row, where] = torch.tensor([ord(char) for char in text], dtype=torch.int64)
        mask[row, where] = 1
    return ids, mask


def batch_of(*rows: Row | str, width: int = RESPONSE_TOKENS, **more: Any) -> Proto:
    """A batch with left-padded prompts and right-padded responses. `more` adds or (None) removes columns."""
    filled = [Row(row) if isinstance(row, str) else row for row in rows]
    prompts, prompt_mask = tokens_of(["Why?"] * len(filled), PROMPT_TOKENS, left=True)
    responses, response_mask = tokens_of([row.response for row in filled], width)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    tensors: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": response_mask,
    }
    columns: dict[str, Any] = {
        "data_source": objects([row.source for row in filled]),
        "ability": objects(["words"] * len(filled)),
        "reward_model": objects([{"ground_truth": row.truth, "style": "rule"} for row in filled]),
        "extra_info": objects([row.extra for row in filled]),
        "uid": objects([row.uid for row in filled]),
    }
    for key, value in more.items():
        place = tensors if key in tensors or isinstance(value, torch.Tensor) else columns
        if value is None:
            del place[key]
        else:
            place[key] = value
    return Proto(tensors, columns, {"global_token_num": attention_mask.sum(dim=1).tolist()})


def last_values(tensor: torch.Tensor, data: Proto) -> list[float]:
    """Return the value on each response's last token. All others must be 0."""
    assert tensor.dtype == torch.float32 and tensor.shape == data.batch["responses"].shape
    assert not tensor.isnan().any()
    lengths = data.batch["response_mask"].sum(dim=1)
    last = (lengths - 1).clamp(min=0)
    values = tensor[torch.arange(len(tensor)), last]
    rest = tensor.clone()
    rest[torch.arange(len(tensor)), last] = 0
    assert not rest.any(), "a reward is not on the last valid token"
    return values.tolist()


def run_threads(*targets: Callable[[], Any]) -> None:
    """Run all at the same time, each in a thread, and wait until they end."""
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture
def mock() -> Iterator[Mock]:
    """Starts mock judges: `mock(scores={"good": "9"})`."""
    with ExitStack() as stack:
        yield lambda **profile: stack.enter_context(MockJudge(JudgeProfile(**profile)).in_thread())


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """`make_manager(mock().url, use_async_io=True)`; without a URL there is no judge. Shut down with the test.

    The engine is a thread unless `judge` says otherwise, and the length penalty is off unless `enable` is given.
    """
    made: list[LengthPenaltyRewardManager] = []

    def make(
        url: str | None = None,
        *,
        compute_score: Any = rule,
        num_examine: int = 0,
        reward_fn_key: str = "data_source",
        **settings: Any,
    ) -> LengthPenaltyRewardManager:
        config: dict[str, Any] = {"enable": False, **settings}
        if url is not None:
            config = {"api_key": KEY, "api_endpoint": url, "model_name": "m", **config}
            config["judge"] = {"placement": "thread", **config.get("judge", {})}
        manager = LengthPenaltyRewardManager(Characters(), num_examine, compute_score, reward_fn_key, config)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.shutdown_workers()


@pytest.fixture(autouse=True)
def _no_log_line_has_the_key(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG, "freewheel")
    yield
    logged = [logging.Formatter("%(message)s %(args)s").format(record) for record in caplog.get_records("call")]
    assert not [line for line in logged if KEY in line]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """`logged()`: the lines of logger `freewheel.rewards` from INFO on; `logged(logging.WARNING)`: of that level."""

    def logged(level: int | None = None) -> list[str]:
        levels = [level] if level else range(logging.INFO, 100)
        records = [one for one in caplog.records if one.name == "freewheel.rewards" and one.levelno in levels]
        return [record.getMessage() for record in records]

    return logged


@pytest.fixture
def judges_ended() -> Iterator[None]:
    """Ends the judges that `compute_score` started."""
    yield
    shutdown_judges()
