"""What a rollouter asks for, over any order of admissions and ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freewheel.rollout.rollouter import LOOKAHEAD, Lookahead


@given(capacity=st.integers(1, 20), n=st.integers(1, 16), moves=st.lists(st.integers(0, 40), max_size=60))
def test_it_asks_for_no_more_than_it_may_and_for_something_whenever_there_is_room(
    capacity: int, n: int, moves: list[int]
) -> None:
    """Each move: what was wanted is admitted, then so many responses end."""
    lookahead = Lookahead(capacity=capacity, n=n)
    for ends in moves:
        assert (lookahead.load - 1) * n < lookahead.unfinished <= lookahead.load * n
        assert lookahead.load + lookahead.want == capacity * LOOKAHEAD
        assert lookahead.want or not lookahead.has_room
        lookahead.admit(lookahead.want)
        assert not lookahead.want and lookahead.unfinished > (capacity * LOOKAHEAD - 1) * n
        lookahead.release(min(ends, lookahead.unfinished))
        assert lookahead.has_room == (lookahead.unfinished <= (capacity - 1) * n)


def test_a_groups_long_response_keeps_one_place() -> None:
    lookahead = Lookahead(capacity=2, n=8)
    lookahead.admit(lookahead.want)
    lookahead.release(4 * 7)  # of four groups all but one response each
    assert lookahead.load == 1 and lookahead.has_room and lookahead.want == 3
