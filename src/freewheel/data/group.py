"""`PromptGroup`: one prompt and its n responses, the unit that is generated, scored, queued and trained as a whole.

    Ticket ─▶ Rollouter ─▶ Response … ─▶ PromptGroup ─▶ EncodedGroup ─▶ MessageQueue, journal ─▶ PromptGroup ─▶ trainer
                                             encoded once ┘                    decoded once ┘

A group is ragged: the tokens of all responses lie one after the other, and `lengths` says where each ends. A padded
`DataProto` is made only for the user's code (`freewheel.data.padded`). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from freewheel.errors import DataError
from freewheel.judge.verdict import Failed, Scored, Skipped, Verdict

Array = np.ndarray[Any, np.dtype[Any]]
Finish = Literal["stop", "length"]
"""Why a response ended: with a stop token, or cut off at `max_new_tokens`."""

NO_VERSION = -1
"""The version of a token that no engine made, such as a tool's reply inside a response."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Permission to generate one group."""

    ordinal: int
    """Number of the prompt in the stream."""
    sequence: int
    """Number of the admission. Each admission has a new one, even if its prompt is issued again. Training follows this
    order."""
    attempt: int = 0
    """Earlier attempts at this ordinal."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data, rendered."""

    tokens: Array
    """int32: token ids."""
    row: Mapping[str, Any]
    """The fields of a sample: `data_source`, `reward_model`, `extra_info` and so on. Plain values only."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One generated response, before or after it was scored."""

    tokens: Array
    """int32: token ids."""
    logprobs: Array
    """float32: the log-probability with which the engine sampled each token; 0 where `mask` is 0."""
    versions: Array
    """int32: the weight version that made each token, `NO_VERSION` where `mask` is 0."""
    mask: Array
    """uint8: 1 for a token that the policy made. 0 is a hole: a token from another source, which the model sees but is
    not trained on."""
    finish: Finish
    verdict: Verdict | None = None
    """The verdict; None before scoring."""
    reward: float = math.nan
    """The shaped reward that is trained on. NaN masks the response."""
    raw_reward: float = math.nan
    """The reward before shaping."""

    def __post_init__(self) -> None:
        sizes = {len(self.tokens), len(self.logprobs), len(self.versions), len(self.mask)}
        if len(sizes) != 1 or 0 in sizes:
            raise DataError(f"response arrays have lengths {sorted(sizes)}: give one entry per token, and at least one")


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """A prompt with all its scored responses. The unit that is generated, queued and trained."""

    ticket: Ticket
    prompt: Array
    lengths: Array
    """int32, one entry per response."""
    tokens: Array
    logprobs: Array
    versions: Array
    mask: Array
    finish: tuple[Finish, ...]
    verdicts: tuple[Verdict, ...]
    rewards: Array
    """float64: the shaped reward of each response, which is trained on. NaN masks a response."""
    raw_rewards: Array
    """float64: the reward of each response before shaping. NaN where there is none."""
    row: Mapping[str, Any]
    created_s: float
    """When its generation started, in seconds of the wall clock."""

    @classmethod
    def of(cls, ticket: Ticket, prompt: Prompt, responses: Sequence[Response], created_s: float) -> PromptGroup:
        assert responses and all(response.verdict is not None for response in responses)
        per_token = {
            name: np.concatenate([getattr(response, name) for response in responses]).astype(kind, copy=False)
            for name, kind in _PER_TOKEN.items()
        }
        return cls(
            ticket=ticket,
            prompt=np.asarray(prompt.tokens, np.int32),
            lengths=np.array([len(response.tokens) for response in responses], np.int32),
            finish=tuple(response.finish for response in responses),
            verdicts=tuple(response.verdict for response in responses),  # type: ignore[misc]  # asserted above
            rewards=np.array([response.reward for response in responses], np.float64),
            raw_rewards=np.array([response.raw_reward for response in responses], np.float64),
            row=prompt.row,
            created_s=created_s,
            **per_token,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def ordinal(self) -> int:
        return self.ticket.ordinal

    @cached_property
    def offsets(self) -> Array:
        """Response i is `tokens[offsets[i]:offsets[i + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def min_version(self) -> int:
        """Version of the oldest token that the policy made. A group's lag is counted from it."""
        return int(self.versions[self.mask != 0].min())

    @property
    def scored(self) -> Array:
        """bool: which responses have a reward. Baselines and the loss leave the others out."""
        return ~np.isnan(self.rewards)

    def response(self, index: int) -> Response:
        part = slice(self.offsets[index], self.offsets[index + 1])
        return Response(
            **{name: getattr(self, name)[part] for name in _PER_TOKEN},
            finish=self.finish[index],
            verdict=self.verdicts[index],
            reward=float(self.rewards[index]),
            raw_reward=float(self.raw_rewards[index]),
        )

    def encode(self) -> bytes:
        """Return the group as bytes without pickle. They travel through the queue, and the journal keeps them."""
        fields = {name: np.ascontiguousarray(getattr(self, name)).tobytes() for name in _ARRAYS}
        return _ENCODER.encode(
            _Wire(
                ticket=self.ticket,
                finish=self.finish,
                rewards=[
                    (reward, raw, verdict.status, verdict.summary, verdict.parts)
                    for reward, raw, verdict in zip(
                        self.rewards.tolist(), self.raw_rewards.tolist(), self.verdicts, strict=True
                    )
                ],
                row=dict(self.row),
                created_s=self.created_s,
                **fields,
            )
        )

    @classmethod
    def decode(cls, data: bytes | memoryview) -> PromptGroup:
        wire = _DECODER.decode(data)
        return cls(
            ticket=wire.ticket,
            finish=wire.finish,
            verdicts=tuple(_verdict(raw, status, summary, parts) for _, raw, status, summary, parts in wire.rewards),
            rewards=np.array([reward for reward, *_ in wire.rewards], np.float64),
            raw_rewards=np.array([raw for _, raw, *_ in wire.rewards], np.float64),
            row=wire.row,
            created_s=wire.created_s,
            **{name: np.frombuffer(getattr(wire, name), kind) for name, kind in _ARRAYS.items()},
        )


_PER_TOKEN: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "mask": np.uint8,
}
_ARRAYS: dict[str, type[np.generic]] = {"prompt": np.int32, "lengths": np.int32, **_PER_TOKEN}


