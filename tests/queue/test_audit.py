"""Whatever contradicts itself in a run is found and named; a run that kept its promises is called clean."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from freewheel.data.group import Ticket
from freewheel.queue.audit import MOST_TOLD, Audit, audit
from freewheel.queue.journal import (
    NO_SEQUENCE,
    Abandoned,
    CheckpointMark,
    Committed,
    Failed,
    Journal,
    Step,
    Stored,
    Took,
    VersionCompleted,
)
from freewheel.queue.ledger import Frontier, Ledger, infra_failure

NOW_S = 1000.0


@dataclass
class History:
    """What a journal would say: also what no journal of ours should ever say."""

    start: CheckpointMark = field(default_factory=CheckpointMark)
    taken: list[Step] = field(default_factory=list)
    queue: list[Stored] = field(default_factory=list)
    data: dict[int, list[Stored]] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)
    gone: list[Abandoned] = field(default_factory=list)

    def snapshot(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def base(self) -> CheckpointMark:
        return self.start

    def steps(self, *, after: int) -> Iterator[Step]:
        return (step for step in self.taken if step.step > after)

    def stored(self) -> Iterator[Stored]:
        return iter(self.queue)

    def groups(self, step: int) -> list[Stored] | None:
        return self.data.get(step)

    def failures(self, ordinal: int | None = None) -> Iterator[Failed]:
        return (one for one in self.failed if ordinal in (None, one.ticket.ordinal))

    def abandoned(self) -> Iterator[Abandoned]:
        return iter(self.gone)


def step(number: int, ordinals: Sequence[int], *, version: int | None = -1, sequences: Sequence[int] = ()) -> Step:
    """Trained, and it made the version of its own number; None: taken only."""
    tickets = tuple(Ticket(one, at) for one, at in zip(ordinals, sequences or ordinals, strict=True))
    return Step(number, number if version == -1 else version, tickets, 0, NOW_S)


def stored(ordinal: int, *, sequence: int | None = None, min_version: int = 0) -> Stored:
    return Stored(Ticket(ordinal, ordinal if sequence is None else sequence), min_version, b"", NOW_S)


def failed(ordinal: int, reason: str = "engine") -> Failed:
    return Failed(Ticket(ordinal, 100 + ordinal), "infra", reason, "it broke", NOW_S)


def gone(ordinal: int, reason: str = "zero_variance") -> Abandoned:
    return Abandoned(ordinal, 0, reason, NOW_S)


def only(found: Audit) -> str:
    (text,) = found.violations
    return text


# -- clean runs -------------------------------------------------------------------------------------------------------


def test_every_ordinal_has_a_state():
    history = History(
        taken=[step(1, [0, 1]), step(2, [3, 4]), step(3, [5, 6], version=None)],
        gone=[gone(2), gone(7, "prompt")],
        queue=[stored(8), stored(10)],
        failed=[failed(9), failed(9, "timeout"), failed(2)],
    )
    found = audit(history)
    assert found.states == {
        "trained": 4, "abandoned": 2, "ended": 0, "taken": 2, "queued": 2, "failed": 1, "open": 0,
    }  # fmt: skip
    assert audit(History(queue=[stored(3)])).states["open"] == 3
    assert (found.step, found.version, found.recorded, found.base, found.stored_groups) == (2, 2, (1, 2), 0, 2)
    assert found.abandoned == {"zero_variance": 1, "prompt": 1}
    assert found.failures == {"engine": 2, "timeout": 1}
    assert (found.violations, found.notes, found.lost, found.repeated) == ([], [], 0, 0)


def test_a_run_that_has_not_begun_is_clean():
    for found in (audit(History()), audit(None)):
        assert sum(found.states.values()) == 0 and not found.violations and found.recorded is None


def test_what_was_compacted_is_known_by_its_rows_and_vouched_for_by_the_base():
    bare = Step(1, 1, (Ticket(0, NO_SEQUENCE), Ticket(2, NO_SEQUENCE)), 0, NOW_S)
    frontier = Frontier(low=3, trained=2, abandoned={"prompt": 1})
    found = audit(
        History(start=CheckpointMark(1, 1, frontier), taken=[bare, step(2, [3, 4])], gone=[gone(1, "prompt")])
    )
    assert not found.violations and found.states["trained"] == 4 and found.states["ended"] == 0


def test_a_journal_that_begins_at_a_checkpoint_counts_what_ended_before():
    """Its predecessor was damaged and set aside."""
    start = CheckpointMark(5, 5, Frontier(low=9, ended=(11,), trained=9, abandoned={"prompt": 1}))
    found = audit(History(start=start, taken=[step(6, [9, 10])]))
    assert not found.violations and found.states["ended"] == 10 and found.states["trained"] == 2
    assert found.notes == ["5 steps up to 5 have no row of their own: a checkpoint vouches for them"]


def test_checkpoints_alone_tell_what_they_can():
    marks = [
        CheckpointMark(2, 2, Frontier(low=4, trained=4)),
        CheckpointMark(4, 3, Frontier(low=8, trained=7, abandoned={"hook": 1})),
    ]
    found = audit(None, checkpoints=marks)
    assert (found.step, found.version, found.states["ended"], found.abandoned) == (4, 3, 8, {"hook": 1})
    assert not found.violations and found.base is None


def test_a_lost_tail_is_told_and_the_checkpoint_holds():
    mark = CheckpointMark(3, 3, Frontier(low=6, trained=6))
    found = audit(History(taken=[step(1, [0, 1])]), checkpoints=[mark])
    assert not found.violations and found.step == 3 and found.states["ended"] == 4
    assert "the journal ends at step 1, before the checkpoint of step 3" in found.notes[0]


# -- each promise, broken ---------------------------------------------------------------------------------------------


def test_a_prompt_in_two_steps_is_repeated():
    found = audit(History(taken=[step(1, [0, 1]), step(2, [1, 2], sequences=[7, 8])]))
    assert found.repeated == 1
    assert only(found) == "prompt 1 was trained on in step 1 and again in step 2"


def test_a_prompt_that_was_trained_and_abandoned_is_repeated():
    found = audit(History(taken=[step(1, [0, 1])], gone=[gone(1)]))
    assert found.repeated == 1 and only(found) == "prompt 1 was abandoned and trained on in step 1"


def test_a_gap_below_the_frontier_is_lost():
    start = CheckpointMark(1, 1, Frontier(low=4, trained=2, abandoned={"prompt": 1}))
    found = audit(History(start=start, taken=[step(1, [0, 1])], gone=[gone(2, "prompt")]))
    assert found.lost == 1 and found.states["ended"] == 1
    assert any(
        text.startswith("prompt 3 has ended by the journal's base at step 1, and nobody") for text in found.violations
    )


def test_a_frontier_that_counts_fewer_than_it_has_is_a_loss_without_a_journal_too():
    found = audit(None, checkpoints=[CheckpointMark(1, 1, Frontier(low=5, trained=3))])
    assert found.lost == 2 and "has 5 ended prompts, and counts 3" in only(found)
    assert audit(None, checkpoints=[CheckpointMark(1, 1, Frontier(low=5, trained=6))]).repeated == 1


def test_a_missing_step_is_told():
    start = CheckpointMark(1, 1, Frontier(low=2, trained=2))
    found = audit(History(start=start, taken=[step(1, [0, 1]), step(3, [4, 5])]))
    assert only(found) == "step 2 is missing between 1 and 3"


def test_a_group_that_was_trained_too_old_is_told():
    history = History(taken=[step(n, [2 * n, 2 * n + 1]) for n in range(1, 5)], gone=[gone(0), gone(1)])
    history.data[4] = [stored(8, min_version=1), stored(9, min_version=0)]
    found = audit(history, max_lag=2)
    assert (found.stale_trained, found.lags_checked) == (1, 2)
    assert only(found) == "prompt 9 lagged 3 versions in step 4, and 2 are allowed"
    assert "the lag of 2 of 8 trained groups could be checked" in found.notes[0]
    assert not audit(history, max_lag=3).violations and not audit(history).violations


def test_a_step_whose_groups_are_dropped_is_judged_by_its_oldest():
    compacted = [msgspec.structs.replace(step(n, [n]), min_version=0) for n in range(1, 5)]
    found = audit(History(taken=compacted, gone=[gone(0)]), max_lag=2)
    assert (found.stale_trained, found.lags_checked, found.notes) == (1, 4, [])
    assert only(found) == "a group of step 4 lagged 3 versions, and 2 are allowed"


def test_lags_go_by_the_version_before_the_step_whatever_steps_a_version_takes():
    history = History(taken=[step(1, [0], version=0), step(2, [1], version=1), step(3, [2], version=1)])
    history.data = {2: [stored(1)], 3: [stored(2)]}
    found = audit(history, max_lag=0)
    assert only(found) == "prompt 2 lagged 1 versions in step 3, and 0 are allowed"


def test_a_sequence_that_was_given_out_twice_is_told():
    found = audit(History(taken=[step(1, [0, 1], sequences=[4, 5]), step(2, [2, 3], sequences=[5, 6])]))
    assert only(found) == "sequence 5 stands twice in the steps' groups"


def test_a_prompt_that_is_queued_again_is_told():
    history = History(taken=[step(1, [0, 1])], queue=[stored(1, sequence=9), stored(2), stored(2, sequence=8)])
    assert audit(history).violations == [
        "prompt 2 is in the queue twice (sequences 2 and 8)",
        "prompt 1 is in step 1 and in the queue",
    ]


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        (CheckpointMark(1, 1, Frontier(low=3, trained=3)), "prompt 2 has ended by {}, and was trained on later"),
        (CheckpointMark(2, 2, Frontier(low=3, trained=3)), "prompt 3 was trained on up to then, and is open by {}"),
        (CheckpointMark(1, 9, Frontier(low=2, trained=2)), "{} is of version 9, and the journal says 1"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_disagrees_with_the_journal_is_told(mark: CheckpointMark, told: str):
    found = audit(History(taken=[step(1, [0, 1]), step(2, [2, 3])]), checkpoints=[mark])
    assert told.format(f"the checkpoint of step {mark.step}") in found.violations


def test_versions_do_not_go_back():
    found = audit(History(taken=[step(1, [0], version=4), step(2, [1], version=3)]))
    assert only(found) == "step 2 made version 3, and 4 was there before it"


def test_more_open_prompts_than_can_be_alive_are_noted():
    history = History(queue=[stored(9)])
    assert "10 prompts have begun and not ended, and 4 can be alive" in audit(history, capacity=4).notes[0]
    assert not audit(history, capacity=10).notes


def test_a_thousand_violations_of_a_kind_are_told_as_ten_and_a_number():
    many = range(1000)
    found = audit(History(taken=[step(1, many), step(2, many, sequences=range(1000, 2000))]))
    assert found.repeated == 1000 and len(found.violations) == MOST_TOLD + 1
    assert found.violations[-1] == "… and 990 more like this"


# -- with a journal of ours -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_ledger_goes_through_its_journal_is_clean(tmp_path: Path, seed: int):
    """Steps, failures, abandonments and compactions at random, as a queue writes them; read while it is open."""
    draw, ledger, journal = random.Random(seed), Ledger(), Journal(tmp_path / "journal.sqlite")
    alive: dict[int, Ticket] = {}
    sequence, marks, versions = 0, [], 0
    for number in range(1, 25):
        group: list[Ticket] = []
        while len(group) < 4:
            ordinal, attempt = ledger.issue() or (0, 0)
            ticket = Ticket(ordinal, sequence, attempt)
            sequence += 1
            happened = draw.random()
            if happened < 0.1:
                ledger.fail(ordinal, infra_failure("engine", "died"))
                journal.append([Failed(ticket, "infra", "engine", "died", NOW_S)])
            elif happened < 0.2:
                ledger.abandon(ordinal, "zero_variance")
                journal.append([Abandoned(ordinal, attempt, "zero_variance", NOW_S)])
            else:
                journal.append([Stored(ticket, versions, b"data", NOW_S)])
                (alive.__setitem__(ordinal, ticket) if happened < 0.3 else group.append(ticket))
        versions += 1
        journal.append([Took(number, tuple(group)), Committed(number, versions, NOW_S)])
        ledger.train(ticket.ordinal for ticket in group)
        if number % 6 == 0:
            marks.append(CheckpointMark(number, versions, ledger.frontier()))
        if number % 12 == 0:
            journal.compact(step=marks[-2].step, frontier=marks[-2].frontier, keep_groups=4)
    journal.append([Took(25, tuple(list(alive.values())[:2]))])
    journal.append([VersionCompleted(24, versions)])
    reader = Journal(tmp_path / "journal.sqlite", readonly=True)
    found = audit(reader, checkpoints=marks[-2:], max_lag=0)
    reader.close()
    journal.close()
    assert found.violations == [] and (found.lost, found.repeated, found.stale_trained) == (0, 0, 0)
    assert found.states["trained"] == 24 * 4 == ledger.trained
    assert found.abandoned == dict(ledger.abandoned)
    assert found.states["taken"] == min(2, len(alive)) and found.states["queued"] == max(0, len(alive) - 2)
    assert found.states["open"] == 0 and found.lags_checked >= 4 * 6
