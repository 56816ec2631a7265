"""Checks that hold for the trace of any run, on the merged events that a viewer gets."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.observe.trace import merge_traces

DOCUMENTED = re.compile(r"^\| `(\w+)` \| (span|group|counter) \| (\w+) \| ([^|]*) \|", re.M)
KNOWN = {
    (category, name): (component, re.findall(r"\w+", args))
    for name, category, component, args in DOCUMENTED.findall(
        (Path(__file__).parent.parent.parent / "docs/dashboard.md").read_text()
    )
}
"""Component and arguments of each event in docs/dashboard.md."""


@dataclass(frozen=True)
class Phase:
    """A phase of one group."""

    component: str
    ordinal: int
    name: str
    begin: int
    end: int
    args: dict[str, Any]


@dataclass(frozen=True)
class Trace:
    events: list[dict[str, Any]]
    components: dict[int, str]
    phases: list[Phase]

    @classmethod
    def of(cls, run_dir: Path) -> Trace:
        """Raise for an undocumented event, an incomplete pair, or overlapping spans."""
        events = list(merge_traces(run_dir))
        components = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        for event in events:
            _check_known(event, components)
        _check_spans(event for event in events if event["ph"] == "X")
        return cls(events, components, _phases(events, components))

    def spans(self, component: str) -> set[str]:
        return {event["name"] for event in self.events if event["ph"] == "X" and self._of(event) == component}

    def _of(self, event: dict[str, Any]) -> str:
        return self.components[event["pid"]]

    def of_group(self, ordinal: int, name: str) -> list[Phase]:
        return [phase for phase in self.phases if (phase.ordinal, phase.name) == (ordinal, name)]


def _check_known(event: dict[str, Any], components: dict[int, str]) -> None:
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    if event["ph"] == "M" or event["cat"] == "event":
        return
    component, args = KNOWN[event["cat"], event["name"]]
    assert components[event["pid"]].startswith(component), event
    if event["ph"] != "e":
        of_group = ("ordinal",) if event["ph"] == "b" else ()
        assert tuple(event["args"]) == (*of_group, *args), event


def _check_spans(spans: Iterable[dict[str, Any]]) -> None:
    """On one track, no span begins before the last one has ended."""
    tracks = defaultdict(list)
    for span in spans:
        tracks[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"], span["name"]))
    for track in tracks.values():
        _check_one_after_the_other(track)


def _check_one_after_the_other(found: list[tuple[int, int, str]]) -> None:
    for (_, end, name), (begin, _, after) in itertools.pairwise(sorted(found)):
        assert end <= begin, f"{after} begins {end - begin} us before {name} has ended"


def _phases(events: Iterable[dict[str, Any]], components: dict[int, str]) -> list[Phase]:
    """Every begin has an end, and phases of one id do not overlap."""
    found, open_ = [], {}
    by_id = defaultdict(list)
    for event in events:
        key = (event["pid"], event.get("id2", {}).get("local"))
        if event["ph"] == "b":
            assert key not in open_
            open_[key] = event
        elif event["ph"] == "e":
            begin = open_.pop(key)
            assert begin["ts"] <= event["ts"]
            ordinal = begin["args"]["ordinal"]
            assert key[1].split("/")[:2] == [str(ordinal), event["name"]]
            place = components[event["pid"]]
            by_id[key].append((begin["ts"], event["ts"], event["name"]))
            found.append(Phase(place, ordinal, event["name"], begin["ts"], event["ts"], begin["args"]))
    assert not open_
    for phases in by_id.values():
        _check_one_after_the_other(phases)
    return found


def check_lives(trace: Trace, ordinals: Iterable[int], *, n: int) -> None:
    """Check that each group was generated, scored, stored and trained on, in this order and without faults."""
    for ordinal in ordinals:
        (made,), (trained,) = trace.of_group(ordinal, "generate"), trace.of_group(ordinal, "train")
        (stored,) = trace.of_group(ordinal, "store")
        responses = {phase.args["index"]: phase for phase in trace.of_group(ordinal, "response")}
        scores = {phase.args["index"]: phase for phase in trace.of_group(ordinal, "score")}
        assert set(responses) == set(scores) == set(range(n))
        assert sum(response.args["tokens"] for response in responses.values()) == made.args["tokens"]
        for index, response in responses.items():
            assert made.begin == response.begin <= response.end <= made.end
            assert response.end <= scores[index].begin <= scores[index].end <= stored.begin
        assert made.end <= stored.begin <= trained.begin <= trained.end
        assert made.component == stored.component
        assert trained.component == "trainer"
        assert trained.args["lag"] >= 0
