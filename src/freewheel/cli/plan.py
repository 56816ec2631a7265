"""`freewheel plan`: predict the throughput of a run, or of a model on N accelerators, as tables, JSON or a picture.

Neither torch nor Ray is imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from freewheel.plan.planner import Planned, Row
    from freewheel.plan.scene import Scores

EPILOG = """
Simulated with the classes that decide in a run, under a virtual clock. Every line tells what is measured from what is
extrapolated. Exit codes: 0; 2 a flag or a folder that cannot work.
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
MOST_N, MOST_TOKENS, MOST_KNEE, MOST_LATENCY_S, MOST_RATE, MOST_PRICE = 4096, 10_000_000, 10**9, 86_400.0, 1e9, 1e9
"""Bounds of the other flags, far above anything real."""
OF_A_MODEL = {
    "accelerator": "--accelerator",
    "n": "--n",
    "prompt_tokens": "--prompt-tokens",
    "response_tokens": "--response-tokens",
    "max_new_tokens": "--max-new-tokens",
}
"""Flags that only work with --model, by their parameter."""
DRAWN = ".svg"
_WHAT, _WORK, _SHOW = "What is planned", "The work", "Output"


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no amount: give a finite number")
    return value


def plan(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's folder: its own lengths, latencies and step times are used.",
                       show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="In place of RUN: a model's size, 0.5b to 72b.", metavar="SIZE", rich_help_panel=_WHAT),
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(help="With --model: h200, h100, a100, b200, mi300x or l40s.", metavar="NAME",
                     rich_help_panel=_WHAT),
    ] = "h200",
    accelerators: Annotated[
        int | None,
        typer.Option(help="How many, for training and generation together. With RUN: as it had.", metavar="N", min=2,
                     max=MOST_ACCELERATORS, rich_help_panel=_WHAT),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="sync, one_step_off or fully_async. With RUN: its own.", metavar="MODE",
                     rich_help_panel=_WORK),
    ] = None,
    groups_per_step: Annotated[
        int | None,
        typer.Option(help="Groups a step. With --model: 16 for each accelerator.", metavar="P", min=1,
                     max=MOST_GROUPS, rich_help_panel=_WORK),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option("--staleness-threshold", help="Versions that generation may run ahead.", metavar="T", min=0,
                     max=MOST_AHEAD, rich_help_panel=_WORK),
    ] = None,
    sync_every_steps: Annotated[
        int | None,
        typer.Option(help="Steps between two weight versions.", metavar="N", min=1, max=MOST_AHEAD,
                     rich_help_panel=_WORK),
    ] = None,
    n: Annotated[
        int,
        typer.Option("--n", help="With --model: responses to a prompt.", min=1, max=MOST_N, rich_help_panel=_WORK),
    ] = 8,
    prompt_tokens: Annotated[
        int,
        typer.Option(help="With --model: of a prompt, on average.", min=1, max=MOST_TOKENS, rich_help_panel=_WORK),
    ] = 256,
    response_tokens: Annotated[
        int,
        typer.Option(help="With --model: of a response, on average.", min=1, max=MOST_TOKENS, rich_help_panel=_WORK),
    ] = 1024,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="With --model: of a response, at most.", min=1, max=MOST_TOKENS, rich_help_panel=_WORK),
    ] = 4096,
    judge_latency: Annotated[
        float | None,
        typer.Option(help="Seconds that a score takes, alone. With RUN: as measured.", metavar="S", min=0.0,
                     max=MOST_LATENCY_S, callback=_finite, rich_help_panel=_WORK),
    ] = None,
    judge_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second that the judge takes at most.", metavar="PER_S", min=0.001,
                     max=MOST_RATE, callback=_finite, rich_help_panel=_WORK),
    ] = None,
    judge_knee: Annotated[
        int | None,
        typer.Option(help="Requests at a time from which on the judge is slower for each.", metavar="N", min=1,
                     max=MOST_KNEE, rich_help_panel=_WORK),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(help="Of an accelerator for an hour: costs are then told too.", metavar="MONEY", min=0.0,
                     max=MOST_PRICE, callback=_finite, rich_help_panel=_SHOW),
    ] = None,
    scale_to: Annotated[
        int | None,
        typer.Option(help="Show scaling up to so many accelerators; 0: none. Without it: eight times N.", metavar="N",
                     min=0, max=MOST_ACCELERATORS, rich_help_panel=_SHOW),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw both into an SVG file.", metavar="FILE.svg", rich_help_panel=_SHOW)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All figures as one JSON object.", rich_help_panel=_SHOW)
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Of every draw: the same gives the same figures.", min=0, rich_help_panel=_SHOW)
    ] = 0,
) -> None:  # fmt: skip
    """Find the best split of accelerators between training and generation, before they are rented."""
    from freewheel.cli.console import plain_errors, say

    with plain_errors():
        from freewheel.errors import ConfigError
        from freewheel.plan.clusters import Workload, find_shape
        from freewheel.plan.planner import GROUPS_PER_ACCELERATOR, of_model, of_run
        from freewheel.plan.scene import Scores

        if run is not None and model is not None:
            raise ConfigError("--model", model, f"the run {run} is given too, and has a model: leave one of them out")
        if plot is not None and plot.suffix.lower() != DRAWN:
            raise ConfigError("--plot", str(plot), f"it is drawn as SVG: give a name that ends with {DRAWN}")
        scores = _scores(judge_latency, judge_rate, judge_knee)
        if run is not None:
            _refuse_given(context, OF_A_MODEL)
            planned = of_run(
                run,
                mode=mode,
                threshold=threshold,
                sync_every_steps=sync_every_steps,
                accelerators=accelerators,
                groups_per_step=groups_per_step,
                scores=scores,
                seed=seed,
            )
        elif model is not None and accelerators is not None:
            work = Workload(
                n=n,
                groups_per_step=groups_per_step or GROUPS_PER_ACCELERATOR * accelerators,
                prompt_tokens=prompt_tokens,
                response_tokens=response_tokens,
                max_new_tokens=max_new_tokens,
                scores=scores or Scores(),
            )
            planned = of_model(
                model,
                accelerator,
                accelerators,
                work,
                mode=mode,
                threshold=threshold,
                sync_every_steps=sync_every_steps,
                seed=seed,
            )
        elif model is not None:
            find_shape(model)  # one that is not there is said first
            said = "give how many there are, for training and generation together"
            raise typer.BadParameter(said, param_hint="--accelerators")
        else:
            raise typer.BadParameter("give a run's folder, or in its place a model with --model", param_hint="RUN")
        if scale_to and scale_to < 2 * planned.accelerators:
            remedy = f"the {planned.accelerators:,} that are planned are doubled again and again: give "
            raise ConfigError("--scale-to", scale_to, f"{remedy}{2 * planned.accelerators:,} or more, or 0 for none")
        if sys.stderr.isatty():
            say(f"simulating {_title(planned).splitlines()[-1]}, which may take a minute")
        rows = planned.splits()
        last = min(EIGHTFOLD * planned.accelerators, LARGEST) if scale_to is None else scale_to
        scaled = planned.scaling(last, rows)
        if plot is not None:
            _draw(plot, planned, rows, scaled)
        _show(planned, rows, scaled, price=price, as_json=as_json)


