"""Tasks: the rows they load, the tokens of their prompts, and the responses they reward."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from freewheel.data.group import Prompt
from freewheel.data.prompts import PLAIN, Rendering, render, render_rows
from freewheel.data.tasks import TASKS, get_task
from freewheel.data.tasks.gsm8k import INSTRUCTION
from freewheel.data.tasks.word_problems import SPLITS, TEMPLATES, WordProblems, model_path, problems
from freewheel.errors import ConfigError, DataError
from freewheel.judge.verdict import Scored
from freewheel.rewards import rule_score

CHATML = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

NATALIA = {"question": "Natalia sold 48 clips and 24 more. How many?", "answer": "48+24 = <<48+24=72>>72\n#### 72"}
WENG = {"question": "Weng earns $1,000 twice.", "answer": "She earns 2 x 1,000.\n#### 2,000"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_path())


class Letters:
    """A tokenizer with one token a character, and a first one that marks the beginning."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"[{one['role']}]{one['content']}" for one in conversation) + "[assistant]"


def text_of(prompt: Prompt) -> str:
    return "".join("^" if token == 1 else chr(token) for token in prompt.tokens)


BRIEF = Rendering(system_prompt="Be brief.")
SYSTEM = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]
TURNS = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]


@pytest.mark.parametrize(
    ("prompt", "template", "rendering", "text"),
    [
        ("Hi", None, PLAIN, "^Hi"),
        ("Hi", None, BRIEF, "^Be brief.\n\nHi"),
        ("Hi", CHATML, PLAIN, "[user]Hi[assistant]"),  # the template writes its own special tokens
        ("Hi", CHATML, Rendering(chat_template="off"), "^Hi"),
        ("Hi", CHATML, BRIEF, "[system]Be brief.[user]Hi[assistant]"),
        (SYSTEM, CHATML, BRIEF, "[system]Be brief.[user]Hi[assistant]"),
        (SYSTEM, CHATML, PLAIN, "[system]Be long.[user]Hi[assistant]"),
        (TURNS, CHATML, PLAIN, "[user]u[assistant]a[user]u[assistant]"),
        (np.array(TURNS, dtype=object), CHATML, PLAIN, "[user]u[assistant]a[user]u[assistant]"),  # from pandas
    ],
)
def test_a_prompt_is_text_or_messages_with_or_without_a_chat_template(
    prompt: Any, template: str | None, rendering: Rendering, text: str
):
    found = render({"messages": prompt, "index": 3}, Letters(template), rendering)
    assert text_of(found) == text and found.tokens.dtype == np.int32
    assert found.row == {"index": 3}, "the text is in the tokens"


@pytest.mark.parametrize(
    ("row", "rendering", "error", "said"),
    [
        (
            {"question": "Hi"},
            Rendering(chat_template="on"),
            ConfigError,
            r"data\.chat_template = 'on': this tokenizer has",
        ),
        ({"prompt": TURNS}, PLAIN, DataError, "only a chat template can mark who speaks"),
        ({"text": "Hi"}, PLAIN, DataError, r"no prompt, messages or question: its keys are \['text'\]"),
        ({"prompt": []}, PLAIN, DataError, "give text, or a list of messages with role and content"),
        ({"prompt": [{"role": "user"}]}, PLAIN, DataError, "give text, or a list of messages"),
        ({"prompt": ["Hi"]}, PLAIN, DataError, "give text, or a list of messages"),
        ({"prompt": 3}, PLAIN, DataError, "give text, or a list of messages"),
    ],
)
def test_a_row_that_cannot_be_rendered_is_refused(row, rendering, error, said):
    with pytest.raises(error, match=said):
        render(row, Letters(), rendering)


