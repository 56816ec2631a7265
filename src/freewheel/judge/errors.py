"""The exceptions of the judge engine. A judgement that fails is not one of them: that is a `Failed` verdict."""

from __future__ import annotations

from freewheel.errors import FreewheelError


class JudgeError(FreewheelError):
    """Anything that stops the engine itself."""


class JudgeClosed(JudgeError, RuntimeError):
    """The judge was closed, or belongs to another process (a handle does not survive a fork)."""


class EngineDied(JudgeError, RuntimeError):
    """The engine's process kept dying. The message says how it ended; its last output is on stderr."""
