"""The errors that every half of freewheel raises: a setting or data that cannot work.

Each message names the key, the value and the remedy. `JudgeError` and its kinds are in `freewheel.judge`.
"""

from __future__ import annotations

VALUE_CHARS = 200
"""How much of a rejected value a message shows: the value may be a whole batch."""


class FreewheelError(Exception):
    """Base class of the errors that freewheel raises on purpose."""


class ConfigError(FreewheelError, ValueError):
    """A setting that cannot work. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {format_value(value)}: {remedy}")
        self.key = key

    def renamed(self, key: str) -> ConfigError:
        """Return the same error under the name by which the caller knows the setting."""
        return _restore(key + str(self).removeprefix(self.key), key)

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (str(self), self.key))


class DataError(FreewheelError, ValueError):
    """Data that does not have the expected form. The message names the key, the value and the remedy."""


def format_value(value: object) -> str:
    """Return `repr(value)`, shortened to what fits in a message."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= VALUE_CHARS else text[:VALUE_CHARS] + "…"


def _restore(message: str, key: str) -> ConfigError:
    """Unpickle a `ConfigError`: the pickle holds the message, not the value, which may be anything and large."""
    error = ConfigError.__new__(ConfigError, message)
    error.args, error.key = (message,), key
    return error
