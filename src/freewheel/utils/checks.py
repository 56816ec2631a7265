"""Checks of settings. Each raises a `ConfigError` that names the key, the value and the remedy.

drain_s: Positive = 25.0 ── check_fields(limits) ──▶ ConfigError: drain_s = 0: give a finite number above 0
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from freewheel.errors import ConfigError

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(pattern=r"\S")]
"""Types of fields for `check_fields`. A `Text` is not blank."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_fields(settings: msgspec.Struct, prefix: str = "") -> None:
    """Check each field of a struct that Python code made against its annotation; msgspec does so when it decodes.

    Numbers must be finite, and text must have no lone surrogates.
    """
    for field in _fields(type(settings)):
        value = getattr(settings, field.name)
        if not _fits(value, field.type):
            raise ConfigError(prefix + field.name, shown_value(field.name, value), f"give {describe(field.type)}")


_fields = cache(msgspec.structs.fields)


def _fits(value: Any, kind: Any) -> bool:
    plain = float(value) if isinstance(value, float) else value  # msgspec refuses numpy's subclass of float
    try:
        msgspec.convert(plain, kind)
    except msgspec.ValidationError:
        return False
    return not (isinstance(plain, float) and not math.isfinite(plain)) and not (
        isinstance(plain, str) and _LONE_SURROGATE.search(plain)
    )


def describe(kind: Any) -> str:
    """Describe the values of a type: `a whole number of at least 1, auto or None`."""
    words = [word for one in alternatives(kind) for word in _words(one)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _words(kind: Any) -> list[str]:
    bounds = Meta()
    if get_origin(kind) is Annotated:
        kind, bounds = get_args(kind)
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    words = _TYPES.get(get_origin(kind) or kind) or f"a {getattr(kind, '__name__', kind)}"
    if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        words += f" of {len(get_args(kind))}"
    if bounds.pattern is not None:
        words += " that is not blank"
    if bounds.ge is not None and bounds.le is not None:
        return [f"{words} from {bounds.ge} to {bounds.le}"]
    if bounds.ge is not None:
        words += f" of at least {bounds.ge}"
    if bounds.gt is not None:
        words += f" above {bounds.gt}"
    return [words + (f" and at most {bounds.le}" if bounds.le is not None else "")]


_TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "None",
}


def check_number(
    key: str, value: Any, *, low: float = -math.inf, above: float = -math.inf, optional: bool = False
) -> None:
    if value is None and optional:
        return
    wanted = f"above {above:g}" if above > -math.inf else f"of at least {low:g}" if low > -math.inf else ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(key, value, f"give a finite number {wanted}".rstrip() + (", or None" if optional else ""))
    if value < low or value <= above:
        raise ConfigError(key, value, f"it must be {wanted}")


def check_integer(key: str, value: Any, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(key, value, f"give a whole number of at least {low}")
    if value > high:
        raise ConfigError(key, value, f"give at most {high}")


def shown_value(key: str, value: object) -> object:
    """A value that an error may show: a misspelt `api_key` is still a key."""
    names = ("key", "token", "secret", "password", "auth")
    is_secret = any(name in key.lower() for name in names) or difflib.get_close_matches(key.lower(), ["api_key"])
    return "<hidden>" if is_secret else value


def read_settings(key: str, file: Path) -> dict[str, Any]:
    """Return the settings in a .json or .toml file. `key` names the setting that names the file."""
    kind = "JSON" if file.suffix == ".json" else "TOML"
    try:
        content = file.read_bytes()
        values = msgspec.json.decode(content) if kind == "JSON" else tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(key, str(file), f"the file cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(key, str(file), f"the file is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(key, str(file), "the file must hold one object with settings")
    return values
