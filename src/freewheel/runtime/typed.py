"""From plain values to a `TrainConfig`, strictly: each key by its full name, and what would be right for it.

    {"trainer": {"total_step": 5}} ─▶ trainer.total_step = 5: unknown key; did you mean trainer.total_steps?

`freewheel.runtime.compose` calls it with what Hydra merged, or with what a run directory holds.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from freewheel.errors import ConfigError
from freewheel.runtime.config import TrainConfig
from freewheel.utils.checks import shown_value

MANDATORY = "???"
"""How a Hydra file marks a value that its user must give."""
SIMILAR = 0.6
"""How alike a name must be to be suggested; difflib's own cutoff."""
SWITCHES = {True: "on", False: "off"}
"""YAML reads a bare `on` and `off` as booleans; some keys mean the words."""

MOST_EXACT = 2.0**53
"""Up to which a float is exactly the whole number that it shows."""

PAIRS = ("reward.on_failure",)
"""Keys whose text is a name and a number, `fallback: -1.0`, which YAML reads as a mapping unless it is quoted."""


def to_config(values: Mapping[Any, Any]) -> TrainConfig:
    """Checked key by key, then as a whole. Every error is a `ConfigError` that names the key."""
    plain = _checked(values, TrainConfig, "")
    try:
        return msgspec.convert(plain, TrainConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


def all_keys(struct: Any = TrainConfig, path: str = "") -> Iterator[str]:
    """Every key in dotted form, sections left out."""
    for name, kind in _hints(struct).items():
        inner = section_of(kind)
        if inner is None:
            yield path + name
        else:
            yield from all_keys(inner, f"{path}{name}.")


def mapping_keys() -> frozenset[str]:
    """Keys whose value is a mapping with names of the user's choice."""
    return frozenset(_mappings(TrainConfig, ""))


def _mappings(struct: Any, path: str) -> Iterator[str]:
    for name, kind in _hints(struct).items():
        inner = section_of(kind)
        if inner is not None:
            yield from _mappings(inner, f"{path}{name}.")
        elif any(get_origin(one) is dict for one in _alternatives(kind)):
            yield path + name


def _checked(value: Any, kind: Any, path: str) -> Any:
    """The value with sections checked one by one, so that whatever is wrong can be named."""
    section = section_of(kind)
    if section is not None and (value is not None or type(None) not in get_args(kind)):
        return _checked_section({} if value is None else value, section, path)
    inner = _values_of(kind)
    if inner is not None and isinstance(value, Mapping):
        return {str(name): _checked(one, inner, f"{path}.{name}") for name, one in value.items()}
    if isinstance(value, bool) and SWITCHES[value] in _choices(kind):
        return SWITCHES[value]
    if path in PAIRS and isinstance(value, Mapping) and len(value) == 1:
        return ": ".join(map(str, *value.items()))
    if value == MANDATORY:
        raise ConfigError(path, value, "this value is marked as one that you must give")
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        meant = f": {int(value)}" if int in _alternatives(kind) and _is_whole(value) else ""
        raise ConfigError(path, shown_value(path, value), f"give {in_words(kind)}{meant}") from None
    return value


def _is_whole(value: Any) -> bool:
    """A float that means one whole number, such as YAML's 1e9."""
    return isinstance(value, float) and value.is_integer() and abs(value) <= MOST_EXACT


def _checked_section(value: Any, section: Any, path: str) -> dict[str, Any]:
    hints = _hints(section)
    if not isinstance(value, Mapping):
        known = ", ".join(hints)
        raise ConfigError(path, shown_value(path, value), f"this is a section: give its keys, which are {known}")
    found: dict[str, Any] = {}
    for name, one in value.items():
        inner = f"{path}.{name}".removeprefix(".")
        if name not in hints:
            raise ConfigError(inner, shown_value(inner, one), f"unknown key; {_suggestion(inner, hints)}")
        found[name] = _checked(one, hints[name], inner)
    return found


def _suggestion(path: str, siblings: Mapping[str, Any]) -> str:
    """A similar name in the same section, else the same or a similar one elsewhere, else what there is."""
    section, _, name = path.rpartition(".")
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=SIMILAR)
    if near:
        return f"did you mean {f'{section}.{near[0]}'.removeprefix('.')}?"
    elsewhere = {key.rpartition(".")[2]: key for key in all_keys()}
    near = difflib.get_close_matches(name, elsewhere, n=1, cutoff=SIMILAR)
    if near:
        return f"did you mean {elsewhere[near[0]]}?"
    return f"{f'{section} has' if section else 'there are'} {', '.join(siblings)}"


def in_words(kind: Any) -> str:
    """What a value of this type is, for a person."""
    words = [str(choice) for choice in _choices(kind)]
    for one in _alternatives(kind):
        name = get_origin(one) or one
        if name in _WORDS:
            words.append(f"a list of {len(get_args(one))}" if name is tuple else _WORDS[name])
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list of so many",
    dict: "a mapping",
    type(None): "null",
}


@cache
def _hints(struct: Any) -> dict[str, Any]:
    return get_type_hints(struct)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _choices(kind: Any) -> list[Any]:
    return [choice for one in _alternatives(kind) if get_origin(one) is Literal for choice in get_args(one)]


def section_of(kind: Any) -> Any | None:
    """The struct that a field holds, directly or as an option."""
    found = [one for one in _alternatives(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    return found[0] if found else None


def _values_of(kind: Any) -> Any | None:
    """The struct that a mapping has for values."""
    if get_origin(kind) is not dict:
        return None
    return section_of(get_args(kind)[1])
