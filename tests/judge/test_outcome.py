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
    Failure,
    Kind,
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


def kind(status: int, body: object = b"", **headers: str) -> Kind:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return classify(status, named, raw, wall_now=NOW).kind


def wait_s(status: int = 429, **headers: str) -> float | None:
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return classify(status, named, b"", wall_now=NOW).retry_after_s


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, Kind.REJECTED), (413, Kind.REJECTED), (422, Kind.REJECTED), (403, Kind.FORBIDDEN), (405, Kind.REJECTED),
        (401, Kind.AUTH), (402, Kind.QUOTA), (404, Kind.NOT_FOUND), (408, Kind.TIMEOUT), (429, Kind.THROTTLED),
        (301, Kind.NOT_FOUND), (302, Kind.NOT_FOUND), (307, Kind.NOT_FOUND), (308, Kind.NOT_FOUND),
        (500, Kind.OVERLOADED), (502, Kind.OVERLOADED), (503, Kind.OVERLOADED), (504, Kind.OVERLOADED),
        (520, Kind.OVERLOADED), (529, Kind.OVERLOADED), (599, Kind.OVERLOADED),
    ],
)  # fmt: skip
def test_a_status_has_its_kind(status: int, expected: Kind) -> None:
    assert kind(status) is expected


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": "insufficient_quota", "message": "x"}},
        {"error": {"message": "You exceeded your current quota, please check your plan"}},
        {"error": "Insufficient Balance"},
        {"detail": "insufficient credit"},
        b"insufficient_quota",
    ],
)
def test_a_429_for_want_of_credit_is_not_waited_for(body: object) -> None:
    assert kind(429, body) is Kind.QUOTA


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "Rate limit reached for requests. Limit: 500 / min."}},
        {"error": {"message": "Rate limit reached for tokens"}},
        {"error": {"message": "You have hit 60 requests per minute"}},
        {"error": {"message": "Limit 10000 TPM"}},
        b"too many tokens per day",
    ],
)
def test_a_429_for_the_rate_is_known_by_its_words(body: object) -> None:
    assert kind(429, body) is Kind.RATE


def test_a_429_for_the_rate_is_known_by_its_headers() -> None:
    assert kind(429, x_ratelimit_remaining_requests="0") is Kind.RATE
    assert kind(429, x_ratelimit_remaining_tokens="0") is Kind.RATE
    assert kind(429, x_ratelimit_remaining_requests="5") is Kind.THROTTLED
    assert kind(429, {"error": {"message": "Too many requests are in flight"}}) is Kind.THROTTLED


def test_retry_after_is_read_as_seconds_as_a_date_and_in_milliseconds() -> None:
    assert wait_s(Retry_After="7") == 7.0
    assert wait_s(Retry_After="1.5") == 1.5
    assert wait_s(Retry_After=formatdate(NOW + 30, usegmt=True)) == 30.0
    assert wait_s(Retry_After=formatdate(NOW - 30, usegmt=True)) == 0.0
    assert wait_s(retry_after_ms="250", Retry_After="7") == 0.25
    assert wait_s(503, Retry_After="3") == 3.0
    assert wait_s() is None


@pytest.mark.parametrize("text", ["", "soon", "-", "NaN", "inf", "1e999", "\x00"])
def test_a_retry_after_that_says_nothing_is_none(text: str) -> None:
    assert wait_s(Retry_After=text) is None


def test_the_exhausted_limits_reset_stands_in_for_retry_after() -> None:
    assert wait_s(x_ratelimit_remaining_requests="0", x_ratelimit_reset_requests="6m0s") == 360.0
    assert wait_s(x_ratelimit_remaining_tokens="3", x_ratelimit_reset_tokens="6m0s") is None
    assert wait_s(
        x_ratelimit_remaining_requests="0", x_ratelimit_reset_requests="20ms",
        x_ratelimit_remaining_tokens="0", x_ratelimit_reset_tokens="2s",
    ) == 2.0  # fmt: skip


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
        (b"", ""),
    ],
)
def test_the_detail_holds_the_servers_own_words_on_one_line(body: bytes, words: str) -> None:
    detail = classify(400, {}, body, wall_now=NOW).detail
    assert detail.startswith("HTTP 400 Bad Request") and words in detail and "\n" not in detail
    detail.encode()  # it travels between processes


def test_the_detail_is_short_whatever_the_server_sends() -> None:
    assert len(classify(400, {}, b"x" * 1_000_000, wall_now=NOW).detail) < DETAIL_CHARS + 50
    assert shorten("a" * DETAIL_CHARS) == "a" * DETAIL_CHARS
    assert shorten("a" * (DETAIL_CHARS + 1)) == "a" * (DETAIL_CHARS - 1) + "…"


def test_a_redirect_says_where_to_and_what_to_do_however_long_its_page() -> None:
    failure = classify(302, {"Location": "https://elsewhere/v1"}, b"<html>" + b"moved " * 500, wall_now=NOW)
    assert "https://elsewhere/v1" in failure.detail[:DETAIL_CHARS] and "not followed" in failure.detail[:DETAIL_CHARS]


