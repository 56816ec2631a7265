"""The exceptions of the judge. A judgement that fails is not one of them: that is a `Failed` verdict."""

from __future__ import annotations

VALUE_CHARS = 200
"""As much of a refused value as a message shows: it may be a whole batch, given in the wrong shape."""


class JudgeError(Exception):
    """Anything that stops the engine itself."""


class ConfigError(JudgeError, ValueError):
    """A setting that cannot work. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > VALUE_CHARS:
            shown = shown[:VALUE_CHARS] + "…"
        super().__init__(f"{key} = {shown}: {remedy}")
        self.key = key

    def renamed(self, key: str) -> ConfigError:
        """The same for a caller who knows the setting by another name."""
        return _restored(key + str(self).removeprefix(self.key), key)

    def __reduce__(self) -> tuple[object, ...]:
        return (_restored, (str(self), self.key))


class JudgeClosed(JudgeError, RuntimeError):
    """The judge was closed, or belongs to another process (a handle does not survive a fork)."""


class EngineDied(JudgeError, RuntimeError):
    """The engine's process kept dying; the message says how it ended, and its last words are on stderr."""


def _restored(message: str, key: str) -> ConfigError:
    """From a pickle, which has the message and not the value: that may be anything, and large."""
    error = ConfigError.__new__(ConfigError, message)
    error.args, error.key = (message,), key
    return error
