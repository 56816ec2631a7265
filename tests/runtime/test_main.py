"""Failures of a run, with stand-ins instead of Ray actors: dead components are replaced while that helps, the trainer
saves if it can, and the user is told."""

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
from freewheel.sync.synchronizer import SyncFailed
from freewheel.trainer.checkpoint import RunLock

from .pipeline import plan_of, small_config
from .standins import WAIT_S, Part, StandInSupervisor, Trainer, successor, until

pytestmark = pytest.mark.timeout(60)


class Scene(FullyAsyncMain):
    """A run with stand-ins. `happens` is called after the start; a coroutine of it runs concurrently."""

    happens: Callable[[Scene], Coroutine[Any, Any, None] | None]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.supervisor = self._supervisor = StandInSupervisor(
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


def nothing_moves(one: Scene, *, apart_s: int = 3600) -> None:
    """Let this much time pass at each look."""
    times = itertools.count(apart_s, apart_s)
    one._clock = lambda: next(times)


def dies_whenever_it_is_started(name: str) -> Callable[[Scene], None]:
    def happens(one: Scene) -> None:
        one.supervisor.on_made = lambda part: part.die() if part.name == name else None
        one.supervisor[name].die()

    return happens


def fails(name: str, error: BaseException) -> Callable[[Scene], None]:
    return lambda one: one.supervisor[name].end.set_exception(error)


SYNC_FAILS = fails("sync", SyncFailed("no engine took version 3"))


def abandons(reason: str) -> Callable[[Scene], None]:
    def happens(one: Scene) -> None:
        one.supervisor["queue"].statistics["abandoned"] = {reason: 10_000}
        one._account.look({"queue": {"step": 3, "abandoned": {}}}, [], 0.0)

    return happens


async def a_trainer_that_loads_for_ever(one: Scene) -> None:
    one.supervisor.on_made = lambda part: part.opens.clear()
    first = one.supervisor["trainer"]
    first.die()
    await until(lambda: one.supervisor["trainer"] is not first)


async def sync_fails_while_the_trainer_loads(one: Scene) -> None:
    await a_trainer_that_loads_for_ever(one)
    SYNC_FAILS(one)


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (SYNC_FAILS, SyncFailed),
        (abandons("reward"), NothingToTrainOn),
        (abandons("zero_variance"), NothingToTrainOn),
        (nothing_moves, Stalled),
        (fails("rollouter-1", ZeroDivisionError("a bug in the reward function")), ZeroDivisionError),
        (dies_whenever_it_is_started("rollouter-0"), KeepsDying),
        (dies_whenever_it_is_started("sync"), KeepsDying),
    ],
)
def test_the_trainer_saves_first_whatever_else_fails(
    scene: Build, happens: Callable[[Scene], None], error: type[Exception]
) -> None:
    one = scene(happens, recovery={"max_restarts": 2})
    result = one.run()
    assert isinstance(result.error, error)
    if error is KeepsDying:
        assert "died 3 times without a step trained in between (recovery.max_restarts)" in said(result)
        assert len(one.supervisor.made) == 5 + 2
    assert (result.outcome, result.exit_code, result.steps) == ("failed", 1, 3)
    assert "The checkpoint of step 3 is there" in said(result)
    assert one.supervisor["queue"].closed and one.supervisor["trainer"].closed


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (fails("trainer", ValueError("no finite loss")), ValueError),
        (dies_whenever_it_is_started("trainer"), KeepsDying),
        (dies_whenever_it_is_started("queue"), KeepsDying),
        (sync_fails_while_the_trainer_loads, SyncFailed),
    ],
)
def test_a_trainer_that_cannot_save_is_not_asked_to(
    scene: Build, happens: Callable[[Scene], Any], error: type[Exception]
) -> None:
    one = scene(happens, recovery={"max_restarts": 1})
    result = one.run()
    assert isinstance(result.error, error) and f"{error.__name__}: {result.error}" in said(result)
    assert ("request_stop",) not in one.supervisor["trainer"].calls
    assert not any("saving before" in text for text in one.events())


