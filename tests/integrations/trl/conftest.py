"""A judge to ask, and what it must say; for the tests in TRL's environment also a model, a tokenizer and trainers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from freewheel.integrations.trl import JudgeReward
from freewheel.judge.request import JudgeRequest, PromptBuilder
from freewheel.judge.rubric import BUILTIN
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge, expected_score

EXAMPLE = Path(__file__).parents[3] / "examples/trl/grpo_judge.py"

_prompts = PromptBuilder(BUILTIN["integer"], secret=bytes(32))


def judged(response: str, prompt: str = "", reference: str = "") -> int:
    """The mock judge's score of this response."""
    return expected_score(_prompts.user(JudgeRequest(response=response, prompt=prompt, reference=reference)))


@pytest.fixture
def score() -> Callable[..., int]:
    return judged


@pytest.fixture
def mock() -> Iterator[Callable[..., RunningJudge]]:
    """Starts mock judges: `mock(latency_s=0.1)`."""
    with ExitStack() as stack:
        yield lambda **profile: stack.enter_context(MockJudge(JudgeProfile(**profile)).in_thread())


@pytest.fixture
def make_reward() -> Iterator[Callable[..., JudgeReward]]:
    """`make_reward(mock.url, rule=…, judge={…})`: what is no option of JudgeReward goes into its config."""
    options = ("rule", "ground_truth", "data_source", "group", "on_failure", "name")
    with ExitStack() as stack:

        def make(url: str, **settings: Any) -> JudgeReward:
            config = {"api_key": "EMPTY", **{key: one for key, one in settings.items() if key not in options}}
            reward = JudgeReward(
                {"api_endpoint": url, "model_name": "m", **config},
                **{key: one for key, one in settings.items() if key in options},
            )
            stack.callback(reward.close)
            return reward

        yield make


@pytest.fixture(scope="session")
def example() -> ModuleType:
    import torch

    torch.set_num_threads(1)  # two on two busy cores take up to ten times as long
    spec = importlib.util.spec_from_file_location("grpo_judge_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token a byte, with the marks and the template of Qwen's chats, as TRL ships it."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    marks = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=text, **marks)
    made.chat_template = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja").read_text()
    return made