def test_a_header_that_is_not_utf8_can_still_be_told() -> None:
    detail = classify(302, {"Location": "http://h/\udcff"}, b"", wall_now=NOW).detail
    assert b"http://h/" in detail.encode()


def test_an_unnamed_status_is_told() -> None:
    assert classify(599, {}, b"", wall_now=NOW).detail == "HTTP 599 ?"


def test_each_kind_has_a_reason_and_the_groups_do_not_overlap() -> None:
    assert set(REASONS) == set(Kind)
    assert not (WAITS & INFRA or WAITS & HALTS or INFRA & HALTS)


# -- bodies with status 200 ------------------------------------------------------------------------------------------


def body(content: Any, finish_reason: str | None = "stop", **rest: Any) -> bytes:
    message = {"role": "assistant", "content": content, **rest.pop("message", {})}
    return json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}], **rest}).encode()


def reply(content: bytes) -> Reply:
    found = read_completion(content)
    assert isinstance(found, Reply), found
    return found


def failure(content: bytes) -> Failure:
    found = read_completion(content)
    assert isinstance(found, Failure), found
    return found


def test_text_and_usage_are_read() -> None:
    found = reply(body("7", usage={"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}))
    assert found == Reply("7", Usage(12, 1))


def test_a_list_of_parts_is_read_without_the_thinking() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "3?"}]}, {"type": "text", "text": "7"}]
    assert reply(body(parts)).text == "7"


def test_reasoning_beside_the_content_is_left_out() -> None:
    assert reply(body("7", message={"reasoning_content": "it could be 3"})).text == "7"


@pytest.mark.parametrize("tokens", [10**30, -5, 2.0, None])
def test_an_odd_count_of_tokens_harms_nobody(tokens: Any) -> None:
    usage = reply(body("7", usage={"prompt_tokens": tokens, "completion_tokens": 1})).usage
    assert 0 <= usage.prompt_tokens <= TOKENS_MAX and usage.completion_tokens == 1


@pytest.mark.parametrize("why", ["length", "content_filter"])
def test_a_reply_that_did_not_come_to_its_end_is_marked(why: str) -> None:
    assert reply(body("1", finish_reason=why)).cut_off


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + body("7"),
        body("7 caf\u00e9").decode().encode().replace(b"\\u00e9", b"\xe9"),
        body("7 \ud800"),
        body("7", usage="none of your business"),
        body("7", usage={"prompt_tokens": "many"}),
    ],
    ids=["byte order mark", "latin-1", "lone surrogate", "usage as text", "usage of text"],
)
def test_what_can_be_read_is_read_however_it_is_wrapped(content: bytes) -> None:
    assert reply(content).text.startswith("7")


def test_an_answer_that_nothing_can_be_made_of_is_still_billed() -> None:
    assert failure(b"<html>").billed and failure(b'{"choices": []}').billed
    assert not failure(b'{"error": {"code": 429, "message": "no"}}').billed


def test_a_refusal_is_not_asked_for_again() -> None:
    found = failure(body(None, message={"refusal": "I cannot judge this."}))
    assert found.kind is Kind.REJECTED and "I cannot judge this." in found.detail
    assert failure(body("", finish_reason="content_filter")).kind is Kind.REJECTED


@pytest.mark.parametrize(("code", "kind"), [(429, Kind.THROTTLED), (502, Kind.OVERLOADED), (400, Kind.REJECTED)])
def test_an_error_with_status_200_is_what_its_code_says(code: int, kind: Kind) -> None:
    found = failure(json.dumps({"error": {"code": code, "message": "upstream said no"}}).encode())
    assert found.kind is kind and "upstream said no" in found.detail


NESTED = b"[" * 1200
"""Deeper than any decoder goes: it raises RecursionError."""


@pytest.mark.parametrize("read", [read_completion, read_chat])
@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"[]", b"{}", b"\xff", b'{"choices": []}', b'{"error": "x"}', b'{"choices": 3}',
     NESTED, b'{"choices": ' + NESTED],
)  # fmt: skip
def test_what_is_no_completion_is_garbage(read: Any, content: bytes) -> None:
    found = read(content)
    assert isinstance(found, Failure) and found.kind is Kind.GARBAGE and found.billed


def test_deep_nesting_breaks_no_reader() -> None:
    assert classify(503, {}, NESTED, wall_now=0.0).kind is Kind.OVERLOADED
    assert read_models(NESTED) == []
    assert read_stream_usage(b'data: {"usage": ' + NESTED) == Usage()


def test_no_content_at_all_is_an_empty_reply() -> None:
    assert reply(body(None)).text == ""


def test_usage_is_found_at_a_streams_end_or_taken_as_nothing() -> None:
    last = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\r\n\r\ndata: [DONE]\n\n'
    assert read_stream_usage(b'data: {"choices": []}\n\n' + last) == Usage(5, 2)
    assert read_stream_usage(b'data: {"choices": [], "usage": null}\n\n') == Usage()
    assert read_stream_usage(b'ice", "usage": {"prom') == Usage()