def _refuse_given(context: typer.Context, flags: Mapping[str, str]) -> None:
    """Refuse a flag for something that the run itself determines."""
    from freewheel.errors import ConfigError

    for parameter, flag in flags.items():
        source = context.get_parameter_source(parameter)
        if source is not None and source.name == "COMMANDLINE":
            remedy = "it is for a model that is planned (--model), and a run has its own: leave it out"
            raise ConfigError(flag, context.params[parameter], remedy)


def _scores(latency_s: float | None, rate_per_s: float | None, knee: int | None) -> Scores | None:
    """Return the judge that the flags describe, or None."""
    from freewheel.plan.scene import Constant, Scores

    if latency_s is None and rate_per_s is None and knee is None:
        return None
    latency = Constant(USUAL_LATENCY_S if latency_s is None else latency_s)
    return Scores(is_judge=True, latency_s=latency, rate_per_s=rate_per_s, knee=knee)


def _title(planned: Planned) -> str:
    config = planned.config
    return f"{planned.about}\nmode {config.mode}, {planned.groups_per_step:,} groups x {config.rollout.n} a step"


def _show(planned: Planned, rows: list[Row], scaled: list[Row], *, price: float | None, as_json: bool) -> None:
    from freewheel.cli.console import print_json, print_text
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
    said = [_title(planned), "", report.table(rows, price=price), "", report.summary(rows)]
    if scaled:
        said += ["", "With as many groups a step for each accelerator:", "", report.scaling_table(scaled)]
    print_text("\n".join([*said, "", report.explained([*rows, *scaled])]))


def _draw(path: Path, planned: Planned, rows: list[Row], scaled: list[Row]) -> None:
    from freewheel.cli.console import say
    from freewheel.errors import ConfigError
    from freewheel.plan.report import draw

    try:
        path.write_text(draw(rows, scaled, title=_title(planned)), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--plot", str(path), f"it cannot be written: {error.strerror}") from error
    say(f"drawn into {path}")
