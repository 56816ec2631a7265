"""The request and reply formats: bytes to requests, verdicts to bytes. Pure.

    /v1/chat/completions   the client's own body        ─▶ Chat (goes upstream unchanged)
    /score                 freewheel's requests         ─▶ JudgeRequests ─▶ verdicts, including failed ones
    /openrlhf              {"query", "prompts", …}      ─▶ JudgeRequests ─▶ {"rewards": [...]}, or an error
    /slime                 {"prompt", "response", …}    ─▶ JudgeRequest  ─▶ a number, or an error

OpenRLHF and slime convert the reply to a tensor: a null would end their run, and a NaN would corrupt it. Both retry
after an error status, so a failed verdict is answered with one. At the retry, the verdicts that were scored come from
the cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from freewheel.errors import ConfigError
from freewheel.gateway.limits import Problem, bad_field, problem_of
from freewheel.judge.judge import as_requests
from freewheel.judge.request import JudgeRequest
from freewheel.judge.verdict import Failed, Scored, Verdict, plain_verdict

_END_MARKS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>")
"""End-of-turn marks of templates. OpenRLHF decodes special tokens too; they are not part of the response."""


def not_json(why: str) -> Problem:
    message = f"the body is not JSON that can be read: {why.removeprefix('JSON is malformed: ')}"
    return Problem(HTTPStatus.BAD_REQUEST, "invalid_json", message)


def read_json(body: bytes) -> tuple[Any, bytes]:
    """Parse a body. Returns its value and the body, in which lone surrogates are replaced.

    Models emit lone surrogates and Python's json writes them, but UTF-8 cannot hold one. `RecursionError` is left to
    the caller: later steps may also raise it.
    """
    try:
        try:
            return msgspec.json.decode(body), body
        except ValueError:
            body = json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8", "replace")
            return msgspec.json.decode(body), body
    except ValueError as error:
        raise not_json(str(error)) from None


def read_chat(body: bytes, model: str) -> tuple[bytes, bool]:
    """Check the fields that the gateway uses; the upstream checks the rest. Returns the body, and whether it
    streams."""
    fields, body = read_json(body)
    if not isinstance(fields, dict):
        raise bad_field("body", fields, "send a JSON object with model and messages")
    given = fields.get("model")
    if not isinstance(given, str):
        raise bad_field("model", given, f"name the model: {model!r}")
    if given != model:
        # If the request were passed on, the upstream's 404 would stop that endpoint for all clients.
        message = f"model = {given!r}: this gateway serves {model!r}"
        raise Problem(HTTPStatus.NOT_FOUND, "model_not_found", message, param="model")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", messages, "give a list of at least one message")
    streams = fields.get("stream")
    if not (streams is None or isinstance(streams, bool)):
        raise bad_field("stream", streams, "give true or false")
    return body, bool(streams)


# -- /score -----------------------------------------------------------------------------------------------------------


def read_score(body: bytes) -> list[JudgeRequest]:
    """Read `{"requests": [...]}`, a list, or one request. A null means a missing field."""
    given, _ = read_json(body)
    if isinstance(given, dict) and "requests" in given:
        unknown = sorted(set(given) - {"requests"})
        if unknown:
            raise bad_field(unknown[0], given[unknown[0]], "unknown field; the only one is requests")
        given = given["requests"]
    elif isinstance(given, dict | str):
        given = [given]
    if not isinstance(given, list):
        raise bad_field("requests", given, "give a list of requests, each with a response")
    try:
        return as_requests([_drop_nulls(one) for one in given])
    except ConfigError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, "invalid_value", str(error), param=error.key) from None


def write_score(requests: Sequence[JudgeRequest], verdicts: Sequence[Verdict]) -> bytes:
    """Return one entry per request, in order. Only a scored one has a value."""
    entries = [
        ({"id": request.id} if request.id else {}) | plain_verdict(verdict)
        for request, verdict in zip(requests, verdicts, strict=True)
    ]
    return msgspec.json.encode({"verdicts": entries})


def _drop_nulls(one: Any) -> Any:
    if not isinstance(one, dict):
        return one
    given = {key: value for key, value in one.items() if value is not None}
    if given.get("skip") is True:
        given["skip"] = "skip"
    elif given.get("skip") is False:
        del given["skip"]
    return given


# -- remote reward models ---------------------------------------------------------------------------------------------


def read_openrlhf(body: bytes) -> list[JudgeRequest]:
    """Read `{"query": [...], "prompts": [...], "labels": [...]}`: a query is its prompt followed by the response."""
    fields = _object(read_json(body)[0], "query")
    queries = fields.get("query")
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list):
        raise bad_field("query", queries, "give a list of texts: each a prompt with its response")
    prompts = _beside(fields, "prompts", len(queries))
    labels = _beside(fields, "labels", len(queries))
    return [
        JudgeRequest(_after(_text(f"query[{i}]", query), prompt), prompt, reference)
        for i, (query, prompt, reference) in enumerate(zip(queries, prompts, labels, strict=True))
    ]


def write_openrlhf(verdicts: Sequence[Verdict]) -> bytes:
    values = _values(verdicts)
    return msgspec.json.encode({"rewards": values, "scores": values, "extra_logs": {}})


def read_slime(body: bytes) -> JudgeRequest:
    """Read `{"prompt": text or messages, "response": text, "label": text or null}`."""
    fields = _object(read_json(body)[0], "response")
    prompt = fields.get("prompt")
    question = _messages("prompt", prompt) if isinstance(prompt, list) else _text("prompt", prompt or "")
    return JudgeRequest(_text("response", fields.get("response")), question, _label(fields.get("label")))


def write_slime(verdict: Verdict, key: str | None = None) -> bytes:
    """Return the bare number, or the number under the name of slime's `--reward-key`."""
    value = _values([verdict])[0]
    return msgspec.json.encode(value if key is None else {key: value})


