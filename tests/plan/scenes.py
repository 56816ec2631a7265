"""Small scenes to simulate, and strategies that draw them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from freewheel.plan.scene import (
    Generation,
    HandOver,
    Lognormal,
    Measured,
    Scene,
    Scores,
    Slowdown,
    Training,
    WeightTransfer,
)
from freewheel.queue.staleness import Bounds

INSTANT = HandOver(linger_s=0.0)
"""Messages that cost nothing."""


def bounds(
    mode: str = "fully_async", *, groups: int = 8, steps: int = 12, threshold: int = 3, extra: int = 2, every: int = 1
) -> Bounds:
    """As `TrainConfig.bounds` has them."""
    ahead = {"sync": 0, "one_step_off": 1}.get(mode, threshold)
    return Bounds(
        groups_per_step=groups,
        steps_per_version=every,
        threshold=ahead,
        window=extra * groups * every + 1 if mode == "fully_async" else 1,
        max_alive=10**6,
        max_lag_allowed=ahead + extra,
        drain=mode != "fully_async",
        total_groups=groups * steps,
    )


def scene(mode: str = "fully_async", **changes: Any) -> Scene:
    """Generation and training about as fast as each other: 4 tokens a step in 16 slots, a step of 0.5 s."""
    shape = {name: changes.pop(name) for name in ("groups", "steps", "threshold", "extra", "every") if name in changes}
    given: dict[str, Any] = {
        "bounds": bounds(mode, **shape),
        "n": 4,
        "lengths": Measured((10,)),
        "generation": Generation(slots=16, step_s=0.02),
        "training": Training(base_s=0.4),
        "hand_over": INSTANT,
    }
    return Scene(**{**given, **changes})


lengths = st.one_of(
    st.integers(1, 50).map(lambda tokens: Measured((float(tokens),))),
    st.tuples(st.floats(2, 40), st.floats(0.1, 1.5)).map(lambda pair: Lognormal(pair[0], pair[1], 200.0)),
    st.lists(st.integers(1, 100), min_size=1, max_size=8).map(lambda values: Measured(tuple(map(float, values)))),
)
seconds = st.floats(0, 2)
scores = st.one_of(
    st.just(Scores()),
    seconds.map(lambda s: Scores(latency_s=Measured((0.5 * s, s, 1.5 * s)))),
    st.tuples(st.floats(0.05, 1), st.integers(2, 40)).map(
        lambda pair: Scores(latency_s=Measured((pair[0],)), knee=pair[1])
    ),
    st.tuples(st.floats(0.05, 1), st.floats(5, 60)).map(
        lambda pair: Scores(latency_s=Measured((pair[0],)), rate_per_s=pair[1])
    ),
)


scenes = st.builds(
    scene,
    st.sampled_from(["sync", "one_step_off", "fully_async"]),
    groups=st.integers(1, 12),
    steps=st.integers(3, 10),
    threshold=st.integers(0, 4),
    extra=st.integers(0, 3),
    every=st.integers(1, 3),
    n=st.integers(1, 6),
    lengths=lengths,
    generation=st.builds(
        Generation,
        replicas=st.integers(1, 4),
        slots=st.integers(1, 24),
        step_s=st.floats(0.001, 0.1),
        per_sequence_s=st.floats(0, 0.01),
        prefill_s=st.floats(0, 0.05),
        refill=st.integers(1, 4),
    ),
    scores=scores,
    training=st.builds(
        Training,
        base_s=st.floats(0.01, 2),
        per_token_s=st.floats(0, 0.001),
        varies=st.just(Measured((0.8, 1.0, 1.2))),
        pack_s=st.floats(0, 0.2),
    ),
    weights=st.builds(WeightTransfer, transfer_s=st.floats(0, 0.3), pause_s=st.floats(0, 0.3)),
    hand_over=st.builds(
        HandOver, message_s=st.floats(0, 0.05), linger_s=st.floats(0, 0.1), interval_s=st.sampled_from([0.0, 0.1])
    ),
    slowdown=st.builds(Slowdown, generation=st.floats(1, 2), training=st.floats(1, 2)),
)
"""Small scenes of any kind."""
