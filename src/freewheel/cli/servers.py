"""`freewheel serve`, the gateway, and `freewheel mock-judge`, a judge to test against.

The gateway takes the judge's flags as `freewheel score` does; its bounds are those of `Limits`. The mock judge's flags
are fields of `JudgeProfile`. Both serve until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.cli.flags import (
    CacheDirFlag,
    ConcurrencyFlag,
    ConfigFlag,
    EndpointFlag,
    KeyVariableFlag,
    MaxCostFlag,
    MaxTokensFlag,
    ModelFlag,
    NoCacheFlag,
    PriceInFlag,
    PriceOutFlag,
    RubricFlag,
    SamplingFlag,
    TemperatureFlag,
)

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig, Secret

_SERVER, _LIMITS, _SHOW = "Server", "Limits", "Output"
_TIME, _FAULTS, _REPLIES = "Time", "Faults", "Replies"

REPEAT_S = 60.0
"""A repeated log line is written once in this time: a judge that refuses the key refuses every client's call."""
MOST_LINES_KEPT = 1000
"""Distinct lines to remember: a gateway runs for weeks, and some of its lines contain numbers."""


def serve(
    endpoint: EndpointFlag = None,
    model: ModelFlag = None,
    rubric: RubricFlag = None,
    api_key_env: KeyVariableFlag = None,
    concurrency: ConcurrencyFlag = None,
    temperature: TemperatureFlag = None,
    max_tokens: MaxTokensFlag = None,
    sampling: SamplingFlag = None,
    price_in: PriceInFlag = None,
    price_out: PriceOutFlag = None,
    max_cost: MaxCostFlag = None,
    cache_dir: CacheDirFlag = None,
    no_cache: NoCacheFlag = False,
    config: ConfigFlag = None,
    share_samples: Annotated[
        bool,
        typer.Option("--share-samples", help="Share and cache all that is equal, requests for a sample (temperature "
                     "not 0, no seed) among them.", rich_help_panel=_SERVER),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on (127.0.0.1). Any other than loopback needs a token.",
                     rich_help_panel=_SERVER),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on (8900); 0 takes a free one.", rich_help_panel=_SERVER)
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(help="The environment variable with the token that clients must send "
                     "(FREEWHEEL_GATEWAY_TOKEN, where it is set).", metavar="NAME", rich_help_panel=_SERVER),
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that open requests have after SIGTERM (25).", rich_help_panel=_SERVER)
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(help="Largest request body (8 MiB).", rich_help_panel=_LIMITS)
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Most connections (4096).", rich_help_panel=_LIMITS)
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Most judgements taken and not answered (32768).", rich_help_panel=_LIMITS)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say where it listens as one JSON line.", rich_help_panel=_SHOW)
    ] = False,
) -> None:  # fmt: skip
    """Serve the judge to many processes: one limit, one cache and one budget for all of them.

    OpenAI-compatible at /v1/chat/completions; /score, /openrlhf and /slime judge by the rubric. It serves until Ctrl-C
    or SIGTERM, and lets open requests end.
    """
    from freewheel.cli.console import plain_errors
    from freewheel.cli.flags import check_start, judge_config, parse_sampling, parse_temperature
    from freewheel.gateway.limits import Doorkeeper, Limits
    from freewheel.gateway.server import DEFAULT_HOST, DEFAULT_PORT
    from freewheel.gateway.server import serve as run

    with plain_errors(), _logging():
        flags = {
            "endpoint": endpoint or None, "model": model, "rubric": rubric, "api_key_env": api_key_env,
            "concurrency": concurrency, "temperature": parse_temperature(temperature), "max_tokens": max_tokens,
            "sampling": parse_sampling(sampling), "max_cost": max_cost, "cache_dir": cache_dir,
            "cache": False if no_cache else None,
        }  # fmt: skip
        settings = judge_config(config, flags, price_in=price_in, price_out=price_out)
        check_start(settings)
        bounds: dict[str, Any] = {
            "drain_s": drain_s, "max_body_bytes": max_body_bytes, "max_connections": max_connections,
            "max_waiting": max_waiting,
        }  # fmt: skip
        limits = Limits(**{key: value for key, value in bounds.items() if value is not None})
        host = DEFAULT_HOST if host is None else host
        port = DEFAULT_PORT if port is None else port
        _refuse_itself(settings, port)
        door = Doorkeeper(host, *_token(token_env))
        run(
            settings, limits, host, port, door=door, shares_samples=share_samples,
            ready=lambda host, port: _announce(host, port, settings.model, as_json=as_json),
        )  # fmt: skip


def _refuse_itself(settings: JudgeConfig, port: int) -> None:
    """Refuse the gateway's own address as the judge's, as an environment may give it: it would ask itself forever."""
    from urllib.parse import urlsplit

    from freewheel.errors import ConfigError
    from freewheel.utils.http import is_loopback

    for endpoint in settings.endpoints:
        parts = urlsplit(endpoint.url)
        if parts.port == port and is_loopback(parts.hostname or ""):
            raise ConfigError("endpoint", endpoint.url, "that is this gateway itself; give the judge's own address")


def _token(name: str | None) -> tuple[Secret | None, str]:
    """Return the token and the name of its variable. A variable that was named must be set."""
    from freewheel.errors import ConfigError
    from freewheel.gateway.limits import TOKEN_ENV
    from freewheel.judge.config import Secret

    token = Secret.from_env(name or TOKEN_ENV)
    if name is not None and token is None:
        raise ConfigError("--token-env", name, "that variable is not set in the environment")
    return token, name or TOKEN_ENV


def _announce(host: str, port: int, model: str, *, as_json: bool) -> None:
    import msgspec

    from freewheel.cli.console import print_text

    root = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    ready = msgspec.json.encode({"endpoint": f"{root}/v1", "url": root, "port": port, "model": model}).decode()
    print_text(ready if as_json else f"the gateway listens; use base_url {root}/v1 and model {model}")


class _Once(logging.Filter):
    """Lets each line through once in `REPEAT_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = record.getMessage(), time.monotonic()
        if now - self._said_at.get(text, -REPEAT_S) < REPEAT_S:
            return False
        if len(self._said_at) >= MOST_LINES_KEPT:
            self._said_at.clear()
        self._said_at[text] = now
        return True


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Write the library's log to stderr with times: a server's log is read long after."""
    logger, handler = logging.getLogger("freewheel"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(_Once())
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


# -- the mock judge ---------------------------------------------------------------------------------------------------


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
        _run_mock(_profile_fields(profile, given, api_key_env), host, port, as_json=as_json)


def _profile_fields(profile: Path | None, given: dict[str, Any], api_key_env: str | None) -> dict[str, Any]:
    """Return the profile's fields: from the file, then the given flags, then the key from its variable."""
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


def _run_mock(fields: dict[str, Any], host: str | None, port: int | None, *, as_json: bool) -> None:
    from urllib.parse import urlsplit

    import msgspec

    from freewheel.cli.console import print_text
    from freewheel.errors import ConfigError
    from freewheel.judge.testing import JudgeProfile, serve
    from freewheel.judge.testing.mock import CHAT_PATH, DEFAULT_HOST, DEFAULT_PORT

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
