"""`freewheel mock-judge`: an OpenAI-compatible judge to test against. Defaults are `JudgeProfile`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_TIME, _LIMITS, _FAULTS, _REPLIES, _SERVER = "Time", "Limits", "Faults", "Replies", "Server"


def _share(help_text: str) -> Any:
    return typer.Option(help=f"Share of requests, 0 to 1, {help_text}", metavar="SHARE", rich_help_panel=_FAULTS)


def mock_judge(
    latency_s: Annotated[
        float | None, typer.Option("--latency", help="Mean seconds per request.", rich_help_panel=_TIME)
    ] = None,
    latency: Annotated[
        str | None, typer.Option("--latency-shape", help="fixed or lognormal.", rich_help_panel=_TIME)
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Spread of the lognormal shape.", rich_help_panel=_TIME)
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="Wall seconds per second: 0.1 is ten times faster.", rich_help_panel=_TIME)
    ] = None,
    knee: Annotated[
        float | None, typer.Option(help="Requests in service past which each one slows.", rich_help_panel=_LIMITS)
    ] = None,
    reject_above: Annotated[
        int | None, typer.Option(help="429 for a request that finds this many in flight.", rich_help_panel=_LIMITS)
    ] = None,
    retry_after_s: Annotated[
        float | None, typer.Option("--retry-after", help="Retry-After of a 429, in s.", rich_help_panel=_LIMITS)
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option("--rpm", help="429 beyond this many requests a minute.", rich_help_panel=_LIMITS)
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option("--tpm", help="429 beyond this many tokens a minute.", rich_help_panel=_LIMITS)
    ] = None,
    max_prompt_chars: Annotated[
        int | None, typer.Option(help="400 for a longer prompt.", rich_help_panel=_LIMITS)
    ] = None,
    error_share: Annotated[float | None, _share("that end with --error-status.")] = None,
    error_status: Annotated[int | None, typer.Option(help="Status of those.", rich_help_panel=_FAULTS)] = None,
    disconnect_share: Annotated[float | None, _share("whose connection is closed.")] = None,
    truncate_share: Annotated[float | None, _share("whose body is cut in the middle.")] = None,
    garbage_share: Annotated[float | None, _share("that get 200 and no JSON.")] = None,
    wrong_type_share: Annotated[float | None, _share("that get 200 and an HTML page.")] = None,
    hang_share: Annotated[float | None, _share("that are never answered.")] = None,
    drip_share: Annotated[float | None, _share("that are answered a few bytes at a time.")] = None,
    unparseable_share: Annotated[float | None, _share("whose reply holds no score.")] = None,
    empty_share: Annotated[float | None, _share("whose reply is empty.")] = None,
    faults_per_content: Annotated[
        int | None, typer.Option(help="A content is answered after this many faults.", rich_help_panel=_FAULTS)
    ] = None,
    insufficient_quota: Annotated[
        bool, typer.Option("--insufficient-quota", help="Every request: no credit left.", rich_help_panel=_FAULTS)
    ] = False,
    reply_style: Annotated[
        str | None,
        typer.Option(help="bare, bold, labelled, json, think, chinese or mixed.", rich_help_panel=_REPLIES),
    ] = None,
    score_low: Annotated[int | None, typer.Option(help="Lowest score.", rich_help_panel=_REPLIES)] = None,
    score_high: Annotated[int | None, typer.Option(help="Highest score.", rich_help_panel=_REPLIES)] = None,
    seed: Annotated[int | None, typer.Option(help="Of latencies and faults.", rich_help_panel=_REPLIES)] = None,
    model: Annotated[
        str | None, typer.Option(help="404 for a request for another model.", rich_help_panel=_SERVER)
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="401 for a request without the key in this environment variable.", metavar="NAME",
                     rich_help_panel=_SERVER),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="A .json file with any fields of JudgeProfile; flags come before it.", metavar="FILE",
                     rich_help_panel=_SERVER),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).", rich_help_panel=_SERVER)] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=_SERVER)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it listens as one JSON line.", rich_help_panel=_SERVER)
    ] = False,
) -> None:  # fmt: skip
    """Serve an OpenAI-compatible judge on loopback that is slow, crowded or broken as you say.

    Scores are derived from the content, so they repeat. It serves until Ctrl-C or SIGTERM; what it saw is at /__counts.
    """
    from freewheel.cli.console import plain_errors

    given = dict(locals())
    for name in ("profile", "host", "port", "as_json", "api_key_env", "plain_errors"):
        del given[name]
    with plain_errors():
        _serve(_fields(profile, given, api_key_env), host, port, as_json=as_json)


def _fields(profile: Path | None, given: dict[str, Any], api_key_env: str | None) -> dict[str, Any]:
    """The profile's fields from the file, the flags that were given, and the key's variable."""
    import os

    import msgspec

    from freewheel.errors import ConfigError

    fields: dict[str, Any] = {}
    if profile is not None:
        try:
            fields = msgspec.json.decode(profile.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError("--profile", str(profile), f"it cannot be read as a JSON object: {error}") from None
    fields.update({name: value for name, value in given.items() if value is not None and value is not False})
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if not key:
            raise ConfigError("--api-key-env", api_key_env, "that variable is not set in the environment")
        fields["api_key"] = key
    return fields


def _serve(fields: dict[str, Any], host: str | None, port: int | None, *, as_json: bool) -> None:
    from urllib.parse import urlsplit

    import msgspec

    from freewheel.cli.console import print_text
    from freewheel.errors import ConfigError
    from freewheel.judge.testing import JudgeProfile, serve
    from freewheel.judge.testing.mock import DEFAULT_HOST, DEFAULT_PORT
    from freewheel.judge.testing.server import CHAT_PATH

    try:
        profile = msgspec.convert(fields, JudgeProfile)
    except msgspec.ValidationError as error:
        raise ConfigError("profile", {name: fields[name] for name in fields if name != "api_key"}, str(error)) from None

    def announce(url: str) -> None:
        base = url.removesuffix(CHAT_PATH)
        ready = msgspec.json.encode({"endpoint": base, "port": urlsplit(url).port}).decode()
        print_text(ready if as_json else f"the mock judge listens; use --endpoint {base}")

    host = DEFAULT_HOST if host is None else host
    port = DEFAULT_PORT if port is None else port
    try:
        serve(profile, host, port, announce)
    except (OSError, OverflowError) as error:
        raise ConfigError("--host and --port", f"{host}:{port}", f"it cannot listen there: {error}") from None
