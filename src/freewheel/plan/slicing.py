"""A large run by a slice of it: as many engines, groups and verdicts for each other, fewer of all. Pure.

Engines are alike, and a step takes its groups from all of them: a tenth of the engines, a tenth of the groups a step
and a judge with a tenth of the rate behave as the whole does, as long as there are enough of each to average over. What
does not shrink (the time of a step, of a version, of a message) is as it was. A test compares slices with wholes.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from freewheel.plan.outcome import Outcome
from freewheel.plan.scene import Scene
from freewheel.plan.simulation import simulate

MOST_GROUPS = 768
"""Groups a step of a slice, about: their lengths average out to a percent."""
LEAST_REPLICAS = 8
"""Engines of a slice, at least; one is enough where each has as many groups to itself."""


def simulate_slice(scene: Scene, *, seed: int = 0) -> Outcome:
    """As `simulate`, for scenes of any size; small ones are simulated whole."""
    one, parts = sliced(scene)
    found = simulate(one, seed=seed)
    if parts == 1.0:
        return found
    return msgspec.structs.replace(
        found,
        groups=round(found.groups * parts),
        samples=round(found.samples * parts),
        tokens=round(found.tokens * parts),
        lag_counts=[round(count * parts) for count in found.lag_counts],
        ready_mean=found.ready_mean * parts,
        scores_per_s=found.scores_per_s * parts,
        judge_limit=None if found.judge_limit is None else round(found.judge_limit * parts),
        judge_refused=round(found.judge_refused * parts),
        lives=round(found.lives * parts),
    )


def sliced(scene: Scene) -> tuple[Scene, float]:
    """A slice, and how many of it make the whole."""
    bounds, made = scene.bounds, scene.generation
    fewest = LEAST_REPLICAS if bounds.groups_per_step < MOST_GROUPS * made.replicas else 1
    into = min(bounds.groups_per_step // MOST_GROUPS, made.replicas // fewest)
    if into < 2:
        return scene, 1.0
    replicas = round(made.replicas / into)
    groups = round(bounds.groups_per_step * replicas / made.replicas)
    parts = bounds.groups_per_step / groups
    return (
        replace(
            scene,
            bounds=replace(
                bounds,
                groups_per_step=groups,
                window=round((bounds.window - 1) / parts) + 1,
                max_alive=max(groups * bounds.steps_per_version, round(bounds.max_alive / parts)),
                total_groups=scene.steps * groups,
            ),
            generation=replace(made, replicas=replicas),
            scores=replace(
                scene.scores,
                knee=_part(scene.scores.knee, parts),
                refuse_above=_part(scene.scores.refuse_above, parts),
                rate_per_s=None if scene.scores.rate_per_s is None else scene.scores.rate_per_s / parts,
            ),
            training=replace(scene.training, per_token_s=scene.training.per_token_s * parts),
        ),
        parts,
    )


def _part(count: int | None, parts: float) -> int | None:
    return None if count is None else max(1, round(count / parts))
