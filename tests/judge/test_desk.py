"""The desk under every interleaving: each request gets exactly one verdict, and the engine never holds too many."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freewheel.judge import EngineDied, Failed, Handle, JudgeClosed, JudgeRequest, JudgeStats, Scored
from freewheel.judge import tracker as tracker_module
from freewheel.judge.tracker import CHUNK, CHUNK_CHARS, GRACE_S, WINDOW, RequestTracker
from freewheel.judge.transport import AskStats, Cancel, Results, StatsReply, Submit

SMALL_WINDOW, SMALL_CHUNK = 7, 3


def requests(count: int, chars: int = 1) -> list[JudgeRequest]:
    return [JudgeRequest("x" * chars) for _ in range(count)]


def drain(desk: RequestTracker) -> list[Any]:
    messages = []
    while (message := desk.next()) is not None:
        messages.append(message)
    return messages


class Interleavings(RuleBasedStateMachine):
    """A model of an engine beside the real desk. Verdicts carry their request's identity, so a mix-up shows."""

    @initialize()
    def begin(self) -> None:
        self.window, self.chunk = tracker_module.WINDOW, tracker_module.CHUNK
        tracker_module.WINDOW, tracker_module.CHUNK = SMALL_WINDOW, SMALL_CHUNK
        self.desk = RequestTracker()
        self.handles: list[Handle] = []
        self.sent: Counter[tuple[int, int]] = Counter()
        self.holding: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.given: dict[tuple[int, int], Any] = {}

    def teardown(self) -> None:
        if hasattr(self, "window"):
            while True:
                drained = drain(self.desk)
                self._hold(drained)
                if not self.holding:
                    break
                self._answer(self.holding)
            assert all(handle.done() for handle in self.handles)
            self.no_verdict_changes()
            tracker_module.WINDOW, tracker_module.CHUNK = self.window, self.chunk

    @rule(count=st.integers(0, 30), deadline=st.sampled_from([None, -1.0, 1000.0]))
    def submit(self, count: int, deadline: float | None) -> None:
        at = None if deadline is None else time.monotonic() + deadline
        self.handles.append(self.desk.submit(requests(count), at))

    def _hold(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                assert len(message.indexes) == len(message.requests) <= SMALL_CHUNK
                pairs = [(message.batch, index) for index in message.indexes]
                self.sent.update(pairs)
                self.holding += pairs
            elif isinstance(message, Cancel):
                self.late += [pair for pair in self.holding if pair[0] == message.batch]
                self.holding = [pair for pair in self.holding if pair[0] != message.batch]

    @rule(times=st.integers(1, 4))
    def next(self, times: int) -> None:
        for _ in range(times):
            message = self.desk.next()
            self._hold([message] if message is not None else [])

    def _answer(self, pairs: list[tuple[int, int]]) -> None:
        self.desk.take(Results([(b, i, Scored(float(b * 1000 + i))) for b, i in pairs], 0.0))
        self.holding = [pair for pair in self.holding if pair not in pairs]

    @rule(share=st.floats(0, 1), data=st.data())
    def take(self, share: float, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.holding)) if self.holding else []
        self._answer(order[: round(share * len(order))])

    @rule()
    @precondition(lambda self: self.late)
    def an_answer_comes_too_late(self) -> None:
        self.desk.take(Results([(b, i, Scored(-1.0)) for b, i in self.late], 0.0))

    @rule(data=st.data())
    @precondition(lambda self: self.handles)
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.handles)).cancel()

    @rule()
    def engine_lost(self) -> None:
        self.desk.engine_lost()
        self.holding.clear()
        self.late.clear()

    @rule()
    def expire(self) -> None:
        time.sleep(0.0)
        self.desk.expire(time.monotonic())
        overdue = time.monotonic() - GRACE_S
        assert all(h.done() for h in self.handles if h.deadline_at is not None and h.deadline_at < overdue)

    @invariant()
    def the_engine_never_holds_more_than_the_window(self) -> None:
        assert len(getattr(self, "holding", ())) <= SMALL_WINDOW + len(getattr(self, "late", ()))

    @invariant()
    def no_verdict_changes(self) -> None:
        for handle in getattr(self, "handles", ()):
            for index, verdict in enumerate(handle._verdicts):
                if verdict is None:
                    continue
                assert self.given.setdefault((handle.batch, index), verdict) is verdict
                if isinstance(verdict, Scored):
                    assert verdict.value == handle.batch * 1000 + index
                else:
                    assert isinstance(verdict, Failed) and verdict.reason in ("cancelled", "deadline")
            progress = handle.progress()
            assert progress.done == sum(v is not None for v in handle._verdicts)
            assert handle.done() == (progress.done == progress.total)


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_interleaving_gives_each_request_exactly_one_verdict = Interleavings.TestCase


