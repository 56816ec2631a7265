"""Each way in which a call can end: statuses by their kind, and bodies with status 200 as replies or failures."""

from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import pytest
from multidict import CIMultiDict

from freewheel.judge.outcome import (
    DETAIL_CHARS,
    HALTS,
    INFRA,
    REASONS,
    WAITS,
    CallFailure,
    FailureKind,
    Reply,
    classify,
    read_chat,
    read_completion,
    read_models,
    read_stream_usage,
    shorten,
)
from freewheel.judge.verdict import TOKENS_MAX, Usage

NOW = 1_800_000_000.0
NESTED = b"[" * 1200
"""Deeper than any decoder goes: it raises RecursionError."""


def outcome(status: int, body: object = b"", **headers: str) -> CallFailure:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return classify(status, named, raw, wall_now=NOW)


@pytest.mark.parametrize(
    ("kind", "statuses"),
    [
        (FailureKind.REJECTED, [400, 405, 413, 422]), (FailureKind.FORBIDDEN, [403]),
        (FailureKind.AUTH, [401]), (FailureKind.QUOTA, [402]),
        (FailureKind.NOT_FOUND, [404, 301, 302, 307, 308]), (FailureKind.TIMEOUT, [408]),
        (FailureKind.THROTTLED, [429]), (FailureKind.OVERLOADED, [500, 502, 503, 504, 520, 529, 599]),
    ],
)  # fmt: skip
def test_a_status_has_its_kind(kind: FailureKind, statuses: list[int]) -> None:
    assert {outcome(status).kind for status in statuses} == {kind}


@pytest.mark.parametrize(
    ("kind", "body", "headers"),
    [
        (FailureKind.QUOTA, {"error": {"code": "insufficient_quota", "message": "x"}}, {}),
        (FailureKind.QUOTA, {"error": {"message": "You exceeded your current quota, please check your plan"}}, {}),
        (FailureKind.QUOTA, {"error": "Insufficient Balance"}, {}),
        (FailureKind.QUOTA, {"detail": "insufficient credit"}, {}),
        (FailureKind.QUOTA, b"insufficient_quota", {}),
        (FailureKind.RATE, {"error": {"message": "Rate limit reached for requests. Limit: 500 / min."}}, {}),
        (FailureKind.RATE, {"error": {"message": "Rate limit reached for tokens"}}, {}),
        (FailureKind.RATE, {"error": {"message": "You have hit 60 requests per minute"}}, {}),
        (FailureKind.RATE, {"error": {"message": "Limit 10000 TPM"}}, {}),
        (FailureKind.RATE, b"too many tokens per day", {}),
        (FailureKind.RATE, b"", {"x_ratelimit_remaining_requests": "0"}),
        (FailureKind.RATE, b"", {"x_ratelimit_remaining_tokens": "0"}),
        (FailureKind.THROTTLED, b"", {"x_ratelimit_remaining_requests": "5"}),
        (FailureKind.THROTTLED, {"error": {"message": "Too many requests are in flight"}}, {}),
    ],
)
def test_the_words_and_headers_of_a_429_tell_credit_rate_and_concurrency_apart(
    kind: FailureKind, body: object, headers: dict[str, str]
) -> None:
    assert outcome(429, body, **headers).kind is kind


@pytest.mark.parametrize(
    ("wait_s", "headers"),
    [
        (7.0, {"Retry_After": "7"}),
        (1.5, {"Retry_After": "1.5"}),
        (30.0, {"Retry_After": formatdate(NOW + 30, usegmt=True)}),
        (0.0, {"Retry_After": formatdate(NOW - 30, usegmt=True)}),
        (0.25, {"retry_after_ms": "250", "Retry_After": "7"}),
        (None, {}),
        (360.0, {"x_ratelimit_remaining_requests": "0", "x_ratelimit_reset_requests": "6m0s"}),
        (None, {"x_ratelimit_remaining_tokens": "3", "x_ratelimit_reset_tokens": "6m0s"}),
        (
            2.0,
            {
                "x_ratelimit_remaining_requests": "0",
                "x_ratelimit_reset_requests": "20ms",
                "x_ratelimit_remaining_tokens": "0",
                "x_ratelimit_reset_tokens": "2s",
            },
        ),
        *((None, {"Retry_After": text}) for text in ("", "soon", "-", "NaN", "inf", "1e999", "\x00")),
    ],
)
def test_the_requested_wait_is_retry_after_or_the_reset_of_the_exhausted_limit(
    wait_s: float | None, headers: dict[str, str]
) -> None:
    assert outcome(429, **headers).retry_after_s == wait_s
    if "Retry_After" in headers:
        assert outcome(503, **headers).retry_after_s == wait_s


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no such thing", "code": "gone"}}', "gone; no such thing"),
        (b'{"message": "plain"}', "plain"),
        (b'{"error": "text"}', "text"),
        (b'["a", 1]', "['a', 1]"),
        (b"<html>\n <b>Bad</b>\n</html>", "<html> <b>Bad</b> </html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"error": {"message": "half \\ud83d"}}', "half"),
        (b"null", "None"),
        (b"x" * 1_000_000, "xxx"),
        (NESTED, "[[["),
    ],
)
def test_the_detail_holds_the_servers_words_short_and_on_one_line(body: bytes, words: str) -> None:
    detail = outcome(400, body).detail
    assert detail.startswith("HTTP 400 Bad Request") and words in detail and "\n" not in detail
    assert len(detail.encode()) < 3 * DETAIL_CHARS


