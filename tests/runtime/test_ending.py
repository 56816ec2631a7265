"""However a run goes wrong, it goes on or ends in one way: who died is replaced while that helps, the trainer saves
where it can, and the user is told. Without Ray: the components are stand-ins."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from freewheel.errors import ConfigError
from freewheel.observe.recorder import SinkError, read_metrics
from freewheel.observe.run_folder import CONFIG, JOURNAL
from freewheel.queue.journal import Journal
from freewheel.queue.ledger import Frontier
from freewheel.runtime import cluster, main
from freewheel.runtime.account import RunResult
from freewheel.runtime.main import FullyAsyncMain
from freewheel.runtime.recovery import KeepsDying, NothingToTrainOn, NotRecorded, RayDied, Stalled
from freewheel.runtime.remote import NoAnswer
from freewheel.runtime.supervisor import Poller
from freewheel.sync.synchronizer import SyncFailed
from freewheel.trainer.checkpoint import RunLock

from .pipeline import plan_of, small_config
from .standins import WAIT_S, Part, StandInSupervisor, Trainer, successor, until

pytestmark = pytest.mark.timeout(60)


class Scene(FullyAsyncMain):
    """A run whose parts are here. `happens` is called when it has started, and awaited beside it where it can be."""

    happens: Callable[[Scene], Coroutine[Any, Any, None] | None]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.crew = self._supervisor = StandInSupervisor(
            config=self.config, plan=self.plan, run_dir=self.run_dir, on_process=self._record_process
        )

    async def _start(self) -> None:
        await super()._start()
        script = self.happens(self)
        if script is not None:
            self.script = asyncio.ensure_future(script)

    def events(self) -> list[str]:
        return [row["text"] for row in read_metrics(self.run_dir, "event")]


Build = Callable[..., Scene]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    def build(happens: Callable[[Scene], Any] = lambda _: None, **sections: Any) -> Scene:
        recovery = {"backoff_s": 0} | sections.pop("recovery", {})
        config = small_config(run_dir=str(tmp_path), rollout={"replicas": 2}, recovery=recovery, **sections)
        made = Scene(config=config, plan=plan_of(config))
        made.happens = happens
        return made

    @contextmanager
    def no_cluster(**_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(main, "cluster", no_cluster)
    monkeypatch.setattr(main, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(main.ray, "kill", lambda handle: handle.part.die())
    yield build


def said(result: RunResult) -> str:
    return "\n".join(result.summary)


# -- one way to end ---------------------------------------------------------------------------------------------------


def sync_fails(one: Scene) -> None:
    one.crew["sync"].end.set_exception(SyncFailed("no engine took version 3"))


def nothing_to_train_on(one: Scene) -> None:
    one.crew["queue"].told["abandoned"] = {"reward": 10_000}
    one._account.look({"queue": {"step": 3, "abandoned": {}}}, [], 0.0)


def every_group_scores_the_same(one: Scene) -> None:
    nothing_to_train_on(one)
    one.crew["queue"].told["abandoned"] = {"zero_variance": 10_000}


def nothing_moves(one: Scene, *, apart_s: int = 3600) -> None:
    """At each look, and each judgement, so much time has passed."""
    times = itertools.count(apart_s, apart_s)
    one._clock = lambda: next(times)


def a_reward_may_not_fail(one: Scene) -> None:
    one.crew["rollouter-1"].end.set_exception(ZeroDivisionError("a bug in the reward function"))


def dies_whenever_it_is_started(name: str) -> Callable[[Scene], None]:
    def happens(one: Scene) -> None:
        one.crew.on_made = lambda part: part.die() if part.name == name else None
        one.crew[name].die()

    return happens


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (sync_fails, SyncFailed),
        (nothing_to_train_on, NothingToTrainOn),
        (every_group_scores_the_same, NothingToTrainOn),
        (nothing_moves, Stalled),
        (a_reward_may_not_fail, ZeroDivisionError),
        (dies_whenever_it_is_started("rollouter-0"), KeepsDying),
        (dies_whenever_it_is_started("sync"), KeepsDying),
    ],
)
def test_whatever_fails_beside_the_trainer_the_trainer_saves_first(
    scene: Build, happens: Callable[[Scene], None], error: type[Exception]
) -> None:
    one = scene(happens)
    result = one.run()
    assert isinstance(result.error, error)
    assert (result.outcome, result.exit_code, result.steps) == ("failed", 1, 3)
    assert "The checkpoint of step 3 is there" in said(result)
    assert one.crew["queue"].closed and one.crew["trainer"].closed


def test_a_trainer_that_does_not_end_is_not_waited_for_without_end(
    scene: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "SAVE_S", 0.05)
    monkeypatch.setattr(Trainer, "saves", False)
    result = scene(sync_fails).run()
    assert isinstance(result.error, SyncFailed)
    assert "The checkpoint of step 2 is there" in said(result)


def test_a_trainer_that_failed_itself_is_told_as_it_is(scene: Build) -> None:
    one = scene(lambda one: one.crew["trainer"].end.set_exception(ValueError("no finite loss")))
    result = one.run()
    assert "ValueError: no finite loss" in said(result)
    assert not any("saving before" in text for text in one.events())


def test_a_run_whose_checkpoint_cannot_be_loaded_is_not_begun_anew_with_half_a_journal(
    scene: Build, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "step_000020.replaced").mkdir(parents=True)  # left by a kill, and damaged
    with closing(Journal(tmp_path / JOURNAL)) as journal:
        journal.reset(step=20, version=20, frontier=Frontier())
    one = scene(lambda _: pytest.fail("it began"))
    one._resume = True
    result = one.run()
    assert isinstance(result.error, ConfigError) and not one.crew.handles
    assert "there is no checkpoint in it that can be loaded" in said(result)


# -- who died ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["queue", "sync", "trainer", "rollouter-1"])
def test_whoever_dies_is_replaced_and_the_run_goes_on_to_its_end(scene: Build, name: str) -> None:
    async def happens(one: Scene) -> None:
        first = one.crew[name]
        first.die()
        second = await successor(one.crew, first)
        second.die()  # and once more
        await successor(one.crew, second)
        one.crew["trainer"].end.set_result("finished")

    one = scene(happens)
    result = one.run()
    assert result.error is None
    assert (result.outcome, result.steps) == ("finished", 3)
    assert sum(f"{name} died and is restarted" in text for text in one.events()) == 2
    assert sum(part.name == name for part in one.crew.made) == 3
    assert ("export", str(one.run_dir / "final")) in one.crew["trainer"].calls


def test_a_successor_that_is_not_ready_in_time_is_ended_and_replaced_itself(scene: Build) -> None:
    async def not_ready(*_: Any) -> Any:
        raise NoAnswer("open gave no answer within 600 s")

    async def happens(one: Scene) -> None:
        def on_made(part: Part) -> None:
            part.open = not_ready  # type: ignore[method-assign]
            one.crew.on_made = lambda _: None

        one.crew.on_made = on_made
        first = one.crew["trainer"]
        first.die()
        await successor(one.crew, first)
        one.crew["trainer"].end.set_result("stopped")

    one = scene(happens)
    assert one.run().outcome == "stopped"
    assert one.crew.killed == ["trainer"]
    assert any("trainer is killed: open gave no answer within 600 s" in text for text in one.events())


def test_a_part_that_keeps_dying_is_started_as_often_as_was_allowed(scene: Build) -> None:
    one = scene(dies_whenever_it_is_started("sync"), recovery={"max_restarts": 2})
    result = one.run()
    assert isinstance(result.error, KeepsDying)
    assert "sync died 3 times without a step trained in between (recovery.max_restarts)" in said(result)
    assert sum(part.name == "sync" for part in one.crew.made) == 3


def test_a_part_that_is_out_of_reach_is_ended_before_another_takes_its_name(scene: Build) -> None:
    async def happens(one: Scene) -> None:
        first = one.crew["trainer"]
        first.end.set_exception(ActorUnavailableError("the network", b"0" * 16))
        await successor(one.crew, first)
        one.crew["trainer"].end.set_result("stopped")

    one = scene(happens)
    assert one.run().outcome == "stopped"
    assert one.crew.killed == ["trainer"]


def test_when_ray_itself_is_gone_nobody_is_started_on_it(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "lost_processes", lambda: ["raylet"])
    monkeypatch.setattr(main, "SAVE_S", 0.05)
    one = scene(dies_whenever_it_is_started("sync"))
    result = one.run()
    assert isinstance(result.error, RayDied)
    assert "Ray itself died (raylet)" in said(result) and f"resume={one.run_dir}" in said(result)
    assert sum(part.name == "sync" for part in one.crew.made) == 1


@pytest.mark.parametrize("name", ["trainer", "queue"])
def test_a_trainer_that_died_or_has_no_queue_is_not_waited_for_to_save(scene: Build, name: str) -> None:
    one = scene(dies_whenever_it_is_started(name), recovery={"max_restarts": 1})
    result = one.run()
    assert isinstance(result.error, KeepsDying)
    assert ("request_stop",) not in one.crew["trainer"].calls
    assert not any("saving before" in text for text in one.events())


@pytest.mark.parametrize("name", ["queue", "trainer"])
def test_without_a_journal_the_death_of_who_holds_the_run_is_its_end(scene: Build, name: str) -> None:
    one = scene(lambda one: one.crew[name].die(), journal={"enabled": False})
    result = one.run()
    assert isinstance(result.error, NotRecorded)
    assert f"{name} died" in said(result) and "journal.enabled" in said(result)
    assert f"freewheel train resume={one.run_dir}" in said(result)
    assert sum(part.name == name for part in one.crew.made) == 1


@pytest.mark.parametrize("name", ["sync", "rollouter-0"])
def test_without_a_journal_others_are_replaced_all_the_same(scene: Build, name: str) -> None:
    async def happens(one: Scene) -> None:
        first = one.crew[name]
        first.die()
        await successor(one.crew, first)
        one.crew["trainer"].end.set_result("stopped")

    assert scene(happens, journal={"enabled": False}).run().outcome == "stopped"


def test_a_failure_while_the_trainer_is_being_replaced_is_told_at_once(scene: Build) -> None:
    async def happens(one: Scene) -> None:
        await a_trainer_that_loads_for_ever(one)
        sync_fails(one)

    one = scene(happens)
    assert isinstance(one.run().error, SyncFailed)
    assert not any("saving before" in text for text in one.events())


def test_what_stands_still_is_started_anew_once_before_the_run_is_given_up(scene: Build) -> None:
    one = scene(nothing_moves)
    assert isinstance(one.run().error, Stalled)
    assert one.crew.killed == ["rollouter-0", "rollouter-1"]
    assert "rollouter-0 is killed: no step, no token and no score" in "\n".join(one.events())


def test_a_step_that_never_ends_ends_the_trainer(scene: Build) -> None:
    def happens(one: Scene) -> None:
        one.crew["trainer"].told["training"] = True
        nothing_moves(one, apart_s=500)

    one = scene(happens)
    one.run()
    assert one.crew.killed[0] == "trainer"
    assert any("trainer is killed: step 4 has been trained for" in text for text in one.events())


def test_a_pause_is_said_once_and_so_is_its_end(scene: Build) -> None:
    async def happens(one: Scene) -> None:
        queue = one.crew["queue"]
        for paused in ("0 MB free on /data", "1 MB free on /data", ""):
            queue.told = {**queue.told, "paused": paused}
            await until(lambda: one._account._last_queue.get("paused") == paused)  # noqa: B023  # it holds before the next is told
        one.crew["trainer"].end.set_result("stopped")

    one = scene(happens)
    assert one.run().outcome == "stopped"
    found = [text for text in one.events() if "paused" in text or "room again" in text]
    assert found == [
        "The run is paused and continues when there is room: 0 MB free on /data",
        "There is room again: the run continues",
    ]


# -- who is silent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rollouter-1", "queue", "sync", "trainer"])
def test_who_is_silent_is_ended_and_replaced(scene: Build, name: str) -> None:
    asked = []

    async def silent() -> dict[str, Any]:
        asked.append(name)
        raise NoAnswer("stats gave no answer")

    async def happens(one: Scene) -> None:
        first = one.crew[name]
        first.stats = silent
        await successor(one.crew, first)
        one.crew["trainer"].end.set_result("finished")

    one = scene(happens)
    assert one.run().outcome == "finished"
    assert len(asked) == main.SILENT_QUESTIONS  # a question that was lost is no silence
    assert one.crew.killed == [name]
    assert any(f"{name} is killed: it was silent for 60 s" in text for text in one.events())
    assert any(f"{name} died and is restarted" in text for text in one.events())


async def test_an_answer_that_comes_late_is_heard_once_and_nobody_waits_for_it() -> None:
    asking, gate, asked = Poller(), asyncio.Event(), []

    async def slow() -> str:
        asked.append("slow")
        await gate.wait()
        return "late"

    async def quick() -> str:
        return "now"

    questions = {"slow": slow, "quick": quick}
    assert await asking.poll(questions, wait_s=0.01) == {"quick": "now"}
    assert await asking.poll(questions, wait_s=WAIT_S) == {"quick": "now"}  # not for the one that owes an answer
    gate.set()
    assert await asking.poll(questions, wait_s=WAIT_S, late=True) == {"slow": "late", "quick": "now"}
    assert asked == ["slow"]


async def test_only_silence_in_a_row_counts() -> None:
    asking, answers = Poller(), [NoAnswer("1"), NoAnswer("2"), None, NoAnswer("3")]

    async def ask() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    counts = []
    for _ in range(4):
        await asking.poll({"peer": ask}, wait_s=WAIT_S)
        counts.append(asking.silent["peer"])
    assert counts == [1, 2, 0, 1]


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self) -> None:
        self.closed = False

    def write(self, kind: str, step: int, values: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_a_start_that_is_refused_leaves_no_run_that_the_next_one_finds(
    scene: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(**_: Any) -> list[Any]:
        raise SinkError("observe.prometheus_port", 9000, "it is taken")

    monkeypatch.setattr(main, "open_sinks", taken)
    one = scene()
    with pytest.raises(ConfigError, match=r"observe\.prometheus_port = 9000: it is taken"):
        one.run()
    assert not (one.run_dir / CONFIG).exists()
    sink = Sink()
    monkeypatch.setattr(main, "open_sinks", lambda **_: [sink])
    (one.run_dir / CONFIG).mkdir()
    with pytest.raises(ConfigError, match="it cannot be written"):
        one.run()
    assert sink.closed
    with RunLock(one.run_dir):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("ray.address", "nowhere", "start one")])
def test_sinks_are_closed_when_ray_is_not_joined_and_an_interrupt_ends_in_words(
    scene: Build, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def no_ray(*_: Any) -> None:
        raise error

    monkeypatch.setattr(main, "cluster", cluster.cluster)
    monkeypatch.setattr(cluster, "_connect", no_ray)
    sink = Sink()
    monkeypatch.setattr(main, "open_sinks", lambda **_: [sink])
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    one = scene()
    if isinstance(error, ConfigError):
        with pytest.raises(ConfigError):
            one.run()
    else:
        result = one.run()
        assert (result.outcome, result.exit_code) == ("stopped", 130)
        assert "Stopped before training began" in said(result)
    assert sink.closed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["joined", "left"])
def test_a_signal_while_ray_is_joined_or_left_lets_that_be_finished(
    monkeypatch: pytest.MonkeyPatch, when: str, number: signal.Signals
) -> None:
    done: list[str] = []

    def act(name: str) -> None:
        if name == when:
            os.kill(os.getpid(), number)
        done.append(name)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: act("left"))
    monkeypatch.setattr(cluster, "_connect", lambda *_: act("joined"))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stops = pytest.raises(KeyboardInterrupt) if when == "joined" else nullcontext()
    with stops, cluster.cluster(address=None, cpus=1):
        done.append("used")
    assert done == (["joined", "left"] if when == "joined" else ["joined", "used", "left"])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_ctrl_c_while_closing_waits_for_nobody(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "STOP_S", WAIT_S)

    async def slow_to_close() -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(WAIT_S)

    def happens(one: Scene) -> None:
        one.crew["rollouter-0"].close = slow_to_close
        os.kill(os.getpid(), signal.SIGINT)  # the first: it saves

    one = scene(happens)
    result = one.run()
    assert (result.outcome, result.exit_code) == ("stopped", 130)
    assert "The checkpoint of step 3 is there" in said(result)
    assert all(part.dead.is_set() for part in one.crew.made)


async def a_trainer_that_loads_for_ever(one: Scene) -> None:
    def on_made(part: Part) -> None:
        part.opens.clear()

    one.crew.on_made = on_made
    first = one.crew["trainer"]
    first.die()
    await until(lambda: one.crew["trainer"] is not first)


def test_ctrl_c_while_the_trainer_is_being_replaced_stops_the_run(scene: Build) -> None:
    async def happens(one: Scene) -> None:
        await until(lambda: one._account.statistics.get("trainer"))
        await a_trainer_that_loads_for_ever(one)
        os.kill(os.getpid(), signal.SIGINT)

    one = scene(happens)
    result = one.run()
    assert (result.outcome, result.exit_code, result.error) == ("stopped", 130, None)
    assert f"The checkpoint of step 2 is there; continue with: freewheel train resume={one.run_dir}" in said(result)
    assert all(part.dead.is_set() for part in one.crew.made)


def test_a_trainer_that_dies_while_it_is_to_stop_is_not_replaced(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "saves", False)

    async def happens(one: Scene) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: ("request_stop",) in one.crew["trainer"].calls)
        one.crew["trainer"].die()

    one = scene(happens)
    assert one.run().outcome == "stopped"
    assert sum(part.name == "trainer" for part in one.crew.made) == 1
