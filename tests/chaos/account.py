"""Results of disturbed runs: pure records and their arithmetic.

    Trained, Trained, … (the witness's lines) ─▶ path ─▶ lost, repeated, stale
    Result, Result, … ─▶ table, verdict

Used by `harness.py` (one run) and `scripts/chaos.py` (all).
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

LAST_STEPS = 5
"""Steps that the final reward is averaged over: 1,280 responses, a standard error of 0.01."""
REWARD_TOLERANCE = 0.1
"""How far the final reward may be below an undisturbed run's. Runs with another order of groups differ by a few
hundredths; a run that continued from untrained weights differs by a few tenths."""
LONGEST_S = 3600.0
"""No recovery takes longer: the clock was changed meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One line of the witness: a step that was trained, also if it was undone later."""

    step: int
    ordinals: tuple[int, ...]
    lag: int
    reward: float | None

    @classmethod
    def read(cls, line: bytes) -> Trained:
        told = json.loads(line)
        return cls(**{**told, "ordinals": tuple(told["ordinals"])})


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A process that was killed or stopped, and the time until its replacement's run committed a step."""

    role: str
    how: str
    during: str
    step: int
    at_s: float
    recovery_s: float | None = None

    def recovered(self, at_s: float | None) -> Kill:
        """`at_s`: None if unknown, because the run had ended or its clock was changed."""
        took_s = None if at_s is None else at_s - self.at_s
        return self if took_s is None or not 0 <= took_s <= LONGEST_S else replace(self, recovery_s=took_s)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a scenario."""

    scenario: str
    seed: int
    kills: list[Kill]
    lost: int
    repeated: int
    stale_trained: int
    violations: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    reward: float | None = None
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        return not (self.lost or self.repeated or self.stale_trained or self.violations or self.problems)

    def compared(self, undisturbed: float | None) -> Result:
        """Add a problem if it learned less than an undisturbed run."""
        if undisturbed is None or self.reward is None or self.reward >= undisturbed - REWARD_TOLERANCE:
            return self
        why = f"reward {self.reward:.3f} at the end, and {undisturbed:.3f} undisturbed"
        return replace(self, problems=(*self.problems, why))


@dataclass(kw_only=True)
class Seen:
    """The audit of the witness's lines."""

    lost: int
    repeated: int
    stale_trained: int
    problems: list[str] = field(default_factory=list)


def path(trained: Iterable[Trained]) -> dict[int, Trained]:
    """Return the steps that led to the last weights. A step that is trained again replaces the earlier one and undoes
    those after it, because it starts from weights without them."""
    found: dict[int, Trained] = {}
    for one in trained:
        for undone in [step for step in found if step >= one.step]:
            del found[undone]
        found[one.step] = one
    return found


def audit_witness(trained: Sequence[Trained], *, total: int | None, max_lag: int) -> Seen:
    """Find violations: each of the first `total` prompts must be on the path exactly once, none older than `max_lag`.
    `total` None: prompts may be dropped for a reason that the witness does not know."""
    steps = path(trained)
    counts = Counter(ordinal for one in steps.values() for ordinal in one.ordinals)
    promised = set(counts) if total is None else set(range(total))
    gaps = sorted(set(range(1, max(steps, default=0) + 1)) - steps.keys())
    problems = [f"steps {gaps} are not on the path"] if gaps else []
    if beyond := sorted(set(counts) - promised):
        problems.append(f"{len(beyond)} prompts beyond the first {total} were trained, such as {beyond[:3]}")
    return Seen(
        lost=len(promised - set(counts)),
        repeated=sum(count - 1 for count in counts.values()),
        stale_trained=sum(one.lag > max_lag for one in trained),
        problems=problems,
    )


def last_reward(trained: Sequence[Trained]) -> float | None:
    """Return the mean reward of the last steps of the path."""
    steps = path(trained)
    rewards = [steps[step].reward for step in sorted(steps)[-LAST_STEPS:]]
    told = [reward for reward in rewards if reward is not None]
    return statistics.fmean(told) if told else None


# -- many runs --------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Format kills by role, and the results of the scenarios."""
    kills = [kill for result in results for kill in result.kills]
    rows = [("role", "kills", "recovery s: median", "max")]
    for role in sorted({_kind(kill) for kill in kills}):
        of_role = [kill for kill in kills if _kind(kill) == role]
        rows.append((role, str(len(of_role)), *_spread(of_role)))
    rows.append(("all", str(len(kills)), *_spread(kills)))
    runs = [("scenario", "runs", "kills", "lost", "repeated", "stale trained", "reward", "s", "")]
    for name in dict.fromkeys(result.scenario for result in results):
        runs.append(_line(name, [result for result in results if result.scenario == name]))
    runs.append(_line("all", results))
    return _aligned(rows) + "\n\n" + _aligned(runs)


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return the table's numbers and every run."""
    kills = [kill for result in results for kill in result.kills]
    times = [kill.recovery_s for kill in kills if kill.recovery_s is not None]
    return {
        "kills": len(kills),
        "kills_by_role": dict(Counter(_kind(kill) for kill in kills)),
        "recovery_s": {"median": statistics.median(times), "max": max(times)} if times else None,
        **{name: sum(getattr(result, name) for result in results) for name in ("lost", "repeated", "stale_trained")},
        "fine": all(result.fine for result in results),
        "runs": [asdict(result) for result in results],
    }


def _kind(kill: Kill) -> str:
    return kill.role if kill.how == "SIGKILL" else f"{kill.role} ({kill.how})"


def _spread(kills: Sequence[Kill]) -> tuple[str, str]:
    times = [kill.recovery_s for kill in kills if kill.recovery_s is not None]
    return (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("-", "-")


def _line(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    rewards = [result.reward for result in results if result.reward is not None]
    sums = [sum(getattr(result, key) for result in results) for key in ("lost", "repeated", "stale_trained")]
    return (
        *(name, str(len(results)), str(sum(len(result.kills) for result in results)), *map(str, sums)),
        f"{min(rewards):.2f}" if rewards else "-",
        f"{sum(result.seconds for result in results):.0f}",
        "" if all(result.fine for result in results) else "NOT FINE",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *rest = (text.ljust(width) if not at else text.rjust(width)
                        for at, (text, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)