def test_details_of_redirects_and_odd_statuses_can_be_shown() -> None:
    redirect = outcome(302, b"<html>" + b"moved " * 500, Location="https://elsewhere/v1").detail[:DETAIL_CHARS]
    assert "https://elsewhere/v1" in redirect and "not followed" in redirect
    assert b"http://h/" in outcome(302, Location="http://h/\udcff").detail.encode()
    assert outcome(599).detail == "HTTP 599 ?"
    assert shorten("a" * DETAIL_CHARS) == "a" * DETAIL_CHARS
    assert shorten("a" * (DETAIL_CHARS + 1)) == "a" * (DETAIL_CHARS - 1) + "…"


def test_each_kind_has_a_reason_and_the_groups_do_not_overlap() -> None:
    assert set(REASONS) == set(FailureKind)
    assert not (WAITS & INFRA or WAITS & HALTS or INFRA & HALTS)


# -- bodies with status 200 ------------------------------------------------------------------------------------------


def body(content: Any, finish_reason: str | None = "stop", message: Any = None, **rest: Any) -> bytes:
    whole = {"role": "assistant", "content": content, **(message or {})}
    return json.dumps({"choices": [{"message": whole, "finish_reason": finish_reason}], **rest}).encode()


PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "3?"}]}, {"type": "text", "text": "7"}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (body("7", usage={"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}), Reply("7", Usage(12, 1))),
        (body(PARTS), Reply("7", Usage())),
        (body("7", message={"reasoning_content": "it could be 3"}), Reply("7", Usage())),
        (body(None), Reply("", Usage())),
        (body("1", finish_reason="length"), Reply("1", Usage(), cut_off=True)),
        (body("1", finish_reason="content_filter"), Reply("1", Usage(), cut_off=True)),
        (body("7", usage={"prompt_tokens": 10**30, "completion_tokens": 1}), Reply("7", Usage(TOKENS_MAX, 1))),
        (body("7", usage={"prompt_tokens": -5, "completion_tokens": 2.0}), Reply("7", Usage(0, 2))),
        (body("7", usage={"prompt_tokens": None}), Reply("7", Usage())),
        (body("7", usage="none of your business"), Reply("7", Usage())),
        (body("7", usage={"prompt_tokens": "many"}), Reply("7", Usage())),
        (b"\xef\xbb\xbf" + body("7"), Reply("7", Usage())),
        (body("7 caf\u00e9").replace(b"\\u00e9", b"\xe9"), Reply("7 caf\ufffd", Usage())),
        (body("7 \ud800"), Reply("7 \ufffd", Usage())),
    ],
)
def test_a_completion_is_read_however_it_is_wrapped(content: bytes, expected: Reply) -> None:
    assert read_completion(content) == expected


@pytest.mark.parametrize(
    ("content", "kind", "words", "billed"),
    [
        (body(None, message={"refusal": "I cannot judge this."}), FailureKind.REJECTED, "I cannot judge this.", True),
        (body("", finish_reason="content_filter"), FailureKind.REJECTED, "content_filter", True),
        *(
            (json.dumps({"error": {"code": code, "message": "upstream said no"}}).encode(), kind, "said no", False)
            for code, kind in ((429, FailureKind.THROTTLED), (502, FailureKind.OVERLOADED), (400, FailureKind.REJECTED))
        ),
    ],
)
def test_a_refusal_or_an_error_with_status_200_is_recognized(
    content: bytes, kind: FailureKind, words: str, billed: bool
) -> None:
    found = read_completion(content)
    assert isinstance(found, CallFailure) and (found.kind, found.billed) == (kind, billed) and words in found.detail
    if not billed:
        assert read_chat(content) == found, "a client's completion has the same errors"


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"[]", b"{}", b"\xff", b'{"choices": []}', b'{"error": "x"}', b'{"choices": 3}',
     NESTED, b'{"choices": ' + NESTED],
)  # fmt: skip
def test_a_body_that_is_not_a_completion_is_garbage_and_is_billed(content: bytes) -> None:
    odd_message = b'{"choices": [{"message": {"content": 7}}]}'  # a client of the gateway may get it
    for found in (read_completion(content), read_chat(content), read_completion(odd_message)):
        assert isinstance(found, CallFailure) and found.kind is FailureKind.GARBAGE and found.billed


def test_usage_is_found_at_a_streams_end_if_it_is_there() -> None:
    last = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\r\n\r\ndata: [DONE]\n\n'
    assert read_stream_usage(b'data: {"choices": []}\n\n' + last) == Usage(5, 2)
    for tail in (b'data: {"choices": [], "usage": null}\n\n', b'ice", "usage": {"prom', b'data: {"usage": ' + NESTED):
        assert read_stream_usage(tail) == Usage()


def test_the_names_of_models_are_read_from_the_list() -> None:
    assert read_models(b'{"data": [{"id": "a"}, {"id": "b"}]}') == ["a", "b"]
    for content in (NESTED, b"", b"{}", b'{"data": [3]}', b'{"data": [{}]}'):
        assert read_models(content) == []