def test_a_prompt_without_tokens_is_refused(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(DataError, match="has no tokens"):
        render({"prompt": ""}, tokenizer)


def rendered(*texts: str, **options: Any) -> list[str]:
    rows = [{"prompt": text} for text in texts]
    return [text_of(prompt) for prompt in render_rows(rows, lambda row: render(row, Letters()), **options)]


def test_prompts_that_are_too_long_are_left_out_cut_or_refused(caplog: pytest.LogCaptureFixture):
    texts = ("ab", "abcdef", "abcd", "abcdefgh")
    with caplog.at_level(logging.WARNING, "freewheel.data"):
        assert rendered(*texts, max_prompt_tokens=5) == ["^ab", "^abcd"]
    assert caplog.messages == ["2 of 4 prompts left out: over max_prompt_tokens=5 (longest 9)"]
    assert rendered(*texts, max_prompt_tokens=5, too_long="truncate_left") == ["^ab", "bcdef", "^abcd", "defgh"]
    with pytest.raises(DataError, match="row 1: its prompt has 7 tokens, over max_prompt_tokens = 5: raise the limit"):
        rendered(*texts, max_prompt_tokens=5, too_long="error")
    with pytest.raises(DataError, match="none of 4 prompts is left: raise max_prompt_tokens = 2, the longest has 9"):
        rendered(*texts, max_prompt_tokens=2)
    assert rendered(*texts)[3] == "^abcdefgh"


def test_a_bad_row_is_named_by_its_place():
    with pytest.raises(DataError, match="row 1: a row has no prompt"):
        render_rows([{"prompt": "a"}, {"text": "b"}], lambda row: render(row, Letters()))


def load_file(task: str, folder: Path, *rows: Any) -> list[Any]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(get_task(task).load("train", path))


def test_gsm8k_reads_the_published_files_and_those_that_verl_prepared(tmp_path: Path):
    prepared = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "Natalia …"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "test", "index": 17, **NATALIA},
    }
    natalia, weng, verls = load_file("gsm8k", tmp_path, NATALIA, WENG, prepared)
    assert natalia == prepared | {
        "index": 0,
        "prompt": f"{NATALIA['question']} {INSTRUCTION}",
        "extra_info": {**NATALIA, "index": 0, "split": "train"},
    }
    assert weng["reward_model"]["ground_truth"] == "2000"
    assert verls == prepared | {"index": 2}
    assert text_of(get_task("gsm8k").render(verls, Letters(CHATML))) == "[user]Natalia …[assistant]"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "?", "solution": "1"}, r"row 1: no answer; its keys are \['question', 'solution'\]"),
        ({"question": "?", "answer": "So:\n#### many"}, "row 1: the answer 'many' is not a number"),
        ({"prompt": "?", "reward_model": "72"}, "row 1, reward_model is '72': give an object with ground_truth"),
        ({"prompt": "?", "reward_model": {"style": "rule"}}, "reward_model: no ground_truth"),
    ],
)
def test_gsm8k_names_a_row_that_it_cannot_use(tmp_path: Path, row: dict[str, Any], said: str):
    with pytest.raises(DataError, match=said):
        load_file("gsm8k", tmp_path, NATALIA, row)


@pytest.mark.parametrize(
    ("text", "correct", "right_format"),
    [("#### 2,000", 1.0, 1.0), ("so #### $2000.00", 1.0, 1.0), ("#### 72", 0.0, 1.0), ("2000", 0.0, 0.0)],
)
def test_gsm8k_scores_the_number_after_the_mark(tmp_path: Path, text: str, correct: float, right_format: float):
    found = get_task("gsm8k").score(text, load_file("gsm8k", tmp_path, WENG)[0])
    assert isinstance(found, Scored) and found.value == correct
    assert found.parts == {"correct": correct, "format": right_format}


def test_rows_of_any_data_source_are_scored_by_its_rule(tmp_path: Path):
    task = get_task("rows")
    one = {"prompt": "1 + 1?", "data_source": "openai/gsm8k", "answer": "2", "level": 5}
    two = {"prompt": "2 + 2?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}
    first, second = load_file("rows", tmp_path, one, two)
    assert first["extra_info"] == {"answer": "2", "index": 0, "question": "1 + 1?", "split": "train"}
    assert first["level"] == 5 and second["reward_model"] == {"ground_truth": "4", "style": "rule"}
    assert [task.score("#### 2", row).value for row in (first, second)] == [1.0, 0.0]  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"data\.train = None: the task rows has no data"):
        task.load("train")


def test_no_numbers_of_the_test_split_occur_in_training():
    found = {split: {(p.template.name, p.a, p.b, p.c) for p in problems(split)} for split in SPLITS}
    assert not found["train"] & found["test"]
    share = len(found["test"]) / (len(found["train"]) + len(found["test"]))
    assert 0.10 < share < 0.15
    assert {name for name, *_ in found["test"]} == {template.name for template in TEMPLATES}
    asked = [tuple(map(int, re.findall("[0-9]+", row["prompt"]))) for row in load("test")]
    assert sorted(asked) == sorted(combination[1:] for combination in found["test"])


