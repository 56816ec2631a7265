"""What the mock judge saw and did: enough to prove that a content was sent once."""

from __future__ import annotations

from typing import Any

import msgspec

from freewheel.judge.testing.replies import Content


class ContentCount(msgspec.Struct):
    """What happened to one content."""

    received: int = 0
    """Requests that carried it."""
    admitted: int = 0
    """Of these, the ones that were let in: neither refused nor caught by an outage."""
    answered: int = 0
    """Whole chat completions sent for it; replies without a score in them included."""
    rejected: int = 0
    """Requests for it that got a 429."""
    faults: int = 0
    """Faults it met."""
    text: str = ""
    """The user message without its nonce (empty with `keep_texts=False`)."""


class Counts(msgspec.Struct):
    """Counts since the start or the last reset. Requests to other paths than chat completions are not in them."""

    received: int = 0
    answered: int = 0
    rejected: int = 0
    gone: int = 0
    """Admitted requests whose client went away before the reply."""
    by_status: dict[int, int] = {}
    """Replies begun, by status; a cut or dripping body is in it, a closed connection is not."""
    faults: dict[str, int] = {}
    """Faults met, by kind, as the profile's shares name them (`error`, `hang`, ...), and `outage`."""
    in_flight: int = 0
    max_in_flight: int = 0
    connections: int = 0
    """Connections that carried a chat request."""
    connections_refused: int = 0
    """Connections aborted on arrival, in an outage that refuses."""
    open_connections: int = 0
    """Connections open now, for any path."""
    bytes_received: int = 0
    """Bytes of request bodies."""
    bytes_sent: int = 0
    """Bytes of reply bodies."""
    contents: dict[str, ContentCount] = {}

    def of(self, user_content: str) -> ContentCount:
        """What happened to this very user message; all zeros if it never came."""
        return self.contents.get(Content.of(user_content).key) or ContentCount()

    def containing(self, part: str) -> list[ContentCount]:
        """The contents whose text holds `part`, in the order of their first arrival."""
        return [count for count in self.contents.values() if part in count.text]

    @property
    def most_received(self) -> int:
        """How often the most frequent content was received; 1 proves that each content was sent once."""
        return max((count.received for count in self.contents.values()), default=0)


class RecordedRequest(msgspec.Struct, frozen=True):
    """A chat request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: str

    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)
