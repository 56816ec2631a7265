"""Frames: whatever the sizes in which bytes arrive, the same messages come out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge import (
    Endpoint,
    Failed,
    JudgeConfig,
    JudgeRequest,
    JudgeStats,
    Price,
    Scored,
    Secret,
    Skipped,
    Usage,
)
from freewheel.judge.transport import (
    CALLER_DECODER,
    ENGINE_DECODER,
    AskStats,
    Cancel,
    Close,
    Configure,
    FrameReader,
    LogLine,
    Results,
    Started,
    StatsReply,
    Stopped,
    Submit,
    pack,
)

TO_ENGINE: list[Any] = [
    Submit(3, [0, 2], [JudgeRequest("ä\x00\U0001f600", "p", "r", "id"), JudgeRequest("", skip="why")], 12.5),
    Submit(4, [], [], None),
    Cancel(3),
    AskStats(7),
    Close(),
]
TO_CALLER: list[Any] = [
    Started(),
    Results(
        [
            (1, 0, Scored(7.0, "**7**", Usage(10, 2), {"style": 7.0}, cached=True, attempts=0)),
            (1, 1, Failed("deadline", 3, "no reply so far", Usage(1, 0))),
            (2, 0, Skipped("empty")),
        ],
        0.25,
    ),
    StatsReply(7, JudgeStats(submitted=3, failed={"auth": 1})),
    LogLine(30, "one\ntwo"),
    Stopped(),
    Stopped("why"),
]


@given(st.lists(st.integers(1, 400), max_size=50))
def test_messages_survive_any_fragmentation(cuts: list[int]) -> None:
    for reader, messages in ((FrameReader(ENGINE_DECODER), TO_ENGINE), (FrameReader(CALLER_DECODER), TO_CALLER)):
        stream = b"".join(pack(message) for message in messages)
        got, at = [], 0
        for size in [*cuts, len(stream)]:
            got += list(reader.feed(stream[at : at + size]))
            at += size
        assert got == messages


def test_a_message_larger_than_any_buffer_arrives_whole() -> None:
    request = JudgeRequest("x" * 5_000_000)
    reader, data = FrameReader(ENGINE_DECODER), pack(Submit(0, [0], [request], None))
    got = [m for at in range(0, len(data), 65536) for m in reader.feed(data[at : at + 65536])]
    assert got == [Submit(0, [0], [request], None)]


def test_the_config_travels_whole_and_the_key_with_it() -> None:
    endpoints = (Endpoint(url="http://a", api_key="sk-own"), Endpoint(url="http://b", weight=0, model="m2"))
    config = JudgeConfig(
        endpoint=endpoints, model="m", api_key="sk-main", rubric="yes_no", prices={"m": Price(input=1, output=2)},
        sampling={"top_p": 0.5, "stop": ["x"]}, concurrency="fixed:3",
    )  # fmt: skip
    (got,) = FrameReader(ENGINE_DECODER).feed(pack(Configure(config, 42, 1.5)))
    assert got.config == config and got.parent_pid == 42 and got.spent == 1.5
    assert [key.reveal() for e in got.config.endpoints if (key := got.config.key_for(e))] == ["sk-own", "sk-main"]
    assert got.config.api_key.source == "the api_key argument"


def test_a_key_that_pickling_left_out_travels_as_none() -> None:
    config = JudgeConfig(endpoint="http://a", model="m", api_key=Secret(None))
    (got,) = FrameReader(ENGINE_DECODER).feed(pack(Configure(config, 1, 0.0)))
    assert not got.config.api_key


def test_a_lone_surrogate_is_replaced_by_the_frame() -> None:
    (got,) = FrameReader(ENGINE_DECODER).feed(pack(Submit(0, [0], [JudgeRequest("\ud800")], None)))
    assert got.requests == [JudgeRequest("\ufffd")]
