"""The state of a queue after a kill, for each way a journal, a checkpoint and live rollouters can disagree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from freewheel.data.group import Ticket
from freewheel.queue.journal import (
    Abandoned,
    AttemptFailed,
    CheckpointMark,
    Committed,
    Journal,
    JournalDamaged,
    JournalEvent,
    Reserved,
    Stored,
    Took,
)
from freewheel.queue.ledger import BUDGETS, Frontier, Kind, infra_failure
from freewheel.queue.restore import Restored, restore


def ticket(ordinal: int, *, sequence: int | None = None, attempt: int = 0) -> Ticket:
    return Ticket(ordinal, ordinal if sequence is None else sequence, attempt)


def stored(*ordinals: int, version: int = 0) -> list[JournalEvent]:
    return [Stored(ticket(one), version, b"%d" % one, 0.0) for one in ordinals]


def took(step: int, *ordinals: int, missing: int = 0) -> JournalEvent:
    return Took(step, tuple(ticket(one) for one in ordinals), missing)


def trained(step: int, *ordinals: int, version: int | None = None) -> list[JournalEvent]:
    before, after = (step - 1, step) if version is None else (version, version)
    return [*stored(*ordinals, version=before), took(step, *ordinals), Committed(step, after, float(step))]


def failed(one: Ticket, kind: Kind | None = Kind.INFRA, reason: str = "engine") -> AttemptFailed:
    return AttemptFailed(one, kind, reason, "", 0.0)


def damage(journal: Journal, sequence: int) -> None:
    journal._db.execute("UPDATE groups SET data = 'x' WHERE sequence = ?", (sequence,))


def issued(restored: Restored, count: int) -> list[tuple[int, int]]:
    return [one for one in (restored.ledger.issue() for _ in range(count)) if one is not None]


def mark(step: int, trained: int) -> CheckpointMark:
    """A checkpoint that trained the first prompts."""
    return CheckpointMark(step, step, Frontier(low=trained, trained=trained))


def again(journal: Journal, checkpoint: CheckpointMark | None = None, **in_flight: Sequence[Ticket]) -> Restored:
    return restore(journal, total=100, checkpoint=checkpoint, in_flight=in_flight)


# -- a queue's restart ------------------------------------------------------------------------------------------------


def test_an_empty_journal_starts_a_run(journal: Journal) -> None:
    found = again(journal)
    assert (found.step, found.policy.version, found.policy.next_sequence, found.notes) == (0, 0, 0, [])
    assert issued(found, 3) == [(0, 0), (1, 0), (2, 0)]


def test_the_groups_of_a_step_that_was_given_back_are_ready(journal: Journal) -> None:
    journal.append([*trained(1, 0), *stored(1, 2), took(2, 1), took(3, 2), took(3), took(2)])
    assert again(journal).policy.untaken == {1: True, 2: True}


@pytest.mark.parametrize(
    "events",
    [
        stored(1),
        trained(1, 1),
        [*stored(1), took(1, 1)],
        [Abandoned(1, 0, "zero_variance", 0.0)],
        [failed(ticket(1))],
        [Stored(ticket(1, sequence=5), 0, b"", 0.0)],
    ],
    ids=["stored", "trained", "taken", "abandoned", "failed", "another attempt stored"],
)
def test_an_attempt_in_flight_that_has_ended_is_not_open(journal: Journal, events: list[JournalEvent]) -> None:
    journal.append(events)
    found = again(journal, a=[ticket(1)])
    assert not found.in_flight
    assert "1 attempts in flight had been stored, ended or given up" in found.notes[0]


def test_the_later_of_two_attempts_at_one_prompt_continues(journal: Journal) -> None:
    found = again(journal, a=[ticket(1)], b=[ticket(1, sequence=9, attempt=1)])
    assert found.in_flight == {9: (ticket(1, sequence=9, attempt=1), "b")}
    assert found.policy.next_sequence == 10
    journal.append([Reserved(1024)])
    assert again(journal, a=[ticket(1)]).policy.next_sequence == 1024, "a sequence below may have been given out"


def test_of_two_groups_stored_for_one_prompt_one_is_trained(journal: Journal) -> None:
    second = [Stored(ticket(one, sequence=7 + one, attempt=1), 0, b"", 0.0) for one in (0, 1)]
    journal.append([*stored(0, 1, 2), *second, took(1, 0)])
    found = again(journal)
    assert (found.policy.taken, found.policy.untaken) == ([0], {1: True, 2: True})
    assert issued(found, 1) == [(3, 0)]


def test_failed_attempts_still_count(journal: Journal) -> None:
    journal.append([failed(ticket(0)), failed(ticket(0, sequence=1, attempt=1)), failed(ticket(2), None, "stale")])
    found = again(journal)
    assert found.ledger.failures == {"engine": 2, "stale": 1}
    assert issued(found, 3) == [(0, 2), (2, 1), (1, 0)]
    for left in reversed(range(BUDGETS[Kind.INFRA] - 2)):
        assert found.ledger.fail(0, infra_failure("engine", "")) == bool(left)
        if left:
            found.ledger.issue()


def test_a_prompt_whose_budget_was_spent_when_the_queue_died_is_abandoned(journal: Journal) -> None:
    journal.append([failed(ticket(0, sequence=one, attempt=one), Kind.DATA, "reward") for one in range(2)])
    for _ in range(2):
        found = again(journal)
        assert found.ledger.abandoned == {"reward": 1}
        assert issued(found, 1) == [(1, 0)]
    assert next(journal.abandoned()).attempt == 1


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([*trained(1, 0), *trained(2, 1), *stored(2), took(4, 2)], "step 3"),
        ([*stored(0), took(1, 0, 1)], "groups of step 1 are gone"),
    ],
    ids=["a step", "a group"],
)
def test_a_queue_cannot_restart_without_what_a_live_trainer_builds_on(
    journal: Journal, events: list[JournalEvent], message: str
) -> None:
    journal.append(events)
    with pytest.raises(JournalDamaged, match=message):
        again(journal)


# -- a whole resume ---------------------------------------------------------------------------------------------------


def test_groups_that_a_dead_trainer_took_are_ready_again(journal: Journal) -> None:
    journal.append([*trained(1, 0), *stored(1, 2), took(2, 1), took(3, 2)])
    found = again(journal, mark(1, 1))
    assert not found.taken and not list(journal.steps(after=1))
    assert found.policy.untaken == {1: True, 2: True}


def test_steps_after_the_checkpoint_are_trained_again_with_their_groups(journal: Journal) -> None:
    journal.append([*trained(1, 0), *trained(2, 1), *trained(3, 2)])
    journal.compact(step=1, frontier=Frontier(low=1, trained=1), keep_groups=0)
    found = again(journal, mark(1, 1))
    assert (found.step, found.base, found.policy.version, found.ledger.trained) == (3, 1, 3, 3)
    assert "Steps 2 to 3 are in the journal" in found.notes[0]
    assert [one.ticket.ordinal for step in (2, 3) for one in journal.groups(step) or []] == [1, 2]


def test_a_recorded_step_that_is_not_whole_is_forgotten_with_all_after_it(journal: Journal) -> None:
    journal.append([*trained(1, 0), *trained(2, 1), *stored(5, version=2), *trained(3, 2, 6), *trained(4, 3)])
    damage(journal, 2)
    found = again(journal, mark(1, 1))
    notes = "\n".join(found.notes)
    assert (found.step, found.policy.version) == (2, 2)
    assert "Step 3 is not whole in the journal" in notes and "(2, 3, 6) are trained again" in notes
    assert "1 groups are dropped" in notes, "versions 3 made it, and that is forgotten"
    assert found.policy.untaken == {5: True, 6: True}
    assert issued(found, 4) == [(3, 1), (2, 0), (4, 0), (7, 0)]


@pytest.mark.parametrize("ordinals", [range(1, 2), range(1, 9)])
def test_a_note_names_the_first_prompts_of_a_forgotten_step(journal: Journal, ordinals: range) -> None:
    journal.append([*trained(1, 0), *trained(2, *ordinals)])
    damage(journal, 1)
    named = "(1) are" if len(ordinals) == 1 else "(1, 2, 3, 4, 5 and 3 more) are"
    assert named in again(journal, mark(1, 1)).notes[0]


def test_a_journal_that_lost_its_end_starts_from_the_checkpoint(journal: Journal) -> None:
    journal.append([*trained(1, 0, 1), *stored(3, 7, version=1)])
    checkpoint = CheckpointMark(3, 3, Frontier(low=5, ended=(6,), trained=6))
    assert "ends with step 1, before the checkpoint" in again(journal, checkpoint).notes[0]
    for _ in range(2):  # killed again
        found = again(journal, checkpoint)
        assert (found.step, found.policy.version, found.policy.published) == (3, 3, 3)
        assert found.ledger.frontier() == checkpoint.frontier
        assert found.policy.untaken == {7: True}, "its prompt has not ended"


@pytest.mark.parametrize(
    ("events", "base", "checkpoint", "note", "next_ordinals"),
    [
        ([], 0, mark(2, 3), "The journal has no step of this run", [3, 4]),
        # A group of prompt 2 is there, but weights of version 2 made it, which is forgotten.
        (
            [*trained(1, 0), *trained(2, 1), *trained(3, 2)],
            2,
            mark(1, 1),
            "has dropped the groups of steps 2 to 2",
            [2, 1],
        ),
        ([*trained(1, 0), *trained(2, 1)], 0, mark(2, 7), "disagree about step 2", [7, 8]),
        ([*trained(1, 0), *trained(2, 1)], 0, CheckpointMark(2, 9, Frontier(low=2, trained=2)), "disagree", [2, 3]),
    ],
    ids=["new", "compacted beyond the checkpoint", "other prompts", "other version"],
)
def test_a_journal_that_does_not_fit_the_checkpoint_starts_from_it(
    journal: Journal,
    events: list[JournalEvent],
    base: int,
    checkpoint: CheckpointMark,
    note: str,
    next_ordinals: list[int],
) -> None:
    journal.append(events)
    if base:
        journal.compact(step=base, frontier=Frontier(low=base, trained=base), keep_groups=0)
    found = again(journal, checkpoint)
    assert note in found.notes[0]
    assert (found.step, found.base, found.policy.version) == (checkpoint.step, checkpoint.step, checkpoint.version)
    assert found.ledger.frontier() == checkpoint.frontier
    assert [one for one, _ in issued(found, 2)] == next_ordinals
