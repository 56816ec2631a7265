"""A request's hash covers everything that decides a reply; its messages fence the content in by a code."""

from __future__ import annotations

import logging
import multiprocessing
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from freewheel.judge import Endpoint, JudgeConfig, JudgeRequest, Rubric, load_rubric
from freewheel.judge.request import (
    CODE_HEX_DIGITS,
    SECRET_BYTES,
    SECRET_FILE,
    PromptBuilder,
    RequestHasher,
    local_secret,
)
from freewheel.judge.rubric import ANNOUNCE, BUILTIN, DATA_RULE

CONTENTS = st.tuples(st.text(max_size=12), st.text(max_size=12), st.text(max_size=12))
ONE = JudgeRequest("response", "prompt", "reference")
OWN_WORDS = Rubric(name="r", system="s", template="{prompt}{reference}{response}", closing="c", reminder="r")


def digest(request: JudgeRequest = ONE, **settings: Any) -> bytes:
    return RequestHasher(JudgeConfig(**{"endpoint": "http://h", "model": "m", **settings}))(request)


def test_it_is_the_same_in_every_process_and_release() -> None:
    """If this changes, cached replies are lost: change HASH_VERSION then, and say so in the changelog."""
    assert digest(rubric=OWN_WORDS).hex() == "f41861047a77baccdc81a724f7c946868f3294df42f6333aaa77fd2b9b775a61"