def test_waiting_for_the_trainer_to_save_has_a_limit(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "SAVE_S", 0.05)
    monkeypatch.setattr(Trainer, "saves", False)
    result = scene(SYNC_FAILS).run()
    assert isinstance(result.error, SyncFailed) and "The checkpoint of step 2 is there" in said(result)


def test_a_resume_without_a_usable_checkpoint_needs_the_whole_journal(scene: Build, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_000020.replaced").mkdir(parents=True)  # damaged, left by a kill
    with closing(Journal(tmp_path / JOURNAL)) as journal:
        journal.reset(step=20, version=20, frontier=Frontier())
    one = scene(lambda _: pytest.fail("it began"))
    one._resume = True
    result = one.run()
    assert isinstance(result.error, ConfigError) and not one.supervisor.handles
    assert "there is no checkpoint in it that can be loaded" in said(result)


# -- who died ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "journal"),
    [
        *((name, True) for name in ("queue", "sync", "trainer", "rollouter-1")),
        *((name, False) for name in ("sync", "rollouter-0")),
    ],
)
def test_a_dead_component_is_replaced_and_the_run_finishes(scene: Build, name: str, journal: bool) -> None:
    async def happens(one: Scene) -> None:
        first = one.supervisor[name]
        first.die()
        second = await successor(one.supervisor, first)
        second.die()  # a second time
        await successor(one.supervisor, second)
        one.supervisor["trainer"].end.set_result("finished")

    one = scene(happens, journal={"enabled": journal})
    result = one.run()
    assert result.error is None
    assert (result.outcome, result.steps) == ("finished", 3)
    assert sum(f"{name} died and is restarted" in text for text in one.events()) == 2
    assert sum(part.name == name for part in one.supervisor.made) == 3
    assert ("export", str(one.run_dir / "final")) in one.supervisor["trainer"].calls


@pytest.mark.parametrize("unreachable", [True, False], ids=["unreachable", "not open in time"])
def test_a_component_that_may_be_alive_is_killed_before_it_is_replaced(scene: Build, unreachable: bool) -> None:
    async def not_ready(*_: Any) -> Any:
        raise NoAnswer("open gave no answer within 600 s")

    async def happens(one: Scene) -> None:
        first = one.supervisor["trainer"]

        def on_made(part: Part) -> None:
            part.open = not_ready  # type: ignore[method-assign]
            one.supervisor.on_made = lambda _: None

        if unreachable:
            first.end.set_exception(ActorUnavailableError("the network", b"0" * 16))
        else:
            one.supervisor.on_made = on_made
            first.die()
        await successor(one.supervisor, first)
        one.supervisor["trainer"].end.set_result("stopped")

    one = scene(happens)
    assert one.run().outcome == "stopped"
    assert one.supervisor.killed == ["trainer"]
    why = "" if unreachable else "open gave no answer within 600 s"
    assert any(f"trainer is killed: {why}" in text for text in one.events())


def test_nothing_is_restarted_when_ray_itself_died(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "lost_processes", lambda: ["raylet"])
    monkeypatch.setattr(main, "SAVE_S", 0.05)
    one = scene(dies_whenever_it_is_started("sync"))
    result = one.run()
    assert isinstance(result.error, RayDied)
    assert "Ray itself died (raylet)" in said(result) and f"resume={one.run_dir}" in said(result)
    assert sum(part.name == "sync" for part in one.supervisor.made) == 1


@pytest.mark.parametrize("name", ["queue", "trainer"])
def test_without_a_journal_a_dead_queue_or_trainer_ends_the_run(scene: Build, name: str) -> None:
    one = scene(lambda one: one.supervisor[name].die(), journal={"enabled": False})
    result = one.run()
    assert isinstance(result.error, NotRecorded)
    assert f"{name} died" in said(result) and "journal.enabled" in said(result)
    assert f"freewheel train resume={one.run_dir}" in said(result)
    assert sum(part.name == name for part in one.supervisor.made) == 1


