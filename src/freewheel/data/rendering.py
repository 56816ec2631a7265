"""From a row of data to a `Prompt`: messages or text, the tokenizer's chat template, token ids.

    row {"prompt": text | messages, …} ─▶ chat template ─▶ token ids ─▶ Prompt(tokens, the row without its prompt)

Tasks call `render`; `render_rows` does it for all rows before a run starts, so that a bad one is found then. The row
that a `Prompt` carries has the fields of a sample (`data_source`, `reward_model`, `extra_info`, …), where reward
functions look for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from freewheel.data.group import Prompt
from freewheel.errors import ConfigError, DataError, shown

logger = logging.getLogger("freewheel.data")

Row = Mapping[str, Any]
"""Plain values by name, as a file has them."""
Message = Mapping[str, Any]
"""`{"role": …, "content": …}`."""
TooLong = Literal["filter", "truncate_left", "error"]

PROMPT_KEYS = ("prompt", "messages", "question")
"""Where the text of a prompt may be, the first that is there."""
PARAGRAPH = "\n\n"
"""Between the system prompt and the question where there is no chat template."""


class TokenizerLike(Protocol):
    """As much of a Hugging Face tokenizer as rendering needs."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = ...) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How prompts are written, the same for a whole run."""

    system_prompt: str | None = None
    """Put first. It replaces one that a row has of its own."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """`auto`: the tokenizer's, if it has one."""


PLAIN = Rendering()


def render(row: Row, tokenizer: TokenizerLike, rendering: Rendering = PLAIN) -> Prompt:
    """The prompt of a row, with what else the row has. A row without text is a `DataError` that names its keys."""
    messages = conversation(row)
    if rendering.system_prompt is not None:
        own = bool(messages) and messages[0]["role"] == "system"
        messages = [{"role": "system", "content": rendering.system_prompt}, *messages[own:]]
    has_template = bool(tokenizer.chat_template)
    if rendering.chat_template == "on" and not has_template:
        raise ConfigError(
            "data.chat_template", "on", "this tokenizer has none: choose auto or off, or a model that was made for chat"
        )
    if has_template and rendering.chat_template != "off":
        text = tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(_without_template(messages))["input_ids"]
    if not len(ids):
        raise DataError(f"prompt = {shown(_without_template(messages))} has no tokens: give it text, or leave it out")
    kept = {key: value for key, value in row.items() if key not in PROMPT_KEYS}
    return Prompt(tokens=np.asarray(ids, np.int32), row=kept)


def conversation(row: Row) -> list[Message]:
    """The messages of a row. Text is what the user says."""
    key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if key is None:
        names = f"{', '.join(PROMPT_KEYS[:-1])} or {PROMPT_KEYS[-1]}"
        raise DataError(f"a row has no {names}: its keys are {[*row]}; rename what the model is to be asked to prompt")
    value = row[key]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    is_list = isinstance(value, Sequence | np.ndarray) and len(value) > 0
    if not is_list or not all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value):
        raise DataError(f"{key} = {shown(value)}: give text, or a list of messages with role and content")
    return list(value)


def _without_template(messages: Sequence[Message]) -> str:
    if any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"prompt = {shown(messages)} has turns of an assistant: only a chat template can tell who speaks; "
            "take a tokenizer that has one, and data.chat_template=auto"
        )
    return PARAGRAPH.join(str(message["content"]) for message in messages)


def as_sample(
    row: Row,
    *,
    index: int,
    data_source: str,
    ground_truth: object,
    question: str,
    split: str,
    answer: str = "",
    ability: str = "",
) -> dict[str, Any]:
    """A row with the fields that samples have, its own where it has them already."""
    for name in ("reward_model", "extra_info"):
        if not isinstance(row.get(name) or {}, Mapping):
            raise DataError(f"{name} = {shown(row[name])}: give an object with named values")
    extra = {"answer": answer, "index": index, "question": question, "split": split}
    reward_model = {"ground_truth": ground_truth, "style": "rule"}
    defaults = {"data_source": data_source, "ability": ability, "index": index}
    return {
        **defaults,
        **{key: value for key, value in row.items() if value is not None},
        "reward_model": reward_model | dict(row.get("reward_model") or {}),
        "extra_info": extra | dict(row.get("extra_info") or {}),
    }


def render_rows(
    rows: Iterable[Row],
    render_row: Callable[[Row], Prompt],
    *,
    max_prompt_tokens: int | None = None,
    too_long: TooLong = "filter",
) -> list[Prompt]:
    """All prompts, none longer than `max_prompt_tokens`.

    `filter` leaves longer ones out and says how many, `truncate_left` keeps their end, `error` refuses. An error names
    the row by its place."""
    kept: list[Prompt] = []
    dropped = longest = count = 0
    for place, row in enumerate(rows):
        count += 1
        try:
            prompt = render_row(row)
        except DataError as error:
            raise DataError(f"row {place}: {error}") from error
        size = len(prompt.tokens)
        if max_prompt_tokens is not None and size > max_prompt_tokens:
            longest = max(longest, size)
            if too_long == "error":
                raise DataError(
                    f"row {place}: its prompt has {size} tokens, over max_prompt_tokens = {max_prompt_tokens}: raise "
                    "that, or choose too_long=filter or too_long=truncate_left"
                )
            if too_long == "filter":
                dropped += 1
                continue
            prompt = Prompt(tokens=prompt.tokens[-max_prompt_tokens:], row=prompt.row)
        kept.append(prompt)
    if dropped:
        logger.warning(
            "%d of %d prompts left out: over max_prompt_tokens=%s (longest %d)",
            *(dropped, count, max_prompt_tokens, longest),
        )
    if not kept:
        remedy = f"raise max_prompt_tokens = {max_prompt_tokens}, the longest has {longest}" if count else "give rows"
        raise DataError(f"none of {count} prompts is left: {remedy}")
    return kept
