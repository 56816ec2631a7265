"""What a queue begins with after a kill: each way in which a journal, a checkpoint and live rollouters can disagree."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel.data.group import Ticket
from freewheel.queue.journal import (
    Abandoned,
    CheckpointMark,
    Committed,
    Event,
    Failed,
    GivenBack,
    Journal,
    JournalDamaged,
    Reserved,
    Stored,
    Took,
    VersionCompleted,
)
from freewheel.queue.ledger import BUDGETS, Frontier, Kind, infra_failure
from freewheel.queue.restore import Restored, restore

from .journals import MemoryJournal


@pytest.fixture(params=["memory", "disk"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    opened: Any = MemoryJournal() if request.param == "memory" else Journal(tmp_path / "journal.sqlite")
    yield opened
    opened.close()


def ticket(ordinal: int, *, sequence: int | None = None, attempt: int = 0) -> Ticket:
    return Ticket(ordinal, ordinal if sequence is None else sequence, attempt)


def stored(*ordinals: int, version: int = 0) -> list[Event]:
    return [Stored(ticket(one), version, b"%d" % one, 0.0) for one in ordinals]


def took(step: int, *ordinals: int, missing: int = 0) -> Event:
    return Took(step, tuple(ticket(one) for one in ordinals), missing)


def trained(step: int, *ordinals: int, version: int | None = None) -> list[Event]:
    made = step - 1 if version is None else version
    return [
        *stored(*ordinals, version=made),
        took(step, *ordinals),
        Committed(step, step if version is None else version, float(step)),
    ]


def failed(one: Ticket, kind: Kind | None = Kind.INFRA, reason: str = "engine") -> Failed:
    return Failed(one, kind, reason, "", 0.0)


def issued(restored: Restored, count: int) -> list[tuple[int, int]]:
    found = [restored.ledger.issue() for _ in range(count)]
    return [one for one in found if one is not None]


def mark(step: int, *ordinals: int, version: int | None = None) -> CheckpointMark:
    """A checkpoint that trained the first prompts."""
    frontier = Frontier(low=len(ordinals), trained=len(ordinals))
    return CheckpointMark(step, step if version is None else version, frontier)


def words(restored: Restored) -> str:
    return "\n".join(restored.notes)


def again(journal: Any, checkpoint: CheckpointMark | None, **in_flight: Sequence[Ticket]) -> Restored:
    return restore(journal, total=100, checkpoint=checkpoint, in_flight=in_flight)


# -- a queue's restart ------------------------------------------------------------------------------------------------


def test_a_run_begins_with_an_empty_journal(journal: Any) -> None:
    found = again(journal, None)
    assert (found.step, found.policy.version, found.policy.next_sequence, found.notes) == (0, 0, 0, [])
    assert issued(found, 3) == [(0, 0), (1, 0), (2, 0)]


def test_what_was_stored_is_ready_and_what_was_trained_has_ended(journal: Any) -> None:
    journal.append([Reserved(1024), *trained(1, 0, 1), *stored(3, version=1)])
    found = again(journal, None)
    assert (found.step, found.policy.version, found.ledger.trained) == (1, 1, 2)
    assert found.policy.untaken == {3: True}
    assert found.stored[3].data == b"3"
    assert issued(found, 3) == [(2, 0), (4, 0), (5, 0)]
    assert found.policy.next_sequence == 1024
    assert found.last_commit_s == 1.0


def test_a_step_that_a_live_trainer_has_stays_taken(journal: Any) -> None:
    journal.append([*trained(1, 0, 1), *stored(2, 3, 4), took(2, 2, 3), took(3, 4, missing=1)])
    found = again(journal, None)
    assert {step: [one.ordinal for one in row.tickets] for step, row in found.taken.items()} == {2: [2, 3], 3: [4]}
    assert found.taken[3].missing == 1
    assert sorted(found.policy.taken) == [2, 3, 4] == sorted(found.stored)
    assert not found.policy.untaken


def test_attempts_in_flight_go_on_under_their_sequences(journal: Any) -> None:
    journal.append([Reserved(1024), *stored(0)])
    found = again(journal, None, a=[ticket(1), ticket(2, sequence=7, attempt=2)], b=[ticket(3)])
    assert found.in_flight == {7: (ticket(2, sequence=7, attempt=2), "a"), 1: (ticket(1), "a"), 3: (ticket(3), "b")}
    assert found.policy.untaken == {0: True, 1: False, 3: False, 7: False}
    assert issued(found, 2) == [(4, 0), (5, 0)]
    found.ledger.retry(2, "stale")
    assert issued(found, 1) == [(2, 3)]


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
def test_an_attempt_in_flight_that_came_to_an_end_is_not_open(journal: Any, events: list[Event]) -> None:
    journal.append(events)
    found = again(journal, None, a=[ticket(1)])
    assert not found.in_flight
    assert "1 attempts in flight had been stored, ended or given up" in words(found)


def test_of_two_attempts_at_one_prompt_the_later_goes_on(journal: Any) -> None:
    found = again(journal, None, a=[ticket(1)], b=[ticket(1, sequence=9, attempt=1)])
    assert found.in_flight == {9: (ticket(1, sequence=9, attempt=1), "b")}
    assert found.policy.next_sequence == 10


def test_failed_attempts_still_count(journal: Any) -> None:
    journal.append([failed(ticket(0)), failed(ticket(0, sequence=1, attempt=1)), failed(ticket(2), None, "stale")])
    found = again(journal, None)
    assert found.ledger.failures == {"engine": 2, "stale": 1}
    assert issued(found, 3) == [(0, 2), (2, 1), (1, 0)]
    for left in reversed(range(BUDGETS[Kind.INFRA] - 2)):
        assert found.ledger.fail(0, infra_failure("engine", "")) == bool(left)
        if left:
            found.ledger.issue()


def test_a_prompt_whose_budget_was_spent_as_the_queue_died_is_abandoned(journal: Any) -> None:
    journal.append([failed(ticket(0, sequence=one, attempt=one), Kind.DATA, "reward") for one in range(2)])
    for _ in range(2):
        found = again(journal, None)
        assert found.ledger.abandoned == {"reward": 1}
        assert issued(found, 1) == [(1, 0)]
    assert [one.ordinal for one in journal.abandoned()] == [0]


def test_slots_of_what_is_not_known_to_be_published_are_held(journal: Any) -> None:
    journal.append([*trained(1, 0, 1, version=0), *trained(2, 2, 3, version=1), *trained(3, 4, 5, version=1)])
    found = again(journal, None)
    assert found.policy.held == {1: 4, 2: 2}
    assert (found.policy.published, found.policy.version, found.policy.steps_in_version) == (None, 1, 1)
    assert found.versions == {1: 0, 2: 1, 3: 1}


def test_a_checkpoint_says_nothing_of_what_engines_hold(journal: Any) -> None:
    """It may be written before they have its version: its groups hold their slots as well."""
    journal.append([*trained(1, 0, 1, version=1), *trained(2, 2, 3, version=2), *trained(3, 4, version=3)])
    journal.compact(step=2, frontier=Frontier(low=4, trained=4), keep_groups=0)
    found = again(journal, None)
    assert (found.base, found.policy.published) == (2, None)
    assert found.policy.held == {1: 2, 2: 2, 3: 1}


def test_a_version_that_was_cut_short_is_whole(journal: Any) -> None:
    journal.append([*trained(1, 0, version=0), VersionCompleted(1, 1)])
    found = again(journal, None)
    assert (found.policy.version, found.policy.steps_in_version, found.versions) == (1, 0, {1: 1})


def test_what_is_compacted_has_ended(journal: Any) -> None:
    journal.append([Reserved(1024), *trained(1, 0, 2), *trained(2, 1, 4), Abandoned(3, 0, "zero_variance", 0.0)])
    frontier = Frontier(low=1, ended=(2, 3), trained=2, abandoned={"zero_variance": 1})
    journal.compact(step=1, frontier=frontier, keep_groups=0)
    found = again(journal, None)
    assert found.ledger.frontier() == Frontier(low=5, trained=4, abandoned={"zero_variance": 1})
    assert (found.step, found.base, found.versions, found.policy.held) == (2, 1, {2: 2}, {1: 2, 2: 2})


def test_a_gap_in_the_steps_ends_a_queue_that_a_live_trainer_builds_on(journal: Any) -> None:
    journal.append([*trained(1, 0), *trained(2, 1), *stored(2), took(4, 2)])
    with pytest.raises(JournalDamaged, match="step 3"):
        again(journal, None)


def test_groups_that_are_being_trained_must_be_there(journal: Any) -> None:
    journal.append([*stored(0), took(1, 0, 1)])
    with pytest.raises(JournalDamaged, match="groups of step 1 are gone"):
        again(journal, None)


# -- a whole resume ---------------------------------------------------------------------------------------------------


def test_a_resumed_run_trains_the_recorded_steps_again(journal: Any) -> None:
    journal.append([Reserved(1024), *trained(1, 0, 1), *trained(2, 2, 3), *trained(3, 4, 5), *stored(6, version=3)])
    found = again(journal, mark(1, 0, 1))
    assert (found.step, found.policy.version, found.policy.published) == (3, 3, 1)
    assert found.policy.held == {2: 2, 3: 2}
    assert found.policy.untaken == {6: True}
    assert "Steps 2 to 3 are in the journal and are trained again with the same groups" in words(found)
    assert found.policy.next_sequence == 1024


def test_a_resume_before_the_first_checkpoint_begins_with_the_first_recorded_step(journal: Any) -> None:
    journal.append(trained(1, 0, 1))
    found = again(journal, CheckpointMark())
    assert (found.step, found.policy.published, found.policy.held) == (1, 0, {1: 2})


def test_what_a_dead_trainer_took_is_ready_again(journal: Any) -> None:
    journal.append([*trained(1, 0), *stored(1, 2), took(2, 1), took(3, 2)])
    found = again(journal, mark(1, 0))
    assert not found.taken and not list(journal.steps(after=1))
    assert found.policy.untaken == {1: True, 2: True}


def test_a_recorded_step_that_is_not_whole_is_forgotten_with_all_after_it(journal: Any) -> None:
    journal.append([*trained(1, 0), *trained(2, 1), *trained(3, 2), *trained(4, 3), *stored(4, version=4)])
    lose(journal, 2)
    found = again(journal, mark(1, 0))
    assert (found.step, found.policy.version) == (2, 2)
    assert "Step 3 is not whole in the journal" in words(found)
    assert "(2, 3) are trained again" in words(found)
    assert "2 groups are dropped" in words(found)  # versions 3 and 4 made them, which are no more
    assert issued(found, 4) == [(3, 1), (4, 1), (2, 0), (5, 0)]
    assert not found.policy.untaken


def lose(journal: Any, sequence: int) -> None:
    if isinstance(journal, MemoryJournal):
        del journal.rows["groups"][sequence]
    else:
        with sqlite3.connect(journal.path) as other:
            other.execute("UPDATE groups SET data = 'x' WHERE sequence = ?", (sequence,))
        other.close()


def test_groups_of_a_forgotten_step_that_are_there_are_trained_on_anew(journal: Any) -> None:
    journal.append([*stored(1, 2), *trained(1, 0), took(2, 1, 2), Committed(2, 2, 0.0)])
    lose(journal, 1)
    found = again(journal, mark(1, 0))
    assert found.policy.untaken == {2: True}
    assert issued(found, 2) == [(1, 0), (3, 0)]


def test_a_journal_that_lost_its_end_begins_from_the_checkpoint(journal: Any) -> None:
    journal.append([*trained(1, 0, 1), *stored(3, 7, version=1)])
    frontier = Frontier(low=5, ended=(6,), trained=6)
    found = again(journal, CheckpointMark(3, 3, frontier))
    assert (found.step, found.policy.version, found.policy.published) == (3, 3, 3)
    assert found.ledger.frontier() == frontier
    assert found.policy.untaken == {7: True}  # not known to the checkpoint, and of an unended prompt
    assert "ends with step 1, before the checkpoint" in words(found)
    assert again(journal, CheckpointMark(3, 3, frontier)).policy == found.policy  # killed again


def test_a_new_journal_begins_from_the_checkpoint(journal: Any) -> None:
    found = again(journal, mark(2, 0, 1, 2))
    assert (found.step, found.base, issued(found, 1)) == (2, 2, [(3, 0)])
    assert "The journal has no step of this run" in words(found)


def test_a_checkpoint_from_before_the_base_is_gone_on_from_without_the_journals_steps(journal: Any) -> None:
    journal.append([*trained(1, 0), *trained(2, 1), *trained(3, 2)])
    journal.compact(step=2, frontier=Frontier(low=2, trained=2), keep_groups=0)
    found = again(journal, mark(1, 0))
    assert (found.step, found.policy.version) == (1, 1)
    assert "has dropped the groups of steps 2 to 2" in words(found)
    assert [one for one, _ in issued(found, 2)] == [2, 1]  # of 2 a group was there that weights of version 2 had made


def test_a_journal_of_another_history_is_not_believed(journal: Any) -> None:
    journal.append([*trained(1, 0), *trained(2, 1)])
    found = again(journal, CheckpointMark(2, 2, Frontier(low=7, trained=7)))
    assert "disagree about step 2" in words(found)
    assert found.ledger.frontier() == Frontier(low=7, trained=7)


def test_a_step_that_was_given_back_is_no_gap(journal: Any) -> None:
    journal.append([*trained(1, 0), *stored(1, 2), took(2, 1), took(3, 2), GivenBack(3), GivenBack(2)])
    assert again(journal, None).policy.untaken == {1: True, 2: True}
