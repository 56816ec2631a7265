"""Reads a `TrainConfig` from a YAML file, a command line or plain values, and writes it.

    schema defaults ◀─ NAME.yaml (--config-path, or the package's own) ◀─ key=value overrides ◀─ Python values
           └─ `${…}` filled in ─▶ plain values ─▶ `to_config`: checks each key and each pair of keys

    {"trainer": {"total_step": 5}} ─▶ trainer.total_step = 5: unknown key; did you mean trainer.total_steps?

Files have no defaults: those are in the schema. `to_yaml` writes a run's configuration, `load` reads it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
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
_DEFAULTS, _SELF = "defaults", "_self_"
"""A file's key that lists the files below it, and the file's own place among them: the last one unless it is listed."""
_GRAMMAR = "write key=value; text that begins with a bracket needs quotes: 'data.system_prompt=\"[a] b\"'"
_NO_SPACE = re.compile(r"([{,]\s*[\w.-]+):(?=\S)(?!//)")
"""`{rank:16}` in an override, which YAML would read as one name."""
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_VARIABLE = "oc.env:"
"""`${oc.env:NAME}` is the environment variable NAME, and `${oc.env:NAME,8}` is 8 where it is not set."""


# -- reading ----------------------------------------------------------------------------------------------------------


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
    return to_config(merge(overrides, config_path=config_path, config_name=config_name, base=base, settings=settings))


def merge(
    overrides: Sequence[str] = (),
    *,
    config_path: str | os.PathLike[str] | None = None,
    config_name: str | None = None,
    base: TrainConfig | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what `compose` checks: plain values by section, one for each key that is given."""
    values: dict[str, Any] = (base or TrainConfig()).to_dict()
    if base is None:
        _set_all(values, _mark(_read_with_defaults(*_find(config_path, config_name))))
    for text in overrides:
        _override(values, text)
    values = _fill_in(values, values)
    _set_all(values, settings or {})
    return values


def _set_all(values: dict[str, Any], given: Mapping[Any, Any]) -> None:
    for key, value in given.items():
        _set(values, str(key), value, "")


def _set(values: dict[str, Any], key: str, value: Any, path: str) -> None:
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


def _override(values: dict[str, Any], text: str) -> None:
    """Apply one argument of a command line: `key=value` (`+` before it is Hydra's and changes nothing) or `~key`."""
    key, gives, raw = text.partition("=")
    key, resets = key.lstrip("+~"), key.startswith("~")
    if not key or not (gives or resets):
        raise ConfigError("override", _hide_key(text), _GRAMMAR)
    if resets:
        *sections, name = key.split(".")
        try:
            del _find_value(values, sections)[name]  # `to_config` fills in the default
        except (KeyError, TypeError):
            raise ConfigError("override", text, "there is nothing to restore: no such key") from None
        return
    try:
        value = _load_yaml(_NO_SPACE.sub(r"\1: ", raw)) if raw else ""
    except (yaml.YAMLError, ValueError):
        raise ConfigError("override", _hide_key(text), _GRAMMAR) from None
    if isinstance(value, dict) and not raw.lstrip().startswith("{"):
        value = raw  # text with a colon
    _set(values, key, _mark(value), "")


def _hide_key(override: str) -> object:
    """Return an override for a message, hidden if it sets an API key, also in a mapping: `reward.judge={api_key: …`."""
    names = [override.partition("=")[0], *re.findall(r"([\w-]+)\s*[:=]", override)]
    return next((hidden for name in names if (hidden := shown_value(name, override)) != override), override)


def configs(folder: Path = PACKAGED) -> list[str]:
    """Return the names that `config_name` may have."""
    return sorted(file.stem for file in folder.glob(f"*{_SUFFIX}"))


def _find(config_path: str | os.PathLike[str] | None, config_name: str | None) -> tuple[Path, str]:
    """Return the folder and the name of a configuration file."""
    folder = PACKAGED if config_path is None else Path(config_path).expanduser().absolute()
    name = (config_name or _DEFAULT_NAME).removesuffix(_SUFFIX)
    if not folder.is_dir():
        why = f"there is no such folder; relative paths start at {Path.cwd()}"
        if folder.is_file():
            why = "that is a file: give its folder, and its name with --config-name"
        raise ConfigError("--config-path", str(config_path), why)
    if not (folder / f"{name}{_SUFFIX}").is_file():
        there = ", ".join(configs(folder)) or f"no {_SUFFIX} file"
        remedy = f"freewheel comes with {there}; your own file needs --config-path DIR"
        if config_path is not None:
            remedy = f"{folder} comes with {there}"
        raise ConfigError("--config-name", config_name or _DEFAULT_NAME, remedy)
    return folder, name


