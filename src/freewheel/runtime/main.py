"""`FullyAsyncMain`: starts the components, watches them, recovers what can be recovered, and stops everything.

    start:  Ray ─▶ actors, all at once ─▶ opened in the order of their needs ─▶ their loops
    watch:  a look every second: rows to the recorder, statistics to log and view, progress to the watchdog
    end:    trainer's loop ended ─▶ queue closed ─▶ export ─▶ everything released, whatever happened before

It waits for: the components' loops (each look is bounded). It is unblocked by: the trainer's end, a component's death,
Ctrl-C or SIGTERM. A dead rollouter is replaced, and what it worked on is issued again. Runs in the user's own process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from freewheel.judge.errors import ConfigError
from freewheel.observe.alerts import Alerts
from freewheel.observe.logs import attach_log, component_statistics, detach_log
from freewheel.observe.recorder import Recorder
from freewheel.observe.sinks import Sink, SinkError, open_sinks
from freewheel.queue.ledger import Frontier
from freewheel.runtime import actors
from freewheel.runtime.account import RunAccount
from freewheel.runtime.actors import MANY, PeerSilent, RemoteQueue, call
from freewheel.runtime.building import model_folder, named_function
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.run_dir import new_run, write_config
from freewheel.trainer.checkpoint import CheckpointStore, RunLock, RunLocked
from freewheel.trainer.saving import Resumed

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan

log = logging.getLogger("freewheel.runtime")

LOOK_EVERY_S = 1.0
"""Between two looks at the components. A look costs a few milliseconds of theirs."""
START_S = 600.0
"""Longest time for an actor to load its model."""
STOP_S = 10.0
"""Longest time for a component to close when a run ends."""
MAX_REPLACEMENTS = 3
"""Times that one rollouter is started anew: one that keeps dying has a cause that restarting does not mend."""
EXPORT = "final"

Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    outcome: Outcome
    run_dir: Path
    steps: int
    summary: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """As shells know them: 130 after Ctrl-C."""
        return {"finished": 0, "stopped": 130, "failed": 1}[self.outcome]


class Stalled(RuntimeError):
    """Nothing moved for a long time, and work remains."""


class NothingToTrainOn(RuntimeError):
    """Prompt after prompt is given up, and no step comes of it."""


class FullyAsyncMain:
    """Nothing that it started outlives it. Hook: `custom_monitor`, by subclass or by configuration."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        plan: Plan,
        resume: bool = False,
        view: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config if config.run_dir else new_run(config)
        self.plan = plan
        self.run_dir = Path(self.config.run_dir or "").absolute()
        self._resume = resume
        self._clock = clock
        self._view = view
        self._monitor = named_function("observe.custom_monitor", config.observe.custom_monitor)
        self._handles: dict[str, Any] = {}
        self._rollouters: dict[str, Any] = {}
        self._loops: dict[str, asyncio.Task[Any]] = {}
        self._replaced: dict[str, int] = {}
        self._stopping = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """The whole run, in the foreground. `ConfigError`: it cannot begin."""
        with self._own_folder():
            sinks = self._sinks()
            given = ray.is_initialized()  # a notebook's, or a test's: ours to use and theirs to end
            try:
                if not given:
                    self._connect()  # before our signal handlers, which replace those that Ray sets
                return asyncio.run(self._whole(sinks))
            finally:
                if not given:
                    ray.shutdown()

    @contextmanager
    def _own_folder(self) -> Iterator[None]:
        """The run directory, for nobody else while this run lasts, with its configuration and its log."""
        lock = RunLock(self.run_dir)
        try:
            lock.acquire()
            write_config(self.config)
            attach_log(self.run_dir, "main")
        except OSError as error:
            lock.release()
            remedy = f"it cannot be written ({error.strerror}): give another folder"
            raise ConfigError("run_dir", str(self.run_dir), remedy) from error
        except RunLocked as error:
            raise ConfigError("run_dir", str(self.run_dir), str(error)) from error
        try:
            yield
        finally:
            detach_log()
            lock.release()

    def _sinks(self) -> list[Sink]:
        """Before Ray is started: what cannot work is to be said at once."""
        observe = self.config.observe
        try:
            return open_sinks(
                run_dir=self.run_dir,
                tensorboard=observe.tensorboard,
                wandb_project=observe.wandb_project,
                prometheus_port=observe.prometheus_port,
                config=self.config.to_dict(),
            )
        except SinkError as error:
            raise ConfigError(error.key, error.value, error.remedy) from error

    async def _whole(self, sinks: list[Sink]) -> RunResult:
        recorder = Recorder(run_dir=self.run_dir, sinks=sinks, alerts=Alerts(self.config.observe.alerts))
        account = RunAccount(config=self.config, run_dir=self.run_dir, recorder=recorder, view=self._view)
        self._account = account
        outcome: Outcome = "failed"
        error: BaseException | None = None
        self._working = asyncio.ensure_future(self._work())
        try:
            with self._signals():
                outcome = await self._working
        except asyncio.CancelledError:
            outcome = "stopped"
        except Exception as caught:  # told to the user with what to do next, whatever it was
            error = _cause(caught)
            log.error("The run ended: %s: %s", type(error).__name__, error, exc_info=caught)
        finally:
            await self._end()
            recorder.close()
        summary = account.finish(outcome, error)
        return RunResult(outcome=outcome, run_dir=self.run_dir, steps=account.step, summary=summary, error=error)

    async def _work(self) -> Outcome:
        await self._start()
        try:
            outcome = await self._watch()
        except Exception:
            with suppress(Exception):  # what the others know by now may say why
                await self._look(last=True)
            raise
        await self._look(last=True)
        if outcome == "finished" and self._account.step == 0:
            raise NothingToTrainOn("every prompt was given up and no step was taken: the warnings in the log say why")
        if outcome == "finished":
            await call(self._handles["trainer"], "export", str(self.run_dir / EXPORT), deadline_s=START_S)
        return outcome

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM: finish the step and save. A second one: end now."""
        loop = asyncio.get_running_loop()
        here = threading.current_thread() is threading.main_thread()  # elsewhere signals are somebody else's
        numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
        for number in numbers:
            loop.add_signal_handler(number, self._interrupted)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _interrupted(self) -> None:
        self._stopping += 1
        trainer = self._loops.get("trainer")
        if self._stopping > 1 or trainer is None or trainer.done():
            self._working.cancel()
            return
        self._account.say("Finishing the step and saving; once more ends at once")
        self._handles["trainer"].request_stop.remote()

    # -- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self.config
        resumed = self._resumed() if self._resume else None
        path = resumed.path if resumed else model_folder(config)
        version, step = (resumed.version, resumed.step) if resumed else (0, 0)
        self._account.begin(step)
        for note in self.plan.notes:
            self._account.say(note)
        self._handles["queue"] = self._actor(actors.QueueActor, str(self.run_dir))
        self._handles["sync"] = self._actor(actors.SynchronizerActor, str(self.run_dir))
        self._handles["trainer"] = self._actor(
            actors.TrainerActor,
            *(config, self.plan, str(self.run_dir), resumed.path if resumed else None),
            threads=self.plan.threads_trainer,
            gpus=self.plan.gpus_trainer,
        )
        self._start_from = (path, version)
        for index in range(self.plan.replicas):
            self._rollouters[f"rollouter-{index}"] = self._new_rollouter(f"rollouter-{index}")
        queue = self._handles["queue"]
        opening = [call(handle, "open", queue, deadline_s=START_S) for handle in self._rollouters.values()]
        rest = (queue, self._handles["sync"], self._rollouters)
        described, opened, *_ = await asyncio.gather(
            call(self._handles["trainer"], "open", *rest, deadline_s=START_S), *opening
        )
        frontier = resumed.frontier if resumed else Frontier()
        await call(queue, "open", config.bounds, opened["total_prompts"], frontier, version, step)
        await call(self._handles["sync"], "open", config, queue, self._rollouters, version)
        log.info("Training: %s", described)
        for name, handle in {**self._rollouters, **self._handles}.items():
            if name != "queue":  # which has no loop of its own
                self._loops[name] = asyncio.ensure_future(_awaited(handle.run.remote()))
        self._account.started()

    def _resumed(self) -> Resumed | None:
        store = CheckpointStore(self.run_dir, keep_last=self.config.trainer.keep_last)
        latest = store.latest()
        if latest is None and not any(store.folder.glob("step_*")):
            self._account.say("There is no checkpoint yet: beginning anew")
            return None
        if latest is None:
            raise ConfigError("--resume", str(self.run_dir), "there is no checkpoint in it that can be loaded")
        resumed = Resumed.of(latest, store.load(latest).state)
        log.info("Resuming from %s (step %d, version %d)", latest, resumed.step, resumed.version)
        return resumed

    def _connect(self) -> None:
        """Ray: a cluster that runs already, or one of our own that ends with the run."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would have training give way to anything else
        # One for all actors: Ray starts workers ahead for the environment of the job. Torch's own number of threads is
        # set by each actor.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        wanted = self.plan.replicas * self.plan.threads_rollout + self.plan.threads_trainer
        address = self.config.ray.address
        try:
            ray.init(
                address=address or "local",
                num_cpus=None if address else max(os.cpu_count() or 1, wanted),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": environment},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is None:
                raise
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = f"no Ray cluster answers there ({why}): start one, or leave it out. See also RAY_AUTH_MODE"
            raise ConfigError("ray.address", address, remedy) from error

    def _actor(self, kind: type, *args: Any, threads: int = 0, gpus: float = 0) -> Any:
        options = {"num_cpus": threads, "num_gpus": gpus, "max_concurrency": MANY}
        return ray.remote(kind).options(**options).remote(*args)

    def _new_rollouter(self, name: str) -> Any:
        path, version = self._start_from
        if not Path(path).exists():  # a checkpoint that was resumed from, and pruned since: `join` brings newer weights
            path = model_folder(self.config)
        return self._actor(
            actors.RollouterActor,
            *(self.config, self.plan, name, str(self.run_dir), path, version),
            threads=self.plan.threads_rollout,
            gpus=self.plan.gpus_per_replica,
        )

    # -- watch --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> Outcome:
        while True:
            await asyncio.wait(self._loops.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if self._loops["trainer"].done():
                outcome: Outcome = self._loops["trainer"].result()
                return outcome
            for name in [name for name, loop in self._loops.items() if loop.done()]:
                self._ended(name, self._loops.pop(name).exception())
            await self._look()

    def _ended(self, name: str, error: BaseException | None) -> None:
        """A component's loop is over while the trainer's is not."""
        if error is None or name not in self._rollouters or not _died(error):
            raise error or RuntimeError(f"{name} ended by itself")
        self._replaced[name] = self._replaced.get(name, 0) + 1
        if self._replaced[name] > MAX_REPLACEMENTS:
            raise RuntimeError(f"{name} died {self._replaced[name]} times; the last time: {error}") from error
        self._account.say(f"{name} died and is started anew: {str(error).splitlines()[0]}")
        self._loops[name] = asyncio.ensure_future(self._replacement(name, error))

    async def _replacement(self, name: str, error: BaseException) -> None:
        """A rollouter in the place of one that died: what that one worked on is issued again, and the new one has the
        newest weights before it gets any work. Beside the watch, which must not stand still for it."""
        lost = await RemoteQueue(self._handles["queue"]).replica_lost(name)
        log.error("%s died; %d groups are issued again: %s", name, lost, error)
        handle = self._rollouters[name] = self._new_rollouter(name)
        await call(handle, "open", self._handles["queue"], deadline_s=START_S)
        await call(self._handles["sync"], "join", name, handle, deadline_s=START_S)
        await call(self._handles["trainer"], "replace_rollouter", name, handle)
        await handle.run.remote()

    async def _look(self, *, last: bool = False) -> None:
        """Statistics and rows from everybody who answers; who died is told by its loop."""
        asked = {**self._handles, **self._rollouters}
        names = list(asked)
        answers = await asyncio.gather(*(self._asked(name, "stats") for name in names), self._asked("trainer", "rows"))
        *found, rows = answers
        stats = {name: answer for name, answer in zip(names, found, strict=True) if answer is not None}
        if self._account.look(stats, rows or [], self._clock(), last=last):
            for line in component_statistics(self._account.statistics):
                log.info("%s", line)
            self._call_monitor()
        if not last and self._account.hopeless:
            raise NothingToTrainOn(self._account.hopeless)
        if not last and self._account.progress.stalled_s(self._clock()) > self._patience_s:
            where = stats.get("queue", {}).get("waiting_for", "the queue does not answer")
            raise Stalled(f"no step, no token and no score for {self._patience_s:g} s: {where}")

    @property
    def _patience_s(self) -> float:
        a = self.config.async_training
        return 10 * max(a.batch_timeout, a.generation_timeout) + 2 * self.config.reward.timeout_s

    async def _asked(self, name: str, method: str) -> Any:
        try:
            if name == "queue":
                return await RemoteQueue(self._handles["queue"]).stats()
            return await call({**self._handles, **self._rollouters}[name], method)
        except RayActorError:
            return None
        except PeerSilent as error:
            log.warning("%s: %s", name, error)
            return None

    def _call_monitor(self) -> None:
        statistics = self._account.statistics
        try:
            self.custom_monitor(statistics.get("trainer", {}), statistics.get("rollouter", {}))
        except Exception:  # a user's hook; the run does not depend on it
            log.exception("custom_monitor failed")

    def custom_monitor(self, trainer_stats: Mapping[str, Any], rollouter_stats: Mapping[str, Any]) -> None:
        """Hook, called with each `Component Statistics`: the function that `observe.custom_monitor` names."""
        if self._monitor is not None:
            self._monitor(trainer_stats, rollouter_stats)

    # -- end ----------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Releases everything, in the order of the data; nobody who does not answer is waited for."""
        handles = [*self._rollouters.values(), *self._handles.values()]
        closing = [handle.close.remote() for handle in [*self._rollouters.values(), *_some(self._handles, "trainer")]]
        if "queue" in self._handles:
            closing.append(self._handles["queue"].call.remote("close", (), {}))
        if closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.gather(*(_awaited(ref) for ref in closing), return_exceptions=True)
        for loop in self._loops.values():
            loop.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)
        for handle in handles:
            ray.kill(handle)


def _died(error: BaseException) -> bool:
    """The actor itself, and not one that it was talking to."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


async def _awaited(reference: Any) -> Any:
    return await reference


def _some(handles: dict[str, Any], *names: str) -> list[Any]:
    return [handles[name] for name in names if name in handles]


def _cause(error: BaseException) -> BaseException:
    """What a component raised, out of Ray's wrapping."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error
