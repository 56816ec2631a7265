"""The tracker under every interleaving: each request gets exactly one verdict, and the engine never holds too many."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from freewheel.judge import Failed, Handle, JudgeClosed, JudgeDied, JudgeRequest, JudgeStats, Scored, Skipped
from freewheel.judge import tracker as tracker_module
from freewheel.judge.tracker import CHUNK, CHUNK_CHARS, GRACE_S, WINDOW, RequestTracker
from freewheel.judge.transport import AskStats, Cancel, Results, StatsReply, Submit

SMALL_WINDOW, SMALL_CHUNK = 7, 3


def requests(count: int) -> list[JudgeRequest]:
    return [JudgeRequest("x") for _ in range(count)]


def drain(tracker: RequestTracker) -> list[Any]:
    messages = []
    while (message := tracker.next()) is not None:
        messages.append(message)
    return messages


def sent(tracker: RequestTracker) -> list[int]:
    return [index for message in drain(tracker) if isinstance(message, Submit) for index in message.indexes]


class Interleavings(RuleBasedStateMachine):
    """A model of an engine next to the real tracker. Verdicts carry their request's identity, so a mix-up shows."""

    @initialize()
    def begin(self) -> None:
        self.window, self.chunk = tracker_module.WINDOW, tracker_module.CHUNK
        tracker_module.WINDOW, tracker_module.CHUNK = SMALL_WINDOW, SMALL_CHUNK
        self.tracker = RequestTracker()
        self.handles: list[Handle] = []
        self.sent: Counter[tuple[int, int]] = Counter()
        self.holding: list[tuple[int, int]] = []
        self.late: list[tuple[int, int]] = []
        self.given: dict[tuple[int, int], Any] = {}

    def teardown(self) -> None:
        if hasattr(self, "window"):
            while True:
                drained = drain(self.tracker)
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
        self.handles.append(self.tracker.submit(requests(count), at))

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
            message = self.tracker.next()
            self._hold([message] if message is not None else [])

    def _answer(self, pairs: list[tuple[int, int]]) -> None:
        self.tracker.take(Results([(b, i, Scored(float(b * 1000 + i))) for b, i in pairs], 0.0))
        self.holding = [pair for pair in self.holding if pair not in pairs]

    @rule(share=st.floats(0, 1), data=st.data())
    def take(self, share: float, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.holding)) if self.holding else []
        self._answer(order[: round(share * len(order))])

    @rule()
    @precondition(lambda self: self.late)
    def an_answer_comes_too_late(self) -> None:
        self.tracker.take(Results([(b, i, Scored(-1.0)) for b, i in self.late], 0.0))

    @rule(data=st.data())
    @precondition(lambda self: self.handles)
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.handles)).cancel()

    @rule()
    def engine_lost(self) -> None:
        self.tracker.engine_lost()
        self.holding.clear()
        self.late.clear()

    @rule()
    def expire(self) -> None:
        self.tracker.expire(time.monotonic())
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


def test_a_cancelled_batch_and_a_repeated_answer_free_their_places_once() -> None:
    tracker = RequestTracker()
    tracker.submit(requests(WINDOW), None).cancel()
    handle = tracker.submit(requests(WINDOW + 10), None)
    assert len(sent(tracker)) == WINDOW
    tracker.take(Results([(1, 0, Scored(1.0)), (1, 0, Scored(2.0))], 0.0))
    assert len(sent(tracker)) == 1
    assert handle._verdicts[0] == Scored(1.0) and handle.progress().scored == 1


def test_long_texts_are_sent_in_small_messages() -> None:
    tracker = RequestTracker()
    tracker.submit([JudgeRequest("x", reference="y" * (CHUNK_CHARS // 4)) for _ in range(16)], None)
    tracker.submit([JudgeRequest("x" * (CHUNK_CHARS // 4)) for _ in range(16)], None)
    assert max(len(m.indexes) for m in drain(tracker)) <= 5


def test_older_batches_are_sent_first_and_a_batch_larger_than_the_window_takes_turns() -> None:
    tracker = RequestTracker()
    for _ in range(2):
        tracker.submit(requests(1000), None)
    order = [message.batch for message in drain(tracker)]
    assert order == sorted(order) and set(order) == {0, 1}
    tracker = RequestTracker()
    bulk, small = tracker.submit(requests(2 * WINDOW), None), tracker.submit(requests(1), None)
    assert [message.batch for message in (tracker.next(), tracker.next()) if isinstance(message, Submit)] == [
        bulk.batch,
        small.batch,
    ]
    tracker.take(Results([(small.batch, 0, Scored(7.0))], 0.0))
    assert small.done() and not bulk.done()


def test_the_next_engine_gets_the_unanswered_requests_first_and_in_order_and_knows_what_was_spent() -> None:
    tracker = RequestTracker()
    handle = tracker.submit(requests(CHUNK + 10), None)
    assert isinstance(message := tracker.next(), Submit) and len(message.indexes) == CHUNK
    tracker.take(Results([(0, index, Scored(1.0)) for index in range(5)], 0.75))
    for restarts in (1, 2):
        tracker.engine_lost()
        assert sent(tracker) == list(range(5, CHUNK + 10))
        assert (tracker.restarts, tracker.spent, handle.progress().scored) == (restarts, 0.75, 5)


def test_the_engine_learns_of_a_cancelled_batch_only_if_it_holds_part_of_it() -> None:
    tracker = RequestTracker()
    never_sent, held = tracker.submit(requests(3), None), tracker.submit(requests(3), None)
    never_sent.cancel()
    assert [type(m) for m in drain(tracker)] == [Submit]
    for expected in ([Cancel(held.batch)], []):
        held.cancel()
        assert drain(tracker) == expected
    assert [v.reason for v in held.result(0)] == ["cancelled"] * 3


def test_a_batch_expires_after_the_grace_and_not_before() -> None:
    tracker, deadline = RequestTracker(), time.monotonic() + 1000
    handle = tracker.submit(requests(2), deadline)
    assert tracker.next_deadline() == pytest.approx(deadline + GRACE_S)
    tracker.expire(deadline + GRACE_S / 2)
    assert not handle.done()
    tracker.expire(deadline + GRACE_S)
    assert {v.reason for v in handle.result(0)} == {"deadline"}
    assert tracker.next_deadline() == float("inf")


@pytest.mark.parametrize(("error", "reason"), [(JudgeClosed, "cancelled"), (JudgeDied, "engine")])
def test_after_the_end_open_batches_are_answered_and_new_ones_are_refused(error: Any, reason: str) -> None:
    tracker = RequestTracker()
    handle, asked = tracker.submit([*requests(2), JudgeRequest("y", skip="rule")], None), tracker.ask_stats()
    tracker.end(error("out of luck"))
    assert handle.result(0) == [Failed(reason, 0, "out of luck")] * 2 + [Skipped("rule")]
    with pytest.raises(error, match="out of luck"):
        tracker.submit(requests(1), None)
    assert tracker.ask_stats().result(0) == JudgeStats(), "no engine is left to answer"
    if error is JudgeDied:
        assert asked.result(0) == JudgeStats()


def test_stats_answer_everyone_who_asked_and_survive_the_engine() -> None:
    tracker = RequestTracker()
    first = tracker.ask_stats()
    assert tracker.ask_stats() is first and drain(tracker) == [AskStats()]
    tracker.take(StatsReply(JudgeStats(scored=2)))
    assert first.result(0).scored == tracker.last_stats.scored == 2
    second = tracker.ask_stats()
    tracker.engine_lost()
    assert second.result(0).scored == 2 and drain(tracker) == []
