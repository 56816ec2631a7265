"""Tickets are dealt as the queue deals them."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.group import Ticket
from freewheel.plan.simulation import deal
from freewheel.queue.message_queue import TicketRequest, pick_least_loaded

asked = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8)


def made(asks):
    return [TicketRequest(str(place), want, load) for place, (want, load) in enumerate(asks)]


def tickets():
    numbers = count()
    return lambda: Ticket(number := next(numbers), number)


@given(asked.filter(lambda asks: all(want + load for want, load in asks)), st.integers(0, 40))
def test_the_order_is_that_of_least_loaded(asks, room):
    ours, theirs = made(asks), made(asks)
    deal(ours, room, tickets())
    issue = tickets()
    for _ in range(room):
        one = pick_least_loaded(theirs)
        if one is None:
            break
        one.tickets.append(issue())
    assert [one.tickets for one in ours] == [one.tickets for one in theirs]
