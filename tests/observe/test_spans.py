"""Spans: the time in which at least one of a name is open."""

from __future__ import annotations

import asyncio
import threading

import pytest

from freewheel.observe.spans import Spans, shares


def test_seconds_add_up_by_name_and_a_running_span_counts(clock):
    spans = Spans(clock)
    for seconds in (2.0, 3.0):
        with spans("train"):
            clock.now += seconds
    with spans("sync"):
        clock.now += 1.0
        assert spans.snapshot() == {"train": 5.0, "sync": 1.0, "elapsed": 6.0}


async def test_tasks_that_wait_at_once_have_waited_once(clock):
    spans = Spans(clock)
    opened, go = asyncio.Event(), asyncio.Event()

    async def first():
        with spans("wait"):
            opened.set()
            await go.wait()

    async def second():
        await opened.wait()
        clock.now += 1.0
        with spans("wait"):
            clock.now += 1.0
            go.set()
            await task
            clock.now += 1.0

    task = asyncio.create_task(first())
    await second()
    assert spans.snapshot() == {"wait": 3.0, "elapsed": 3.0}


def test_an_exception_ends_its_span(clock):
    spans = Spans(clock)
    with pytest.raises(KeyError), spans("train"):
        clock.now += 1.0
        raise KeyError
    clock.now += 5.0
    assert spans.snapshot()["train"] == 1.0


def test_threads_may_share_it():
    spans = Spans()

    def work():
        for _ in range(2000):
            with spans("work"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    once = spans.snapshot()
    assert once["work"] == spans.snapshot()["work"], "a span is still taken for open"
    assert 0 < once["work"] <= once["elapsed"]


def test_shares_are_of_the_time_between_two_snapshots(clock):
    spans = Spans(clock)
    with spans("train"):
        clock.now += 10.0
    before = spans.snapshot()
    with spans("train"):
        clock.now += 3.0
    with spans("wait_batch"):
        clock.now += 1.0
    assert shares(before, spans.snapshot()) == {"train": 0.75, "wait_batch": 0.25}


def test_a_restarted_component_has_no_negative_shares(clock):
    before = {"train": 50.0, "elapsed": 100.0}
    assert shares(before, {"train": 1.0, "elapsed": 4.0}) == {"train": 0.25}


def test_no_time_has_no_shares():
    same = {"train": 1.0, "elapsed": 4.0}
    assert shares(same, same) == {} == shares({}, {})


def test_each_span_that_closes_is_told_with_what_is_known_of_it(clock):
    told = []
    spans = Spans(clock, on_close=lambda *span: told.append(span))
    with spans("train", step=3):
        clock.now += 2.0
        with spans("save", step=2):
            clock.now += 1.0
    with spans("train", step=4), spans("train"):
        clock.now += 1.0
    assert told == [
        ("save", 102.0, 103.0, {"step": 2}),
        ("train", 100.0, 103.0, {"step": 3}),
        ("train", 103.0, 104.0, {"step": 4}),
    ]
