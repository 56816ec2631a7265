"""Which slots and pages samples get, for any sequence of requests."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from freewheel.rollout.native.cache import NO_PAGE, PageTable
from freewheel.rollout.native.engine import Scheduler, SlotAssignment

Move = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 5)),
    st.tuples(st.just("admit"), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 100)),
    st.tuples(st.just("drop"), st.integers(0, 100)),
)


class Story:
    """Plays moves against a scheduler and checks every placement."""

    def __init__(self, slots: int, refill: int) -> None:
        self.scheduler: Scheduler[int] = Scheduler(slots=slots, refill=refill)
        self.refill = refill
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

    def admit(self) -> list[SlotAssignment[int]]:
        free = [slot for slot in range(self.scheduler.slots) if slot not in self.held]
        waiting = self.scheduler.waiting
        worth_a_prefill = not self.held or len(free) >= min(self.refill, waiting)
        placed = self.scheduler.admit()
        assert [one.slot for one in placed] == free[: waiting * worth_a_prefill], "low slots first"
        for one in placed:
            assert one.request not in self.dropped
            self.held[one.slot] = (one.request, one.index)
            self.entered.append((one.request, one.index))
        assert self.scheduler.running == len(self.held)
        unentered = [r for r, size in self.sizes.items() if r not in self.dropped and (r, size - 1) not in self.entered]
        assert list(self.scheduler.upcoming()) == unentered
        return placed


@given(slots=st.integers(1, 6), refill=st.integers(1, 4), moves=st.lists(Move, max_size=60))
@example(slots=1, refill=1, moves=[("add", 1), ("admit", 0), ("drop", 0), ("add", 1), ("admit", 0)])  # it is free again
def test_every_sample_enters_once_in_order_and_takes_a_low_free_slot_once_enough_are_free(
    slots: int, refill: int, moves: list[tuple[str, int]]
) -> None:
    story = Story(slots, refill)
    for kind, number in moves:
        story.play(kind, number)
    while story.admit() or story.held:
        story.play("release", 0)
    assert story.entered == sorted(set(story.entered))
    kept = [(r, i) for r, size in story.sizes.items() for i in range(size) if r not in story.dropped]
    assert [entry for entry in story.entered if entry[0] not in story.dropped] == kept
    assert story.scheduler.waiting == story.scheduler.running == 0


ROWS, PER_ROW = 5, 4
PageMove = st.tuples(st.booleans(), st.integers(0, ROWS - 1), st.integers(1, PER_ROW))


def page_of(table: PageTable, row: int, level: int) -> int:
    return int(table.pages(np.array([row]), level)[0])


@given(moves=st.lists(PageMove, max_size=80))
def test_no_page_belongs_to_two_rows_and_levels_list_all_of_them(moves: list[tuple[bool, int, int]]) -> None:
    table = PageTable(rows=ROWS, pages_per_row=PER_ROW)
    sizes = [1] * ROWS
    for grows, row, levels in moves:
        free = sorted(
            set(range(ROWS * PER_ROW)) - set(table.pages(np.repeat(range(ROWS), PER_ROW), [*range(4)] * ROWS))
        )
        if grows:
            given_out = table.grow(np.array([row]), np.array([levels]))
            assert given_out == free[: max(0, levels - sizes[row])], "low pages first"
            sizes[row] = max(sizes[row], levels)
        else:
            assert len(table.release(np.array([row]))) == sizes[row] - 1
            sizes[row] = 1
        pages = {(r, level): page_of(table, r, level) for r in range(ROWS) for level in range(PER_ROW)}
        held = {key: page for key, page in pages.items() if key[1] < sizes[key[0]]}
        assert len(set(held.values())) == len(held) and max(held.values()) == table.high - 1
        assert all(page == NO_PAGE for key, page in pages.items() if key not in held)
        listed = {
            (r, level): page
            for level, (rows, of_rows) in enumerate(table.levels(), start=1)
            for r, page in zip(rows.tolist(), of_rows.tolist(), strict=True)
        }
        assert listed == {key: page for key, page in held.items() if key[1] > 0}
        owners = table.owners()
        assert len(owners) == table.high - ROWS
        assert all(owners[page - ROWS] == r for (r, _), page in listed.items())
