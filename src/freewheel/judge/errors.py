"""The exceptions of the judge. A judgement that fails is not one of them: that is a `Failed` verdict."""


class JudgeError(Exception):
    """Anything that stops the engine itself."""


class ConfigError(JudgeError, ValueError):
    """A setting that cannot work. The message names the key, the value and the remedy."""

    def __init__(self, key: str, value: object, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {remedy}")
        self.key = key


class JudgeClosed(JudgeError, RuntimeError):
    """The judge was closed, or belongs to another process (a handle does not survive a fork)."""


class EngineDied(JudgeError, RuntimeError):
    """The engine's process kept dying; the message says how it ended and what it last wrote."""
