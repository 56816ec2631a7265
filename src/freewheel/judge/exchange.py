"""What one kind of request is to the engine: its identity, its bytes on the wire, and what a reply to it means.

JudgeRequest ─▶ RubricExchange   a rubric's two messages; the reply is read as a score
ChatRequest  ─▶ ChatExchange     the client's own body; the reply goes back as it came
ChatStream   ─▶ StreamExchange   likewise, chunk by chunk
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from freewheel.judge.cache_file import CachedReply
from freewheel.judge.config import JudgeConfig
from freewheel.judge.outcome import Failure, HungUp, Reply, read_chat
from freewheel.judge.parse import Unparseable, make_reader
from freewheel.judge.prompt import PromptBuilder
from freewheel.judge.request import JudgeRequest, RequestHasher
from freewheel.judge.verdict import Scored, Usage

if TYPE_CHECKING:
    from freewheel.judge.client import ChatClient
    from freewheel.judge.engine import Flight


class ChatRequest(msgspec.Struct, frozen=True):
    """One chat completion as a client sent it.

    Equal ones are sent once, as judge requests are, where one answer can stand for another: with `temperature` 0 or a
    `seed`. All others ask for a sample, and who asks for two votes wants two.
    """

    body: bytes
    """A JSON object. It goes upstream as it is, save `model` where an endpoint has its own name for it."""
    fresh: bool = False
    """Ask the upstream whatever is cached, share with nobody, and keep the answer for the next."""
    shares_samples: bool = False
    """Take one sample for all who ask for the same."""


class ChatStream:
    """The same for `"stream": true`: it takes a slot and is retried until its first byte, and is never shared."""

    __slots__ = ("body", "sink")

    def __init__(self, body: bytes, sink: Callable[[bytes], Awaitable[None]]) -> None:
        self.body = body
        self.sink = sink
        """Gets each chunk of the event stream."""


class Relayed(msgspec.Struct, frozen=True, tag="relayed"):
    """A chat completion that was answered."""

    content: bytes
    """The upstream's body; empty for a stream, which went to its sink."""
    usage: Usage = Usage()
    cached: bool = False
    attempts: int = 1

    status = "relayed"


_MARK = "\x00user\x00"


class BodyWriter:
    """Writes chat-completion requests for one model name."""

    def __init__(self, config: JudgeConfig, model: str, prompts: PromptBuilder) -> None:
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "system", "content": prompts.system}, {"role": "user", "content": _MARK}],
        }
        if config.temperature is not None:
            body["temperature"] = config.temperature
        if config.max_tokens is not None:
            body["max_tokens"] = config.max_tokens
        response_format = config.loaded_rubric.response_format()
        if response_format is not None:
            body["response_format"] = response_format
        body.update(config.sampling)
        self._prompts = prompts
        self._before, _, self._after = msgspec.json.encode(body).partition(msgspec.json.encode(_MARK))

    def write(self, request: JudgeRequest, *, reask: bool) -> bytes:
        user = self._prompts.reask(request) if reask else self._prompts.user(request)
        return self._before + msgspec.json.encode(user) + self._after


CHAT_VERSION = b"freewheel-chat-1"
"""Changes when the recipe of a chat body's key does."""
PRIVATE_FIELDS = ("user", "metadata", "safety_identifier")
"""Fields that say who asks and not what is asked: they do not change the answer."""


class Identity(NamedTuple):
    """What the engine must know before anything is sent."""

    key: bytes
    """Equal for requests that may share one call."""
    size: int
    """Bytes to be sent, roughly: tokens are estimated from it."""
    keep_as: bytes | None
    """The key under which its reply may serve later requests; what is kept there serves it only where it is `key`."""
    most_tokens: int | None = None
    """Longest reply that it allows, where that is not the config's affair; 0: it does not say."""
    patient: bool = False
    """Its reply may take the whole of `attempt_timeout_s`, however quick others are."""


class Exchange(Protocol):
    def identify(self, request: Any) -> Identity: ...

    async def call(self, client: ChatClient, model: str, flight: Flight) -> Reply | Failure: ...

    def read(self, flight: Flight, reply: Reply) -> Scored | Relayed:
        """Raises `Unparseable`."""

    def revive(self, cached: CachedReply) -> Scored | Relayed | None:
        """A kept reply as an answer; None: it has to be asked for again."""


