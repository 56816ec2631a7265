"""Checks of single settings. Each raises a `ConfigError` that names the key, the value and the remedy."""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

from freewheel.errors import ConfigError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_number(
    key: str,
    value: Any,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
    optional: bool = False,
) -> None:
    if value is None and optional:
        return
    wanted = f"above {above:g}" if above > -math.inf else f"of at least {low:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(key, value, f"give a finite number {wanted}" + (", or None" if optional else ""))
    if value < low or value <= above:
        raise ConfigError(key, value, f"it must be {wanted}")
    if value > high:
        raise ConfigError(key, value, f"give at most {high:g}")


def check_integer(
    key: str, value: Any, *, low: int, high: int | None = None, auto: bool = False, optional: bool = False
) -> None:
    """`auto`: the word `auto` is also allowed. `optional`: None is."""
    if (value is None and optional) or (auto and value == "auto"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        also = ", or None" if optional else ", or 'auto'" if auto else ""
        raise ConfigError(key, value, f"give a whole number of at least {low}{also}")
    if high is not None and value > high:
        raise ConfigError(key, value, f"give at most {high}")


def check_text(key: str, value: Any, remedy: str, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip() or _LONE_SURROGATE.search(value):
        raise ConfigError(key, value, remedy)


def check_choice(key: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ConfigError(key, value, f"choose {', '.join(choices[:-1])} or {choices[-1]}")


def check_share(key: str, value: Any) -> None:
    check_number(key, value, low=0)
    if value > 1:
        raise ConfigError(key, value, "it is a share: give a number from 0 to 1")


def shown_value(key: str, value: object) -> object:
    """A value that an error may show: a misspelt `api_key` is still a key."""
    names = ("key", "token", "secret", "password", "auth")
    is_secret = any(name in key.lower() for name in names) or difflib.get_close_matches(key.lower(), ["api_key"])
    return "<hidden>" if is_secret else value
