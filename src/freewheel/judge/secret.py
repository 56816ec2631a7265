"""A key that stays in memory: it does not print, does not pickle, and knows where it came from."""

from __future__ import annotations

import os
from typing import NoReturn


class Secret:
    """An API key and the name of its source. `reveal()` is the only way to the text.

    A pickle may come to lie on a disk, so it carries the source and not the key: where the source is an
    environment variable the other process reads it there; a key given as text must be given there again.
    """

    __slots__ = ("_text", "source")

    def __init__(self, text: str | None, *, source: str = "the api_key argument") -> None:
        self._text = text
        self.source = source

    @classmethod
    def from_env(cls, name: str) -> Secret | None:
        """The key in environment variable `name`, or None where it is unset or empty."""
        text = os.environ.get(name, "").strip()
        return cls(text, source=_env_source(name)) if text else None

    def reveal(self) -> str:
        if self._text is None:
            raise ValueError(
                f"the API key from {self.source} was left out when its config was pickled; "
                "set it in the environment of this process (api_key_env), or give api_key here"
            )
        return self._text

    def redact(self, text: str) -> str:
        """`text` without the key in it, for what servers echo back in their errors."""
        return text.replace(self._text, "[key]") if self._text else text

    def __bool__(self) -> bool:
        """False where pickling left the key out: it is then looked for elsewhere."""
        return self._text is not None

    def __repr__(self) -> str:
        return f"<key from {self.source}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (self.source,))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __iter__(self) -> NoReturn:
        raise TypeError("a Secret is not text; call reveal()")


def _env_source(name: str) -> str:
    return f"environment variable {name}"


def _restore(source: str) -> Secret:
    prefix = _env_source("")
    if source.startswith(prefix):
        return Secret.from_env(source.removeprefix(prefix)) or Secret(None, source=source)
    return Secret(None, source=source)
