"""`freewheel plan`: predict the throughput of a run, or of a model on N accelerators, as tables, JSON or a picture.

Neither torch nor Ray is imported.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from freewheel.cli.console import plain_errors, print_json, print_text, say
from freewheel.cli.flags import argument, flag, flags, takes
from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.plan.planner import Planned, SimulatedSplit

EPILOG = """
The plan simulates a run under a virtual clock, with the classes that make the decisions in a real run. Each line says
whether it was measured or extrapolated. Exit codes: 0; 2 a flag or a folder cannot work.
"""
LARGEST = 4096
"""Scaling is shown up to this many accelerators by default..."""
EIGHTFOLD = 8
"""...and up to this many times the number that was asked for."""
USUAL_LATENCY_S = 1.0
"""Latency of a judge for which only limits are given."""
MOST_ACCELERATORS = 16_384
"""Above this the table of links and shares has no meaning."""
MOST_GROUPS = 16 * MOST_ACCELERATORS
"""Groups per step: the default number for each of those accelerators."""
MOST_AHEAD = 100
"""Versions ahead, and steps per version: a simulation must be several times as long as generation runs ahead."""
MOST_TOKENS = 10_000_000
MOST = 1e9
"""Bound of other amounts, far above anything real."""
_WHAT, _WORK, _SHOW = "What is planned", "The work", "Output"


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not an amount: give a finite number")
    return value


ONLY_WITH_MODEL = (
    flag("accelerator", str, "With --model: h200, h100, a100, b200, mi300x or l40s (h200).", metavar="NAME",
         panel=_WHAT),
    flag("n", int, "With --model: responses to a prompt (8).", "--n", min=1, max=4096, panel=_WORK),
    flag("prompt_tokens", int, "With --model: mean tokens of a prompt (256).", min=1, max=MOST_TOKENS, panel=_WORK),
    flag("response_tokens", int, "With --model: mean tokens of a response (1024).", min=1, max=MOST_TOKENS,
         panel=_WORK),
    flag("max_new_tokens", int, "With --model: most tokens of a response (4096).", min=1, max=MOST_TOKENS,
         panel=_WORK),
)  # fmt: skip
"""A run determines these values itself."""


@flags(
    _WORK,
    flag("judge_latency", float, "Seconds for one score without load. With RUN: as measured.", metavar="S", min=0.0,
         max=MOST, callback=_finite),
    flag("judge_rate", float, "Most requests per second that the judge accepts.", metavar="PER_S", min=0.001,
         max=MOST, callback=_finite),
    flag("judge_knee", int, "Concurrent requests above which the judge slows down.", metavar="N", min=1,
         max=int(MOST)),
)  # fmt: skip
def _scores_from_flags(**given: Any) -> Any:
    """Return the judge that the flags describe, or None."""
    from freewheel.plan.scene import Measured, Scores

    latency = Measured((given.get("judge_latency", USUAL_LATENCY_S),))
    judge = Scores(is_judge=True, latency_s=latency, rate_per_s=given.get("judge_rate"), knee=given.get("judge_knee"))
    return judge if given else None


@takes(
    argument("run", str, "[RUN]", "A run's folder: its own lengths, latencies and step times are used."),
    flag("model", str, "In place of RUN: a model's size, 0.5b to 72b.", metavar="SIZE", panel=_WHAT),
    flag("accelerators", int, "Number of accelerators, for training and generation together. With RUN: the run's.",
         metavar="N", min=2, max=MOST_ACCELERATORS, panel=_WHAT),
    flag("mode", str, "sync, one_step_off or fully_async. With RUN: its own.", metavar="MODE", panel=_WORK),
    flag("groups_per_step", int, "Groups per step. With --model: 16 for each accelerator.", metavar="P", min=1,
         max=MOST_GROUPS, panel=_WORK),
    flag("threshold", int, "Versions that generation may run ahead.", "--staleness-threshold", metavar="T", min=0,
         max=MOST_AHEAD, panel=_WORK),
    flag("sync_every_steps", int, "Steps between two weight versions.", metavar="N", min=1, max=MOST_AHEAD,
         panel=_WORK),
    flag("price", float, "Price of one accelerator for an hour: adds costs.", metavar="MONEY", min=0.0, max=MOST,
         callback=_finite, panel=_SHOW),
    flag("scale_to", int, "Show scaling up to this many accelerators; 0: none. Default: eight times N.", metavar="N",
         min=0, max=MOST_ACCELERATORS, panel=_SHOW),
    flag("plot", Path, "Draw both tables into an SVG file.", metavar="FILE.svg", panel=_SHOW),
    flag("as_json", bool, "All figures as one JSON object.", "--json", panel=_SHOW),
    flag("seed", int, "Seed of the simulation: the same seed gives the same figures.", default=0, min=0, panel=_SHOW),
    *ONLY_WITH_MODEL,
    scores=_scores_from_flags,
)  # fmt: skip
def plan(
    run: str | None,
    model: str | None,
    accelerators: int | None,
    groups_per_step: int | None,
    price: float | None,
    scale_to: int | None,
    plot: Path | None,
    as_json: bool,
    scores: Any,
    **others: Any,
) -> None:
    """Find the best split of accelerators between training and generation, before they are rented."""
    of_a_model = {one.name: others.pop(one.name) for one in ONLY_WITH_MODEL}
    of_a_model = {name: value for name, value in of_a_model.items() if value is not None}
    with plain_errors():
        from freewheel.plan.clusters import Workload, find_shape
        from freewheel.plan.planner import GROUPS_PER_ACCELERATOR, of_model, of_run
        from freewheel.plan.scene import Scores

        if run is not None and model is not None:
            raise ConfigError(
                "--model", model, f"the run {run} is also given and has its own model: leave one of them out"
            )
        if plot is not None and plot.suffix.lower() != ".svg":
            raise ConfigError("--plot", str(plot), "it is drawn as SVG: give a name that ends with .svg")
        if run is not None:
            for name, value in of_a_model.items():
                remedy = "it belongs to --model, and a run has its own value: leave it out"
                raise ConfigError(f"--{name.replace('_', '-')}", value, remedy)
            planned = of_run(run, **others, accelerators=accelerators, groups_per_step=groups_per_step, scores=scores)
        elif model is None:
            raise typer.BadParameter("give a run's folder, or in its place a model with --model", param_hint="RUN")
        elif accelerators is None:
            find_shape(model)  # an unknown model is reported first
            missing = "give how many there are, for training and generation together"
            raise typer.BadParameter(missing, param_hint="--accelerators")
        else:
            groups = groups_per_step or GROUPS_PER_ACCELERATOR * accelerators
            accelerator = of_a_model.pop("accelerator", "h200")
            work = Workload(groups_per_step=groups, scores=scores or Scores(), **of_a_model)
            planned = of_model(model, accelerator, accelerators, work, **others)
        if scale_to and scale_to < 2 * planned.accelerators:
            remedy = f"the {planned.accelerators:,} planned ones are doubled repeatedly: give "
            raise ConfigError("--scale-to", scale_to, f"{remedy}{2 * planned.accelerators:,} or more, or 0 for none")
        if sys.stderr.isatty():
            say(f"simulating {_title(planned).splitlines()[-1]}, this may take a minute")
        rows = planned.splits()
        last = min(EIGHTFOLD * planned.accelerators, LARGEST) if scale_to is None else scale_to
        scaled = planned.scaling(last, rows)
        if plot is not None:
            _draw(plot, planned, rows, scaled)
        _show(planned, rows, scaled, price=price, as_json=as_json)


def _title(planned: Planned) -> str:
    config = planned.config
    return f"{planned.about}\nmode {config.mode}, {planned.groups_per_step:,} groups x {config.rollout.n} per step"


def _show(
    planned: Planned, rows: list[SimulatedSplit], scaled: list[SimulatedSplit], *, price: float | None, as_json: bool
) -> None:
    from freewheel.plan import report
    from freewheel.plan.planner import best

    if as_json:
        print_json(
            {
                "title": _title(planned),
                "splits": [report.as_json(row, price) for row in rows],
                "best": report.as_json(best(rows), price),
                "scaling": [report.as_json(row, price) for row in scaled],
            }
        )
        return
    parts = [_title(planned), "", report.table(rows, price=price), "", report.summary(rows)]
    if scaled:
        parts += ["", "With groups per step in proportion to the accelerators:", "", report.scaling_table(scaled)]
    print_text("\n".join([*parts, "", report.explain([*rows, *scaled])]))


def _draw(path: Path, planned: Planned, rows: list[SimulatedSplit], scaled: list[SimulatedSplit]) -> None:
    from freewheel.plan.report import draw

    try:
        path.write_text(draw(rows, scaled, title=_title(planned)), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--plot", str(path), f"it cannot be written: {error.strerror}") from error
    say(f"drawn into {path}")
