"""The exception of this package, and how its messages show a value."""

VALUE_CHARS = 200
"""As much of a refused value as a message shows: it may be a whole batch."""


class DataError(ValueError):
    """Data that cannot be what it was given as. The message names the key, the value and the remedy."""


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS else text[:VALUE_CHARS] + "…"
