"""The two kinds of request: for each, how to identify it, write its body and read a reply to it.

    JudgeRequest ─▶ RubricExchange   the two messages of a rubric; the reply is read as a score
    ChatRequest  ─▶ ChatExchange     the body of a gateway's client; the reply is returned as it came

Both share the limiter, retries, breaker, cache and accounts of the engine.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from freewheel.judge.config import JudgeConfig
from freewheel.judge.outcome import Failure, HungUp, Reply, read_chat
from freewheel.judge.parse import Unparseable, make_reader
from freewheel.judge.request import JudgeRequest, PromptBuilder, RequestHasher
from freewheel.judge.store import CachedReply
from freewheel.judge.verdict import Scored, Usage

if TYPE_CHECKING:
    from freewheel.judge.client import ChatClient
    from freewheel.judge.engine import InFlightRequest

_CHAT_VERSION = b"freewheel-chat-1"
"""Change this whenever the computation of a chat body's key changes."""
_PRIVATE_FIELDS = ("user", "metadata", "safety_identifier")
"""Fields that identify the client. They do not change the answer."""

_MARK = "\x00user\x00"


Sink = Callable[[bytes], Awaitable[None]]
"""Receives each chunk of an event stream. Raises `OSError` if its client is gone."""


class ChatRequest(msgspec.Struct, frozen=True):
    """One chat completion as a client sent it.

    Equal requests are sent once if they have `temperature` 0 or a `seed`, because their answers are the same. Any other
    request asks for a sample, and a client that asks twice wants two samples.
    """

    body: bytes
    """A JSON object. It is sent as it is, except for `model` where an endpoint has its own name for it."""
    fresh: bool = False
    """Send it even if an answer is cached, do not share the call, and cache the new answer."""
    shares_samples: bool = False
    """Give equal requests the same sample."""
    sink: Sink | None = None
    """Receives the reply as it arrives, for a body with `"stream": true`. A stream is retried until its first byte, and
    never shared."""


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """The answer to a chat completion."""

    content: bytes
    """The upstream's body; empty for a stream, which went to its sink."""
    usage: Usage = Usage()
    cached: bool = False
    attempts: int = 1

    status = "relayed"


class Identity(NamedTuple):
    """The facts about a request that the engine needs before it sends it."""

    key: bytes
    """Equal for requests that may share one call."""
    size: int
    """Approximate number of bytes to send, from which tokens are estimated."""
    keep_as: bytes | None
    """The key under which the reply is cached; None: it is not. A request reads the cache only if this equals its
    `key`."""
    most_tokens: int | None = None
    """Longest reply that the request allows. None: the config decides; 0: the request does not say."""
    patient: bool = False
    """The reply may take the whole of `attempt_timeout_s`, however fast other replies are."""


class BodyWriter:
    """Writes the HTTP bodies for one model name. Everything except the user message is encoded once."""

    def __init__(self, config: JudgeConfig, model: str, prompts: PromptBuilder) -> None:
        messages = [{"role": "system", "content": prompts.system}, {"role": "user", "content": _MARK}]
        settings = {
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "response_format": config.loaded_rubric.response_format(),
        }
        given = {key: value for key, value in settings.items() if value is not None}
        body = {"model": model, "messages": messages, **given, **config.sampling}
        self._prompts = prompts
        self._before, _, self._after = msgspec.json.encode(body).partition(msgspec.json.encode(_MARK))

    def write(self, request: JudgeRequest, *, reask: bool) -> bytes:
        user = self._prompts.reask(request) if reask else self._prompts.user(request)
        return self._before + msgspec.json.encode(user) + self._after


class RubricExchange:
    def __init__(self, config: JudgeConfig, secret: bytes) -> None:
        self._hash = RequestHasher(config)
        self._parse = make_reader(config.loaded_rubric)
        prompts = PromptBuilder(config.loaded_rubric, secret)
        self._static_size = len(prompts.system)
        models = {endpoint.model or config.model for endpoint in config.endpoints}
        self._bodies = {model: BodyWriter(config, model, prompts) for model in models}

    def identify(self, request: Any) -> Identity:
        key = self._hash(request)
        content = sum(map(_utf8_bytes, (request.response, request.prompt, request.reference)))
        return Identity(key, self._static_size + content, keep_as=key)

    async def call(self, client: ChatClient, model: str, inflight: InFlightRequest) -> Reply | Failure:
        return await client.ask(self._bodies[model].write(inflight.request, reask=inflight.asks > 0))

    def read(self, inflight: InFlightRequest, reply: Reply) -> Scored:
        if reply.cut_off:
            raise Unparseable(f"the reply was cut off (max_tokens, or a filter): {reply.text[:80]!r}")
        value, parts = self._parse(reply.text)
        return Scored(value, reply.text, inflight.usage, parts, attempts=inflight.calls)

    def revive(self, cached: CachedReply) -> Scored | None:
        try:
            value, parts = self._parse(cached.text)
        except Unparseable:
            return None  # the rubric has become stricter
        usage = Usage(cached.prompt_tokens, cached.completion_tokens)
        return Scored(value, cached.text, usage, parts, cached=True, attempts=0)


class ChatExchange:
    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        first = config.endpoints[0]
        self._base = hashlib.sha256(_CHAT_VERSION)
        for part in (first.url.encode(), (first.model or config.model).encode()):
            self._base.update(b"%d:" % len(part) + part)

    def identify(self, request: Any) -> Identity:
        fields = msgspec.json.decode(request.body)
        longest, choices = fields.get("max_completion_tokens") or fields.get("max_tokens"), fields.get("n")
        counts = [count if isinstance(count, int) and count > 0 else 0 for count in (longest, choices or 1)]
        unique = Identity(secrets.token_bytes(32), len(request.body), None, counts[0] * counts[1], patient=True)
        wants_sample = fields.get("temperature") != 0 and fields.get("seed") is None
        if request.sink is not None or (wants_sample and not request.shares_samples):
            return unique
        for name in _PRIVATE_FIELDS:
            fields.pop(name, None)
        digest = self._base.copy()
        digest.update(msgspec.json.encode(fields, order="sorted"))
        key = digest.digest()
        return unique._replace(key=unique.key if request.fresh else key, keep_as=key)

    async def call(self, client: ChatClient, model: str, inflight: InFlightRequest) -> Reply | Failure:
        body, sink = self._with_model(inflight.request.body, model), inflight.request.sink
        if sink is None:
            return await client.ask(body, read_chat)

        async def pass_on(chunk: bytes) -> None:
            inflight.commit()
            began = time.monotonic()
            try:
                await sink(chunk)
            except OSError as error:  # the connection to the client, not to the judge
                raise HungUp(str(error)) from error
            inflight.held_s += time.monotonic() - began

        return await client.stream(body, pass_on)

    def read(self, inflight: InFlightRequest, reply: Reply) -> Relayed:
        return Relayed(reply.text.encode(), inflight.usage, attempts=inflight.calls)

    def revive(self, cached: CachedReply) -> Relayed | None:
        usage = Usage(cached.prompt_tokens, cached.completion_tokens)
        return Relayed(cached.text.encode(), usage, cached=True, attempts=0)

    def _with_model(self, body: bytes, model: str) -> bytes:
        """Replace the configured model name with the endpoint's name for that model."""
        if model == self._model:
            return body
        fields = msgspec.json.decode(body)
        if fields.get("model") != self._model:
            return body
        return msgspec.json.encode({**fields, "model": model})


Exchange = RubricExchange | ChatExchange


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
