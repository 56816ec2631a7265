"""What servers really send with status 200, as a reply or as the failure that it stands for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freewheel.judge.outcome import TOKENS_MAX, Failure, Kind, Reply, read_completion
from freewheel.judge.verdict import Usage


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


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b"{}", b"\xff", b'{"choices": []}', b'{"error": "x"}'])
def test_what_is_no_completion_is_garbage(content: bytes) -> None:
    assert failure(content).kind is Kind.GARBAGE


def test_no_content_at_all_is_an_empty_reply() -> None:
    assert reply(body(None)).text == ""
