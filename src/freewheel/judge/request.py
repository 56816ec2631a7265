"""`JudgeRequest`, one response to judge: its hash, which identifies equal content, and the messages that ask for it.

    rubric ──▶ system message: instructions, then the rule about data      (the same bytes for every request)
    request ─▶ user message:   code · [BEGIN x code] text [END x code] · closing line

The code is an HMAC of the content under a local secret. The author of the content cannot know it, so nothing in the
content can close its block. Equal content has an equal code, and the code is not part of the request's hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from freewheel.judge.rubric import ANNOUNCE, BEGIN, END, LABELS, MARKER_CLOSE, Rubric, template_parts
from freewheel.utils.files import open_private

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig

logger = logging.getLogger("freewheel.judge")

CODE_HEX_DIGITS = 32
"""128 bits of the HMAC: impossible to guess, and short enough for a judge to compare."""
SECRET_BYTES = 32
"""The width of SHA-256."""
SECRET_FILE = "delimiter.key"

_LENGTH_BYTES = 8
"""The HMAC's input has each field's length before the field, so that no two requests have the same input."""

_in_memory: dict[Path, bytes] = {}
"""Secrets for directories that could not be used. Each lasts as long as the process, and one warning is logged for
it."""

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


# -- the messages -----------------------------------------------------------------------------------------------------


class PromptBuilder:
    """Builds the messages of one rubric. The response is sent unchanged, and cannot leave its block."""

    __slots__ = ("_begin", "_end", "_parts", "_reminder", "_secret", "_tail", "system")

    def __init__(self, rubric: Rubric, secret: bytes) -> None:
        self.system = rubric.system_text()
        self._secret = secret
        self._begin = {field: f"{BEGIN}{label} " for field, label in LABELS.items()}
        # On a separate line, however the text ends.
        self._end = {field: f"\n{END}{label} " for field, label in LABELS.items()}
        self._parts = _lines(template_parts(rubric.template))
        self._tail = rubric.closing_text()
        self._reminder = rubric.reminder_text()

    def user(self, request: JudgeRequest) -> str:
        """The user message of a first ask."""
        code = self._code(request)
        close = code + MARKER_CLOSE
        pieces = [ANNOUNCE, code, ".\n\n"]
        for text, field in self._parts:
            if text:
                pieces.append(text)
            content = getattr(request, field) if field else ""
            if content or field == "response":
                pieces += (self._begin[field], close, "\n", content, self._end[field], close, "\n\n")
        pieces.append(self._tail)
        return "".join(pieces)

    def reask(self, request: JudgeRequest) -> str:
        """The user message after an unreadable reply: the first one plus the rubric's reminder."""
        return f"{self.user(request)}\n\n{self._reminder}"

    def _code(self, request: JudgeRequest) -> str:
        fields = [text.encode() for text in (request.prompt, request.reference, request.response)]
        framed = b"".join([part for data in fields for part in (len(data).to_bytes(_LENGTH_BYTES, "big"), data)])
        return hmac.digest(self._secret, framed, "sha256").hex()[:CODE_HEX_DIGITS]


def _lines(parts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the template parts with line breaks added, so that each text ends its line before the next block or the
    closing line."""
    found: list[tuple[str, str]] = []
    for text, field in parts:
        line = text.lstrip("\n") if found else text
        if line and not field:
            line = line.rstrip("\n") + "\n\n"
        elif line and not line.endswith("\n"):
            line += "\n"
        found.append((line, field))
    return tuple(found)


def local_secret(directory: Path | None) -> bytes:
    """Return this user's secret from a private file in `directory`. The file is created on first use.

    Processes that start together agree on one secret. Without a usable directory the secret is in memory only: codes
    then differ between processes, which changes no hash and no cached verdict.
    """
    if directory is None:
        return secrets.token_bytes(SECRET_BYTES)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _read_or_make_secret(directory / SECRET_FILE)
    except OSError as error:
        if directory not in _in_memory:
            logger.warning("The secret for delimiters cannot be kept in %s (%s); it stays in memory.", directory, error)
        return _in_memory.setdefault(directory, secrets.token_bytes(SECRET_BYTES))


def _read_or_make_secret(path: Path) -> bytes:
    """Raises if others can read the file."""
    with os.fdopen(open_private(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the first process writes, the others read
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not private to this user; remove it, and a new one is made")
        found = file.read(SECRET_BYTES + 1)
        if not found:
            found = secrets.token_bytes(SECRET_BYTES)
            file.write(found)
            file.flush()
            os.fsync(file.fileno())
        if len(found) != SECRET_BYTES:
            raise OSError(f"{path} does not hold {SECRET_BYTES} bytes; remove it, and a new one is made")
        return found
