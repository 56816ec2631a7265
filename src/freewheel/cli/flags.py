"""Flags that several commands share, each with one name and one help text, and the judge's configuration from flags.

    @takes(judge=judge_from_flags)              the command has the flags of `judge_from_flags` as well,
    def serve(judge: JudgeConfig, host=...)     and receives what that returns as `judge`

A flag that is not given leaves its setting out, so every default is the configuration's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from freewheel.cli.console import plain_errors
from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.parse import make_reader
from freewheel.judge.rubric import PARSERS

CONFIG_PANEL = "Configuration"

ConfigPathFlag = Annotated[
    str | None,
    typer.Option(
        help="The folder with your YAML files. Default: the files that ship with freewheel.",
        metavar="DIR",
        rich_help_panel=CONFIG_PANEL,
    ),
]
ConfigNameFlag = Annotated[
    str | None,
    typer.Option(help="The YAML file in that folder (default).", metavar="NAME", rich_help_panel=CONFIG_PANEL),
]


PANEL = "Judge"

KeyVariableFlag = Annotated[
    str | None,
    typer.Option(
        help="The environment variable that holds the judge's key. A key is never a flag: flags show in ps.",
        metavar="NAME",
        rich_help_panel=PANEL,
    ),
]
LEFT_OUT = "none"
"""Leaves the temperature out of requests, as reasoning models require. TOML and flags have no null."""


def takes(**made: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace one parameter of a command by the flags of a function. The command receives what the function returns.

    Typer reads flags from a signature, so the two signatures become one.
    """
    ((name, make),) = made.items()

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = inspect.signature(make, eval_str=True).parameters
        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            parameters += shared.values() if parameter.name == name else [parameter]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            with plain_errors():
                result = make(**{flag: given.pop(flag) for flag in shared})
            command(**{name: result}, **given)

        # Keyword parameters keep their order, which is that of the help, wherever their defaults are.
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
        return run

    return decorate


def judge_from_flags(
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an OpenAI-compatible judge; repeat it for several.", metavar="URL",
                     rich_help_panel=PANEL),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the endpoint.", rich_help_panel=PANEL)] = None,
    rubric: Annotated[
        str | None,
        typer.Option(help="A built-in rubric (integer, number, yes_no, json, criteria) or a .toml or .json file.",
                     metavar="NAME|FILE", rich_help_panel=PANEL),
    ] = None,
    api_key_env: KeyVariableFlag = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="auto finds the judge's limit; N is an upper bound; fixed:N uses N.", rich_help_panel=PANEL),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(help="Sampling temperature; none leaves it out, as reasoning models require.",
                     metavar="NUMBER|none", rich_help_panel=PANEL),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest reply.", rich_help_panel=PANEL)] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(help="Another field of the request, such as reasoning_effort=low; repeat it for several.",
                     metavar="KEY=VALUE", rich_help_panel=PANEL),
    ] = None,
    price_in: Annotated[
        float | None, typer.Option(help="Price per million prompt tokens.", rich_help_panel=PANEL)
    ] = None,
    price_out: Annotated[
        float | None, typer.Option(help="Price per million reply tokens.", rich_help_panel=PANEL)
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option(help="Stop before this run costs more. Needs prices.", rich_help_panel=PANEL)
    ] = None,
    cache_dir: Annotated[
        str | None, typer.Option(help="Folder of the cache.", metavar="DIR", rich_help_panel=PANEL)
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Keep no replies: a repeated request is paid for again.",
                     rich_help_panel=PANEL),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings of the judge, as .toml or .json. Flags override them.", metavar="FILE",
                     rich_help_panel=PANEL),
    ] = None,
) -> JudgeConfig:  # fmt: skip
    """Return the settings of the `--config` file with the given flags on top, checked as at a start."""
    flags = {
        "endpoint": endpoint or None,
        "model": model,
        "rubric": rubric,
        "api_key_env": api_key_env,
        "concurrency": concurrency,
        "temperature": _temperature(temperature),
        "max_tokens": max_tokens,
        "max_cost": max_cost,
        "cache_dir": cache_dir,
        "cache": False if no_cache else None,
    }
    values = _read(config) if config is not None else {}
    values.update({key: value for key, value in flags.items() if value is not None})
    if sampling:
        values["sampling"] = {**values.get("sampling", {}), **_fields(sampling)}
    if values.get("temperature") == LEFT_OUT:
        values["temperature"] = None
    for key, example in (("endpoint", "--endpoint http://127.0.0.1:8000/v1"), ("model", "--model NAME")):
        if key not in values:
            raise ConfigError(key, None, f"not given; use {example}, or {key} in the --config file")
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ConfigError("api_key_env", api_key_env, "that variable is not set in the environment")
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


def _temperature(text: str | None) -> float | str | None:
    """Parse `--temperature`: a number, or `LEFT_OUT`."""
    if text is None or text == LEFT_OUT:
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError("--temperature", text, f"give a number, or {LEFT_OUT} to leave it out") from None


def _fields(pairs: list[str]) -> dict[str, Any]:
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

    A parser of the user's own may be in the current directory. It comes last in the search, so that nothing there
    replaces an installed module. The engine's process searches where this one does.
    """
    rubric = config.loaded_rubric
    if rubric.parser not in PARSERS:
        with contextlib.suppress(FileNotFoundError):  # the current directory was removed
            sys.path.append(str(Path.cwd()))
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for rows and reports, whatever the module prints
            make_reader(rubric)
    for endpoint in config.endpoints:
        config.key_for(endpoint)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError("config", str(file), f"the file cannot be read: {error.strerror}") from None
    try:
        values = msgspec.json.decode(content) if file.suffix == ".json" else tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise ConfigError("config", str(file), f"the file is not valid {kind}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("config", str(file), "the file must hold one object with the judge's settings")
    return values
