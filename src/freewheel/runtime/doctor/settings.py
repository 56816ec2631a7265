"""Every setting that `freewheel train` would refuse, not the first alone.

    overrides, a file ─▶ read_config ─▶ a config
         ▲                   └─ refused: told, and left out ─┐
         └───────────────────────────────────────────────────┘

What follows from that alone, a second word about the same key, is not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freewheel.judge.errors import ConfigError
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.starting import read_config

GRAMMAR = "override"
"""The key of an override that cannot be read."""


def read_all(
    overrides: Sequence[str], config_path: str | None, config_name: str | None
) -> tuple[TrainConfig | None, list[ConfigError]]:
    """What holds without what is refused; None where that cannot be left out, such as a file that is not YAML."""
    left, found = list(overrides), list[ConfigError]()
    while True:
        read = _read(left, config_path, config_name)
        if isinstance(read, TrainConfig):
            return read, found
        if read.key != GRAMMAR and any(read.key == told.key for told in found):
            return None, found
        found.append(read)
        for rest in _without(left, read.key, in_file=bool(config_path or config_name)):
            if _settles(_read(rest, config_path, config_name), read):
                left = rest
                break
        else:
            return None, found


def _read(overrides: list[str], config_path: str | None, config_name: str | None) -> TrainConfig | ConfigError:
    try:
        return read_config(overrides, config_path, config_name).config
    except ConfigError as error:
        return error


def _settles(now: TrainConfig | ConfigError, before: ConfigError) -> bool:
    """Whether what was refused is refused no more."""
    if isinstance(now, TrainConfig):
        return True
    return str(now) != str(before) if before.key == GRAMMAR else now.key not in (before.key, GRAMMAR)


def _without(overrides: list[str], key: str, *, in_file: bool) -> Iterator[list[str]]:
    """Ways to leave out what a key is refused for: what sets it, what a file has for it, and what it contradicts."""
    others = [override for override in overrides if not _sets(override, key)]
    if len(others) < len(overrides):
        yield others
    if in_file:  # which may have another one that is wrong
        yield [*others, f"~{key}"]
    yield from ([*overrides[:place], *overrides[place + 1 :]] for place in range(len(overrides)))


def _sets(override: str, key: str) -> bool:
    """The key, or what it is a part of."""
    given = override.lstrip("+~").partition("=")[0]
    return f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.")
