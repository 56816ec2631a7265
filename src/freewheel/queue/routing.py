"""Which of the rollouters that ask for work gets the next ticket: the least loaded. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from freewheel.data.group import Ticket


@dataclass(eq=False)  # two calls of one rollouter are two, however alike
class Asking:
    """A rollouter that waits for tickets."""

    replica: str
    want: int
    """Groups that it could begin now; 0 once nobody would read the answer."""
    load: int
    """Groups that it has in generation."""
    tickets: list[Ticket] = field(default_factory=list)
    """What it was given."""

    @property
    def pressure(self) -> float:
        """Its load after what it was given, as a share of what it can carry."""
        return (self.load + len(self.tickets)) / (self.load + self.want)


def least_loaded(asking: list[Asking]) -> Asking | None:
    """The one that should get the next ticket; None where nobody can take one. Ties go to the first that asked."""
    return min((one for one in asking if len(one.tickets) < one.want), key=lambda one: one.pressure, default=None)
