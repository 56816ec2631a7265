"""What `Judge` and `InlineJudge` take from their callers, checked: requests in any of their forms, and a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from freewheel.errors import ConfigError
from freewheel.judge.config import JudgeConfig
from freewheel.judge.request import JudgeRequest
from freewheel.utils.checks import check_number

FROM_CONFIG: Final = -1.0
"""A batch's deadline where the caller gives none: the config's `batch_deadline_s`."""

Requests = Iterable[JudgeRequest | str | Mapping[str, str]]


def as_requests(requests: Requests) -> list[JudgeRequest]:
    """The batch as requests. A plain string is a response without a question."""
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):
        raise ConfigError("requests", requests, "give several: a list, even for one")
    return [r if type(r) is JudgeRequest and _all_text(r) else _request(i, r) for i, r in enumerate(requests)]


def deadline_at_of(deadline_s: float | None, config: JudgeConfig) -> float | None:
    """In `time.monotonic()` seconds; None: no limit."""
    if deadline_s is FROM_CONFIG:
        deadline_s = config.batch_deadline_s
    elif deadline_s is not None:
        check_number("deadline_s", deadline_s, above=0, optional=True)
    return time.monotonic() + deadline_s if deadline_s is not None else None


def _all_text(r: JudgeRequest) -> bool:
    return type(r.response) is type(r.prompt) is type(r.reference) is type(r.id) is type(r.skip) is str


def _request(index: int, given: object) -> JudgeRequest:
    try:
        if isinstance(given, str):
            return JudgeRequest(str.__str__(given))
        if isinstance(given, JudgeRequest):
            given = msgspec.structs.asdict(given)
        if isinstance(given, Mapping):
            unknown = sorted(set(given) - set(JudgeRequest.__struct_fields__))
            if unknown:
                known = ", ".join(JudgeRequest.__struct_fields__)
                raise ConfigError(
                    f"requests[{index}].{unknown[0]}", given[unknown[0]], f"unknown field; known are {known}"
                )
            if type(given.get("id")) is int:
                given = {**given, "id": str(given["id"])}
            for key, value in given.items():
                if not isinstance(value, str):
                    raise ConfigError(f"requests[{index}].{key}", value, "give text")
            # str() makes plain text of a subclass, as numpy has one: only that can travel.
            return JudgeRequest(**{key: str.__str__(value) for key, value in given.items()})
    except TypeError as error:
        raise ConfigError(f"requests[{index}]", given, str(error)) from None
    raise ConfigError(
        f"requests[{index}]", given, "give a JudgeRequest, a response as text, or a mapping of its fields"
    )
