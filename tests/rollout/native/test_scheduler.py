"""Slots over arbitrary comings and goings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.native.loop import Placement, Scheduler

Move = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 5)),
    st.tuples(st.just("admit"), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 100)),
    st.tuples(st.just("drop"), st.integers(0, 100)),
)


class Story:
    """Plays moves against a scheduler and checks every placement."""

    def __init__(self, slots: int) -> None:
        self.scheduler: Scheduler[int] = Scheduler(slots=slots)
        self.held: dict[int, tuple[int, int]] = {}
        self.sizes: dict[int, int] = {}
        self.entered: list[tuple[int, int]] = []
        self.dropped: set[int] = set()

    def play(self, kind: str, number: int) -> None:
        if kind == "add":
            self.sizes[len(self.sizes)] = number
            self.scheduler.add(len(self.sizes) - 1, number)
        elif kind == "admit":
            self.admit()
        elif kind == "release" and self.held:
            slot = sorted(self.held)[number % len(self.held)]
            assert self.scheduler.release(slot) == self.held.pop(slot)
        elif kind == "drop" and self.sizes:
            request = number % len(self.sizes)
            freed = self.scheduler.drop(request)
            assert freed == sorted(slot for slot, (owner, _) in self.held.items() if owner == request)
            self.held = {slot: held for slot, held in self.held.items() if held[0] != request}
            self.dropped.add(request)

    def admit(self) -> list[Placement[int]]:
        placed = self.scheduler.admit()
        for one in placed:
            assert one.slot not in self.held and 0 <= one.slot < self.scheduler.slots
            assert one.request not in self.dropped
            self.held[one.slot] = (one.request, one.index)
            self.entered.append((one.request, one.index))
        assert self.scheduler.running == len(self.held)
        assert not self.scheduler.waiting or len(self.held) == self.scheduler.slots
        return placed


@given(slots=st.integers(1, 6), moves=st.lists(Move, max_size=60))
def test_every_sample_enters_once_in_order_and_no_slot_is_used_twice(slots: int, moves: list[tuple[str, int]]) -> None:
    story = Story(slots)
    for kind, number in moves:
        story.play(kind, number)
    while story.admit() or story.held:
        story.play("release", 0)
    assert story.entered == sorted(set(story.entered))
    kept = [(r, i) for r, size in story.sizes.items() for i in range(size) if r not in story.dropped]
    assert [entry for entry in story.entered if entry[0] not in story.dropped] == kept
    assert story.scheduler.waiting == story.scheduler.running == 0


def test_a_request_that_waits_is_not_forgotten_when_its_first_samples_end() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1)
    scheduler.add("a", 2)
    scheduler.add("b", 1)
    (first,) = scheduler.admit()
    scheduler.release(first.slot)
    assert [(p.request, p.index) for p in scheduler.admit()] == [("a", 1)]
    assert list(scheduler.upcoming()) == ["b"]


def test_low_slots_are_taken_first() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=4)
    scheduler.add("a", 4)
    scheduler.admit()
    for slot in (3, 0, 2):
        scheduler.release(slot)
    scheduler.add("b", 2)
    assert [p.slot for p in scheduler.admit()] == [0, 2]


def test_samples_enter_next_to_running_ones_once_enough_slots_are_free_or_all_samples_fit() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=8, refill=4)
    scheduler.add("first", 8)
    assert len(scheduler.admit()) == 8
    scheduler.release(0)
    scheduler.add("second", 2)
    assert scheduler.admit() == []
    scheduler.release(1)
    assert [placement.slot for placement in scheduler.admit()] == [0, 1]
