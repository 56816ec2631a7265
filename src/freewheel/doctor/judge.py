"""Checks that a judge answers: one cheap call to each endpoint, with the client that a run uses.

    JudgeConfig ─▶ ChatClient.ask, once, no retry ─▶ Reply | Failure ─▶ Finding with a remedy for its kind

Called by `freewheel doctor`. It costs one short judgement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from freewheel.errors import ConfigError
from freewheel.judge.client import ChatClient, open_connector
from freewheel.judge.config import Endpoint, JudgeConfig
from freewheel.judge.exchange import BodyWriter
from freewheel.judge.outcome import Failure, Kind, Reply
from freewheel.judge.parse import Unparseable, make_reader
from freewheel.judge.prompt import PromptBuilder, local_secret
from freewheel.judge.request import JudgeRequest
from freewheel.runtime.config import has_key
from freewheel.utils.findings import Finding, ok, problem, warning

CALL_S = 20.0
"""A judge that needs longer cannot be told from one that is down."""
MODELS_S = 5.0
"""For the list of models, after an unknown model name."""
NAMED = 5
"""Existing models named in a message."""
WHAT = "judge"
QUESTION = JudgeRequest("4", prompt="What is 2 + 2?", reference="4")

LATER = "ask again later, or give the judge a smaller max_concurrent_requests"
FAULTS: dict[Kind, tuple[str, str]] = {
    Kind.AUTH: ("it refuses the key", "export {variable}=YOUR_KEY"),
    Kind.FORBIDDEN: ("the key may not use it", "export {variable}=YOUR_KEY"),
    Kind.NOT_FOUND: ("there is no such model or path", "{model_key}=A_NAME_IT_KNOWS"),
    Kind.QUOTA: ("its account is empty", ""),
    Kind.OVERLOADED: ("it answers with an error of its own", ""),
    Kind.TIMEOUT: ("it does not answer in time", ""),
    Kind.BROKEN: ("nobody answers there", "curl -v {url}"),
    Kind.STALE: ("the connection was closed", "curl -v {url}"),
    Kind.GARBAGE: ("what answers there is no chat-completions server", "curl -v {url}"),
    Kind.REJECTED: ("it refuses the request", ""),
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
        raise ConfigError("--judge", "<hidden>", "a command line shows in ps: no key in it; put it into OPENAI_API_KEY")
    settings: dict[str, Any] = {"endpoint": url, "model": model, "cache": False}
    if key_variable is not None:
        settings["api_key_env"] = key_variable
    try:
        return JudgeConfig(**settings)
    except ConfigError as error:
        raise error.renamed("--judge" if error.key.startswith("endpoint") else "--judge-model") from None


def ask(config: JudgeConfig, endpoint: Endpoint, *, model_key: str) -> list[Finding]:
    """Ask an endpoint once. `model_key`: the setting or flag that names the model."""
    return [asyncio.run(_asked(config, endpoint, model_key))]


async def _asked(config: JudgeConfig, endpoint: Endpoint, model_key: str) -> Finding:
    limit_s = min(CALL_S, config.attempt_timeout_s)
    connector = open_connector(config)
    client = ChatClient(connector, config, endpoint)
    model = endpoint.model or config.model
    try:
        body = BodyWriter(config, model, PromptBuilder(config.loaded_rubric, local_secret(None)))
        began = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                reply = await client.ask(body.write(QUESTION, reask=False))
        except TimeoutError:
            reply = Failure(Kind.TIMEOUT, f"no answer within {limit_s:g} s")
        took_s = time.monotonic() - began
        models: Sequence[str] = ()
        if isinstance(reply, Failure) and reply.kind is Kind.NOT_FOUND:
            models = await _models(client)
    finally:
        await client.close()
        await connector.close()
    if isinstance(reply, Reply):
        return judged_reply(config, reply, f"{endpoint.url}, {model}", took_s)
    variable = endpoint.api_key_env or config.api_key_env or "OPENAI_API_KEY"
    words = {"variable": variable, "model_key": model_key, "url": endpoint.url}
    return judged_failure(reply, f"{endpoint.url}, {model}", words, models)


async def _models(client: ChatClient) -> list[str]:
    try:
        async with asyncio.timeout(MODELS_S):
            return await client.models()
    except TimeoutError:
        return []


def judged_reply(config: JudgeConfig, reply: Reply, where: str, took_s: float) -> Finding:
    """Check an answer: the rubric decides whether it is a score."""
    if reply.cut_off:
        detail = f"{where}: the reply was cut off, and such a reply is no score: raise max_tokens"
        return problem(WHAT, detail)
    try:
        value = make_reader(config.loaded_rubric)(reply.text).value
    except Unparseable as error:
        rubric = config.loaded_rubric.name
        return problem(WHAT, f"{where}: it answers, but not as the rubric {rubric} asks: {error}")
    return ok(WHAT, f"{where}: a score of {value:g} after {took_s:.2f} s")


def judged_failure(failure: Failure, where: str, words: Mapping[str, str], models: Sequence[str] = ()) -> Finding:
    told = failure.detail.removeprefix(f"{words['url']}: ")  # `where` names it
    if failure.kind not in FAULTS:
        after = "" if failure.retry_after_s is None else f", for {failure.retry_after_s:g} s"
        detail = f"{where}: key and address are right, and it asks for patience{after}: {told}"
        return warning(WHAT, detail, LATER)
    meaning, remedy = FAULTS[failure.kind]
    known = ""
    if models:
        left = f" and {len(models) - NAMED} more" if len(models) > NAMED else ""
        known = f"; it has {', '.join(models[:NAMED])}{left}"
        words = {**words, "model": models[0]}
        remedy = "{model_key}={model}" if "." in words["model_key"] else "{model_key} {model}"
    return problem(WHAT, f"{where}: {meaning}: {told}{known}", remedy.format(**words))
