"""However a run goes wrong, it ends in one way: the trainer saves where it can, and the user is told. Without Ray: the
components are stand-ins behind handles like Ray's."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from freewheel.judge.errors import ConfigError
from freewheel.observe.recorder import read_metrics
from freewheel.runtime import cluster, main
from freewheel.runtime.account import RunResult
from freewheel.runtime.actors import PeerSilent, RemoteQueue, call
from freewheel.runtime.asking import Asking
from freewheel.runtime.main import FullyAsyncMain
from freewheel.runtime.progress import NothingToTrainOn, Stalled
from freewheel.sync.synchronizer import SyncFailed
from freewheel.trainer.trainer import Row

from .pipeline import plan_of, small_config

pytestmark = pytest.mark.timeout(60)

WAIT_S = 30.0


class Handle:
    """Ray's way of calling, with no process behind it."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, method: str) -> Any:
        called = getattr(self.part, method)
        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(called(*args, **kwargs)))


class Part:
    """A component: its loop ends when it is told how, its statistics are what a test says."""

    def __init__(self, **stats: Any) -> None:
        self.told = stats
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closed = False

    async def run(self) -> Any:
        return await self.end

    async def stats(self) -> dict[str, Any]:
        return self.told

    async def close(self) -> None:
        self.closed = True


class Trainer(Part):
    """At step 3, saved up to 2; when it is to stop it saves."""

    saves = True

    async def request_stop(self) -> None:
        if self.saves and not self.end.done():
            self.told["saved_step"] = 3
            self.end.set_result("stopped")

    async def rows(self) -> list[Row]:
        return [Row("step", 3, {})] if self.end.done() else []


class Queue(Part):
    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        return await getattr(self, method)(*args, **kwargs)

    async def replica_lost(self, name: str) -> int:
        return 0


class Scene(FullyAsyncMain):
    """A run whose parts are here."""

    killed: list[str]
    happens: Callable[[Scene], None]

    async def _start(self) -> None:
        self.killed = []
        self._account.begin(0)
        self.trainer = Trainer(global_steps=3, saved_step=2)
        self.queue, self.sync = Queue(step=3, abandoned={}), Part()
        self.parts = {f"rollouter-{index}": Part() for index in range(2)}
        self._rollouters = {name: Handle(part) for name, part in self.parts.items()}
        self._handles = {"queue": Handle(self.queue), "sync": Handle(self.sync), "trainer": Handle(self.trainer)}
        for name, handle in {**self._rollouters, **self._handles}.items():
            if name != "queue":
                self._loops[name] = asyncio.ensure_future(handle.run.remote())
        self._account.started()
        self.happens(self)

    def _new_rollouter(self, name: str) -> Any:
        raise RuntimeError(f"{name} cannot be started")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    def build(happens: Callable[[Scene], None] = lambda _: None, **sections: Any) -> Scene:
        config = small_config(run_dir=str(tmp_path), **sections)
        made = Scene(config=config, plan=plan_of(config))
        made.happens = happens

        def kill(handle: Handle) -> None:
            made.killed += [name for name, one in made._rollouters.items() if one is handle]
            if not handle.part.end.done():
                handle.part.end.set_exception(ActorDiedError())

        monkeypatch.setattr(main.ray, "kill", kill)
        return made

    @contextmanager
    def no_cluster(**_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(main, "cluster", no_cluster)
    monkeypatch.setattr(main, "LOOK_EVERY_S", 0.01)
    yield build


def said(result: RunResult) -> str:
    return "\n".join(result.summary)


# -- one way to end ---------------------------------------------------------------------------------------------------


def sync_fails(one: Scene) -> None:
    one.sync.end.set_exception(SyncFailed("no engine took version 3"))


def nothing_to_train_on(one: Scene) -> None:
    one.queue.told["abandoned"] = {"reward": 10_000}
    one.queue.told["step"] = 3
    one._account.look({"queue": {"step": 3, "abandoned": {}}}, [], 0.0)


def every_group_scores_the_same(one: Scene) -> None:
    nothing_to_train_on(one)
    one.queue.told["abandoned"] = {"zero_variance": 10_000}


def nothing_moves(one: Scene) -> None:
    hours = itertools.count(3600, 3600)
    one._clock = lambda: next(hours)


def a_reward_may_not_fail(one: Scene) -> None:
    one.parts["rollouter-1"].end.set_exception(ZeroDivisionError("a bug in the reward function"))


def a_rollouter_dies_for_the_last_time(one: Scene) -> None:
    one._replaced["rollouter-0"] = main.MAX_REPLACEMENTS
    one.parts["rollouter-0"].end.set_exception(ActorDiedError())


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (sync_fails, SyncFailed),
        (nothing_to_train_on, NothingToTrainOn),
        (every_group_scores_the_same, NothingToTrainOn),
        (nothing_moves, Stalled),
        (a_reward_may_not_fail, ZeroDivisionError),
        (a_rollouter_dies_for_the_last_time, RuntimeError),
    ],
)
def test_whatever_fails_beside_the_trainer_the_trainer_saves_first(
    scene: Callable[..., Scene], happens: Callable[[Scene], None], error: type[Exception]
) -> None:
    one = scene(happens)
    result = one.run()
    assert isinstance(result.error, error)
    assert (result.outcome, result.exit_code, result.steps) == ("failed", 1, 3)
    assert "The checkpoint of step 3 is there" in said(result)
    assert one.queue.closed and one.trainer.closed


