"""A simulated rollouter: its engine, what it has asked for, its outbox, and what it spends its time on."""

from __future__ import annotations

from freewheel.plan.engine import Engine, Group
from freewheel.queue.message_queue import Asking
from freewheel.rollout.lookahead import Lookahead

DOING = ("generate", "wait_reward", "wait_room")


class Replica:
    """State only: `simulation` decides what happens."""

    __slots__ = (
        "_doing", "_since", "_spent", "asking", "engine", "event", "generating", "loading_s", "loading_since",
        "lookahead", "mail", "making", "place", "post", "rest", "resting",
    )  # fmt: skip

    def __init__(self, place: int, engine: Engine, *, slots: int, n: int) -> None:
        self.place = place
        self.engine = engine
        self.lookahead = Lookahead(capacity=max(1, slots // n), n=n)
        self.generating = 0
        self.making = 0
        """Groups in generation or scoring."""
        self.asking: Asking | None = None
        self.resting = False
        """It asks again when responses leave the engine, or after the interval."""
        self.mail: list[Group] = []
        self.loading_s = 0.0
        self.loading_since: float | None = None
        self.event = self.rest = self.post = 0
        """Numbers of what is expected last: an event with another number is void."""
        self._doing = "wait_room"
        self._since = 0.0
        self._spent = dict.fromkeys(DOING, 0.0)

    def note(self, now: float) -> None:
        """What it does now, by the rule of `Rollouter`."""
        doing = "generate" if self.generating else "wait_reward" if self.making else "wait_room"
        if doing != self._doing:
            self._spent[self._doing] += now - self._since
            self._doing, self._since = doing, now

    def spans(self, now: float) -> dict[str, float]:
        """Seconds by name until now."""
        loading_s = 0.0 if self.loading_since is None else now - self.loading_since
        spent = {**self._spent, "load_weights": self.loading_s + loading_s}
        spent[self._doing] += now - self._since
        return spent
