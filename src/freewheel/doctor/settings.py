"""Every setting that `freewheel train` would refuse, not the first alone.

    overrides, a file ─▶ read_config ─▶ a config
         ▲                   └─ refused: told, and left out ─┐
         └───────────────────────────────────────────────────┘

What follows from that alone, a second word about the same key, is not told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freewheel.errors import ConfigError
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.run_dir import RESUME, is_resume
from freewheel.runtime.starting import read_config

GRAMMAR = "override"
"""The key of an override that cannot be read."""


def read_all(
    overrides: Sequence[str], config_path: str | None, config_name: str | None
) -> tuple[TrainConfig | None, list[ConfigError]]:
    """What holds without what is refused; None where that cannot be left out, such as a file that is not YAML."""
    left, found = list(overrides), list[ConfigError]()
    read = _read(left, config_path, config_name)
    while isinstance(read, ConfigError):
        refused = read
        if refused.key != GRAMMAR and any(refused.key == told.key for told in found):
            return None, found
        found.append(refused)
        for rest in _without(left, refused.key, in_file=bool(config_path or config_name)):
            read = _read(rest, config_path, config_name)
            if _settles(read, refused):
                left = rest
                break
        else:
            return None, found
    return read, found


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
    """Ways to leave out what a key is refused for: what sets it, what a file has for it, and what it contradicts. Never
    the run that goes on: what is left would be said of another run."""
    if key == RESUME:
        return
    others = [override for override in overrides if is_resume(override) or not _sets(override, key)]
    if len(others) < len(overrides):
        yield others
    if in_file:  # which may have another one that is wrong
        yield [*others, f"~{key}"]
    for place, override in enumerate(overrides):
        if not is_resume(override):
            yield [*overrides[:place], *overrides[place + 1 :]]


def _sets(override: str, key: str) -> bool:
    """The key, or what it is a part of."""
    given = override.lstrip("+~").partition("=")[0]
    return f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.")