class RubricExchange:
    """Judging by the config's rubric."""

    def __init__(self, config: JudgeConfig, secret: bytes) -> None:
        self._hash = RequestHasher(config)
        self._parse = make_reader(config.loaded_rubric)
        prompts = PromptBuilder(config.loaded_rubric, secret)
        self._static_size = len(prompts.system)
        models = {endpoint.model or config.model for endpoint in config.endpoints}
        self._bodies = {model: BodyWriter(config, model, prompts) for model in models}

    def identify(self, request: JudgeRequest) -> Identity:
        try:
            key = self._hash(request)
        except UnicodeEncodeError:
            request = request.encodable()
            key = self._hash(request)
        content = sum(map(_utf8_bytes, (request.response, request.prompt, request.reference)))
        return Identity(key, self._static_size + content, keep_as=key)

    async def call(self, client: ChatClient, model: str, flight: Flight) -> Reply | Failure:
        assert isinstance(flight.request, JudgeRequest)
        return await client.ask(self._bodies[model].write(flight.request, reask=flight.asks > 0))

    def read(self, flight: Flight, reply: Reply) -> Scored:
        if reply.cut_off:
            raise Unparseable(f"the reply was cut off (max_tokens, or a filter): {reply.text[:80]!r}")
        value, parts = self._parse(reply.text)
        return Scored(value, reply.text, flight.usage, parts, attempts=flight.calls)

    def revive(self, cached: CachedReply) -> Scored | None:
        try:
            value, parts = self._parse(cached.text)
        except Unparseable:
            return None  # the rubric reads more strictly now: ask again
        usage = Usage(cached.prompt_tokens, cached.completion_tokens)
        return Scored(value, cached.text, usage, parts, cached=True, attempts=0)


class ChatExchange:
    """Passing a client's request on, and the answer back."""

    def __init__(self, config: JudgeConfig) -> None:
        self._model = config.model
        first = config.endpoints[0]
        self._base = hashlib.sha256(CHAT_VERSION)
        for part in (first.url.encode(), (first.model or config.model).encode()):
            self._base.update(b"%d:" % len(part) + part)

    def identify(self, request: ChatRequest) -> Identity:
        fields = msgspec.json.decode(request.body)
        unique = secrets.token_bytes(32)
        wants_sample = fields.get("temperature") != 0 and fields.get("seed") is None
        if wants_sample and not request.shares_samples:
            return self._identity(request.body, fields, unique, None)
        for name in PRIVATE_FIELDS:
            fields.pop(name, None)
        digest = self._base.copy()
        digest.update(msgspec.json.encode(fields, order="sorted"))
        key = digest.digest()
        return self._identity(request.body, fields, unique if request.fresh else key, key)

    @staticmethod
    def _identity(body: bytes, fields: dict[str, Any], key: bytes, keep_as: bytes | None) -> Identity:
        longest, choices = fields.get("max_completion_tokens") or fields.get("max_tokens"), fields.get("n")
        counts = [count if isinstance(count, int) and count > 0 else 0 for count in (longest, choices or 1)]
        return Identity(key, len(body), keep_as, most_tokens=counts[0] * counts[1], patient=True)

    async def call(self, client: ChatClient, model: str, flight: Flight) -> Reply | Failure:
        assert isinstance(flight.request, ChatRequest)
        return await client.ask(self._named(flight.request.body, model), read_chat)

    def read(self, flight: Flight, reply: Reply) -> Relayed:
        return Relayed(reply.text.encode(), flight.usage, attempts=flight.calls)

    def revive(self, cached: CachedReply) -> Relayed | None:
        usage = Usage(cached.prompt_tokens, cached.completion_tokens)
        return Relayed(cached.text.encode(), usage, cached=True, attempts=0)

    def _named(self, body: bytes, model: str) -> bytes:
        """With the endpoint's own name for the configured model."""
        if model == self._model:
            return body
        fields = msgspec.json.decode(body)
        if fields.get("model") != self._model:
            return body
        return msgspec.json.encode({**fields, "model": model})


class StreamExchange(ChatExchange):
    """Passing an event stream on while it comes. Once a byte of it went out, it cannot be asked for again."""

    def identify(self, request: ChatStream) -> Identity:  # type: ignore[override]
        return self._identity(request.body, msgspec.json.decode(request.body), secrets.token_bytes(32), None)

    async def call(self, client: ChatClient, model: str, flight: Flight) -> Reply | Failure:
        stream = flight.request
        assert isinstance(stream, ChatStream)

        async def pass_on(chunk: bytes) -> None:
            flight.commit()
            began = time.monotonic()
            try:
                await stream.sink(chunk)
            except OSError as error:  # the client's connection, and not the judge's
                raise HungUp(str(error)) from error
            flight.held_s += time.monotonic() - began

        return await client.stream(self._named(stream.body, model), pass_on)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
