"""`make chaos`: kills a hundred processes of real training runs, and reports whether anything was lost.

    python scripts/chaos.py [--kills 100] [--seed 0] [--only NAME,…] [--json FILE] [--keep DIR]

Runs every scenario of `tests/chaos/scenarios.py` once, and spends the rest on kills of single roles. Prints a table.
Exit code 1: a prompt was lost, trained twice or trained too old, or a run did not finish.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.chaos.account import Result, as_json, table  # noqa: E402
from tests.chaos.plan import Part, campaign  # noqa: E402
from tests.chaos.scenarios import ALONE, SCENARIOS, SOAK, SOAK_KILLS, can_mount  # noqa: E402

SPARE = 5
"""Most additional runs to reach the number of kills."""


def main() -> int:
    given = _arguments()
    folder = Path(given.keep or tempfile.mkdtemp(prefix="freewheel-chaos-"))
    chosen = given.only.split(",") if given.only else list(SCENARIOS)
    names = [name for name in SCENARIOS if name in chosen and name not in (SOAK, ALONE)]
    if not can_mount() and "full_disk" in names:
        names.remove("full_disk")
        _say("full_disk is left out: it needs the right to mount a file system")
    fixed = [(name, SCENARIOS[name].kills) for name in names]
    kills = given.kills if SOAK in chosen else sum(count for _, count in fixed)
    parts = campaign(kills=kills, seed=given.seed, fixed=fixed, soak=SOAK, soak_kills=SOAK_KILLS)
    began = time.monotonic()
    alone = SCENARIOS[ALONE].run(folder / ALONE, given.seed)
    _tell(alone)
    results = [alone]
    for number in range(len(parts) + (SPARE if SOAK in chosen else 0)):
        if number >= len(parts):  # some runs ended before their last strike
            missing = kills - sum(len(result.kills) for result in results)
            if missing <= 0:
                break
            parts.append(Part(scenario=SOAK, seed=given.seed * 1000 + number, kills=min(missing, SOAK_KILLS)))
        part = parts[number]
        result = _run(folder / f"{number:02d}-{part.scenario}", part, alone.reward)
        _tell(result)
        results.append(result)
        if result.fine and not given.keep:
            shutil.rmtree(folder / f"{number:02d}-{part.scenario}", ignore_errors=True)
    _say(f"\n{table(results)}\n\nseed {given.seed}, {time.monotonic() - began:.0f} s")
    if given.json:
        Path(given.json).write_text(json.dumps({"seed": given.seed, **as_json(results)}, indent=1))
    fine = all(result.fine for result in results)
    if fine and not given.keep:
        shutil.rmtree(folder)
    elif not fine:
        _say(f"The runs that went wrong are in {folder}")
    return 0 if fine else 1


def _run(folder: Path, part: Part, reward_alone: float | None) -> Result:
    scenario = SCENARIOS[part.scenario]
    return scenario.run(folder, part.seed, part.kills).compared(reward_alone if scenario.comparable else None)


def _tell(result: Result) -> None:
    reward = "-" if result.reward is None else f"{result.reward:.2f}"
    _say(
        f"{result.scenario:24} {len(result.kills):3} kills  lost {result.lost}  repeated {result.repeated}  "
        f"stale trained {result.stale_trained}  reward {reward}  {result.seconds:5.0f} s"
    )
    for problem in (*result.violations, *result.problems):
        _say(f"    {problem}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="processes to strike in all (100)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed strikes the same way (0)")
    parser.add_argument("--only", default="", metavar="NAME,…", help=f"some of {', '.join(SCENARIOS)}")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--keep", metavar="DIR", help="keep all run directories there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
