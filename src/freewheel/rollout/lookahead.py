"""`Lookahead`: how many groups a rollouter asks for. Pure; the planner simulates a rollouter by the same class."""

from __future__ import annotations

LOOKAHEAD = 2.0
"""What is admitted, in units of what the engine runs at a time: it must not run dry between two admissions."""


class Lookahead:
    """Counts responses that have not ended, not groups: of a group with one long one the others' slots are free."""

    __slots__ = ("_most", "_n", "capacity", "unmade")

    def __init__(self, *, capacity: int, n: int) -> None:
        self.capacity = capacity
        """Groups whose responses the engine makes at a time."""
        self.unmade = 0
        """Responses that were admitted and have not ended."""
        self._most = int(capacity * LOOKAHEAD)
        self._n = n

    def admit(self, groups: int) -> None:
        self.unmade += groups * self._n

    def made(self, responses: int = 1) -> None:
        """They have left the engine, or will never enter it."""
        self.unmade -= responses

    @property
    def load(self) -> int:
        """Groups' worth of unmade responses."""
        return -(-self.unmade // self._n)

    @property
    def want(self) -> int:
        """Groups to ask for; 0: none now."""
        return max(0, self._most - self.load)

    @property
    def has_room(self) -> bool:
        """The engine has slots to fill, or will have none to fill them with when the next are free."""
        return self.load < self.capacity