@pytest.mark.parametrize(
    ("training", "apart_s", "killed", "why"),
    [
        (False, 3600, ["rollouter-0", "rollouter-1"], "rollouter-0 is killed: no step, no token and no score"),
        (True, 500, ["trainer"], "trainer is killed: step 4 has been trained for"),
    ],
)
def test_stalled_components_are_restarted_once_before_the_run_ends(
    scene: Build, training: bool, apart_s: int, killed: list[str], why: str
) -> None:
    def happens(one: Scene) -> None:
        one.supervisor["trainer"].statistics["training"] = training
        nothing_moves(one, apart_s=apart_s)

    one = scene(happens)
    assert isinstance(one.run().error, Stalled)
    assert one.supervisor.killed[: len(killed)] == killed
    assert why in "\n".join(one.events())


# -- who is silent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rollouter-1", "queue", "sync", "trainer"])
def test_a_silent_component_is_killed_and_replaced(scene: Build, name: str) -> None:
    asked = []

    async def silent() -> dict[str, Any]:
        asked.append(name)
        raise NoAnswer("stats gave no answer")

    async def happens(one: Scene) -> None:
        first = one.supervisor[name]
        first.stats = silent
        await successor(one.supervisor, first)
        one.supervisor["trainer"].end.set_result("finished")

    one = scene(happens)
    assert one.run().outcome == "finished"
    assert len(asked) == main.SILENT_QUESTIONS  # one lost question is not silence
    assert one.supervisor.killed == [name]
    assert any(f"{name} is killed: it was silent for 60 s" in text for text in one.events())
    assert any(f"{name} died and is restarted" in text for text in one.events())


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Sink:
    def __init__(self) -> None:
        self.closed = False

    def write(self, kind: str, step: int, values: Any) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_a_refused_start_leaves_no_run_behind(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_sinks_are_closed_when_ray_does_not_start(
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
def test_a_signal_does_not_interrupt_the_start_or_the_end_of_ray(
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


def test_ctrl_c_while_closing_ends_the_wait(scene: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "STOP_S", WAIT_S)

    async def slow_to_close() -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(WAIT_S)

    def happens(one: Scene) -> None:
        one.supervisor["rollouter-0"].close = slow_to_close
        os.kill(os.getpid(), signal.SIGINT)  # the first one: the run saves

    one = scene(happens)
    result = one.run()
    assert (result.outcome, result.exit_code) == ("stopped", 130)
    assert "The checkpoint of step 3 is there" in said(result)
    assert all(part.dead.is_set() for part in one.supervisor.made)


@pytest.mark.parametrize("dies", ["before", "while it stops", "never, and Ctrl-C comes again"])
def test_ctrl_c_stops_a_run_whose_trainer_does_not_save(
    scene: Build, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    monkeypatch.setattr(Trainer, "saves", False)

    async def happens(one: Scene) -> None:
        await until(lambda: one._account.statistics.get("trainer"))
        if dies == "before":
            await a_trainer_that_loads_for_ever(one)
        os.kill(os.getpid(), signal.SIGINT)
        if dies == "before":
            return
        await until(lambda: ("request_stop",) in one.supervisor["trainer"].calls)
        if dies == "while it stops":
            one.supervisor["trainer"].die()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    one = scene(happens)
    result = one.run()
    assert (result.outcome, result.exit_code, result.error) == ("stopped", 130, None)
    assert f"The checkpoint of step 2 is there; continue with: freewheel train resume={one.run_dir}" in said(result)
    assert all(part.dead.is_set() for part in one.supervisor.made)
    assert sum(part.name == "trainer" for part in one.supervisor.made) == (2 if dies == "before" else 1)