class _Wire(msgspec.Struct, array_like=True):
    ticket: Ticket
    prompt: bytes
    lengths: bytes
    tokens: bytes
    logprobs: bytes
    versions: bytes
    mask: bytes
    finish: tuple[Finish, ...]
    rewards: list[tuple[float, float, Literal["scored", "failed", "skipped"], str, dict[str, float]]]
    """For each response: shaped reward, raw reward, and its verdict's status, summary and parts."""
    row: dict[str, Any]
    created_s: float


def _verdict(raw: float, status: str, summary: str, parts: dict[str, float]) -> Verdict:
    if status == "scored":
        return Scored(raw, parts=parts)
    if status == "skipped":
        return Skipped(summary, parts)
    reason, _, detail = summary.partition(": ")
    return Failed(reason, detail=detail, parts=parts)


def _plain(value: object) -> object:
    """Convert numpy scalars and arrays, which Parquet files and datasets contain."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise DataError(f"a prompt's row holds {type(value).__name__}: give plain values (text, numbers, lists, mappings)")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(_Wire)
_TICKETS = msgspec.msgpack.Decoder(list[Ticket])


class EncodedGroup(NamedTuple):
    """A group as bytes, with everything the queue needs to know about it."""

    ticket: Ticket
    min_version: int
    data: bytes | memoryview

    @classmethod
    def of(cls, group: PromptGroup) -> EncodedGroup:
        return cls(group.ticket, group.min_version, group.encode())


class EncodedGroups(list[EncodedGroup]):
    """Groups in one message.

    Their bytes are sent between processes as one array, so a message costs one copy for any number of groups. The
    receiver's groups are views of that array: nothing is split or joined again until the next message.
    """

    @classmethod
    def encode(cls, groups: Iterable[PromptGroup]) -> EncodedGroups:
        return cls(map(EncodedGroup.of, groups))

    def decode(self) -> list[PromptGroup]:
        return [PromptGroup.decode(one.data) for one in self]

    def __reduce__(self) -> tuple[Any, ...]:
        tickets = _ENCODER.encode([one.ticket for one in self])  # pickling them takes longer than their groups
        ends = list(accumulate(len(one.data) for one in self))
        # numpy pickles an array out of band: Ray copies it once, into shared memory.
        data = np.frombuffer(b"".join([one.data for one in self]), np.uint8)
        return _unpickle_groups, (tickets, [one.min_version for one in self], ends, data)


def _unpickle_groups(tickets: bytes, min_versions: list[int], ends: list[int], data: Array) -> EncodedGroups:
    # Copy the array: it may be in Ray's shared memory, which is freed if the sender dies or the store is full.
    view = memoryview(data.tobytes())
    bounds = pairwise([0, *ends])
    return EncodedGroups(
        EncodedGroup(ticket, min_version, view[start:end])
        for ticket, min_version, (start, end) in zip(_TICKETS.decode(tickets), min_versions, bounds, strict=True)
    )