def test_a_trainer_that_does_not_end_is_not_waited_for_without_end(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "SAVE_S", 0.05)
    monkeypatch.setattr(Trainer, "saves", False)
    result = scene(sync_fails).run()
    assert isinstance(result.error, SyncFailed)
    assert "The checkpoint of step 2 is there" in said(result)


def test_a_trainer_that_failed_itself_is_told_as_it_is(scene: Callable[..., Scene]) -> None:
    one = scene(lambda one: one.trainer.end.set_exception(ValueError("no finite loss")))
    result = one.run()
    assert "ValueError: no finite loss" in said(result)
    assert not any("saving before" in row["text"] for row in read_metrics(one.run_dir, "event"))


# -- who is silent ----------------------------------------------------------------------------------------------------


def test_a_silent_rollouter_is_ended_and_does_not_keep_others_from_being_heard(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "SILENT_S", 0.05)
    monkeypatch.setattr(main, "ANSWER_S", 0.01)

    class Silent(Part):
        async def stats(self) -> dict[str, Any]:
            await asyncio.sleep(WAIT_S)
            return {}

    def happens(one: Scene) -> None:
        silent = Silent()
        silent.end = one.parts["rollouter-1"].end
        one._rollouters["rollouter-1"].part = silent

    one = scene(happens)
    result = one.run()
    assert one.killed[0] == "rollouter-1"
    assert "rollouter-1 cannot be started" in said(result)  # it was to be replaced
    events = [row["text"] for row in read_metrics(one.run_dir, "event")]
    assert any("rollouter-1 was silent" in text for text in events)
    assert any("rollouter-1 died and is started anew" in text for text in events)


async def test_an_answer_that_comes_late_is_heard_once_and_nobody_waits_for_it() -> None:
    asking, gate, asked = Asking(), asyncio.Event(), []

    async def slow() -> str:
        asked.append("slow")
        await gate.wait()
        return "late"

    async def quick() -> str:
        return "now"

    questions = {"slow": slow, "quick": quick}
    assert await asking.round(questions, wait_s=0.01) == {"quick": "now"}
    assert await asking.round(questions, wait_s=WAIT_S) == {"quick": "now"}  # not for the one that owes an answer
    gate.set()
    assert await asking.round(questions, wait_s=WAIT_S, late=True) == {"slow": "late", "quick": "now"}
    assert asked == ["slow"]


async def test_only_silence_in_a_row_counts() -> None:
    asking, answers = Asking(), [PeerSilent("1"), PeerSilent("2"), None, PeerSilent("3")]

    async def ask() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    counts = []
    for _ in range(4):
        await asking.round({"peer": ask}, wait_s=WAIT_S)
        counts.append(asking.silent["peer"])
    assert counts == [1, 2, 0, 1]


# -- calls ------------------------------------------------------------------------------------------------------------


async def test_a_time_out_of_the_peers_own_is_not_its_silence() -> None:
    class Peer:
        async def works(self) -> None:
            raise TimeoutError("a tool took too long")

        async def hangs(self) -> None:
            await asyncio.sleep(WAIT_S)

    with pytest.raises(TimeoutError, match="a tool took too long"):
        await call(Handle(Peer()), "works")
    with pytest.raises(PeerSilent, match=r"hangs gave no answer within 0\.01 s"):
        await call(Handle(Peer()), "hangs", deadline_s=0.01)


async def test_a_queue_behind_a_handle_is_closed_by_its_client() -> None:
    queue = Queue()
    await RemoteQueue(Handle(queue)).close()
    assert queue.closed


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self) -> None:
        self.closed = False

    def write(self, kind: str, step: int, values: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("ray.address", "nowhere", "start one")])
def test_sinks_are_closed_when_ray_is_not_joined_and_an_interrupt_ends_in_words(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def no_ray(*_: Any) -> None:
        raise error

    monkeypatch.setattr(main, "cluster", cluster.cluster)
    monkeypatch.setattr(cluster, "_connect", no_ray)
    sink = Sink()
    monkeypatch.setattr(main, "open_sinks", lambda **_: [sink])
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    one = scene()
    if isinstance(error, ConfigError):
        with pytest.raises(ConfigError):
            one.run()
    else:
        result = one.run()
        assert (result.outcome, result.exit_code) == ("stopped", 130)
        assert "Stopped before training began" in said(result)
    assert sink.closed


def test_an_interrupt_while_ray_is_left_lets_it_go_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    def shutdown() -> None:
        left.append("begun")
        if len(left) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", shutdown)
    monkeypatch.setattr(cluster, "_connect", lambda *_: None)
    with cluster.cluster(address=None, cpus=1):
        pass
    assert left == ["begun", "begun"]


def test_ctrl_c_while_closing_waits_for_nobody(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "STOP_S", WAIT_S)

    class SlowToClose(Part):
        async def close(self) -> None:
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
            await asyncio.sleep(WAIT_S)
            self.closed = True

    def happens(one: Scene) -> None:
        slow = SlowToClose()
        slow.end = one.parts["rollouter-0"].end
        one._rollouters["rollouter-0"].part = slow
        os.kill(os.getpid(), signal.SIGINT)  # the first: it saves

    one = scene(happens)
    result = one.run()
    assert (result.outcome, result.exit_code) == ("stopped", 130)
    assert "The checkpoint of step 3 is there" in said(result)
    assert one.killed == ["rollouter-0", "rollouter-1"]