def _read_with_defaults(folder: Path, name: str, inside: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a file and those that it lists: from its folder, or from the package. `inside`: the files that list it."""
    path = next((path for at in (folder, PACKAGED) if (path := at / f"{name}{_SUFFIX}").is_file()), None)
    if path is None or name in inside:
        why = "it lists itself" if path else f"there is no {name}{_SUFFIX} in {folder}"
        raise ConfigError(f"{inside[-1]}{_SUFFIX}: {_DEFAULTS}", name, f"{why}: list names of other files")
    own, merged = _read(path), dict[str, Any]()
    listed = own.pop(_DEFAULTS, None) or []
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{path.name}: {_DEFAULTS}", listed, f"list names of files, such as [sync, {_SELF}]")
    for one in listed if _SELF in listed else [*listed, _SELF]:
        _set_all(merged, own if one == _SELF else _read_with_defaults(folder, one, (*inside, name)))
    return merged


# -- references -------------------------------------------------------------------------------------------------------


class _Reference(str):
    """Text of a file or of a command line with `${…}` in it. The same text of an earlier run is plain text."""


def _mark(value: Any) -> Any:
    if isinstance(value, str):
        return _Reference(value) if _REFERENCE.search(value) else value
    if isinstance(value, dict):
        return {key: _mark(one) for key, one in value.items()}
    return [_mark(one) for one in value] if isinstance(value, list) else value


def _fill_in(value: Any, values: Mapping[str, Any]) -> Any:
    """Replace each `${key}` and `${oc.env:NAME}` in a value. One that is the whole text keeps its type."""
    if isinstance(value, dict):
        return {key: _fill_in(one, values) for key, one in value.items()}
    if isinstance(value, list):
        return [_fill_in(one, values) for one in value]
    if not isinstance(value, _Reference):
        return value
    try:
        whole = _REFERENCE.fullmatch(value)
        return _look_up(whole[1], values) if whole else _REFERENCE.sub(lambda one: str(_look_up(one[1], values)), value)
    except (KeyError, TypeError, RecursionError):
        raise ConfigError("configuration", str(value), "correct ${…}: give a full key, or oc.env:NAME") from None


def _look_up(name: str, values: Mapping[str, Any]) -> Any:
    if not name.startswith(_VARIABLE):
        return _fill_in(_find_value(values, name.split(".")), values)
    variable, has_default, default = name.removeprefix(_VARIABLE).partition(",")
    text = os.environ.get(variable, default) if has_default else os.environ[variable]
    return _load_yaml(text)


def _find_value(values: Any, path: Sequence[str]) -> Any:
    """Return the value at a path. Raises a `KeyError` or a `TypeError` if there is none."""
    return reduce(lambda inner, name: inner[name], path, values)


# -- files ------------------------------------------------------------------------------------------------------------


def to_yaml(config: TrainConfig) -> str:
    """Write every key with its value, in the schema's order."""
    return yaml.dump(config.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def load(path: str | os.PathLike[str]) -> TrainConfig:
    """Read what `to_yaml` wrote, with all checks. References in it are not filled in, because the run may be somebody
    else's."""
    values = _read(Path(path), _RunLoader)
    try:
        return to_config(values)
    except ConfigError as error:
        raise error.renamed(f"{path}: {error.key}") from None


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return dict(super().construct_mapping(node, deep))


class _RunLoader(_Loader):
    """Refuses aliases: `to_yaml` writes none, and a few lines of them can expand beyond all memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(problem="aliases are not allowed here", problem_mark=mark)
        return super().compose_node(parent, index)


# A run directory may be named after a day: 2026-11-19 is text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


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


def _load_yaml(text: str, loader: type[_Loader] = _Loader) -> Any:
    return yaml.load(text, Loader=loader)  # a SafeLoader


def _read(path: Path, loader: type[_Loader] = _Loader) -> dict[Any, Any]:
    try:
        values = _load_yaml(path.read_text(encoding="utf-8"), loader)
    except OSError as error:
        raise ConfigError("config", str(path), f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("config", str(path), "the file is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # a list as a key, or too many brackets
        raise _bad_yaml(error, path) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("config", str(path), "the file must hold keys with values")
    return values


def _bad_yaml(error: Exception, path: Path) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    return ConfigError("config", where, f"this is not YAML: {problem}; correct the line")


def find_differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the values in two configurations, by dotted key, where they differ."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, msgspec.Struct) and isinstance(after, msgspec.Struct):
            found |= find_differences(before, after, f"{path}{name}.")
        elif before != after:
            found[path + name] = (before, after)
    return found


_MANDATORY = "???"
"""Marks a value in a file that the user must give."""
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
