"""`FullyAsyncMain`: starts the components, watches them, recovers what can be recovered, and stops everything.

    start:  Ray ─▶ actors, all at once ─▶ opened in the order of their needs ─▶ their loops
    watch:  a look every second: rows to the recorder, statistics to log and view, progress to the watchdog
    end:    trainer's loop ended ─▶ queue closed ─▶ export ─▶ everything released, whatever happened before

It waits for: the components' loops (each look is bounded). It is unblocked by: the trainer's end, a component's death,
Ctrl-C or SIGTERM. A dead rollouter is replaced, and what it worked on is issued again; one that is silent is ended, and
then replaced. Whatever else fails, the trainer finishes its step and saves before the run ends. Runs in the user's own
process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

from freewheel.judge.errors import ConfigError
from freewheel.observe.alerts import Alerts
from freewheel.observe.logs import attach_log, component_statistics, detach_log
from freewheel.observe.recorder import Recorder
from freewheel.observe.sinks import Sink, SinkError, open_sinks
from freewheel.queue.ledger import Frontier
from freewheel.rollout.hook import HOOK_TIMEOUTS
from freewheel.runtime import actors
from freewheel.runtime.account import Outcome, RunAccount, RunResult
from freewheel.runtime.actors import MANY, PeerSilent, RemoteQueue, call, cause, died
from freewheel.runtime.asking import Asking
from freewheel.runtime.building import model_folder, named_function
from freewheel.runtime.cluster import cluster
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.progress import NothingToTrainOn, Stalled
from freewheel.runtime.run_dir import new_run, write_config
from freewheel.trainer.checkpoint import CheckpointStore, RunLock, RunLocked
from freewheel.trainer.saving import Resumed

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan

log = logging.getLogger("freewheel.runtime")

LOOK_EVERY_S = 1.0
"""Between two looks at the components. A look costs a few milliseconds of theirs."""
ANSWER_S = 5.0
"""Longest time that a look waits for an answer; one that comes later is told at a later look."""
SILENT_S = 20.0
"""Without an answer for this long, a component was silent: answers take milliseconds, on a busy machine seconds."""
SILENT_TIMES = 3
"""Times in a row that a rollouter may be silent before it is ended and replaced: a pause of a minute may be a driver's
or a file system's."""
START_S = 600.0
"""Longest time for an actor to load its model."""
STOP_S = 10.0
"""Longest time for a component to close when a run ends."""
SAVE_S = 120.0
"""Longest time for the trainer to save after something else failed, the step under way not counted."""
PATIENCE = 10
"""Times a time-out of generation or of a batch passes without any progress before a run is held to be stuck."""
MAX_REPLACEMENTS = 3
"""Times that one rollouter is started anew: one that keeps dying has a cause that restarting does not mend."""
EXPORT = "final"
ROWS = "rows"
"""The question for the trainer's rows, among those for statistics."""


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
        self._opening: set[str] = set()  # rollouters that load their model, and cannot answer
        self._asking = Asking()
        self._ending: tuple[Outcome, BaseException | None] = ("stopped", None)
        self._stopping = 0
        self._hurry = asyncio.Event()

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """The whole run, in the foreground. `ConfigError`: it cannot begin."""
        alerts = Alerts(self.config.observe.alerts)
        with self._own_folder():
            recorder = Recorder(run_dir=self.run_dir, sinks=self._sinks(), alerts=alerts)
            with closing(recorder):
                account = RunAccount(config=self.config, run_dir=self.run_dir, recorder=recorder, view=self._view)
                self._account = account
                # Ray is joined before our signal handlers are set, which replace those that it sets.
                cpus = self.plan.replicas * self.plan.threads_rollout + self.plan.threads_trainer
                try:
                    with cluster(address=self.config.ray.address, cpus=cpus):
                        asyncio.run(self._whole())
                except KeyboardInterrupt:
                    log.warning("Interrupted while Ray was joined or left")
            outcome, error = self._ending
            summary = account.finish(outcome, error)
            return RunResult(outcome=outcome, run_dir=self.run_dir, steps=account.step, summary=summary, error=error)

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

    async def _whole(self) -> None:
        self._working = asyncio.ensure_future(self._work())
        with self._signals():
            try:
                self._ending = (await self._working, None)
            except asyncio.CancelledError:
                self._ending = ("stopped", None)
            except Exception as caught:  # told to the user with what to do next, whatever it was
                error = cause(caught)
                self._ending = ("failed", error)
                log.error("The run ended: %s: %s", type(error).__name__, error, exc_info=caught)
            finally:
                await self._end()

    async def _work(self) -> Outcome:
        await self._start()
        try:
            outcome = await self._watch()
        except Exception:
            with suppress(asyncio.CancelledError):  # ended in haste, it has failed all the same
                await self._let_trainer_save()
                with suppress(Exception):  # what the others know by now may say why
                    await self._look(last=True)
            raise
        await self._look(last=True)
        if outcome == "finished" and self._account.step == 0:
            raise NothingToTrainOn("every prompt was given up and no step was taken: the warnings in the log say why")
        if outcome == "finished":
            await call(self._handles["trainer"], "export", str(self.run_dir / EXPORT), deadline_s=START_S)
        return outcome

    async def _let_trainer_save(self) -> None:
        """Where the trainer lives, what it learned outlives the failure of another."""
        trainer = self._loops.get("trainer")
        if trainer is None or trainer.done():
            return
        self._account.say("The run has failed: finishing the step and saving before it ends")
        with suppress(PeerSilent, RayError):  # it may be about to end by itself
            await call(self._handles["trainer"], "request_stop", deadline_s=SILENT_S)
        limit_s = SAVE_S + self._account.progress.longest_step_s
        await asyncio.wait([trainer], timeout=limit_s)
        if not trainer.done():
            log.error("The trainer did not end within %.0f s: what it learned since its last save is lost", limit_s)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM: finish the step and save. A second one: end now; while closing: wait for nobody."""
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
        if self._working.done():
            self._hurry.set()
            return
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
        if error is None or name not in self._rollouters or not died(error):
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
        self._asking.forget(name)
        self._opening.add(name)
        try:
            handle = self._rollouters[name] = self._new_rollouter(name)
            await call(handle, "open", self._handles["queue"], deadline_s=START_S)
        finally:
            self._opening.discard(name)
        await call(self._handles["sync"], "join", name, handle, deadline_s=START_S)
        await call(self._handles["trainer"], "replace_rollouter", name, handle)
        await handle.run.remote()

    async def _look(self, *, last: bool = False) -> None:
        """Statistics and rows from everybody who answers; who died is told by its loop."""
        stats: dict[str, Any] = {}
        rows: list[Any] = []
        for _ in range(2 if last and self._asking.pending else 1):  # what is still owed does not tell the latest
            found = await self._asking.round(self._questions(), wait_s=ANSWER_S, late=last)
            rows += found.pop(ROWS, None) or []
            stats |= {name: answer for name, answer in found.items() if answer is not None}
        if self._account.look(stats, rows, self._clock(), last=last):
            for line in component_statistics(self._account.statistics):
                log.info("%s", line)
            self._call_monitor()
        if not last:
            self._end_the_silent()
            self._judge(stats)

    def _questions(self) -> dict[str, Callable[[], Any]]:
        asked = {**self._handles, **self._rollouters}
        questions = {name: partial(self._ask, name, "stats", SILENT_S) for name in asked if name not in self._opening}
        return {**questions, ROWS: partial(self._ask, "trainer", "rows", START_S)}  # asked once: they are told once

    async def _ask(self, name: str, method: str, deadline_s: float) -> Any:
        """The answer; None of one that died."""
        try:
            if name == "queue":
                return await RemoteQueue(self._handles["queue"]).stats()
            return await call({**self._handles, **self._rollouters}[name], method, deadline_s=deadline_s)
        except RayActorError:
            return None

    def _end_the_silent(self) -> None:
        """A rollouter that does not answer is as good as dead; its end makes it so, and it is replaced."""
        for name in [name for name in self._rollouters if self._asking.silent[name] >= SILENT_TIMES]:
            self._asking.forget(name)
            self._account.say(f"{name} was silent for {SILENT_TIMES} times {SILENT_S:g} s and is ended")
            ray.kill(self._rollouters[name])

    def _judge(self, stats: Mapping[str, Any]) -> None:
        """Ends a run that gets nowhere."""
        if self._account.hopeless:
            raise NothingToTrainOn(self._account.hopeless)
        if why := self._account.progress.stalled(self._clock(), patience_s=self._patience_s):
            raise Stalled(f"{why}: {stats.get('queue', {}).get('waiting_for', 'the queue does not answer')}")

    @property
    def _patience_s(self) -> float:
        """Longer than anything may take that shows no progress."""
        a, reward = self.config.async_training, self.config.reward
        hook_s = HOOK_TIMEOUTS * a.generation_timeout if self.config.rollout.rollouter_class else 0.0
        return PATIENCE * max(a.batch_timeout, a.generation_timeout) + 2 * reward.timeout_s + hook_s

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
        await self._asking.close()
        handles = [*self._rollouters.values(), *self._handles.values()]
        parts = [*self._rollouters.values(), *_some(self._handles, "trainer")]
        asked: list[Any] = [call(handle, "close", deadline_s=STOP_S) for handle in parts]
        asked += [RemoteQueue(handle).close() for handle in _some(self._handles, "queue")]
        ends: list[Any] = [asyncio.gather(*asked, return_exceptions=True), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(ends, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for loop in self._loops.values():
            loop.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)
        for handle in handles:
            ray.kill(handle)


async def _awaited(reference: Any) -> Any:
    return await reference


def _some(handles: dict[str, Any], name: str) -> list[Any]:
    return [handles[name]] if name in handles else []
