"""`Schedule`: when a trainer's steps, checkpoints and evaluations are due. Pure; used by `FullyAsyncTrainer`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When things are due."""

    total_steps: int
    batch_timeout_s: float
    max_errors: int
    eval_at_start: bool
    save_every: int | None = None
    eval_every: int | None = None
    publish_timeout_s: float = 120.0
    """How long an evaluation waits for its version to reach the engines."""

    def saves(self, step: int, *, since: int) -> bool:
        """Whether a checkpoint became due after step `since`. It is made of a completed version, which may be later."""
        return self.save_every is not None and step // self.save_every > since // self.save_every

    def evaluates(self, step: int) -> bool:
        return self.eval_every is not None and step % self.eval_every == 0 and step < self.total_steps
