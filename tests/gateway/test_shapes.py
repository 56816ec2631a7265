"""Each shape by itself: what is read, what is said about a bad body, and that a failure is never a number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from freewheel.gateway import shapes
from freewheel.gateway.problem import STATUSES, Problem, problem_of
from freewheel.judge import Failed, JudgeRequest, Reason, Scored, Skipped, Usage

MODELS = ("judge",)


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def refused(read: Any, content: bytes, *more: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        read(content, *more)
    return caught.value


# -- chat -------------------------------------------------------------------------------------------------------------

ASK = {"model": "judge", "messages": [{"role": "user", "content": "hi"}]}


def test_a_chat_body_goes_on_byte_by_byte_as_it_came():
    content = (
        b'{ "model": "judge","messages":[{"role":"user","content":"\\ud83d\\ude00"}],  "seed": 12345678901234567890}'
    )
    assert shapes.read_chat(content, MODELS) == shapes.Chat(content, streams=False)


def test_a_lone_surrogate_in_a_chat_body_is_replaced_since_no_judge_could_read_it():
    content = b'{"model":"judge","messages":[{"role":"user","content":"cut \\ud83d"}]}'
    sent = json.loads(shapes.read_chat(content, MODELS).body)
    assert sent["messages"][0]["content"] == "cut \ufffd"


@pytest.mark.parametrize(("stream", "streams"), [(True, True), (False, False), (None, False)])
def test_a_chat_streams_where_its_body_says_so(stream: bool | None, streams: bool):
    assert shapes.read_chat(body({**ASK, "stream": stream}), MODELS).streams is streams


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"stream": 1}, "stream"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named_with_its_value_and_a_remedy(wrong: dict[str, Any], param: str):
    problem = refused(shapes.read_chat, body({**ASK, **wrong}), MODELS)
    assert (problem.status, problem.param) == (400, param)
    assert repr(wrong[param]) in str(problem)


def test_another_model_is_refused_by_the_gateway_itself():
    problem = refused(shapes.read_chat, body({**ASK, "model": "gpt-9"}), MODELS)
    assert (problem.status, problem.code) == (404, "model_not_found")
    assert "'judge'" in str(problem)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b'{"a": "\\ud8"}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_what_is_not_json_is_a_400(content: bytes):
    problem = refused(shapes.read_json, content)
    assert (problem.status, problem.code) == (400, "invalid_json")


@pytest.mark.parametrize("depth", [65, 500])
def test_nesting_that_no_client_needs_is_refused_before_it_reaches_the_engine(depth: int):
    deep = b"[" * depth + b"]" * depth
    assert "deeper" in str(refused(shapes.read_chat, b'{"model":"judge","messages":[{"x":' + deep + b"}]}", MODELS))


def test_a_long_conversation_is_not_taken_for_a_deep_one():
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 500
    assert shapes.read_chat(body({**ASK, "messages": messages}), MODELS).streams is False


# -- /score -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [{"requests": [{"response": "a"}]}, [{"response": "a"}], {"response": "a"}, "a", ["a"], {"requests": ["a"]},
     {"response": "a", "prompt": None, "skip": False}],
)  # fmt: skip
def test_score_takes_a_batch_a_list_or_one_request(given: Any):
    assert shapes.read_score(body(given)) == [JudgeRequest("a")]


def test_score_takes_all_fields_of_a_request():
    given = {"response": "a", "prompt": "q", "reference": "r", "id": 7, "skip": True}
    assert shapes.read_score(body(given)) == [JudgeRequest("a", "q", "r", "7", "skip")]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"requests": [{"response": "a"}, {"respnse": "b"}]}, "requests[1].respnse"),
        ({"requests": [{"response": 3}]}, "requests[0].response"),
        ({"requests": [{}]}, "requests[0]"),
        ({"requests": 3}, "requests"),
        ({"requests": [], "model": "x"}, "model"),
        (3, "requests"),
    ],
)
def test_a_bad_score_request_is_named(given: Any, names: str):
    problem = refused(shapes.read_score, body(given))
    assert problem.status == 400
    assert names in str(problem)


def test_only_a_scored_verdict_has_a_value():
    requests = [JudgeRequest("a", id="7"), JudgeRequest("b"), JudgeRequest("c")]
    verdicts = [
        Scored(7.0, "7", Usage(10, 1), {"style": 3.0}, attempts=2),
        Failed("unparseable", 2, "no score in it"),
        Skipped("gate"),
    ]
    told = json.loads(shapes.write_score(requests, verdicts))["verdicts"]
    assert told[0] == {
        "status": "scored", "id": "7", "value": 7.0, "raw": "7", "cached": False, "parts": {"style": 3.0},
        "attempts": 2, "usage": {"prompt_tokens": 10, "completion_tokens": 1},
    }  # fmt: skip
    assert told[1]["reason"] == "unparseable" and told[1]["detail"] == "no score in it"
    assert told[2] == {"status": "skipped", "reason": "gate"}
    assert not any("value" in entry for entry in told[1:])


# -- remote reward models ---------------------------------------------------------------------------------------------


def test_openrlhf_queries_are_parted_into_prompt_and_response():
    prompt = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    given = {"query": [prompt + "2.<|im_end|>\n"], "prompts": [prompt], "labels": ["2"]}
    assert shapes.read_openrlhf(body(given)) == [JudgeRequest("2.", prompt, "2")]


def test_openrlhf_prompts_are_found_behind_a_tokenizers_own_mark():
    given = {"query": ["<s>1+1? 2</s>"], "prompts": ["1+1?"], "labels": [None]}
    assert shapes.read_openrlhf(body(given)) == [JudgeRequest(" 2", "1+1?")]


def test_openrlhf_of_older_versions_sends_queries_alone():
    assert shapes.read_openrlhf(body({"query": ["1+1? 2"]})) == [JudgeRequest("1+1? 2")]


def test_openrlhf_labels_that_are_no_text_are_shown_to_the_judge_as_json():
    given = {"query": ["a", "b"], "prompts": ["", ""], "labels": [{"answer": 2}, 3.5]}
    assert [request.reference for request in shapes.read_openrlhf(body(given))] == ['{"answer":2}', "3.5"]


def test_openrlhf_may_send_nothing_to_one_of_several_servers():
    given = {"query": [], "prompts": [], "labels": []}
    assert shapes.read_openrlhf(body(given)) == []
    assert json.loads(shapes.write_openrlhf([])) == {"rewards": [], "scores": [], "extra_logs": {}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"query": 3}, "query"),
        ({"query": [3]}, "query[0]"),
        ({"query": ["a"], "prompts": []}, "prompts"),
        ([], "query"),
    ],
)
def test_a_bad_openrlhf_request_is_named(given: Any, param: str):
    assert refused(shapes.read_openrlhf, body(given)).param == param


def test_slime_sends_a_prompt_as_text_or_as_messages():
    plain = {"prompt": "q", "response": "a", "label": "l"}
    assert shapes.read_slime(body(plain)) == JudgeRequest("a", "q", "l")
    one = {"prompt": [{"role": "user", "content": "q"}], "response": "a", "label": None}
    assert shapes.read_slime(body(one)) == JudgeRequest("a", "q")
    parts = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert shapes.read_slime(body({"prompt": parts, "response": "a"})) == JudgeRequest("a", "system: s\n\nuser: q")


def test_slime_gets_a_bare_number_or_one_under_its_reward_key():
    assert json.loads(shapes.write_slime(Scored(7.0))) == 7.0
    assert json.loads(shapes.write_slime(Scored(7.0), "score")) == {"score": 7.0}


@pytest.mark.parametrize("given", [{"prompt": "q"}, {"response": None}, "a", {"response": "a", "prompt": 3}])
def test_a_bad_slime_request_is_a_400(given: Any):
    assert refused(shapes.read_slime, body(given)).status == 400


@pytest.mark.parametrize("reason", list(Reason))
def test_a_failed_verdict_reaches_a_trainer_as_an_error_status_whatever_the_reason(reason: Reason):
    failed = Failed(reason.value, 3, "what was seen")
    for write in (shapes.write_openrlhf, lambda verdicts: shapes.write_slime(verdicts[-1])):
        problem = refused(write, [Scored(7.0), failed])  # type: ignore[arg-type]
        assert problem.status >= 400 and problem.code == reason
        assert "what was seen" in str(problem)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_every_reason_has_a_status_of_its_own_choice():
    assert set(STATUSES) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_failure_says_either_when_to_come_back_or_not_to(reason: Reason):
    problem = problem_of(Failed(reason.value, 3, "seen"))
    may_pass = reason in (Reason.THROTTLED, Reason.UNAVAILABLE, Reason.CANCELLED)
    assert ("Retry-After" in problem.headers) is may_pass
    assert (problem.headers.get("x-should-retry") == "false") is not may_pass
    assert json.loads(problem.body())["error"]["code"] == reason
