"""Frames survive any fragmentation, Ctrl-C is noticed in every wait, and an interrupted start leaves nothing."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.judge import (
    Endpoint,
    Failed,
    JudgeConfig,
    JudgeRequest,
    JudgeStats,
    Price,
    Scored,
    Secret,
    Skipped,
    Usage,
)
from freewheel.judge.transport import (
    CALLER_DECODER,
    ENGINE_DECODER,
    AskStats,
    Cancel,
    Close,
    Configure,
    EngineFailure,
    LogLine,
    Pipe,
    Results,
    Started,
    StatsReply,
    Submit,
    pack,
)

TO_ENGINE: list[Any] = [
    Submit(3, [0, 2], [JudgeRequest("ä\x00\U0001f600", "p", "r", "id"), JudgeRequest("", skip="why")], 12.5),
    Submit(4, [0], [JudgeRequest("x" * 200_000)], None),
    Cancel(3),
    AskStats(),
    Close(),
]
TO_CALLER: list[Any] = [
    Started(),
    Results(
        [
            (1, 0, Scored(7.0, "**7**", Usage(10, 2), {"style": 7.0}, cached=True, attempts=0)),
            (1, 1, Failed("deadline", 3, "no reply so far", Usage(1, 0))),
            (2, 0, Skipped("empty")),
        ],
        0.25,
    ),
    StatsReply(JudgeStats(submitted=3, failed={"auth": 1})),
    LogLine(30, "one\ntwo"),
    EngineFailure("why"),
]


def received(decoder: Any, pieces: Iterable[bytes]) -> list[Any]:
    got: list[Any] = []
    pipe = Pipe(decoder, got.append)
    for piece in pieces:
        pipe.data_received(piece)
    return got


@given(st.lists(st.integers(1, 400), max_size=50))
def test_messages_survive_any_fragmentation(cuts: list[int]) -> None:
    for decoder, messages in ((ENGINE_DECODER, TO_ENGINE), (CALLER_DECODER, TO_CALLER)):
        stream = b"".join(pack(message) for message in messages)
        ends = [*accumulate(cuts), len(stream)]
        assert received(decoder, [stream[a:b] for a, b in pairwise([0, *ends])]) == messages


def test_the_config_is_sent_to_the_child_with_its_key() -> None:
    endpoints = (Endpoint(url="http://a", api_key="sk-own"), Endpoint(url="http://b", weight=0, model="m2"))
    config = JudgeConfig(
        endpoint=endpoints, model="m", api_key="sk-main", rubric="yes_no", prices={"m": Price(input=1, output=2)},
        sampling={"top_p": 0.5, "stop": ["x"]}, concurrency="fixed:3",
    )  # fmt: skip
    (got,) = received(ENGINE_DECODER, [pack(Configure(config, 42, 1.5))])
    assert got.config == config and got.parent_pid == 42 and got.spent == 1.5
    assert [key.reveal() for e in got.config.endpoints if (key := got.config.key_for(e))] == ["sk-own", "sk-main"]
    assert got.config.api_key.source == "the api_key argument"
    (got,) = received(
        ENGINE_DECODER, [pack(Configure(JudgeConfig(endpoint="http://a", model="m", api_key=Secret(None)), 1, 0.0))]
    )
    assert not got.config.api_key, "pickling left it out"


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupt_from_another_thread(waits_in: str) -> threading.Thread:
    """Raise SIGINT in a helper thread while the main thread waits in `waits_in`.

    A signal that another thread catches does not interrupt the main thread's wait. The same happens when a signal
    arrives after CPython's last check and before the thread sleeps.
    """
    main = threading.main_thread().ident
    assert main is not None

    def run() -> None:
        names: list[str] = []
        while names[:1] not in (["wait"], ["_wait_for_tstate_lock"]) or waits_in not in names:
            frame, names = sys._current_frames()[main], []
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_signal_that_another_thread_catches_interrupts_a_wait_for_verdicts(mock: Any, make_judge: Any) -> None:
    judge = make_judge(mock(hang_share=1.0).url)
    for attempt in range(20):
        handle = judge.submit([f"a {attempt}"])
        helper = interrupt_from_another_thread("result")
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            handle.result(20.0)
        assert time.monotonic() - began < 10.0, "it must not be noticed only when the wait ends"
        helper.join()
        handle.cancel()


@pytest.mark.parametrize("moment", ["before the thread runs", "after the thread runs"])
def test_an_interrupted_start_leaves_no_thread_and_a_judge_that_works(
    mock: Any, make_judge: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    judge = make_judge(mock().url)
    start, threads = threading.Thread.start, threading.active_count()

    def interrupted(thread: threading.Thread) -> None:
        on_main = threading.current_thread() is threading.main_thread()  # the engine starts threads of its own
        if not on_main or moment == "after the thread runs":
            start(thread)
        if on_main:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            judge.submit(["a"])
    assert threading.active_count() == threads
    assert judge.submit(["b"]).result(20)[0].status == "scored"
