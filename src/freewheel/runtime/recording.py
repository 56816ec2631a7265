"""What a process of a run writes down beside its work, as `observe` in the configuration says: its trace, its samples.

Called by the actors and by `FullyAsyncMain`, with their component's name.
"""

from __future__ import annotations

import os

from freewheel.observe.samples import attach_samples, detach_samples
from freewheel.observe.trace import attach_trace, detach_trace
from freewheel.runtime.config import ObserveConfig

MB = 1_000_000


def start_recording(
    settings: ObserveConfig, run_dir: str | os.PathLike[str], component: str, *, samples: bool = False
) -> None:
    """Nothing is created before there is something to write, and nothing that goes wrong later is raised."""
    attach_trace(run_dir, component, every=settings.trace_every, most_bytes=int(settings.trace_mb * MB))
    if samples:
        most_bytes = int(settings.samples_mb * MB)
        attach_samples(run_dir, component, per_s=settings.samples_per_s, most_bytes=most_bytes)


def end_recording() -> None:
    """Writes the rest. Without effect where nothing was started."""
    detach_trace()
    detach_samples()
