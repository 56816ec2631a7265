"""Renders a row of data as a `Prompt`, and finds the prompt of an ordinal of the run.

    row {"prompt": text | messages, …} ─▶ chat template ─▶ token ids ─▶ Prompt(tokens, the row without its prompt)
    ordinal ─▶ (epoch, place in the epoch) ─▶ permutation of the epoch ─▶ row ─▶ Prompt

Tasks call `render`. `render_rows` renders all rows before a run starts, so that a bad row is found then. The row inside
a `Prompt` has the fields of a sample (`data_source`, `reward_model`, `extra_info`, …) that reward functions read.
Rollouters ask `PromptStream` for the prompt of a ticket. Needs no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from freewheel.data.group import Array, Prompt
from freewheel.errors import ConfigError, DataError, format_value

log = logging.getLogger("freewheel.data")

Row = Mapping[str, Any]
"""Plain values by name, as read from a file."""
Message = Mapping[str, Any]
"""`{"role": …, "content": …}`."""
TooLong = Literal["filter", "truncate_left", "error"]

PROMPT_KEYS = ("prompt", "messages", "question")
"""Keys that may hold the text of a prompt. The first key that is present is used."""
PARAGRAPH = "\n\n"
"""Separates the system prompt from the question when there is no chat template."""

KEPT_EPOCHS = 4
"""Permutations kept in memory. Ordinals in flight may span the end of an epoch, or several ends if rows are few."""
SEED_BITS = 64


# -- rendering --------------------------------------------------------------------------------------------------------


class TokenizerLike(Protocol):
    """The part of a Hugging Face tokenizer that rendering needs."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = ...) -> Any: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How a run writes its prompts."""

    system_prompt: str | None = None
    """Placed first. It replaces the system prompt of a row."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """`auto` uses the tokenizer's template if it has one."""


PLAIN = Rendering()


def render(row: Row, tokenizer: TokenizerLike, rendering: Rendering = PLAIN) -> Prompt:
    """Return the prompt of a row. A row without text is a `DataError` that names its keys."""
    messages = conversation(row)
    if rendering.system_prompt is not None:
        has_system = bool(messages) and messages[0]["role"] == "system"
        messages = [{"role": "system", "content": rendering.system_prompt}, *messages[has_system:]]
    has_template = bool(tokenizer.chat_template)
    if rendering.chat_template == "on" and not has_template:
        raise ConfigError(
            "data.chat_template", "on", "this tokenizer has none: choose auto or off, or a model that was made for chat"
        )
    if has_template and rendering.chat_template != "off":
        text = tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template writes the special tokens itself
    else:
        ids = tokenizer(_join_messages(messages))["input_ids"]
    if not len(ids):
        raise DataError(
            f"prompt = {format_value(_join_messages(messages))} has no tokens: give it text, or remove the row"
        )
    kept = {key: value for key, value in row.items() if key not in PROMPT_KEYS}
    return Prompt(tokens=np.asarray(ids, np.int32), row=kept)


def conversation(row: Row) -> list[Message]:
    """Return the messages of a row. Plain text becomes one message of the user."""
    key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if key is None:
        names = f"{', '.join(PROMPT_KEYS[:-1])} or {PROMPT_KEYS[-1]}"
        raise DataError(f"a row has no {names}: its keys are {[*row]}; rename the column with the question to prompt")
    value = row[key]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    is_list = isinstance(value, Sequence | np.ndarray) and len(value) > 0
    if not is_list or not all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value):
        raise DataError(f"{key} = {format_value(value)}: give text, or a list of messages with role and content")
    return list(value)


def _join_messages(messages: Sequence[Message]) -> str:
    """Return the text of a prompt for a tokenizer without a chat template."""
    if any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"prompt = {format_value(messages)} has turns of an assistant: only a chat template can mark who speaks; "
            "use a tokenizer that has one, and data.chat_template=auto"
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
    """Return the row with all fields of a sample. Fields that the row already has keep their values."""
    for name in ("reward_model", "extra_info"):
        if not isinstance(row.get(name) or {}, Mapping):
            raise DataError(f"{name} = {format_value(row[name])}: give an object with named values")
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
    """Return the prompts of all rows, none longer than `max_prompt_tokens`.

    `filter` leaves longer prompts out and logs their number, `truncate_left` keeps their end, `error` refuses them. An
    error names the row by its position.
    """
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
                    "the limit, or choose too_long=filter or too_long=truncate_left"
                )
            if too_long == "filter":
                dropped += 1
                continue
            prompt = Prompt(tokens=prompt.tokens[-max_prompt_tokens:], row=prompt.row)
        kept.append(prompt)
    if dropped:
        log.warning(
            "%d of %d prompts left out: over max_prompt_tokens=%s (longest %d)",
            *(dropped, count, max_prompt_tokens, longest),
        )
    if not kept:
        remedy = f"raise max_prompt_tokens = {max_prompt_tokens}, the longest has {longest}" if count else "give rows"
        raise DataError(f"none of {count} prompts is left: {remedy}")
    return kept


# -- the order of prompts ---------------------------------------------------------------------------------------------


class PromptStream:
    """Equal prompts, seeds and settings give the same prompt for an ordinal: on any machine, with any version of numpy,
    in any order of calls. Each epoch has every prompt exactly once.

    This is a pure mapping without a position, so a resumed run has nothing to skip, save or replay.
    """

    def __init__(self, prompts: Sequence[Any], *, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        """With `epochs=None` the stream is endless."""
        if not len(prompts):
            raise DataError("prompts = []: a prompt stream needs at least one prompt")
        if not isinstance(seed, int) or not 0 <= seed < 1 << SEED_BITS:
            raise ConfigError("seed", seed, f"give a whole number from 0 to 2**{SEED_BITS} - 1")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return len(self._prompts)

    @property
    def total(self) -> int | None:
        """Number of ordinals; None if the stream is endless."""
        return None if self._epochs is None else self._epochs * len(self._prompts)

    def place(self, ordinal: int) -> tuple[int, int]:
        """Return the epoch and the index of the prompt. An ordinal past the end is an IndexError."""
        if ordinal < 0 or (self.total is not None and ordinal >= self.total):
            raise IndexError(f"ordinal {ordinal} of a stream with {self.total} prompts")
        epoch, index = divmod(ordinal, len(self._prompts))
        if self._shuffle:
            index = int(_permutation(len(self._prompts), self._seed, epoch)[index])
        return epoch, index

    def prompt(self, ordinal: int) -> Any:
        return self._prompts[self.place(ordinal)[1]]


@lru_cache(maxsize=KEPT_EPOCHS)
def _permutation(size: int, seed: int, epoch: int) -> Array:
    """Return row numbers sorted by a hash of (seed, epoch, row).

    numpy's own shuffles may change between versions, and a run resumed under another version would then skip some
    prompts and repeat others. The hash has no two equal values, so the order is fixed.
    """
    start = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
    return np.argsort(_mix(start + np.arange(size, dtype=np.uint64)), kind="stable")


def _mix(values: Array) -> Array:
    """Return splitmix64 (Steele, Lea, Flood 2014) of each value: a bijection on 64 bits. Each input bit changes half of
    the output bits. Overflow is intended."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed
