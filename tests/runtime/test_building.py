"""What a configuration names is found, or refused by its key before anything is trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freewheel.data.tasks.word_problems import TASK, model_path
from freewheel.judge.errors import ConfigError
from freewheel.rollout.rollouter import Rollouter
from freewheel.runtime.building import (
    evaluation_metrics,
    load_tokenizer,
    model_folder,
    named,
    named_function,
    pad_token_id,
    stop_token_ids,
)
from freewheel.trainer.trainer import FullyAsyncTrainer

from .pipeline import small_config

KEY = "trainer.trainer_class"


@pytest.fixture(autouse=True)
def user_modules() -> Iterator[None]:
    sys.path.append(str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


def test_a_named_class_is_found_and_without_a_name_it_is_our_own() -> None:
    assert named(KEY, "user_code:TellingTrainer", FullyAsyncTrainer).__name__ == "TellingTrainer"
    assert named(KEY, None, FullyAsyncTrainer) is FullyAsyncTrainer


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("user_code:MarkingRollouter", "subclass of FullyAsyncTrainer"),
        ("user_code:monitor", "subclass of FullyAsyncTrainer"),
        ("user_code:Missing", "has no attribute 'Missing'"),
        ("no_such_module:Trainer", "No module named 'no_such_module'"),
    ],
)
def test_a_class_that_is_none_is_said_by_its_key(spec: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        named(KEY, spec, FullyAsyncTrainer)
    assert KEY in str(caught.value)
    assert spec in str(caught.value)


def test_a_monitor_must_be_something_to_call() -> None:
    assert named_function("observe.custom_monitor", None) is None
    assert callable(named_function("observe.custom_monitor", "user_code:monitor"))
    with pytest.raises(ConfigError, match="name a function"):
        named_function("observe.custom_monitor", "user_code:MONITORED")


def test_a_rollouter_is_no_trainer() -> None:
    assert named("rollout.rollouter_class", "user_code:MarkingRollouter", Rollouter) is not Rollouter


def test_the_ends_of_a_response_are_the_tokenizers_the_models_and_the_tasks() -> None:
    tokenizer = load_tokenizer(small_config())
    task: Any = SimpleNamespace(name="mine", stop=(";",))
    semicolon = tokenizer(";", add_special_tokens=False)["input_ids"]
    found = stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=[5, 6]), task)
    assert set(found) == {tokenizer.eos_token_id, 5, 6, *semicolon}
    assert stop_token_ids(tokenizer, None, TASK) == (tokenizer.eos_token_id,)
    with pytest.raises(ConfigError, match="2 tokens here, not one"):
        stop_token_ids(tokenizer, None, SimpleNamespace(name="mine", stop=("1+",)))  # type: ignore[arg-type]


def test_a_tokenizer_without_padding_pads_with_its_end() -> None:
    assert pad_token_id(SimpleNamespace(pad_token_id=None, eos_token_id=3)) == 3
    assert pad_token_id(SimpleNamespace(pad_token_id=0, eos_token_id=3)) == 0
    assert pad_token_id(SimpleNamespace(pad_token_id=None, eos_token_id=None)) == 0


def test_embedded_is_the_model_that_comes_along() -> None:
    assert model_folder(small_config()) == str(model_path())
    assert model_folder(small_config(model={"path": "org/name"})) == "org/name"


def test_where_nobody_had_held_out_prompts_there_is_nothing_to_tell() -> None:
    assert evaluation_metrics([None, None]) is None
