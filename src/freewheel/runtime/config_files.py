"""Reads a `TrainConfig` from a YAML file, a command line or plain values, and writes it.

    schema defaults ◀─ NAME.yaml (--config-path, or the package's own) ◀─ key=value overrides
           └─ Hydra's compose API ─▶ plain values ─▶ `to_config`: checks each key and each pair of keys

    {"trainer": {"total_step": 5}} ─▶ trainer.total_step = 5: unknown key; did you mean trainer.total_steps?

Files have no defaults: those are in the schema. Hydra only merges: the working directory, logging and an application's
own Hydra state stay as they are. `to_yaml` writes a run's configuration, `load` reads it. `compose` needs hydra-core.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import yaml

from freewheel.errors import ConfigError
from freewheel.runtime.config import TrainConfig
from freewheel.utils.checks import alternatives, describe, shown_value

PACKAGED = Path(__file__).parent / "configs"
_DEFAULT_NAME = "default"
_SUFFIX = ".yaml"
_HYDRA_ONLY_MERGES = "Hydra merges settings here and does nothing else: leave it out"

_ROOT, _SCHEMA = "_freewheel_root", "_freewheel_schema"
"""Names in Hydra's config store during a composition."""
_LOCK = threading.Lock()
"""The config store belongs to the whole process."""
_GRAMMAR = "write key=value, with quotes around text that has commas, brackets or quotes: 'data.system_prompt=\"a, b\"'"


