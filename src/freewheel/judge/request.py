"""`JudgeRequest`, one response to judge, and the hash that identifies equal content, so that it is sent once."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig

_HASH_VERSION = b"freewheel-judge-1"
"""Change this whenever the computation of the hash changes. Otherwise an older cache would return wrong replies."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class JudgeRequest(msgspec.Struct, frozen=True, array_like=True):
    """One response to judge. Requests with equal content share one call, even if their `id` differs."""

    response: str
    prompt: str = ""
    """The question that the response answers."""
    reference: str = ""
    """A reference answer, if there is one."""
    id: str = ""
    """The caller's own identifier. It is not sent and not hashed."""
    skip: str = ""
    """A reason not to judge this response. It ends as `Skipped(reason)`, in its place in the batch."""

    def encodable(self) -> JudgeRequest:
        """Replace each lone surrogate by U+FFFD. UTF-8 cannot carry one, and no judge could read it."""
        texts = (self.response, self.prompt, self.reference, self.id, self.skip)
        return JudgeRequest(*map(without_surrogates, texts))


def without_surrogates(text: str) -> str:
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


class RequestHasher:
    """SHA-256 over everything that decides a reply: endpoint, model, rubric as sent, sampling parameters, content.

    The first endpoint stands for all of them: they serve the same judge.
    """

    def __init__(self, config: JudgeConfig) -> None:
        sampling = {**config.sampling, "temperature": config.temperature, "max_tokens": config.max_tokens}
        parts = (
            _HASH_VERSION,
            config.endpoints[0].url.encode(),
            (config.endpoints[0].model or config.model).encode(),
            config.loaded_rubric.identity(),
            msgspec.json.encode(sampling, order="sorted"),
        )
        self._base = hashlib.sha256()
        for part in parts:
            self._base.update(b"%d:" % len(part) + part)

    def __call__(self, request: JudgeRequest) -> bytes:
        prompt, reference, response = request.prompt.encode(), request.reference.encode(), request.response.encode()
        digest = self._base.copy()
        digest.update(b"%d:%d:%d:" % (len(prompt), len(reference), len(response)) + prompt + reference + response)
        return digest.digest()
