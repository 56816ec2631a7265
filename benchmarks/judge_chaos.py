"""Does every request end with its right score when the judge is at its worst?

2,400 contents, 600 of them requested twice, against a test judge (0.2 s, saturating at 60, 429 above 80). Of its calls
10% end with a 500, 5% hang forever and 5% are cut off in the middle. Twice it is down for 5 s, and three times it
answers everything with 429 for a while. Times are real, and the engine has its default configuration. `--kill` adds a
second scene: the engine's process gets a SIGKILL in the middle of the batch.

The exit code is 1 unless:
- every request is scored;
- no score is wrong: the judge's score depends on the text alone, so it is computed again from the text that was sent;
- the judge answers no content twice unless the engine reports a retry: each verdict counts its calls, and for each
  answer that was not used the engine's counts have a time-out or a broken connection. After a kill, replies that the
  engine had received and not passed on may be requested once more.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

from common import (
    Promise,
    at_most,
    exit_code,
    machine_facts,
    machine_line,
    markdown_table,
    parser,
    promise_table,
    running_judge,
    scratch_dir,
    write_json,
)
from freewheel.judge import Handle, JudgeConfig, JudgeRequest, JudgeStats, Scored, Verdict
from freewheel.judge.testing import ContentCount, Counts, JudgeProfile, MockJudge, RunningJudge, expected_score

CONTENTS, REPEATED = 2400, 600
QUICK_CONTENTS, QUICK_REPEATED = 240, 60
KILL_AT_SHARE = 1 / 3
"""Share of the batch. By then the limiter has settled, hundreds of requests are answered and hundreds wait."""
POLL_S = 0.02
"""How often progress is checked: as often as the engine reports it."""
LIMIT_S = 280.0
"""Below the engine's own 300 s for a batch. A benchmark that takes longer has found a bug."""

PROFILE = JudgeProfile(
    seed=1,
    latency="lognormal",
    latency_s=0.2,
    sigma=0.5,
    knee=60,
    reject_above=80,
    error_share=0.10,
    hang_share=0.05,
    truncate_share=0.05,
    outages=((3.0, 5.0), (11.0, 5.0)),
    throttle_bursts=((1.5, 0.5), (9.5, 0.5), (17.0, 1.0)),
    reply_style="mixed",
)
QUICK_PROFILE = msgspec.structs.replace(PROFILE, outages=((0.5, 1.0),), throttle_bursts=((2.0, 0.3),))

_ITEM = re.compile(r"Item (\d+):")


class Figures(msgspec.Struct, kw_only=True):
    """The figures of one scene."""

    scene: str
    requests: int
    contents: int
    scored: int
    failed: int
    failed_reasons: dict[str, int]
    wrong: int
    answered_twice: int
    """Contents that the judge answered more than once."""
    answered_twice_undeclared: int
    retries: int
    """The engine's count; after a kill, the new engine's."""
    calls: int
    """Chat requests that reached the judge."""
    rejected: int
    faults: dict[str, int]
    """The judge's faults, by kind."""
    connections_refused: int
    """During outages."""
    engine_faults: dict[str, int]
    """Faults that the engine saw, by kind."""
    restarts: int
    whole_schedule: bool
    """Whether the batch lasted until the last outage and the last burst were over."""
    wall_s: float


def make_requests(contents: int, repeated: int) -> list[JudgeRequest]:
    """Numbered contents in random order, some of them twice."""
    rng = random.Random(7)
    made = []
    for number in range(contents):
        apples, pears = rng.randint(2, 99), rng.randint(2, 99)
        made.append(
            JudgeRequest(
                prompt=f"Item {number}: a basket holds {apples} apples and {pears} pears. How much fruit is in it?",
                response=f"{apples} + {pears} = {apples + pears}, so it holds {apples + pears} pieces of fruit.",
            )
        )
    made += made[:repeated]
    rng.shuffle(made)
    return made


def item_of(text: str) -> int:
    found = _ITEM.search(text)
    assert found is not None, f"no item in {text[:80]!r}"
    return int(found.group(1))


def count_wrong(requests: Sequence[JudgeRequest], verdicts: Sequence[Verdict], counts: Counts) -> int:
    """Scores that differ from the judge's score for the text that was sent, or whose text was never sent."""
    expected = {item_of(count.text): expected_score(count.text) for count in counts.contents.values()}
    return sum(
        isinstance(verdict, Scored) and verdict.value != expected.get(item_of(request.prompt))
        for request, verdict in zip(requests, verdicts, strict=True)
    )


def count_undeclared(
    requests: Sequence[JudgeRequest], verdicts: Sequence[Verdict], counts: Counts, stats: JudgeStats
) -> int:
    """Contents answered more than once for which the engine's counts show no reason."""
    declared: dict[int, int] = {}
    for request, verdict in zip(requests, verdicts, strict=True):
        item = item_of(request.prompt)
        declared[item] = max(declared.get(item, 0), getattr(verdict, "attempts", 0))

    def is_undeclared(count: ContentCount) -> bool:
        calls = declared[item_of(count.text)]
        if stats.restarts:  # no count includes the calls of a killed engine
            return count.answered > max(1, calls) + stats.restarts
        return count.received > calls

    undeclared = sum(is_undeclared(count) for count in counts.contents.values() if count.answered > 1)
    if stats.restarts:
        return undeclared
    unused = sum(count.answered - 1 for count in counts.contents.values() if count.answered > 1)
    lost = sum(endpoint.faults.get(kind, 0) for endpoint in stats.endpoints for kind in ("timeout", "broken"))
    return max(undeclared, unused - lost)


