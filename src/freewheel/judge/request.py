"""The two kinds of request: for each, how to identify it, write its body and read a reply to it.

    JudgeRequest ─▶ RubricExchange   the two messages of a rubric; the reply is read as a score
    ChatRequest  ─▶ ChatExchange     the body of a gateway's client; the reply is returned as it came

Both share the limiter, retries, breaker, cache and accounts of the engine.

A rubric's messages hold the judged text as data:

    rubric ──▶ system message: instructions, then the rule about data      (the same bytes for every request)
    request ─▶ user message:   code · [BEGIN x code] text [END x code] · closing line

The code is an HMAC of the content under a secret of this user (`ReplyCache.secret`). The author of the content cannot
know it, so nothing in the content can close its block. Equal content has an equal code, and the code is not part of the
request's hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from freewheel.judge.config import JudgeConfig
from freewheel.judge.outcome import CallFailure, HungUp, Reply, read_chat
from freewheel.judge.parse import Unparseable, make_reader
from freewheel.judge.rubric import ANNOUNCE, BEGIN, END, LABELS, MARKER_CLOSE, Rubric, template_parts
from freewheel.judge.verdict import Scored, Usage, without_surrogates

if TYPE_CHECKING:
    from freewheel.judge.cache import CachedReply
    from freewheel.judge.client import ChatClient
    from freewheel.judge.engine import InFlightRequest

_HASH_VERSION = b"freewheel-judge-1"
"""Change this whenever the computation of the hash changes. Otherwise an older cache would return wrong replies."""
_CHAT_VERSION = b"freewheel-chat-1"
"""Change this whenever the computation of a chat body's key changes."""
_PRIVATE_FIELDS = ("user", "metadata", "safety_identifier")
"""Fields that identify the client. They do not change the answer."""

CODE_HEX_DIGITS = 32
"""128 bits of the HMAC: impossible to guess, and short enough for a judge to compare."""
_MARK = "\x00user\x00"
"""Placeholder of the user message in an encoded body."""


class JudgeRequest(msgspec.Struct, frozen=True, array_like=True):
    """One response to judge. Requests with equal content share one call, even if their `id` differs."""

    response: str
    prompt: str = ""
    """The question that the response answers."""
    reference: str = ""
    """A reference answer, if there is one."""
    id: str = ""
    """The caller's own identifier. It is not sent and not hashed."""
    skip: str = ""
    """A reason not to judge this response. It ends as `Skipped(reason)`, in its place in the batch."""

    def encodable(self) -> JudgeRequest:
        """Replace each lone surrogate by U+FFFD. UTF-8 cannot carry one, and no judge could read it."""
        texts = (self.response, self.prompt, self.reference, self.id, self.skip)
        return JudgeRequest(*map(without_surrogates, texts))


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


# -- scores by a rubric ----------------------------------------------------------------------------------------------


class RequestHasher:
    """SHA-256 over everything that decides a reply: endpoint, model, rubric as sent, sampling parameters, content.

    The first endpoint represents all of them: they serve the same judge.
    """

    def __init__(self, config: JudgeConfig) -> None:
        sampling = {**config.sampling, "temperature": config.temperature, "max_tokens": config.max_tokens}
        parts = (
            _HASH_VERSION,
            config.endpoints[0].url.encode(),
            (config.endpoints[0].model or config.model).encode(),
            config.loaded_rubric.identity(),
            msgspec.json.encode(sampling, order="sorted"),
        )
        self._base = hashlib.sha256()
        for part in parts:
            self._base.update(b"%d:" % len(part) + part)

    def __call__(self, request: JudgeRequest) -> bytes:
        digest = self._base.copy()
        digest.update(_encode_content(request))
        return digest.digest()


def _encode_content(request: JudgeRequest) -> bytes:
    """Encode the texts behind their lengths, so that no two contents give the same bytes."""
    prompt, reference, response = request.prompt.encode(), request.reference.encode(), request.response.encode()
    return b"%d:%d:%d:" % (len(prompt), len(reference), len(response)) + prompt + reference + response


class PromptBuilder:
    """Builds the messages of one rubric. The response is sent unchanged, and cannot leave its block."""

    def __init__(self, rubric: Rubric, secret: bytes) -> None:
        self.system = rubric.system_text()
        self._secret = secret
        self._begin = {field: f"{BEGIN}{label} " for field, label in LABELS.items()}
        # On a separate line, however the text ends.
        self._end = {field: f"\n{END}{label} " for field, label in LABELS.items()}
        self._parts = _end_lines(template_parts(rubric.template))
        self._tail = rubric.closing_text()
        self._reminder = rubric.reminder_text()

    def user(self, request: JudgeRequest) -> str:
        """The user message of a first ask."""
        code = hmac.digest(self._secret, _encode_content(request), "sha256").hex()[:CODE_HEX_DIGITS]
        close = code + MARKER_CLOSE
        pieces = [ANNOUNCE, code, ".\n\n"]
        for text, field in self._parts:
            if text:
                pieces.append(text)
            content = getattr(request, field) if field else ""
            if content or field == "response":
                pieces += (self._begin[field], close, "\n", content, self._end[field], close, "\n\n")
        pieces.append(self._tail)
        return "".join(pieces)

    def reask(self, request: JudgeRequest) -> str:
        """The user message after an unreadable reply: the first one plus the rubric's reminder."""
        return f"{self.user(request)}\n\n{self._reminder}"


def _end_lines(parts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the template parts with line breaks added, so that each text ends its line before the next block or the
    closing line."""
    found: list[tuple[str, str]] = []
    for text, field in parts:
        line = text.lstrip("\n") if found else text
        if line and not field:
            line = line.rstrip("\n") + "\n\n"
        elif line and not line.endswith("\n"):
            line += "\n"
        found.append((line, field))
    return tuple(found)


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

    async def call(self, client: ChatClient, model: str, inflight: InFlightRequest) -> Reply | CallFailure:
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


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


# -- chat completions of the gateway's clients ------------------------------------------------------------------------


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

    async def call(self, client: ChatClient, model: str, inflight: InFlightRequest) -> Reply | CallFailure:
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
