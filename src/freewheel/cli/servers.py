"""`freewheel serve`, the gateway, and `freewheel mock-judge`, a judge to test against.

The gateway takes the judge's flags as `freewheel score` does; its bounds are those of `Limits`. The mock judge's flags
are fields of `JudgeProfile`. Both serve until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from freewheel.cli.flags import judge_from_flags, takes
from freewheel.judge.config import JudgeConfig, Secret

_SERVER, _LIMITS, _SHOW = "Server", "Limits", "Output"

REPEAT_S = 60.0
"""A repeated log line is written once in this time: a judge that refuses the key refuses every client's call."""
MOST_LINES_KEPT = 1000
"""Distinct lines to remember: a gateway runs for weeks, and some of its lines contain numbers."""


@takes(judge=judge_from_flags)
def serve(
    judge: JudgeConfig,
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
    from freewheel.gateway.limits import Doorkeeper, Limits
    from freewheel.gateway.server import DEFAULT_HOST, DEFAULT_PORT
    from freewheel.gateway.server import serve as run

    with plain_errors(), _logging():
        bounds: dict[str, Any] = {
            "drain_s": drain_s, "max_body_bytes": max_body_bytes, "max_connections": max_connections,
            "max_waiting": max_waiting,
        }  # fmt: skip
        limits = Limits(**{key: value for key, value in bounds.items() if value is not None})
        host = DEFAULT_HOST if host is None else host
        port = DEFAULT_PORT if port is None else port
        _refuse_itself(judge, port)
        door = Doorkeeper(host, *_token(token_env))
        run(
            judge, limits, host, port, door=door, shares_samples=share_samples,
            ready=lambda host, port: _announce(host, port, judge.model, as_json=as_json),
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


_Rows = tuple[tuple[str, str, type, str], ...]
_PROFILE_FLAGS: dict[str, _Rows] = {
    "Time": (
        ("latency_s", "--latency", float, "Mean seconds per request."),
        ("latency", "--latency-shape", str, "fixed or lognormal."),
        ("sigma", "--sigma", float, "Spread of the lognormal shape."),
        ("time_scale", "--time-scale", float, "Wall seconds per second: 0.1 is ten times faster."),
    ),
    _LIMITS: (
        ("knee", "--knee", float, "Requests in service past which each one slows."),
        ("reject_above", "--reject-above", int, "429 for a request that finds this many in flight."),
        ("retry_after_s", "--retry-after", float, "Retry-After of a 429, in s."),
        ("requests_per_minute", "--rpm", float, "429 beyond this many requests a minute."),
        ("tokens_per_minute", "--tpm", float, "429 beyond this many tokens a minute."),
        ("max_prompt_chars", "--max-prompt-chars", int, "400 for a longer prompt."),
    ),
    "Faults": (
        ("error_share", "--error-share", float, "Share of requests, 0 to 1, that end with --error-status."),
        ("error_status", "--error-status", int, "Status of those."),
        ("disconnect_share", "--disconnect-share", float, "Share of requests whose connection is closed."),
        ("truncate_share", "--truncate-share", float, "Share of requests whose body is cut in the middle."),
        ("garbage_share", "--garbage-share", float, "Share of requests that get 200 and no JSON."),
        ("wrong_type_share", "--wrong-type-share", float, "Share of requests that get 200 and an HTML page."),
        ("hang_share", "--hang-share", float, "Share of requests that are never answered."),
        ("drip_share", "--drip-share", float, "Share of requests that are answered a few bytes at a time."),
        ("unparseable_share", "--unparseable-share", float, "Share of requests whose reply holds no score."),
        ("empty_share", "--empty-share", float, "Share of requests whose reply is empty."),
        ("faults_per_content", "--faults-per-content", int, "A content is answered after this many faults."),
        ("insufficient_quota", "--insufficient-quota", bool, "Every request: no credit left."),
    ),
    "Replies": (
        ("reply_style", "--reply-style", str, "bare, bold, labelled, json, think, chinese or mixed."),
        ("score_low", "--score-low", int, "Lowest score."),
        ("score_high", "--score-high", int, "Highest score."),
        ("seed", "--seed", int, "Of latencies and faults."),
    ),
    _SERVER: (("model", "--model", str, "404 for a request for another model."),),
}
"""By panel: the field of `JudgeProfile`, its flag, its type and its help."""


def _profile_from_flags(**given: Any) -> dict[str, Any]:
    """Return the fields of the profile whose flags are given. Its signature is made from the table."""
    return {name: value for name, value in given.items() if value not in (None, False)}


_profile_from_flags.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if kind is bool else None,
            annotation=Annotated[
                kind if kind is bool else kind | None,
                typer.Option(flag, help=text, rich_help_panel=panel, metavar="SHARE" if "share" in field else None),
            ],
        )
        for panel, rows in _PROFILE_FLAGS.items()
        for field, flag, kind, text in rows
    ]
)


@takes(fields=_profile_from_flags)
def mock_judge(
    fields: dict[str, Any],
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

    with plain_errors():
        _run_mock(_profile_fields(profile, fields, api_key_env), host, port, as_json=as_json)


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
    fields.update(given)
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