def kill_engine_at(handle: Handle, share: float) -> None:
    """Wait until that share of the batch is done, then kill the engine's process, as the out-of-memory killer would."""
    while handle.progress().share < share:
        time.sleep(POLL_S)
    engines = [
        child for child in psutil.Process().children() if "freewheel.judge.transport" in " ".join(child.cmdline())
    ]
    assert len(engines) == 1, f"one engine was expected, {len(engines)} are there"
    os.kill(engines[0].pid, signal.SIGKILL)


def run_scene(scene: str, mock: RunningJudge, requests: Sequence[JudgeRequest], *, kill: bool) -> Figures:
    with scratch_dir() as cache_dir:
        config = JudgeConfig(endpoint=mock.url, model="mock-judge", cache_dir=cache_dir)
        with running_judge(config) as (judge, _):
            began = time.perf_counter()
            handle = judge.submit(requests)
            if kill:
                kill_engine_at(handle, KILL_AT_SHARE)
            verdicts = handle.result(LIMIT_S)
            wall_s = time.perf_counter() - began
            stats = judge.stats()
    counts = mock.counts()
    failed = [verdict for verdict in verdicts if not isinstance(verdict, Scored)]
    reasons = [verdict.reason for verdict in failed]
    schedule_s = max(start + duration for start, duration in mock.profile.outages + mock.profile.throttle_bursts)
    return Figures(
        scene=scene,
        requests=len(requests),
        contents=len({request.prompt for request in requests}),
        scored=len(verdicts) - len(failed),
        failed=len(failed),
        failed_reasons={reason: reasons.count(reason) for reason in sorted(set(reasons))},
        wrong=count_wrong(requests, verdicts, counts),
        answered_twice=sum(count.answered > 1 for count in counts.contents.values()),
        answered_twice_undeclared=count_undeclared(requests, verdicts, counts, stats),
        retries=stats.retries,
        calls=counts.received,
        rejected=counts.rejected,
        faults=counts.faults,
        connections_refused=counts.connections_refused,
        engine_faults=stats.endpoints[0].faults,
        restarts=stats.restarts,
        whole_schedule=wall_s >= schedule_s,
        wall_s=wall_s,
    )


def promises_of(figures: Figures) -> list[Promise]:
    in_scene = f" ({figures.scene})"
    return [
        Promise("scored" + in_scene, figures.scored, f"= {figures.requests}", figures.scored == figures.requests),
        at_most("failed" + in_scene, figures.failed, 0),
        at_most("wrong" + in_scene, figures.wrong, 0),
        at_most("answered_twice_undeclared" + in_scene, figures.answered_twice_undeclared, 0),
        Promise("whole_schedule" + in_scene, figures.whole_schedule, "= 1", figures.whole_schedule),
    ]


def scenes_table(scenes: Sequence[Figures]) -> str:
    names = ("requests", "scored", "failed", "wrong", "answered_twice", "answered_twice_undeclared", "retries",
             "calls", "rejected", "connections_refused", "restarts", "wall_s")  # fmt: skip
    rows = [(name, *(f"{getattr(scene, name):.4g}" for scene in scenes)) for name in names]
    for kind in sorted({kind for scene in scenes for kind in scene.faults}):
        rows.append((f"judge: {kind}", *(scene.faults.get(kind, 0) for scene in scenes)))
    return markdown_table(("", *(scene.scene for scene in scenes)), rows)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--kill", action="store_true", help="a second scene: kill -9 for the engine's process")
    options.add_argument("--seed", type=int, default=PROFILE.seed, help="of the judge's latencies and faults")
    asked = options.parse_args()
    contents, repeated = (QUICK_CONTENTS, QUICK_REPEATED) if asked.quick else (CONTENTS, REPEATED)
    profile = msgspec.structs.replace(QUICK_PROFILE if asked.quick else PROFILE, seed=asked.seed)

    facts = machine_facts()
    requests = make_requests(contents, repeated)
    scenes = []
    with MockJudge(profile).in_process() as mock:
        scenes.append(run_scene("faults", mock, requests, kill=False))
        if asked.kill:
            mock.reset(profile)
            scenes.append(run_scene("faults and kill", mock, requests, kill=True))

    print(f"10% 500s, 5% hang, 5% truncated, outages and bursts of 429; {machine_line(facts)}\n")
    print(scenes_table(scenes))
    promises = [promise for scene in scenes for promise in promises_of(scene)]
    print(f"\nWhat was promised:\n{promise_table(promises)}")
    first: dict[str, Any] = msgspec.to_builtins(scenes[0])
    write_json(
        asked.json,
        {
            **first,
            "promises_kept": all(promise.kept for promise in promises),
            "scenes": scenes,
            "profile": profile,
            "machine": facts,
        },
    )
    return exit_code(promises)


if __name__ == "__main__":
    sys.exit(main())