def load(split: str) -> list[Any]:
    return list(get_task("word_problems").load(split))


def test_rows_are_the_same_each_time_and_limited_on_request():
    assert load("train") == load("train")
    assert get_task("word_problems").load("train", limit=5) == load("train")[:5]
    with pytest.raises(ConfigError, match="split = 'dev': word_problems has train and test"):
        load("dev")
    with pytest.raises(ConfigError, match="word_problems makes its own rows"):
        get_task("word_problems").load("train", "a.jsonl")


@pytest.mark.parametrize("split", SPLITS)
def test_every_solution_is_right_and_fits_and_the_tokenizer_knows_all_words(
    split: str, tokenizer: PreTrainedTokenizerFast
):
    task = get_task("word_problems")
    for row in load(split):
        solution = row["extra_info"]["answer"]
        steps, _, answer = solution.partition("#")
        assert all(eval(left) == int(right) for left, right in (step.split("=") for step in steps.split(";")))
        assert answer == row["reward_model"]["ground_truth"]
        assert task.score(solution, row).value == 1.0  # type: ignore[union-attr]
        assert rule_score(row["data_source"], solution, answer).value == 1.0, "reward managers know the rule"
        for text in (row["prompt"], solution + tokenizer.eos_token):
            tokens = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in tokens and tokenizer.decode(tokens) == text
        assert len(tokens) <= task.max_new_tokens


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("#16", 1.0),
        ("6+9=15;15+1=16#16", 1.0),
        ("9+9=3#16", 1.0),  # steps are not read
        (" #16 ", 1.0),
        ("#15", 0.0),
        ("16", 0.0),
        ("#16#16", 0.0),
        ("#15#16", 0.0),
        ("#16;", 0.0),
        ("#", 0.0),
        ("#016", 0.0),
        ("#16 apples", 0.0),
        ("#１６", 0.0),
        ("", 0.0),
    ],
)
def test_only_one_number_after_one_mark_is_rewarded(response: str, value: float):
    task = get_task("word_problems")
    row = {"reward_model": {"ground_truth": "16"}}
    assert task.score(response, row).value == value  # type: ignore[union-attr]
    assert task.score(response, row, finish="length").value == 0.0  # type: ignore[union-attr]  # cut off


def test_the_base_model_is_small_guesses_and_can_do_better(tokenizer: PreTrainedTokenizerFast):
    """A demonstration of learning needs little reward by greedy decoding, and some by sampling to start with."""
    model = AutoModelForCausalLM.from_pretrained(model_path())
    assert model.config.model_type == "llama" and model.dtype == torch.float32
    assert sum(file.stat().st_size for file in model_path().iterdir()) < 600_000
    assert model.generation_config.eos_token_id == 1 and model.generation_config.pad_token_id == 0
    assert tokenizer.padding_side == "left"
    task, rows = get_task("word_problems"), load("test")
    batch = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}

    def reward(**options: Any) -> float:
        torch.manual_seed(0)
        made = model.generate(**inputs, max_new_tokens=task.max_new_tokens, **options)[
            :, inputs["input_ids"].shape[1] :
        ]
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        return float(np.mean([task.score(text, row).value for text, row in zip(texts, rows, strict=True)]))  # type: ignore[union-attr]

    assert reward(do_sample=False) <= 0.25
    assert 0.2 < reward(do_sample=True, top_k=0, top_p=1.0, temperature=1.0) < 0.45


def test_a_task_is_found_by_its_name_or_as_an_object_or_a_class(monkeypatch: pytest.MonkeyPatch):
    assert [get_task(name).name for name in TASKS] == [*TASKS]
    module = ModuleType("my_tasks")
    module.Mine, module.mine, module.half = WordProblems, WordProblems(), object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_tasks", module)
    assert get_task("my_tasks:mine") is module.mine  # type: ignore[attr-defined]
    assert isinstance(get_task("my_tasks:Mine"), WordProblems)
    with pytest.raises(ConfigError, match="a task needs name, max_new_tokens, stop, load, render, score"):
        get_task("my_tasks:half")
    with pytest.raises(ConfigError, match=r"data\.task = 'gsm9k': choose word_problems, gsm8k, rows, or give module"):
        get_task("gsm9k")


def test_a_task_whose_module_cannot_be_imported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"importing needs_more failed: No module named 'no_such_dependency'"):
        get_task("needs_more:task")
