"""The request and reply formats: what each accepts, how a bad body is reported, and that a failure has no number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freewheel.gateway import shapes
from freewheel.gateway.limits import STATUSES, TEMPORARY, Problem, problem_of
from freewheel.judge import Failed, JudgeRequest, Reason, Scored, Skipped, Usage

ASK = {"model": "judge", "messages": [{"role": "user", "content": "hi"}]}


def encode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def read_chat(body: bytes) -> tuple[bytes, bool]:
    return shapes.read_chat(body, "judge")


def refused(act: Any, *given: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        act(*given)
    return caught.value


@pytest.mark.parametrize(
    ("given", "sent", "streams"),
    [
        (b'{ "model": "judge","messages":["\\ud83d\\ude00"],  "seed": 12345678901234567890}', None, False),
        (b'{"model":"judge","messages":["cut \\ud83d"]}', {"model": "judge", "messages": ["cut ?"]}, False),
        ({**ASK, "stream": True}, None, True),
        ({**ASK, "stream": False}, None, False),
        ({**ASK, "stream": None}, None, False),
    ],
    ids=["odd spacing", "lone surrogate", "stream", "no stream", "null stream"],
)
def test_a_chat_body_is_forwarded_unchanged_unless_utf8_cannot_hold_it(given: Any, sent: Any, streams: bool):
    body, found = read_chat(encode(given))
    assert found is streams
    assert body == encode(given) if sent is None else json.loads(body) == sent


PROMPT = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
USER = {"role": "user", "content": "q"}
PARTS = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]


@pytest.mark.parametrize(
    ("read", "given", "expected"),
    [
        *((shapes.read_score, given, [JudgeRequest("a")]) for given in (
            {"requests": [{"response": "a"}]}, [{"response": "a"}], {"response": "a"}, "a", ["a"], {"requests": ["a"]},
            {"response": "a", "prompt": None, "skip": False},
        )),
        (
            shapes.read_score, {"response": "a", "prompt": "q", "reference": "r", "id": 7, "skip": True},
            [JudgeRequest("a", "q", "r", "7", "skip")],
        ),
        (
            shapes.read_openrlhf, {"query": [PROMPT + "2.<|im_end|>\n"], "prompts": [PROMPT], "labels": ["2"]},
            [JudgeRequest("2.", PROMPT, "2")],
        ),
        (
            shapes.read_openrlhf, {"query": ["<s>1+1? 2</s>"], "prompts": ["1+1?"], "labels": [None]},
            [JudgeRequest(" 2", "1+1?")],
        ),
        (shapes.read_openrlhf, {"query": ["1+1? 2"]}, [JudgeRequest("1+1? 2")]),
        (
            shapes.read_openrlhf, {"query": ["a", "b"], "prompts": ["", ""], "labels": [{"answer": 2}, 3.5]},
            [JudgeRequest("a", "", '{"answer":2}'), JudgeRequest("b", "", "3.5")],
        ),
        (shapes.read_openrlhf, {"query": [], "prompts": [], "labels": []}, []),
        (shapes.read_slime, {"prompt": "q", "response": "a", "label": "l"}, JudgeRequest("a", "q", "l")),
        (shapes.read_slime, {"prompt": [USER], "response": "a", "label": None}, JudgeRequest("a", "q")),
        (shapes.read_slime, {"prompt": PARTS, "response": "a"}, JudgeRequest("a", "system: s\n\nuser: q")),
    ],
)  # fmt: skip
def test_each_format_becomes_judge_requests(read: Any, given: Any, expected: Any):
    assert read(encode(given)) == expected


@pytest.mark.parametrize(
    ("read", "given", "param"),
    [
        (read_chat, 3, "body"),
        (read_chat, {**ASK, "model": None}, "model"),
        (read_chat, {**ASK, "messages": []}, "messages"),
        (read_chat, {**ASK, "messages": "hi"}, "messages"),
        (read_chat, {**ASK, "stream": 1}, "stream"),
        (shapes.read_score, {"requests": [{"response": "a"}, {"respnse": "b"}]}, "requests[1].respnse"),
        (shapes.read_score, {"requests": [{"response": 3}]}, "requests[0].response"),
        (shapes.read_score, {"requests": [{}]}, "requests[0].response"),
        (shapes.read_score, {"requests": 3}, "requests"),
        (shapes.read_score, {"requests": [], "model": "x"}, "model"),
        (shapes.read_openrlhf, {"query": 3}, "query"),
        (shapes.read_openrlhf, {"query": [3]}, "query[0]"),
        (shapes.read_openrlhf, {"query": ["a"], "prompts": []}, "prompts"),
        (shapes.read_openrlhf, [], "query"),
        (shapes.read_slime, {"prompt": "q"}, "response"),
        (shapes.read_slime, {"response": "a", "prompt": 3}, "prompt"),
        (shapes.read_slime, "a", "response"),
    ],
)
def test_a_wrong_field_is_named_in_a_400(read: Any, given: Any, param: str):
    problem = refused(read, encode(given))
    assert (problem.status, problem.code, problem.param) == (400, "invalid_value", param)
    assert str(problem).startswith(f"{param} = ")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b'{"a": "\\ud8"}'])
def test_a_body_that_is_not_json_is_a_400(content: bytes):
    assert (problem := refused(shapes.read_json, content)).status == 400 and problem.code == "invalid_json"


def test_only_a_scored_verdict_has_a_value():
    requests = [JudgeRequest("a", id="7"), JudgeRequest("b"), JudgeRequest("c")]
    verdicts = [
        Scored(7.0, "7", Usage(10, 1), {"style": 3.0}, attempts=2),
        Failed("unparseable", 2, "no score in it"),
        Skipped("gate"),
    ]
    assert json.loads(shapes.write_score(requests, verdicts))["verdicts"] == [
        {
            "status": "scored", "id": "7", "value": 7.0, "raw": "7", "cached": False, "parts": {"style": 3.0},
            "attempts": 2, "usage": {"prompt_tokens": 10, "completion_tokens": 1},
        },
        {
            "status": "failed", "reason": "unparseable", "detail": "no score in it",
            "attempts": 2, "usage": {"prompt_tokens": 0, "completion_tokens": 0},
        },
        {"status": "skipped", "reason": "gate"},
    ]  # fmt: skip


@pytest.mark.parametrize("reason", list(Reason))
def test_a_failed_verdict_is_an_error_that_tells_the_client_whether_to_try_again(reason: Reason):
    failed = Failed(reason.value, 3, "what was seen")
    for act, given in (
        (problem_of, failed),
        (shapes.write_openrlhf, [Scored(7.0), failed]),
        (shapes.write_slime, failed),
    ):
        problem = refused(act, given) if act is not problem_of else problem_of(failed)
        assert problem.status == STATUSES[reason] >= 400 and "what was seen" in str(problem)
        assert json.loads(problem.body())["error"]["code"] == reason
        assert ("Retry-After" in problem.headers) is (reason in TEMPORARY)
        assert (problem.headers.get("x-should-retry") == "false") is (reason not in TEMPORARY)
