"""Flags that several commands share, each with one name and one help text, and the judge's configuration from flags.

    @flags(PANEL, flag("model", str, "…"), …)     the function receives as keywords the flags that are given
    def judge_from_flags(**given) -> JudgeConfig

    @takes(argument("source", str, "IN.jsonl", "…"), flag("host", str, "…"), judge=judge_from_flags)
    def serve(source: str, host: str | None, judge: JudgeConfig)

A command receives None for a flag that is not given. It has the flags of `judge_from_flags` as well, and receives what
that function returns as `judge`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from freewheel.cli.console import plain_errors
from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.parse import make_reader
from freewheel.judge.rubric import PARSERS
from freewheel.utils.checks import read_settings

T = TypeVar("T")

CONFIG_PANEL = "Configuration"
JUDGE_PANEL = "Judge"
KEY_HELP = "The environment variable that holds the judge's key. A key is never a flag: flags show in ps."

# -- flags as a table -------------------------------------------------------------------------------------------------


def flag(
    name: str, kind: Any, text: str, *names: str, panel: str | None = None, default: Any = None, **options: Any
) -> inspect.Parameter:
    """A flag that a function receives as `name`. `names`: what users type, if not --NAME. `options`: of Typer."""
    if kind is bool:
        names, default = names or (f"--{name.replace('_', '-')}",), False
    elif default is None:
        kind |= None
    option = typer.Option(*names, help=text, rich_help_panel=panel, **options)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def argument(name: str, kind: Any, metavar: str, text: str) -> inspect.Parameter:
    """A positional argument. `metavar` in brackets makes it optional: the function then receives None without it."""
    is_optional = metavar.startswith("[")
    given = typer.Argument(metavar=metavar, help=text, show_default=False)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if is_optional else inspect.Parameter.empty,
        annotation=Annotated[kind | None if is_optional else kind, given],
    )


def flags(panel: str, *parameters: inspect.Parameter) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a function these flags. They are listed under `panel` unless they name another."""
    for parameter in parameters:
        (option,) = parameter.annotation.__metadata__
        option.rich_help_panel = option.rich_help_panel or panel

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return make

    return decorate


