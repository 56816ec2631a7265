"""A group encoded as bytes decodes to the same group, with its holes and failed scores."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.group import NO_VERSION, EncodedGroups, Prompt, PromptGroup, Response, Ticket
from freewheel.errors import DataError
from freewheel.judge.verdict import Failed, Scored, Skipped

from .responses import response

PER_TOKEN = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "mask": np.uint8}
ROW = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72", "style": "rule"}, "index": 3}


def group(*responses: Response, ticket: Ticket | None = None, row: Any = ROW) -> PromptGroup:
    prompt = Prompt(tokens=np.array([5, 6, 7], np.int32), row=row)
    return PromptGroup.of(ticket or Ticket(4, 9, 1), prompt, responses, created_s=12.5)


def same(left: PromptGroup, right: PromptGroup) -> bool:
    """By content: arrays by their values and types, NaN equal to NaN."""

    def plain(value: PromptGroup) -> dict[str, Any]:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            key: (str(one.dtype), repr(one.tolist())) if isinstance(one, np.ndarray) else repr(one)
            for key, one in fields.items()
        }

    return plain(left) == plain(right)


@st.composite
def verdicts(draw: st.DrawFn, value: float) -> Any:
    parts = draw(st.dictionaries(st.text(max_size=3), st.floats(), max_size=2))
    word = st.text("abc ", min_size=1, max_size=5)
    failed = Failed(draw(word), detail=draw(word), parts=parts)
    return draw(st.sampled_from([Scored(value, parts=parts), failed, Skipped(draw(st.text(max_size=5)), parts)]))


@st.composite
def responses(draw: st.DrawFn) -> Response:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
    mask = [1, *draw(st.lists(st.integers(0, 1), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
    return response(
        tokens,
        version=draw(st.integers(0, 2**31 - 1)),
        mask=mask,
        value=(value := draw(st.floats(width=64))),
        verdict=draw(verdicts(value)),
    )


groups = st.builds(
    lambda made, ordinal: group(*made, ticket=Ticket(ordinal, ordinal + 7)),
    st.lists(responses(), min_size=1, max_size=4),
    st.integers(0, 2**62),
)


@given(st.lists(groups, max_size=4))
def test_a_message_delivers_its_groups_to_another_process_in_order(sent: list[PromptGroup]):
    message = EncodedGroups.encode(sent)
    assert [one.ticket for one in message] == [one.ticket for one in sent]
    assert [one.min_version for one in message] == [one.min_version for one in sent]
    received = pickle.loads(pickle.dumps(message))
    assert received == message and all(map(same, received.decode(), sent))
    forwarded = pickle.loads(pickle.dumps(EncodedGroups(reversed(received))))
    assert forwarded == EncodedGroups(reversed(message))


def test_the_groups_of_a_received_message_share_one_array_that_the_receiver_owns():
    buffers: list[pickle.PickleBuffer] = []
    shared = [group(response([1, 2])), group(response([3]))]
    pickled = pickle.dumps(EncodedGroups.encode(shared), protocol=5, buffer_callback=buffers.append)
    memory = [bytearray(buffer.raw()) for buffer in buffers]
    assert len(memory) == 1, "one array, out of band"
    received = pickle.loads(pickled, buffers=memory)
    memory[0][:] = bytes(len(memory[0]))  # as if the sender's shared memory was used for something else
    assert all(map(same, received.decode(), shared))
    assert len({id(one.data.obj) for one in received}) == 1


def test_responses_of_different_lengths_follow_each_other():
    responses = [response([1, 2, 3]), response([4], value=math.nan), response([5, 6], value=0.0)]
    wide = {name: getattr(responses[0], name).astype(np.float64) for name in PER_TOKEN}
    whole = group(dataclasses.replace(responses[0], **wide), *responses[1:])
    assert {name: getattr(whole, name).dtype for name in PER_TOKEN} == PER_TOKEN
    assert len(whole) == 3 and whole.ordinal == 4
    assert whole.tokens.tolist() == [1, 2, 3, 4, 5, 6] and whole.offsets.tolist() == [0, 3, 4, 6]
    assert [repr(whole.response(index)) for index in range(3)] == list(map(repr, responses))
    assert whole.scored.tolist() == [True, False, True], "a zero is a score"


def test_rows_from_parquet_travel_as_plain_values_and_other_objects_are_refused():
    row = {"index": np.int64(3), "scores": np.array([1.5, 2.5]), "nested": {"ok": np.bool_(True)}, "none": None}
    sent = PromptGroup.decode(group(response([1]), row=row).encode())
    assert sent.row == {"index": 3, "scores": [1.5, 2.5], "nested": {"ok": True}, "none": None}
    with pytest.raises(DataError, match="a prompt's row holds complex: give plain values"):
        group(response([1]), row={"index": 1j}).encode()


def test_the_wire_format_of_rewards_stays_readable():
    """Journals of existing runs hold (shaped, raw, status, reason, parts) for each response."""
    frame = msgspec.msgpack.decode(group(response([1]), response([2]), response([3]), response([4])).encode())
    nan = math.nan
    frame[8] = [
        (0.5, 1.0, "scored", "", {"length_penalty": 0.5}),
        (nan, nan, "failed", "judge deadline: no reply", {"rule": 1.0}),
        (-1.0, nan, "failed", "timeout", {}),
        (nan, nan, "skipped", "none: the function gave None", {}),
    ]
    data = msgspec.msgpack.encode(frame)
    read = PromptGroup.decode(data)
    assert read.verdicts == (
        Scored(1.0, parts={"length_penalty": 0.5}),
        Failed("judge deadline", detail="no reply", parts={"rule": 1.0}),
        Failed("timeout"),
        Skipped("none: the function gave None"),
    )
    np.testing.assert_array_equal(read.rewards, [0.5, nan, -1.0, nan])
    np.testing.assert_array_equal(read.raw_rewards, [1.0, nan, nan, nan])
    assert read.encode() == data


def test_the_lag_is_counted_from_the_oldest_token_that_the_policy_made():
    with_hole = response([1, 2, 3], version=6, mask=[1, 0, 1])
    assert with_hole.versions.tolist() == [6, NO_VERSION, 6]
    assert group(with_hole, response([4], version=8)).min_version == 6
    assert group(response([1], version=7), response([2], version=5)).min_version == 5


def test_a_response_has_one_entry_a_token_and_at_least_one():
    good = response([1, 2])
    with pytest.raises(DataError, match=r"lengths \[1, 2\]: give one entry per token"):
        dataclasses.replace(good, logprobs=good.logprobs[:1])
    with pytest.raises(DataError, match=r"lengths \[0\]"):
        response([])


def test_bytes_that_are_not_a_group_are_refused():
    data = group(response([1, 2])).encode()
    for broken in (b"", data[: len(data) // 2], msgspec.msgpack.encode({"ticket": 1}), b"\xc1" + data[1:]):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            PromptGroup.decode(broken)