def compose(
    overrides: Sequence[str] = (),
    *,
    config_path: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
    base: TrainConfig | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return the configuration of a run.

    `config_path`: a folder, relative to the working directory; None: the package's own. `config_name`: a file in it,
    with or without `.yaml`. `base` replaces the schema's defaults, and then no file is read. `settings`: Python values
    by key, flat (`{"trainer.total_steps": 3}`) or nested; they override everything else.
    """
    values: dict[Any, Any] = (base or TrainConfig()).to_dict()
    if not base or overrides:  # else there is nothing for Hydra to merge
        folder, name = (PACKAGED, None) if base else _find(config_path, config_name)
        if name is not None:
            _check_file(folder / f"{name}{_SUFFIX}")
        values = _merge(values, folder, name, _parse(overrides, folder))
    for key, value in (settings or {}).items():
        _set(values, str(key), value, "")
    return to_config(values)


def _set(values: dict[Any, Any], key: str, value: Any, path: str) -> None:
    """Set one key, dotted or a section with keys inside, in nested values."""
    section, dot, rest = key.partition(".")
    full = f"{path}.{section}".removeprefix(".")
    if dot:
        inner = values.get(section)
        values[section] = dict(inner) if isinstance(inner, Mapping) else {}
        _set(values[section], rest, value, full)
    elif isinstance(value, Mapping) and isinstance(values.get(key), Mapping) and full not in mapping_keys():
        for name, one in value.items():
            _set(values, f"{key}.{name}", one, path)
    else:
        values[key] = value


def to_yaml(config: TrainConfig) -> str:
    """Write every key with its value, in the schema's order."""
    return yaml.dump(config.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def load(path: str | os.PathLike[str]) -> TrainConfig:
    """Read what `to_yaml` wrote, with all checks. Nothing in it is interpolated."""
    values = _read(Path(path))
    try:
        return to_config(values)
    except ConfigError as error:
        raise error.renamed(f"{path}: {error.key}") from None


def configs(folder: Path = PACKAGED) -> list[str]:
    """Return the names that `config_name` may have."""
    return sorted(file.stem for file in folder.glob(f"*{_SUFFIX}"))


def _find(config_path: str | os.PathLike[str] | None, config_name: str | None) -> tuple[Path, str]:
    folder = PACKAGED if config_path is None else Path(config_path).expanduser().absolute()
    name = (config_name or _DEFAULT_NAME).removesuffix(_SUFFIX)
    if not folder.is_dir():
        remedy = "that is a file: give its folder, and its name with --config-name" if folder.is_file() else (
            f"there is no such folder; relative paths start at {Path.cwd()}"
        )  # fmt: skip
        raise ConfigError("--config-path", os.fspath(config_path or folder), remedy)
    if not (folder / f"{name}{_SUFFIX}").is_file():
        where = "freewheel comes" if config_path is None else f"{folder} comes"
        there = ", ".join(configs(folder)) or f"no {_SUFFIX} file"
        remedy = f"{where} with {there}"
        if config_path is None:
            remedy += "; a file of your own needs --config-path DIR"
        raise ConfigError("--config-name", config_name or _DEFAULT_NAME, remedy)
    return folder, name


def _check_file(path: Path) -> None:
    """Refuse what Hydra would accept silently, or report without file and line."""
    values = _read(path)
    if "hydra" in values:
        raise ConfigError(f"{path.name}: hydra", "…", _HYDRA_ONLY_MERGES)


def _parse(overrides: Sequence[str], folder: Path) -> list[str]:
    """Translate overrides for Hydra. Any key may be set here; `to_config` refuses unknown ones with a suggestion. A
    free mapping (`rollout.vllm`, `reward.judge`, …) that is given whole replaces the earlier one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException

    parser, whole = OverridesParser.create(), mapping_keys()
    found: list[str] = []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except HydraException as error:
            reason = "" if _hide_key(text) != text else f"{_reason(error)}; "
            raise ConfigError("override", _hide_key(text), reason + _GRAMMAR) from None
        key = override.key_or_group
        if not key:
            raise ConfigError("override", text, _GRAMMAR)
        if key.partition(".")[0] == "hydra":
            raise ConfigError(key, text.partition("=")[2], _HYDRA_ONLY_MERGES)
        if override.is_sweep_override():
            raise ConfigError(key, text.partition("=")[2], "a run takes one value; a list is written [1,2]")
        is_group = override.package is not None or (folder / key).is_dir()
        sets = override.type in (OverrideType.CHANGE, OverrideType.ADD) and not is_group
        if sets and key in whole and isinstance(override.value(), dict):
            found.append(f"++{key}=null")  # Hydra would merge it into the earlier mapping, so nothing could be removed
        found.append(f"++{text.lstrip('+')}" if sets else text)
    return found


def _merge(values: Mapping[str, Any], folder: Path, name: str | None, overrides: list[str]) -> dict[Any, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    defaults = [_SCHEMA, *([f"{name}@_global_"] if name is not None else []), "_self_"]
    # A user's file may extend one of the package's.
    root = {"defaults": defaults, "hydra": {"searchpath": [f"file://{PACKAGED}"]}}
    try:
        with (
            _LOCK,
            _borrow_hydra({_ROOT: root, _SCHEMA: _escape(values)}),
            initialize_config_dir(config_dir=str(folder), job_name="freewheel", version_base="1.3"),
        ):
            merged = OmegaConf.to_container(hydra_compose(_ROOT, overrides=overrides), resolve=True)
    except yaml.YAMLError as error:
        raise _bad_yaml(error, folder) from None
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "configuration")
        raise ConfigError(key, _reason(error), "correct ${…}: give a full key, or oc.env:NAME") from None
    except HydraException as error:
        raise _composition_error(error, overrides) from None
    assert isinstance(merged, dict)
    return merged


@contextmanager
def _borrow_hydra(nodes: Mapping[str, Any]) -> Iterator[None]:
    """Use Hydra's process-wide state with `nodes` in its config store, and restore it at the end."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    store = ConfigStore.instance()
    applications = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        for name, node in nodes.items():
            store.store(name=name, node=node)
        yield
    finally:
        GlobalHydra.instance().hydra = applications  # a new instance by now, because Hydra restores copies
        for name in nodes:
            store.repo.pop(f"{name}{_SUFFIX}", None)


def _composition_error(error: Exception, overrides: list[str]) -> ConfigError:
    message = _reason(error)
    for text in overrides:
        if text.lstrip("+~").partition("=")[0] in message:
            return ConfigError("override", _hide_key(text), message if _hide_key(text) == text else _GRAMMAR)
    return ConfigError("configuration", type(error).__name__, message)


def _hide_key(override: str) -> object:
    """Return an override for a message, hidden if it sets an API key, also in a mapping: `reward.judge={api_key: …`."""
    names = [override.partition("=")[0], *re.findall(r"([\w-]+)\s*[:=]", override)]
    return next((hidden for name in names if (hidden := shown_value(name, override)) != override), override)


def _escape(value: Any) -> Any:
    """Escape `${` in values that are already resolved."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {key: _escape(one) for key, one in value.items()}
    return [_escape(one) for one in value] if isinstance(value, list | tuple) else value


def _reason(error: Exception) -> str:
    """Return the message of Hydra or OmegaConf without its references to documentation."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [
        line for line in lines if line and not line.startswith(("Error parsing", "See http", "full_key", "object_"))
    ]
    return " ".join(told)


class _Loader(yaml.SafeLoader):
    """Reads YAML as OmegaConf does: `1e-6` is a number, and duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number, and line breaks that YAML would fold."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    breaks = any(one in value for one in "\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if breaks else None)


_Dumper.add_representer(str, _text)

for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+\Z"),
        list("-+0123456789"),
    )


def _read(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigError("config", str(path), f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("config", str(path), "the file is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise _bad_yaml(error, path) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("config", str(path), "the file must hold keys with values")
    return values


def _bad_yaml(error: yaml.YAMLError, path: Path) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or _reason(error)
    name = getattr(mark, "name", "<")
    where = str(path) if name.startswith("<") else name  # YAML read from a string has no file name
    return ConfigError(
        "config", f"{where}:{mark.line + 1}" if mark else where, f"this is not YAML: {problem}; correct the line"
    )


def find_differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values in both, by dotted key, where they differ."""
    return dict(_walk_differences(old, new, ""))


def _walk_differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
            yield from _walk_differences(before, after, f"{path}{name}.")
        elif before != after:
            yield f"{path}{name}", (before, after)


_MANDATORY = "???"
"""Marks a value in a Hydra file that the user must give."""
_SWITCHES = {True: "on", False: "off"}
"""YAML reads a bare `on` or `off` as a boolean; some keys want the words."""

_LARGEST_EXACT = 2.0**53
"""Floats up to this represent whole numbers exactly."""

_NAME_AND_NUMBER = ("reward.on_failure",)
"""Keys whose text is a name and a number. YAML reads an unquoted `fallback: -1.0` as a mapping."""


def to_config(values: Mapping[Any, Any]) -> TrainConfig:
    """Check plain values key by key, then as a whole. Every error is a `ConfigError` that names the key."""
    plain = _check(values, TrainConfig, "")
    try:
        return msgspec.convert(plain, TrainConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


def all_keys() -> list[str]:
    """Return every dotted key, without sections."""
    return [key for key, _ in walk_keys()]


def mapping_keys() -> list[str]:
    """Return the keys whose value is a mapping with free names."""
    return [key for key, kind in walk_keys() if any(get_origin(one) is dict for one in alternatives(kind))]


def walk_keys(struct: Any = TrainConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its type, without sections."""
    for name, kind in _hints(struct).items():
        inner = section_of(kind)
        if inner is None:
            yield path + name, kind
        else:
            yield from walk_keys(inner, f"{path}{name}.")


def _check(value: Any, kind: Any, path: str) -> Any:
    """Check a value. Sections are checked key by key, so that an error can name the key."""
    section, kinds = section_of(kind), alternatives(kind)
    if section is not None and (value is not None or type(None) not in kinds):
        return _check_section({} if value is None else value, section, path)
    if get_origin(kind) is dict and isinstance(value, Mapping) and section_of(get_args(kind)[1]):
        return {str(name): _check(one, get_args(kind)[1], f"{path}.{name}") for name, one in value.items()}
    if isinstance(value, bool) and any(_SWITCHES[value] in get_args(one) for one in kinds):
        return _SWITCHES[value]
    if path in _NAME_AND_NUMBER and isinstance(value, Mapping) and len(value) == 1:
        return ": ".join(map(str, *value.items()))
    if value == _MANDATORY:
        raise ConfigError(path, value, "the file marks this value as one that you must give")
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        # YAML reads 1e9 as a float.
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT
        words = in_words(kind)
        meant = f": {int(value)}" if is_whole and "a whole number" in words else ""
        raise ConfigError(path, shown_value(path, value), f"give {words}{meant}") from None
    return value


def _check_section(value: Any, section: Any, path: str) -> dict[str, Any]:
    hints = _hints(section)
    if not isinstance(value, Mapping):
        known = ", ".join(hints)
        raise ConfigError(path, shown_value(path, value), f"this is a section: give its keys, which are {known}")
    found: dict[str, Any] = {}
    for name, one in value.items():
        inner = f"{path}.{name}".removeprefix(".")
        if name not in hints:
            raise ConfigError(inner, shown_value(inner, one), f"unknown key; {_suggestion(inner, hints)}")
        found[name] = _check(one, hints[name], inner)
    return found


def _suggestion(path: str, siblings: Mapping[str, Any]) -> str:
    """Suggest a similar name in the section, else the same or a similar one elsewhere, else list all names."""
    section, _, name = path.rpartition(".")
    here = {one: f"{section}.{one}".removeprefix(".") for one in siblings}
    for names in (here, {key.rpartition(".")[2]: key for key in all_keys()}):
        if near := difflib.get_close_matches(name, names, n=1):
            return f"did you mean {names[near[0]]}?"
    return f"{f'{section} has' if section else 'there are'} {', '.join(siblings)}"


def in_words(kind: Any) -> str:
    """Describe the values of a type as YAML has them."""
    return re.sub(r"\bNone\b", "null", describe(kind))


@cache
def _hints(struct: Any) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def section_of(kind: Any) -> Any | None:
    """Return the section (a struct) that a field holds, directly or optionally."""
    found = (one for one in alternatives(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct))
    return next(found, None)