@given(CONTENTS, CONTENTS)
@example(("ab", "c", ""), ("a", "bc", ""))
@example(("", "abc", ""), ("", "", "abc"))
def test_two_requests_are_equal_exactly_if_their_contents_are(
    first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    assert (digest(JudgeRequest(*first, id="1")) == digest(JudgeRequest(*second, id="2"))) == (first == second)


@pytest.mark.parametrize(
    ("settings", "is_in_it"),
    [
        ({"endpoint": "http://other"}, True),
        ({"model": "m2"}, True),
        ({"endpoint": Endpoint(url="http://h", model="m2")}, True),
        ({"rubric": "yes_no"}, True),
        ({"temperature": 0.5}, True),
        ({"temperature": None}, True),
        ({"max_tokens": 5}, True),
        ({"sampling": {"top_p": 0.5}}, True),
        ({"concurrency": 3}, False),
        ({"api_key": "k"}, False),
        ({"placement": "thread"}, False),
        ({"max_attempts": 2}, False),
        ({"cache_ttl_s": 5.0}, False),
        ({"endpoint": [Endpoint(url="http://h"), Endpoint(url="http://other")]}, False),
        ({"endpoint": "http://h/v1/chat/completions"}, False),
        ({"rubric": msgspec.structs.replace(load_rubric("integer"), place="last")}, False),
    ],
)
def test_the_hash_covers_the_settings_that_decide_a_reply_and_no_others(
    settings: dict[str, Any], is_in_it: bool
) -> None:
    assert (digest(**settings) != digest()) == is_in_it


def test_the_order_of_sampling_fields_does_not_matter() -> None:
    assert digest(sampling={"a": 1, "b": 2}) == digest(sampling={"b": 2, "a": 1})


def test_a_lone_surrogate_is_replaced_and_nothing_else() -> None:
    odd = JudgeRequest("a\ud800b\udfff\U0001f600\x00", "\udc80", "", "\ud800", "\ud800")
    assert odd.encodable() == JudgeRequest("a\ufffdb\ufffd\U0001f600\x00", "\ufffd", "", "\ufffd", "\ufffd")
    digest(odd.encodable())


# -- the messages ------------------------------------------------------------------------------------------------

SECRET = bytes(range(SECRET_BYTES))
BUILDER = PromptBuilder(BUILTIN["integer"], SECRET)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def code_of(message: str) -> str:
    found = re.match(rf"{ANNOUNCE}([0-9a-f]{{{CODE_HEX_DIGITS}}})\.\n", message)
    assert found
    return found[1]


def test_a_request_with_all_parts_reads_as_documented() -> None:
    message = BUILDER.user(JudgeRequest("It is 4.", "What is 2+2?", "4"))
    code = code_of(message)
    assert message == (
        f"The code of this message is {code}.\n\n"
        f"[BEGIN QUESTION {code}]\nWhat is 2+2?\n[END QUESTION {code}]\n\n"
        f"[BEGIN REFERENCE ANSWER {code}]\n4\n[END REFERENCE ANSWER {code}]\n\n"
        f"[BEGIN RESPONSE {code}]\nIt is 4.\n[END RESPONSE {code}]\n\n"
        "Now judge the response. Output one integer from 1 to 10 and nothing else."
    )


def test_a_reask_is_the_first_message_with_the_reminder_after_it() -> None:
    request = JudgeRequest("a", "b")
    assert BUILDER.reask(request).startswith(BUILDER.user(request))
    assert BUILDER.reask(request).endswith(BUILTIN["integer"].reminder_text())
    own = msgspec.structs.replace(BUILTIN["integer"], reminder="Digits only.")
    assert PromptBuilder(own, SECRET).reask(request).endswith("\n\nDigits only.")
    assert BUILDER.system == f"{BUILTIN['integer'].system}\n\n{DATA_RULE}"


@given(TEXTS, TEXTS, TEXTS)
def test_every_text_is_sent_unchanged_between_marker_lines_and_an_empty_one_is_left_out(
    response: str, prompt: str, reference: str
) -> None:
    message = BUILDER.user(JudgeRequest(response, prompt, reference))
    code = code_of(message)
    for label, text in (("RESPONSE", response), ("QUESTION", prompt), ("REFERENCE ANSWER", reference)):
        if text or label == "RESPONSE":
            assert f"\n[BEGIN {label} {code}]\n{text}\n[END {label} {code}]\n" in message
        else:
            assert f"{label} {code}" not in message


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
@example(("ab", "", ""), ("b", "a", ""))
@example(("", "ab", ""), ("b", "", "a"))
def test_equal_content_has_an_equal_code_and_other_content_another(
    first: tuple[str, str, str], second: tuple[str, str, str]
) -> None:
    same = code_of(BUILDER.user(JudgeRequest(*first, id="one")))
    assert same == code_of(BUILDER.user(JudgeRequest(*first, id="two")))
    assert (code_of(BUILDER.user(JudgeRequest(*second))) == same) == (first == second)
    assert code_of(PromptBuilder(BUILTIN["integer"], b"x" * 32).user(JudgeRequest(*first))) != same


def test_a_template_keeps_marker_lines_on_separate_lines() -> None:
    rubric = Rubric(name="r", system="s", template="Asked: {prompt} {{as it is}} Said: {response} Decide.")
    message = PromptBuilder(rubric, SECRET).user(JudgeRequest("R", "P"))
    code = code_of(message)
    assert message == (
        f"The code of this message is {code}.\n\n"
        f"Asked: \n[BEGIN QUESTION {code}]\nP\n[END QUESTION {code}]\n\n"
        f" {{as it is}} Said: \n[BEGIN RESPONSE {code}]\nR\n[END RESPONSE {code}]\n\n"
        " Decide.\n\nNow judge the response. Output one integer from 1 to 10 and nothing else."
    )


def test_the_secret_is_kept_in_a_private_file_and_read_back(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "private"
    secret = local_secret(directory)
    assert len(secret) == SECRET_BYTES
    assert local_secret(directory) == secret
    assert stat.S_IMODE((directory / SECRET_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path.name for path in directory.iterdir()] == [SECRET_FILE]


def test_processes_and_threads_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool, ThreadPoolExecutor(16) as threads:
        others = pool.map_async(local_secret, [tmp_path / "private"] * 6)
        found = [*threads.map(local_secret, [tmp_path / "private"] * 64), *others.get()]
    assert len(set(found)) == 1


def test_an_unusable_directory_gives_one_warning_and_the_secret_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with caplog.at_level(logging.WARNING, "freewheel.judge"):
        secrets = {local_secret(blocked / "private") for _ in range(3)}
        assert local_secret(None) not in secrets
    assert len(secrets) == len(caplog.records) == 1
    assert "stays in memory" in caplog.text


@pytest.mark.parametrize("case", ["readable by others", "too short", "a link"])
def test_a_secret_file_that_cannot_be_trusted_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    path = tmp_path / SECRET_FILE
    known = b"k" * (SECRET_BYTES if case != "too short" else 5)
    target = tmp_path / "elsewhere" if case == "a link" else path
    target.write_bytes(known)
    target.chmod(0o644 if case == "readable by others" else 0o600)
    if case == "a link":
        path.symlink_to(target)
    assert local_secret(tmp_path) != known
    assert SECRET_FILE in caplog.text
