"""`freewheel serve`: the gateway as a command. Judge settings are as in `freewheel score`, bounds are `Limits`'."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.cli.judge_flags import (
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

REPEAT_S = 60.0
"""The same line of a log is written once in this time: a judge that refuses the key refuses every client's call."""
MOST_LINES_KEPT = 1000
"""Lines whose last time is remembered; a gateway runs for weeks, and some of its lines hold numbers."""


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
    from freewheel.cli.judge_flags import check_start, judge_config, parse_sampling, parse_temperature
    from freewheel.gateway.auth import Doorkeeper
    from freewheel.gateway.limits import Limits
    from freewheel.gateway.serving import DEFAULT_HOST, DEFAULT_PORT
    from freewheel.gateway.serving import serve as run

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
    """A base URL in an environment that already points at the gateway would have it ask itself for ever."""
    from urllib.parse import urlsplit

    from freewheel.errors import ConfigError
    from freewheel.utils.http import is_loopback

    for endpoint in settings.endpoints:
        parts = urlsplit(endpoint.url)
        if parts.port == port and is_loopback(parts.hostname or ""):
            raise ConfigError("endpoint", endpoint.url, "that is this gateway itself; give the judge's own address")


def _token(name: str | None) -> tuple[Secret | None, str]:
    """(the token, its variable's name). One that is named and not set is an error; the usual one may be missing."""
    from freewheel.errors import ConfigError
    from freewheel.gateway.auth import TOKEN_ENV
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
    """Lets the same line through once in `REPEAT_S`."""

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
    """The library's log on stderr, with times: a server's log is read long after."""
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