def takes(
    *own: inspect.Parameter, **makers: Callable[..., Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command its arguments and flags, and those of `makers`. It receives their results under their names."""
    shared = {name: inspect.signature(make).parameters for name, make in makers.items()}
    parameters = [*own, *(parameter for flags in shared.values() for parameter in flags.values())]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            with plain_errors():
                for name, make in makers.items():
                    taken = {flag: values.pop(flag) for flag in shared[name]}
                    values[name] = make(**{flag: value for flag, value in taken.items() if is_given(value)})
            command(**values)

        run.__annotations__ = {}  # Typer prefers them to the signature
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def is_given(value: Any) -> bool:
    """Whether a flag has a value. 0 is one."""
    return value is not None and value is not False and value != []


# -- the judge --------------------------------------------------------------------------------------------------------

LEFT_OUT = "none"
"""Leaves the temperature out of requests, as reasoning models require. TOML and flags have no null."""
RUBRICS = "A built-in rubric (integer, number, yes_no, json, criteria) or a .toml or .json file."
SAMPLING = "Another field of the request, such as reasoning_effort=low; repeat it for several."


CONFIG_FLAGS = (
    flag("config_path", str, "The folder with your YAML files. Default: the files that ship with freewheel.",
         metavar="DIR", panel=CONFIG_PANEL),
    flag("config_name", str, "The YAML file in that folder (default).", metavar="NAME", panel=CONFIG_PANEL),
)  # fmt: skip
KEY_FLAG = flag("api_key_env", str, KEY_HELP, metavar="NAME", panel=JUDGE_PANEL)
JSON_FLAG = flag("as_json", bool, "Print one JSON object.", "--json")


@flags(
    JUDGE_PANEL,
    flag("endpoint", list[str], "Base URL of an OpenAI-compatible judge; repeat it for several.", metavar="URL"),
    flag("model", str, "The model's name at the endpoint."),
    flag("rubric", str, RUBRICS, metavar="NAME|FILE"),
    KEY_FLAG,
    flag("concurrency", str, "auto finds the judge's limit; N is an upper bound; fixed:N uses N."),
    flag("temperature", str, "Sampling temperature; none leaves it out, as reasoning models require.",
         metavar="NUMBER|none"),
    flag("max_tokens", int, "Longest reply."),
    flag("sampling", list[str], SAMPLING, metavar="KEY=VALUE"),
    flag("price_in", float, "Price per million prompt tokens."),
    flag("price_out", float, "Price per million reply tokens."),
    flag("max_cost", float, "Stop before this run costs more. Needs prices."),
    flag("cache_dir", str, "Folder of the cache.", metavar="DIR"),
    flag("no_cache", bool, "Keep no replies: a repeated request is paid for again."),
    flag("config", Path, "Settings of the judge, as .toml or .json. Flags override them.", metavar="FILE"),
)  # fmt: skip
def judge_from_flags(
    config: Path | None = None,
    sampling: list[str] | None = None,
    temperature: str | None = None,
    no_cache: bool = False,
    price_in: float | None = None,
    price_out: float | None = None,
    **given: Any,
) -> JudgeConfig:
    """Return the settings of the `--config` file with the given flags on top, checked as at a start."""
    values = read_settings("config", config) if config is not None else {}
    values |= given
    if temperature is not None:
        values["temperature"] = _parse_temperature(temperature)
    if no_cache:
        values["cache"] = False
    if sampling:
        values["sampling"] = {**values.get("sampling", {}), **_parse_fields(sampling)}
    if values.get("temperature") == LEFT_OUT:
        values["temperature"] = None
    for key, example in (("endpoint", "--endpoint http://127.0.0.1:8000/v1"), ("model", "--model NAME")):
        if key not in values:
            raise ConfigError(key, None, f"not given; use {example}, or {key} in the --config file")
    if "api_key_env" in given:
        read_variable("api_key_env", given["api_key_env"])
    if (price_in is None) != (price_out is None):
        raise ConfigError("prices", values["model"], "give both --price-in and --price-out")
    if price_in is not None:
        values["prices"] = {**values.get("prices", {}), values["model"]: {"input": price_in, "output": price_out}}
    try:
        settings = JudgeConfig.from_dict(values)
    except ConfigError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError("config", str(config or "flags"), f"a value has the wrong type: {error}") from None
    _check_start(settings)
    return settings


def read_variable(key: str, name: str) -> str:
    """Return the value of an environment variable that a flag names."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(key, name, "that variable is not set in the environment")
    return value


def _parse_temperature(text: str) -> float | str:
    """Parse `--temperature`: a number, or `LEFT_OUT`."""
    try:
        return text if text == LEFT_OUT else float(text)
    except ValueError:
        raise ConfigError("--temperature", text, f"give a number, or {LEFT_OUT} to leave it out") from None


def _parse_fields(pairs: list[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` pairs. A value that is not JSON is text."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key.strip() or not equals:
            raise ConfigError("--sampling", pair, "give KEY=VALUE, as in reasoning_effort=low")
        try:
            fields[key.strip()] = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            fields[key.strip()] = text
    return fields


def _check_start(config: JudgeConfig) -> None:
    """Raise what would break the engine at its start, as a `ConfigError` with a remedy.

    The user's own parser may be in the current directory. It comes last in the search, so that nothing there replaces
    an installed module. The engine's process searches where this one does.
    """
    rubric = config.loaded_rubric
    if rubric.parser not in PARSERS:
        with contextlib.suppress(FileNotFoundError):  # the current directory was removed
            sys.path.append(str(Path.cwd()))
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for rows and reports, whatever the module prints
            make_reader(rubric)
    for endpoint in config.endpoints:
        config.key_for(endpoint)