def test_what_is_handed_over_is_bounded_by_the_window() -> None:
    desk = RequestTracker()
    desk.submit(requests(2 * WINDOW + 7), None)
    first = drain(desk)
    assert sum(len(m.indexes) for m in first) == WINDOW and all(len(m.indexes) <= CHUNK for m in first)
    desk.take(Results([(0, index, Scored(1.0)) for index in range(10)], 0.0))
    assert [m.indexes for m in drain(desk)] == [list(range(WINDOW, WINDOW + 10))]


def test_a_batch_that_ends_early_makes_room() -> None:
    desk = RequestTracker()
    for _ in range(3):
        full = desk.submit(requests(WINDOW), None)
        assert sum(len(m.indexes) for m in drain(desk) if isinstance(m, Submit)) == WINDOW
        full.cancel()


def test_an_answer_that_comes_twice_counts_once() -> None:
    desk = RequestTracker()
    handle = desk.submit(requests(WINDOW + 10), None)
    drain(desk)
    desk.take(Results([(0, 0, Scored(1.0)), (0, 0, Scored(2.0))], 0.0))
    assert sum(len(m.indexes) for m in drain(desk)) == 1
    assert handle._verdicts[0] == Scored(1.0) and handle.progress().scored == 1


def test_long_texts_travel_in_small_messages() -> None:
    desk = RequestTracker()
    desk.submit([JudgeRequest("x", reference="y" * (CHUNK_CHARS // 4)) for _ in range(16)], None)
    desk.submit([JudgeRequest("x" * (CHUNK_CHARS // 4)) for _ in range(16)], None)
    assert max(len(m.indexes) for m in drain(desk)) <= 5


def test_a_dead_engines_requests_go_out_again_first_and_in_order() -> None:
    desk = RequestTracker()
    handle = desk.submit(requests(CHUNK + 10), None)
    assert [len(m.indexes) for m in (desk.next(), desk.next()) if isinstance(m, Submit)] == [CHUNK, 10]
    desk.take(Results([(0, index, Scored(1.0)) for index in range(5)], 0.0))
    desk.engine_lost()
    again = drain(desk)
    assert [index for m in again for index in m.indexes] == list(range(5, CHUNK + 10))
    assert desk.restarts == 1 and handle.progress().scored == 5


def test_cancelling_tells_the_engine_only_if_it_holds_something() -> None:
    desk = RequestTracker()
    never_sent, sent = desk.submit(requests(3), None), desk.submit(requests(3), None)
    never_sent.cancel()
    assert [type(m) for m in drain(desk)] == [Submit]
    sent.cancel()
    assert drain(desk) == [Cancel(sent.batch)]
    assert [v.reason for v in sent.result(0)] == ["cancelled"] * 3
    sent.cancel()
    assert drain(desk) == []


def test_expired_batches_end_only_after_the_engines_grace() -> None:
    desk = RequestTracker()
    handle = desk.submit(requests(2), time.monotonic() + 0.05)
    assert desk.next_deadline() == pytest.approx(handle.deadline_at + GRACE_S)
    desk.expire(time.monotonic())
    assert not handle.done()
    time.sleep(0.05 + GRACE_S + 0.01)
    desk.expire(time.monotonic())
    assert {v.reason for v in handle.result(0)} == {"deadline"}
    assert desk.next_deadline() == float("inf")


def test_after_closing_nothing_is_taken_and_everything_has_ended() -> None:
    desk = RequestTracker()
    handle = desk.submit(requests(2), None)
    desk.close("closed for the night")
    assert {v.detail for v in handle.result(0)} == {"closed for the night"}
    with pytest.raises(JudgeClosed, match="closed for the night"):
        desk.submit(requests(1), None)


def test_a_broken_engine_fails_what_is_open_and_refuses_what_comes() -> None:
    desk = RequestTracker()
    handle = desk.submit(requests(2), None)
    asked = desk.ask_stats()
    desk.break_down("out of luck")
    assert [(v.reason, v.detail) for v in handle.result(0)] == [("engine", "out of luck")] * 2
    with pytest.raises(EngineDied, match="out of luck"):
        desk.submit(requests(1), None)
    assert asked.result(0) == JudgeStats()
    assert desk.ask_stats().result(0) == JudgeStats(), "nobody is left to answer, so nobody is waited for"


def test_figures_are_answered_by_ticket_and_kept() -> None:
    desk = RequestTracker()
    first, second = desk.ask_stats(), desk.ask_stats()
    assert [m.ticket for m in drain(desk) if isinstance(m, AskStats)] == [1, 2]
    desk.take(StatsReply(2, JudgeStats(scored=2)))
    assert second.result(0).scored == 2 and not first.done()
    desk.engine_lost()
    assert first.result(0).scored == 2
    assert desk.last_stats.scored == 2


def test_what_was_spent_is_known_after_the_engine_is_lost() -> None:
    desk = RequestTracker()
    desk.submit(requests(2), None)
    drain(desk)
    desk.take(Results([(0, 0, Scored(1.0))], 0.75))
    desk.engine_lost()
    assert desk.spent == 0.75
