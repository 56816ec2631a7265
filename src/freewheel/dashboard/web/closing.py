"""What held a run up that is over: its own word for it, the same that `freewheel train` says at the end.

A run that was killed had none: then it follows, by the same rule, from what was recorded until then. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from freewheel.dashboard.web.recorded import Recorded
from freewheel.dashboard.web.rows import Statistics
from freewheel.dashboard.web.settings import Settings
from freewheel.runtime.bottleneck import Setting, Watching, stopped


def closing(recorded: Recorded, settings: Settings) -> str:
    """Empty where nothing was measured."""
    pulse, rows = recorded.last_pulse, recorded.latest_statistics
    if not rows or (pulse is not None and pulse.last):  # before the first statistics a pulse is of the whole run
        return pulse.verdict if pulse is not None else ""
    replicas = [name for name in (pulse.waits if pulse is not None else ()) if name.startswith("rollouter")]
    last, judge = rows[-1], rows[-1].rollouter.rewards.judge
    replayed = {name: last.run.replayed.get(name.partition("-")[0], {}) for name in ("trainer", *replicas, "rollouter")}
    watching = Watching(_setting(settings), is_judge=judge is not None, replayed=replayed)
    for row in rows:
        found = _components(row, replicas or ["rollouter"])
        watching.note(row.time, found, msgspec.to_builtins(row.rollouter.rewards))
    endpoints = msgspec.to_builtins(judge.endpoints) if judge is not None else ()
    verdict = stopped(paused=last.queue.paused, endpoints=endpoints) or watching.verdict_on(watching.whole)
    return "" if verdict.bound == "unmeasured" else verdict.sentence


def _components(row: Statistics, replicas: list[str]) -> dict[str, dict[str, Any]]:
    """By name; statistics have the replicas together, so that each is as all of them are."""
    made = row.rollouter
    rollouter: dict[str, Any] = {"spans": made.spans}
    if made.running is not None and made.slots is not None:
        rollouter |= {"running": made.running, "slots": made.slots}
    return {"trainer": {"spans": row.trainer.spans}, **dict.fromkeys(replicas, rollouter)}


def _setting(settings: Settings) -> Setting:
    save_every = settings.number("trainer.save_every_steps")
    return Setting(
        mode=settings.text("mode") or "fully_async",
        threshold=settings.staleness_threshold,
        sync_every_steps=int(settings.number("async_training.sync_every_steps") or 1),
        save_every_steps=None if save_every is None else int(save_every),
    )
