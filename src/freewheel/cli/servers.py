"""`freewheel serve`, the gateway, and `freewheel mock-judge`, a judge to test against.

The gateway takes the judge's flags as `freewheel score` does; its bounds are those of `Limits`. The mock judge's flags
are fields of `JudgeProfile`. Both serve until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import typer

from freewheel.cli.console import log_to, plain_errors, print_text
from freewheel.cli.flags import flag, flags, judge_from_flags, read_variable, takes
from freewheel.errors import ConfigError
from freewheel.judge.config import COMPLETIONS_PATH, JudgeConfig, Secret
from freewheel.utils.checks import read_settings

_SERVER, _LIMITS = "Server", "Limits"
LISTENING_FLAG = flag("as_json", bool, "Print where it listens as one JSON line.", "--json", panel=_SERVER)


@flags(
    _LIMITS,
    flag("drain_s", float, "Seconds that open requests have after SIGTERM (25).", panel=_SERVER),
    flag("max_body_bytes", int, "Largest request body (8 MiB)."),
    flag("max_connections", int, "Most connections (4096)."),
    flag("max_waiting", int, "Most judgements taken and not answered (32768)."),
)
def limits_from_flags(**given: Any) -> Any:
    from freewheel.gateway.limits import Limits

    return Limits(**given)


@takes(
    flag("share_samples", bool, "Share and cache all equal requests, also requests for a sample (temperature not 0, no "
         "seed).", panel=_SERVER),
    flag("host", str, "Address to listen on (127.0.0.1). Any other than loopback needs a token.", panel=_SERVER),
    flag("port", int, "Port to listen on (8900); 0 takes a free one.", panel=_SERVER),
    flag("token_env", str, "The environment variable with the token that clients must send (FREEWHEEL_GATEWAY_TOKEN, "
         "where it is set).", metavar="NAME", panel=_SERVER),
    LISTENING_FLAG,
    judge=judge_from_flags,
    limits=limits_from_flags,
)  # fmt: skip
def serve(
    share_samples: bool,
    host: str | None,
    port: int | None,
    token_env: str | None,
    as_json: bool,
    judge: JudgeConfig,
    limits: Any,
) -> None:
    """Serve the judge to many processes: one limit, one cache and one budget for all of them.

    OpenAI-compatible at /v1/chat/completions; /score, /openrlhf and /slime judge by the rubric. It serves until Ctrl-C
    or SIGTERM, and lets open requests end.
    """
    from freewheel.gateway.limits import TOKEN_ENV, Doorkeeper
    from freewheel.gateway.server import DEFAULT_PORT
    from freewheel.gateway.server import serve as run
    from freewheel.utils.http import HOST

    def announce(host: str, port: int) -> None:
        root = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        ready = {"endpoint": f"{root}/v1", "url": root, "port": port, "model": judge.model}
        text = f"the gateway listens; use base_url {root}/v1 and model {judge.model}"
        print_text(msgspec.json.encode(ready).decode() if as_json else text)

    # A server's log is read much later, so its lines have times.
    pattern = "%(asctime)s %(levelname)s %(message)s"
    log = log_to(partial(typer.echo, err=True), level=logging.INFO, pattern=pattern)
    with plain_errors(), log:
        host, port = host or HOST, DEFAULT_PORT if port is None else port
        _refuse_itself(judge, port)
        if token_env is not None:
            read_variable("--token-env", token_env)
        name = token_env or TOKEN_ENV
        door = Doorkeeper(host, Secret.from_env(name), name)
        run(judge, limits, host, port, door=door, shares_samples=share_samples, ready=announce)


def _refuse_itself(settings: JudgeConfig, port: int) -> None:
    """Refuse the gateway's own address as the judge's: the gateway would ask itself forever. An environment variable
    may hold that address."""
    from freewheel.utils.http import is_loopback

    for endpoint in settings.endpoints:
        parts = urlsplit(endpoint.url)
        if parts.port == port and is_loopback(parts.hostname or ""):
            raise ConfigError("endpoint", endpoint.url, "that is this gateway itself; give the judge's own address")


# -- the mock judge ---------------------------------------------------------------------------------------------------

_TIME, _FAULTS, _REPLIES = "Time", "Faults", "Replies"


def _share(fault: str, text: str) -> Any:
    return flag(f"{fault}_share", float, f"Share of requests, 0 to 1, {text}", metavar="SHARE")


@flags(
    "Faults",
    flag("latency_s", float, "Mean seconds per request.", "--latency", panel=_TIME),
    flag("latency", str, "fixed or lognormal.", "--latency-shape", panel=_TIME),
    flag("sigma", float, "Spread of the lognormal shape.", panel=_TIME),
    flag("time_scale", float, "Wall seconds per second: 0.1 is ten times faster.", panel=_TIME),
    flag("knee", float, "Requests in service past which each one slows.", panel=_LIMITS),
    flag("reject_above", int, "429 for a request that finds this many in flight.", panel=_LIMITS),
    flag("retry_after_s", float, "Retry-After of a 429, in s.", "--retry-after", panel=_LIMITS),
    flag("requests_per_minute", float, "429 beyond this many requests per minute.", "--rpm", panel=_LIMITS),
    flag("tokens_per_minute", float, "429 beyond this many tokens per minute.", "--tpm", panel=_LIMITS),
    flag("max_prompt_chars", int, "400 for a longer prompt.", panel=_LIMITS),
    _share("error", "that end with --error-status."),
    flag("error_status", int, "Status of those."),
    _share("disconnect", "whose connection is closed."),
    _share("truncate", "whose body is cut in the middle."),
    _share("garbage", "that get 200 and no JSON."),
    _share("wrong_type", "that get 200 and an HTML page."),
    _share("hang", "that are never answered."),
    _share("drip", "that are answered a few bytes at a time."),
    _share("unparseable", "whose reply holds no score."),
    _share("empty", "whose reply is empty."),
    flag("faults_per_content", int, "A content is answered after this many faults."),
    flag("insufficient_quota", bool, "Every request: no credit left."),
    flag("reply_style", str, "bare, bold, labelled, json, think, chinese or mixed.", panel=_REPLIES),
    flag("score_low", int, "Lowest score.", panel=_REPLIES),
    flag("score_high", int, "Highest score.", panel=_REPLIES),
    flag("seed", int, "Seed of latencies and faults.", panel=_REPLIES),
    flag("model", str, "404 for a request for another model.", panel=_SERVER),
    flag("profile", Path, "A .json or .toml file with any fields of JudgeProfile; flags override it.", metavar="FILE",
         panel=_SERVER),
    flag("api_key_env", str, "401 for a request without the key in this environment variable.", metavar="NAME",
         panel=_SERVER),
)  # fmt: skip
def profile_from_flags(profile: Path | None = None, api_key_env: str | None = None, **given: Any) -> Any:
    """Return a `JudgeProfile`: the file's fields, then the given flags, then the key from its variable."""
    from freewheel.judge.testing import JudgeProfile

    fields = {} if profile is None else read_settings("--profile", profile)
    fields |= given
    if api_key_env is not None:
        fields["api_key"] = read_variable("--api-key-env", api_key_env)
    try:
        return msgspec.convert(fields, JudgeProfile)
    except msgspec.ValidationError as error:
        raise ConfigError("profile", {name: fields[name] for name in fields if name != "api_key"}, str(error)) from None


@takes(
    flag("host", str, "Address to listen on (127.0.0.1).", panel=_SERVER),
    flag("port", int, "Port to listen on (8099); 0 takes a free one.", panel=_SERVER),
    LISTENING_FLAG,
    profile=profile_from_flags,
)
def mock_judge(host: str | None, port: int | None, as_json: bool, profile: Any) -> None:
    """Serve an OpenAI-compatible judge on loopback that is slow, crowded or broken as you configure it.

    Scores are derived from the content, so they repeat. It serves until Ctrl-C or SIGTERM; what it saw is at /__counts.
    """
    from freewheel.judge.testing import DEFAULT_PORT, serve
    from freewheel.utils.http import HOST

    def announce(url: str) -> None:
        base = url.removesuffix(COMPLETIONS_PATH)
        ready = msgspec.json.encode({"endpoint": base, "port": urlsplit(url).port}).decode()
        print_text(ready if as_json else f"the mock judge listens; use --endpoint {base}")

    host, port = host or HOST, DEFAULT_PORT if port is None else port
    with plain_errors():
        serve(profile, host, port, announce)
