"""The audit finds and names every contradiction in a run, and reports none in a run that kept its promises."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from freewheel.data.group import Ticket
from freewheel.queue.audit import MOST_LISTED, audit
from freewheel.queue.journal import (
    Abandoned,
    AttemptFailed,
    CheckpointMark,
    Committed,
    Journal,
    JournalEvent,
    Stored,
    Took,
)
from freewheel.queue.ledger import Frontier, Ledger, infra_failure

NOW_S = 1000.0


def took(number: int, ordinals: Sequence[int], sequences: Sequence[int] = ()) -> Took:
    return Took(number, tuple(Ticket(one, at) for one, at in zip(ordinals, sequences or ordinals, strict=True)))


def trained(
    number: int, ordinals: Sequence[int], *, version: int | None = None, sequences: Sequence[int] = ()
) -> list[JournalEvent]:
    """`version`: the one after the step; its own number by default."""
    return [took(number, ordinals, sequences), Committed(number, number if version is None else version, NOW_S)]


def stored(ordinal: int, *, sequence: int | None = None, min_version: int = 0) -> Stored:
    return Stored(Ticket(ordinal, ordinal if sequence is None else sequence), min_version, b"", NOW_S)


def failed(ordinal: int, reason: str = "engine", *, sequence: int) -> AttemptFailed:
    return AttemptFailed(Ticket(ordinal, sequence), "infra", reason, "it broke", NOW_S)


def gone(ordinal: int, reason: str = "zero_variance") -> Abandoned:
    return Abandoned(ordinal, 0, reason, NOW_S)


# -- clean runs -------------------------------------------------------------------------------------------------------


def test_every_ordinal_has_a_state(journal: Journal):
    journal.append([*trained(1, [0, 1]), *trained(2, [3, 4]), took(3, [5, 6]), gone(2), gone(7, "prompt")])
    failures = [failed(9, sequence=100), failed(9, "timeout", sequence=101), failed(2, sequence=102)]
    journal.append([stored(8), stored(11), *failures])
    found = audit(journal)
    states = {"trained": 4, "abandoned": 2, "ended": 0, "taken": 2, "queued": 2, "failed": 1, "open": 1}
    assert found.states == states
    assert (found.step, found.version, found.recorded, found.base, found.stored_groups) == (2, 2, (1, 2), 0, 2)
    assert found.abandoned == {"zero_variance": 1, "prompt": 1}
    assert found.failures == {"engine": 2, "timeout": 1}
    assert (found.violations, found.notes, found.lost, found.repeated) == ([], [], 0, 0)
    assert not audit(journal, capacity=5).notes
    assert "5 prompts were started and have not ended, but only 4 can be alive" in audit(journal, capacity=4).notes[0]


def test_a_run_that_has_not_started_is_clean(journal: Journal):
    for found in (audit(journal), audit(None)):
        assert sum(found.states.values()) == 0 and not found.violations and found.recorded is None


def test_a_journal_that_begins_at_a_checkpoint_counts_what_ended_before(journal: Journal):
    """Its predecessor was damaged and set aside."""
    frontier = Frontier(low=9, ended=(11,), trained=9, abandoned={"prompt": 1})
    journal.reset(step=5, version=5, frontier=frontier)
    journal.append(trained(6, [9, 10]))
    found = audit(journal)
    assert not found.violations and found.states["ended"] == 10 and found.states["trained"] == 2
    assert found.notes == ["5 steps up to 5 have no row of their own: a checkpoint vouches for them"]


def test_checkpoints_alone_show_what_they_can():
    marks = [
        CheckpointMark(4, 3, Frontier(low=8, trained=7, abandoned={"hook": 1})),
        CheckpointMark(2, 2, Frontier(low=4, trained=4)),
    ]
    found = audit(None, checkpoints=marks)
    assert (found.step, found.version, found.states["ended"], found.abandoned) == (4, 3, 8, {"hook": 1})
    assert not found.violations and found.base is None


def test_a_journal_that_lost_its_end_is_noted_and_the_checkpoint_counts(journal: Journal):
    journal.append(trained(1, [0, 1]))
    found = audit(journal, checkpoints=[CheckpointMark(3, 3, Frontier(low=6, trained=6))])
    assert not found.violations and found.step == 3 and found.states["ended"] == 4
    assert "the journal ends at step 1, before the checkpoint of step 3" in found.notes[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_journal_of_any_ledger_is_clean(journal: Journal, seed: int):
    """Steps, failures, abandoned prompts and compactions at random, as a queue writes them; read while it is open."""
    draw, ledger = random.Random(seed), Ledger()
    alive: list[Ticket] = []
    sequence, marks = 0, []
    for step in range(1, 25):
        group: list[Ticket] = []
        while len(group) < 4:
            ordinal, attempt = ledger.issue() or (0, 0)
            ticket = Ticket(ordinal, sequence, attempt)
            sequence += 1
            happened = draw.random()
            if happened < 0.1:
                ledger.fail(ordinal, infra_failure("engine", "died"))
                journal.append([AttemptFailed(ticket, "infra", "engine", "died", NOW_S)])
            elif happened < 0.2:
                ledger.abandon(ordinal, "zero_variance")
                journal.append([Abandoned(ordinal, attempt, "zero_variance", NOW_S)])
            else:
                journal.append([Stored(ticket, step - 1, b"data", NOW_S)])
                (alive if happened < 0.3 else group).append(ticket)
        journal.append([Took(step, tuple(group)), Committed(step, step, NOW_S)])
        ledger.train(ticket.ordinal for ticket in group)
        if step % 6 == 0:
            marks.append(CheckpointMark(step, step, ledger.frontier()))
        if step % 12 == 0:
            journal.compact(step=marks[-2].step, frontier=marks[-2].frontier, keep_groups=4)
    journal.append([Took(25, tuple(alive[:2]))])
    reader = Journal(journal.path, readonly=True)
    found = audit(reader, checkpoints=marks[-2:], max_lag=0)
    reader.close()
    assert found.violations == [] and (found.lost, found.repeated, found.stale_trained) == (0, 0, 0)
    assert found.states["trained"] == 24 * 4 == ledger.trained == found.lags_checked
    assert found.abandoned == dict(ledger.abandoned)
    assert found.states["taken"] == min(2, len(alive)) and found.states["queued"] == max(0, len(alive) - 2)
    assert found.states["open"] == 0


# -- each broken promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "repeated", "violations"),
    [
        (
            [*trained(1, [0, 1]), *trained(2, [1, 2], sequences=[7, 8])],
            1,
            ["prompt 1 was trained on in step 1 and trained on in step 2"],
        ),
        ([*trained(1, [0, 1]), gone(1)], 1, ["prompt 1 was abandoned and trained on in step 1"]),
        ([*trained(1, [0, 1]), *trained(3, [4, 5])], 0, ["step 2 is missing between 0 and 3"]),
        (
            [*trained(1, [0, 1], sequences=[4, 5]), *trained(2, [2, 3], sequences=[5, 6])],
            0,
            ["sequence 5 is twice in the groups of steps"],
        ),
        (
            [*trained(1, [0, 1]), stored(1, sequence=9), stored(2), stored(2, sequence=8)],
            0,
            ["prompt 2 is in the queue twice (sequences 2 and 8)", "prompt 1 is in step 1 and in the queue"],
        ),
        (
            [*trained(1, [0], version=4), *trained(2, [1], version=3)],
            0,
            ["step 2 made version 3, which is before 4"],
        ),
    ],
    ids=["trained twice", "trained and abandoned", "gap", "sequence twice", "queued again", "version goes back"],
)
def test_a_contradiction_in_the_journal_is_named(
    journal: Journal, events: list[JournalEvent], repeated: int, violations: list[str]
):
    journal.append(events)
    found = audit(journal)
    assert (found.violations, found.repeated) == (violations, repeated)


def test_a_prompt_that_a_frontier_counts_and_nobody_trained_is_lost(journal: Journal):
    journal.append([stored(0), stored(1), *trained(1, [0, 1]), gone(2, "prompt")])
    journal.compact(step=1, frontier=Frontier(low=4, trained=2, abandoned={"prompt": 1}), keep_groups=0)
    found = audit(journal)
    assert found.lost == 1 and found.states["ended"] == 1
    assert found.violations[1].startswith(
        "prompt 3 has ended according to the journal's base at step 1, but was neither"
    )


@pytest.mark.parametrize(("trained_count", "lost", "repeated"), [(3, 2, 0), (6, 0, 1)])
def test_a_frontier_whose_counts_do_not_add_up_is_a_violation(trained_count: int, lost: int, repeated: int):
    found = audit(None, checkpoints=[CheckpointMark(1, 1, Frontier(low=5, trained=trained_count))])
    assert (found.lost, found.repeated) == (lost, repeated)
    assert f"has 5 ended prompts, and counts {trained_count}" in found.violations[0] and len(found.violations) == 1


@pytest.mark.parametrize(
    ("mark", "violation"),
    [
        (
            CheckpointMark(1, 1, Frontier(low=3, trained=3)),
            "prompt 2 has ended according to {}, but was trained on later",
        ),
        (
            CheckpointMark(2, 2, Frontier(low=3, trained=3)),
            "prompt 3 was trained on before, but is open according to {}",
        ),
        (CheckpointMark(1, 9, Frontier(low=2, trained=2)), "{} is of version 9, and the journal says 1"),
    ],
)
def test_a_checkpoint_that_disagrees_with_the_journal_is_named(journal: Journal, mark: CheckpointMark, violation: str):
    journal.append([*trained(1, [0, 1]), *trained(2, [2, 3])])
    found = audit(journal, checkpoints=[mark])
    assert violation.format(f"the checkpoint of step {mark.step}") in found.violations


def test_groups_that_lagged_too_much_are_named_as_long_as_they_exist(journal: Journal):
    """The trainer's version is the one before the step, however many steps a version takes."""
    for step, version in enumerate([0, 1, 1, 3], 1):
        journal.append([stored(2 * step), stored(2 * step + 1, min_version=version // 3)])
        journal.append(trained(step, [2 * step, 2 * step + 1], version=version))
    found = audit(journal, max_lag=0)
    assert (found.stale_trained, found.lags_checked) == (3, 8)
    assert [text.partition(",")[0] for text in found.violations] == [
        f"prompt {one} lagged 1 versions in step {step}" for one, step in ((6, 3), (7, 3), (8, 4))
    ]
    assert not audit(journal, max_lag=1).violations and not audit(journal).violations
    journal.compact(step=4, frontier=Frontier(low=10, trained=8, abandoned={"hook": 2}), keep_groups=0)
    found = audit(journal, max_lag=0)
    assert (found.stale_trained, found.lags_checked) == (2, 8)
    assert "a group lagged 1 versions in step 3, and 0 are allowed" in found.violations


def test_lags_that_cannot_be_checked_are_noted(journal: Journal):
    journal.append([stored(0), *trained(1, [0]), *trained(2, [1, 2])])
    found = audit(journal, max_lag=2)
    assert "the lag of 1 of 3 trained groups could be checked" in found.notes[0]


def test_ten_of_a_thousand_violations_of_a_kind_are_listed(journal: Journal):
    many = range(1000)
    journal.append([*trained(1, many), *trained(2, many, sequences=range(1000, 2000))])
    found = audit(journal)
    assert found.repeated == 1000 and len(found.violations) == MOST_LISTED + 1
    assert found.violations[-1] == "… and 990 more like this"
