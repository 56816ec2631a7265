"""One disturbed run, from its start to its result. Used by all scenarios."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .account import Result
from .harness import Disturbed, Finished, Stuck
from .plan import Strike


def disturbed(folder: Path, scenario: str, seed: int, during: Callable[[Disturbed], None], **given: Any) -> Result:
    """Start a run, call `during`, and bring it to its end. A run may finish before its last strike. A run that is stuck
    has a problem in its result, and is resumed so that the result covers a whole run."""
    folder.mkdir(parents=True, exist_ok=True)
    with Disturbed(folder, scenario=scenario, seed=seed, **given) as run:
        try:
            run.start()
            with contextlib.suppress(Finished):
                during(run)
            run.to_the_end()
        except Stuck as error:
            run.problems.append(str(error))
            try:
                run.strike_tree(during="stuck")
                run.start().to_the_end()
            except Stuck as again:
                run.problems.append(f"and when it was resumed: {again}")
        return run.result()


def carry_out(run: Disturbed, strikes: Sequence[Strike]) -> None:
    for strike in strikes:
        run.wait_step(strike.after_step)
        time.sleep(strike.delay_s)
        run.strike(*strike.roles)
