"""`MeasuredCluster`: a run that was measured, on other numbers of the same accelerators."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from freewheel.errors import ConfigError
from freewheel.plan.hardware import SCALING, training_at_once
from freewheel.plan.scene import Scene
from freewheel.queue.staleness import Bounds


@dataclass(frozen=True, kw_only=True)
class MeasuredCluster:
    """What was measured holds as it is for the run's own split. With more or fewer, engines are as fast each, a
    training step is divided among those that train, and a version takes longer to bring to more engines."""

    run: Scene
    trainers: int
    """Accelerators (or processes, on CPUs) that trained."""
    per_replica: int = 1
    least_trainers: int = 1
    as_measured: bool = True
    """False where a part is not as it was in the run, or may not have had an accelerator of its own there."""

    @property
    def generators(self) -> int:
        return self.run.generation.replicas * self.per_replica

    @property
    def accelerators(self) -> int:
        return self.trainers + self.generators

    def is_measured(self, bounds: Bounds, *, trainers: int, generators: int) -> bool:
        """With the run's own settings only: how often sides wait for each other depends on them."""
        same = replace(bounds, total_groups=self.run.bounds.total_groups) == self.run.bounds
        return self.as_measured and same and (trainers, generators) == (self.trainers, self.generators)

    def scene(self, bounds: Bounds, *, trainers: int, generators: int) -> Scene:
        replicas = generators // self.per_replica
        if replicas < 1 or trainers < 1:
            raise ConfigError("split", f"{trainers} + {generators}", f"a replica needs {self.per_replica} to generate")
        run = self.run
        more = training_at_once(trainers, bounds, run.n) / training_at_once(self.trainers, run.bounds, run.n)
        speed = more * SCALING ** abs(math.log2(more)) if more > 1 else more
        return replace(
            run,
            bounds=bounds,
            generation=replace(run.generation, replicas=replicas),
            training=replace(
                run.training, base_s=run.training.base_s / speed, per_token_s=run.training.per_token_s / speed
            ),
            weights=replace(
                run.weights, transfer_s=run.weights.transfer_s * max(1.0, replicas / run.generation.replicas)
            ),
            window=None,
        )
