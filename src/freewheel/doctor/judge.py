"""Checks that a judge answers: one cheap call to each endpoint, with the client that a run uses.

    JudgeConfig ─▶ ChatClient.ask, once, no retry ─▶ Reply | CallFailure ─▶ Finding with a remedy for its kind

Called by `freewheel doctor`. It costs one short judgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from freewheel.errors import ConfigError
from freewheel.judge.cache import SECRET_BYTES
from freewheel.judge.client import ChatClient, open_connector
from freewheel.judge.config import Endpoint, JudgeConfig
from freewheel.judge.outcome import CallFailure, FailureKind, Reply
from freewheel.judge.parse import Unparseable, make_reader
from freewheel.judge.request import BodyWriter, JudgeRequest, PromptBuilder
from freewheel.runtime.config import has_key
from freewheel.utils.findings import Finding, ok, problem, warning

CALL_S = 20.0
"""A judge that needs longer cannot be distinguished from one that is down."""
MODELS_S = 5.0
"""Time limit for the list of models, which is requested after an unknown model name."""
NAMED = 5
"""Existing models named in a message."""
WHAT = "judge"
QUESTION = JudgeRequest("4", prompt="What is 2 + 2?", reference="4")

LATER = "try again later, or set a smaller max_concurrent_requests"
FAULTS: dict[FailureKind, tuple[str, str]] = {
    FailureKind.AUTH: ("it rejects the key", "export {variable}=YOUR_KEY"),
    FailureKind.FORBIDDEN: ("the key has no access to it", "export {variable}=YOUR_KEY"),
    FailureKind.NOT_FOUND: ("there is no such model or path", "{model_key}=A_NAME_IT_KNOWS"),
    FailureKind.QUOTA: ("the account has no credit left", ""),
    FailureKind.OVERLOADED: ("it answers with a server error", ""),
    FailureKind.TIMEOUT: ("it did not answer in time", ""),
    FailureKind.BROKEN: ("there is no answer", "curl -v {url}"),
    FailureKind.STALE: ("the connection was closed", "curl -v {url}"),
    FailureKind.GARBAGE: ("the server there is not a chat-completions server", "curl -v {url}"),
    FailureKind.REJECTED: ("it rejects the request", ""),
}
"""Meaning and remedy of each failure. The two kinds of 429 are not faults."""


def of_run(settings: Mapping[str, Any] | None) -> tuple[JudgeConfig | None, list[Finding]]:
    """Return the judge of `reward.judge` if it is on, and what to report otherwise."""
    from freewheel.rewards.config import as_config

    if settings is None:
        return None, []
    config = as_config(dict(settings))
    if config.judges:
        return config.judge_config(), []
    if config.enable_openai_reward is False or not config.names_endpoint:
        return None, [ok(WHAT, "off: rewards are rule score and length penalty")]
    detail = f"no API key for {config.api_endpoint}: it is off, and rewards are rule score and length penalty only"
    return None, [warning(WHAT, detail, f"export {config.key_variable}=YOUR_KEY")]


def at_url(url: str, model: str, key_variable: str | None) -> JudgeConfig:
    """Return a judge named on the command line."""
    if has_key(url):
        raise ConfigError("--judge", "<hidden>", "a command line is visible in ps: put the key into OPENAI_API_KEY")
    settings: dict[str, Any] = {"endpoint": url, "model": model, "cache": False}
    if key_variable is not None:
        settings["api_key_env"] = key_variable
    try:
        return JudgeConfig(**settings)
    except ConfigError as error:
        raise error.renamed("--judge" if error.key.startswith("endpoint") else "--judge-model") from None


def ask(config: JudgeConfig, endpoint: Endpoint, *, model_key: str) -> list[Finding]:
    """Ask an endpoint once. `model_key`: the setting or flag that names the model."""
    model = endpoint.model or config.model
    began = time.monotonic()
    reply, models = asyncio.run(_ask(config, endpoint, model))
    where, rubric = f"{endpoint.url}, {model}", config.loaded_rubric
    if isinstance(reply, CallFailure):
        variable = endpoint.api_key_env or config.api_key_env or "OPENAI_API_KEY"
        return [_explain(reply, where, {"variable": variable, "model_key": model_key, "url": endpoint.url}, models)]
    if reply.cut_off:
        return [problem(WHAT, f"{where}: the reply was cut off before its score: raise max_tokens")]
    try:
        value = make_reader(rubric)(reply.text).value
    except Unparseable as error:
        return [problem(WHAT, f"{where}: it answers, but not as the rubric {rubric.name} asks: {error}")]
    return [ok(WHAT, f"{where}: a score of {value:g} after {time.monotonic() - began:.2f} s")]


async def _ask(config: JudgeConfig, endpoint: Endpoint, model: str) -> tuple[Reply | CallFailure, Sequence[str]]:
    """Return the endpoint's reply, and its models if it does not know ours."""
    limit_s = min(CALL_S, config.attempt_timeout_s)
    models: Sequence[str] = ()
    connector = open_connector(config)
    client = ChatClient(connector, config, endpoint)
    try:
        body = BodyWriter(config, model, PromptBuilder(config.loaded_rubric, secrets.token_bytes(SECRET_BYTES)))
        reply: Reply | CallFailure = CallFailure(FailureKind.TIMEOUT, f"no answer within {limit_s:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                reply = await client.ask(body.write(QUESTION, reask=False))
        if isinstance(reply, CallFailure) and reply.kind is FailureKind.NOT_FOUND:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MODELS_S):
                    models = await client.models()
    finally:
        await client.close()
        await connector.close()
    return reply, models


def _explain(failure: CallFailure, where: str, words: dict[str, str], models: Sequence[str]) -> Finding:
    detail = failure.detail.removeprefix(f"{words['url']}: ")  # `where` names it
    if failure.kind not in FAULTS:
        after = "" if failure.retry_after_s is None else f", for {failure.retry_after_s:g} s"
        return warning(WHAT, f"{where}: key and address are right, but it limits requests{after}: {detail}", LATER)
    meaning, remedy = FAULTS[failure.kind]
    if models:
        left = f" and {len(models) - NAMED} more" if len(models) > NAMED else ""
        detail += f"; it has {', '.join(models[:NAMED])}{left}"
        remedy = "{model_key}={model}" if "." in words["model_key"] else "{model_key} {model}"
        words = {**words, "model": models[0]}
    return problem(WHAT, f"{where}: {meaning}: {detail}", remedy.format(**words))
