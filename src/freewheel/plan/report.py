"""What the planner found, as text: tables with bars, the best split, what is measured and what is not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from freewheel.plan.sweep import Row, best

BAR = 16
"""Columns of the longest bar."""
EXPLAINED = {
    "measured": "measured: every part was measured in the run with these settings, and simulation puts them together",
    "extrapolated": "extrapolated: speeds follow from data sheets or other settings than the run's, and assumed shares "
    "(docs/plan.md names each)",
}


def table(rows: Sequence[Row], *, price: float | None = None, marks: bool = True) -> str:
    """The splits, a line each; the best is marked."""
    winner = best(rows)
    top = winner.samples_per_s
    head = ["", "train", "generate", "samples/s", "", "tokens/s", "trainer waits", "engines wait", "lag", "most"]
    head += ["hours/1M", *(["cost/1M"] if price is not None else []), "basis"]
    cells = [head]
    for row in rows:
        found = row.outcome
        line = [
            "*" if marks and row is winner else "",
            f"{row.trainers:,}",
            f"{row.generators:,}",
            _number(row.samples_per_s),
            "█" * max(1, round(BAR * row.samples_per_s / top)),
            _number(found.tokens_per_s),
            f"{found.trainer_waits:.0%}",
            f"{found.generation_waits:.0%}",
            f"{found.lag_mean:.1f}",
            f"{found.lag_max}",
            _number(row.hours_per_million),
        ]
        cells.append([*line, *([_number(row.cost(price))] if price is not None else []), row.basis])
    return _aligned(cells, left=(0, 4, len(head) - 1))


def scaling_table(rows: Sequence[Row]) -> str:
    """The best split of each number of accelerators, and how much of what they could give is left."""
    first = rows[0]
    cells = [
        ["accelerators", "train", "generate", "groups/step", "samples/s", "of linear", "lag", "basis", "held up by"]
    ]
    for row in rows:
        linear = row.samples_per_s / row.accelerators / (first.samples_per_s / first.accelerators)
        cells.append(
            [
                f"{row.accelerators:,}",
                f"{row.trainers:,}",
                f"{row.generators:,}",
                f"{row.groups_per_step:,}",
                _number(row.samples_per_s),
                f"{linear:.0%}",
                f"{row.outcome.lag_mean:.1f}",
                row.basis,
                row.verdict.partition(":")[0],
            ]
        )
    return _aligned(cells, left=(7, 8))


def summary(rows: Sequence[Row]) -> str:
    """The best split in words."""
    row = best(rows)
    return (
        f"Best: {row.trainers:,} to train and {row.generators:,} to generate "
        f"({row.replicas:,} replica{'s' * (row.replicas != 1)}): "
        f"{_number(row.samples_per_s)} samples/s, a step each {_seconds(row.outcome.step_s)}, "
        f"lag {row.outcome.lag_mean:.1f} versions (at most {row.outcome.lag_max}).\n"
        f"{row.verdict[0].upper()}{row.verdict[1:]}."
    )


def explained(rows: Sequence[Row]) -> str:
    """What the words in `basis` mean, those that occur."""
    return "\n".join(EXPLAINED[basis] for basis in EXPLAINED if any(row.basis == basis for row in rows))


def as_json(row: Row, price: float | None = None) -> dict[str, Any]:
    """With what follows from it."""
    plain: dict[str, Any] = msgspec.to_builtins(row)
    derived = {"samples_per_s": row.samples_per_s, "tokens_per_s": row.outcome.tokens_per_s}
    derived |= {"step_s": row.outcome.step_s, "hours_per_million": row.hours_per_million}
    return plain | derived | ({"cost_per_million": row.cost(price)} if price is not None else {})


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _aligned(cells: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
