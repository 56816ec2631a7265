"""From what a run recorded to a `Scene`: its distributions as they are, and what no file says found by replay.

    Recorded ─▶ Scene ─▶ simulate ─▶ engine time a token, wall time a step ─┐
                  ▲                                                         │ compared with the run's own
                  └──────── the time of a prompt, of a message ◀────────────┘

Two numbers are found this way. What a prompt costs an engine: the decoding step shows in when the responses of a group
end, and what is left of the engine's time is for reading prompts and giving them slots. (Where lengths do not tell the
step, prompts are taken to cost nothing.) A message between components: in turns it is what generation and training
leave of a step; where they overlap, what a group took to be stored stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from freewheel.plan.draws import Measured
from freewheel.plan.recorded import Recorded
from freewheel.plan.scene import MESSAGE_S, Beside, Generation, HandOver, Scene, Scores, Training, Weights
from freewheel.plan.simulation import simulate
from freewheel.queue.staleness import Bounds

REPLAYS = 4
"""Rounds until replay and run agree: time scales with the step, so that the second is close already."""
MOST_VALUES = 20_000
"""Of a distribution: more say nothing more."""
NATIVE_REFILL = 8
"""The native engine fills an eighth of its slots at a time; vLLM every one as it is free."""
MESSAGES = 4
"""Admit, put, take, commit."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What of a run's configuration matters here. `bounds` with the steps that are to be simulated."""

    bounds: Bounds
    n: int
    is_native: bool
    interval_s: float
    is_judge: bool = False


def scene_of(recorded: Recorded, settings: RunSettings, *, generated: Measured | None = None) -> Scene:
    """The run as it was. `generated`: lengths that the engine made, where what was trained on is only a part."""
    per_token_s = sum(recorded.train_s) / sum(recorded.step_tokens)
    varies = Measured.of(
        [took / (per_token_s * tokens) for took, tokens in zip(recorded.train_s, recorded.step_tokens, strict=True)]
    )
    lengths = Measured(_thinned(recorded.lengths))
    scene = Scene(
        bounds=settings.bounds,
        n=settings.n,
        lengths=generated or lengths,
        trained_lengths=lengths if generated else None,
        generation=Generation(
            replicas=recorded.replicas,
            slots=recorded.slots,
            step_s=recorded.decode_s or recorded.busy_per_token_s * recorded.slots,
            refill=max(1, recorded.slots // NATIVE_REFILL) if settings.is_native else 1,
        ),
        scores=Scores(
            is_judge=settings.is_judge,
            latency_s=Measured(_thinned(recorded.latencies_s)),
            rate_per_s=recorded.scored_per_s,
        ),
        training=Training(
            per_token_s=per_token_s * fmean(recorded.step_tokens) / _step_tokens(lengths, settings),
            varies=varies,
            pack_s=recorded.pack_s,
        ),
        weights=Weights(transfer_s=max(0.0, recorded.sync_s - recorded.load_s), pause_s=recorded.load_s),
        hand_over=_hand_over(recorded.put_s or MESSAGE_S, settings),
    )
    scene = _with_prompts(scene, recorded) if recorded.decode_s else _with_step(scene, recorded)
    if settings.bounds.in_turns:
        scene = _with_messages(scene, recorded, settings)
    return scene


def beside(alone: Scene, together: Recorded, bounds: Bounds) -> Beside:
    """What the two sides cost each other: `alone` as it was measured in turns, `together` a run of the same, side by
    side on the same machine, under `bounds`. Each side felt the other for as long as that was at work."""
    expected = simulate(replace(alone, bounds=bounds))
    per_token_s = sum(together.train_s) / sum(together.step_tokens)
    slower_training = per_token_s / (alone.training.per_token_s * alone.training.varies.mean)
    slower_generation = together.busy_per_token_s / expected.busy_per_token_s
    trains = sum(together.train_s) / (together.steps * together.step_s)
    return Beside(
        generation=max(1.0, 1 + (slower_generation - 1) / min(1.0, trains)),
        training=max(1.0, 1 + (slower_training - 1) / expected.engine_busy),
    )


def _step_tokens(lengths: Measured, settings: RunSettings) -> float:
    return settings.bounds.groups_per_step * settings.n * lengths.mean


def _hand_over(message_s: float, settings: RunSettings) -> HandOver:
    return HandOver(
        admit_s=message_s, put_s=message_s, take_s=message_s, commit_s=message_s, interval_s=settings.interval_s
    )


def _with_step(scene: Scene, recorded: Recorded) -> Scene:
    """The decoding step that makes engines take the time a token that they took."""
    for _ in range(REPLAYS):
        found = simulate(scene).busy_per_token_s
        step_s = scene.generation.step_s * recorded.busy_per_token_s / found
        scene = replace(scene, generation=replace(scene.generation, step_s=step_s))
    return scene


def _with_prompts(scene: Scene, recorded: Recorded) -> Scene:
    """The same for what a prompt costs, with a step that is known; where that is more than all, the step is less."""
    tokens = scene.n * scene.lengths.mean
    for _ in range(REPLAYS):
        missing_s = (recorded.busy_per_token_s - simulate(scene).busy_per_token_s) * tokens
        prefill_s = scene.generation.prefill_s + missing_s
        if prefill_s < 0:
            return _with_step(replace(scene, generation=replace(scene.generation, prefill_s=0.0)), recorded)
        scene = replace(scene, generation=replace(scene.generation, prefill_s=prefill_s))
    return scene


def _with_messages(scene: Scene, recorded: Recorded, settings: RunSettings) -> Scene:
    """In turns everything adds up: what is missing in a step is what messages took."""
    message_s = scene.hand_over.put_s
    for _ in range(REPLAYS):
        missing_s = recorded.step_s - simulate(scene).step_s
        message_s = max(0.0, message_s + missing_s / MESSAGES)
        scene = replace(scene, hand_over=_hand_over(message_s, settings))
    return scene


def _thinned(values: tuple[float, ...]) -> tuple[float, ...]:
    """Evenly over the run: lengths change while a model learns."""
    every = -(-len(values) // MOST_VALUES)
    return values[::every]