def _values(verdicts: Sequence[Verdict]) -> list[float]:
    """Return all scores. Raises `Problem` if one is missing: these clients take a number or an error."""
    missing = [verdict for verdict in verdicts if not isinstance(verdict, Scored)]
    if not missing:
        return [verdict.value for verdict in verdicts if isinstance(verdict, Scored)]
    first = missing[0]
    assert isinstance(first, Failed), "these shapes have no way to skip"
    detail = f"{len(missing)} of {len(verdicts)} have no score; the first: {first.detail or first.reason}"
    raise problem_of(Failed(first.reason, first.attempts, detail))


def _after(query: str, prompt: str) -> str:
    """Return the text after the prompt. The prompt may not be at the start: a tokenizer may put a mark before it."""
    at = query.find(prompt)
    response = query[at + len(prompt) :] if at >= 0 else query
    while (mark := next((mark for mark in _END_MARKS if response.rstrip().endswith(mark)), None)) is not None:
        response = response.rstrip().removesuffix(mark)
    return response


def _beside(fields: dict[str, Any], name: str, count: int) -> list[str]:
    """Return the texts of a field that has one entry per query; empty texts if the field is missing."""
    given = fields.get(name)
    if given is None:
        return [""] * count
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) != count:
        raise bad_field(name, given, f"give one for each query, which are {count}")
    return [_label(one) if name == "labels" else _text(f"{name}[{i}]", one) for i, one in enumerate(given)]


def _label(value: Any) -> str:
    """Return a reference answer as text: datasets have text, numbers, or structures."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _messages(field: str, messages: list[Any]) -> str:
    """Return a conversation as one text; a single message is its content."""
    texts = []
    for i, message in enumerate(messages):
        content = _object(message, f"{field}[{i}]").get("content")
        if isinstance(content, list):  # text parts; a rubric cannot show other parts
            content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
        text = _text(f"{field}[{i}].content", content or "")
        texts.append(text if len(messages) == 1 else f"{message.get('role', 'user')}: {text}")
    return "\n\n".join(texts)


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_field(field, value, "it must be in a JSON object")
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad_field(field, value, "give text")
    return value
