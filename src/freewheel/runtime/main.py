"""`FullyAsyncMain`: starts the components, watches them, recovers what can be recovered, and stops everything.

    start:  Ray ─▶ the crew: queue, synchronizer, trainer, rollouters
    watch:  a look every second: rows to the recorder, statistics to log and view, progress to the watchdog
            a part that died, was silent or stands still ─▶ replaced, while its budget lasts
    end:    trainer's loop ended ─▶ queue closed ─▶ export ─▶ everything released, whatever happened before

It waits for: the components' loops (each look is bounded). It is unblocked by: the trainer's end, a component's death,
Ctrl-C or SIGTERM. What a part raises, other than by dying, ends the run; then the trainer finishes its step and saves
first. Runs in the user's own process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from freewheel.errors import ConfigError
from freewheel.observe.logs import attach_log, component_statistics, detach_log
from freewheel.observe.metrics import Alerts
from freewheel.observe.recorder import Recorder, Sink, SinkError, open_sinks
from freewheel.observe.run_folder import FINAL, saved_steps
from freewheel.rollout.hook import HOOK_TIMEOUTS
from freewheel.runtime.account import Outcome, RunAccount, RunResult
from freewheel.runtime.building import check_journal, end_recording, named_function, start_recording
from freewheel.runtime.cluster import cluster, lost_processes
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.recovery import KeepsDying, NothingToTrainOn, NotRecorded, RayDied, Restarts, Stalled
from freewheel.runtime.remote import START_S, NoAnswer, call, cause, died
from freewheel.runtime.start import new_run, write_config
from freewheel.runtime.supervisor import Poller, Supervisor, newest_checkpoint
from freewheel.trainer.checkpoint import Resumed, RunLock, RunLocked

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan

log = logging.getLogger("freewheel.runtime")

LOOK_EVERY_S = 1.0
"""Between two looks at the components. A look costs a few milliseconds of theirs."""
ANSWER_S = 5.0
"""Longest time that a look waits for an answer; one that comes later is told at a later look."""
SILENT_TIMES = 3
"""Questions in a row that `recovery.silent_s` is divided into: one that was lost is no silence."""
STOP_S = 10.0
"""Longest time for a component to close when a run ends."""
SAVE_S = 120.0
"""Longest time for the trainer to save after something else failed, the step under way not counted."""
PATIENCE = 10
"""Times a time-out of generation or of a batch passes without any progress before a run is held to be stuck."""
ROWS = "rows"
"""The question for the trainer's rows, among those for statistics."""
SYNCS = "syncs"
"""The question for what is to be recorded of weight syncs."""


class FullyAsyncMain:
    """Nothing that it started outlives it. Hook: `custom_monitor`, by subclass or by configuration."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        plan: Plan,
        resume: bool = False,
        changed: Sequence[str] = (),
        view: Any = None,
        alongside: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`alongside`: what goes on while the run does, such as its page; from when the folder is its own."""
        self.config = config if config.run_dir else new_run(config)
        self.plan = plan
        self.run_dir = Path(self.config.run_dir or "").absolute()
        self._resume = resume
        self._changed = changed
        """Settings that a resumed run did not have before, in words."""
        self._clock = clock
        self._view = view
        self._alongside = alongside
        self._monitor = named_function("observe.custom_monitor", config.observe.custom_monitor)
        self._supervisor = Supervisor(config=self.config, plan=plan, run_dir=self.run_dir, tell=self._tell)
        recovery = config.recovery
        self._restarts = Restarts(max_restarts=recovery.max_restarts, backoff_s=recovery.backoff_s)
        self._poller = Poller()
        self._ending: tuple[Outcome, BaseException | None] = ("stopped", None)
        self._stopping = 0
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested = False
        self._stop_lock = threading.Lock()

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """The whole run, in the foreground. `ConfigError`: it cannot begin."""
        alerts = Alerts(self.config.observe.alerts)
        with self._own_folder() as sinks:
            recorder = Recorder(run_dir=self.run_dir, sinks=sinks, alerts=alerts)
            with closing(recorder), self._alongside():
                account = RunAccount(config=self.config, run_dir=self.run_dir, recorder=recorder, view=self._view)
                self._account = account
                # Ray is joined before our signal handlers are set, which replace those that it sets.
                cpus = self.plan.replicas * self.plan.threads_rollout + self.plan.world_size * self.plan.threads_trainer
                try:
                    with cluster(address=self.config.ray.address, cpus=cpus):
                        asyncio.run(self._whole())
                except KeyboardInterrupt:
                    log.warning("Stopped while Ray was being started or ended")
                except SystemExit as asked:  # by the handler that Ray sets for SIGTERM before ours are
                    if asked.code != signal.SIGTERM:
                        raise
            outcome, error = self._ending
            summary = account.finish(outcome, error)
            return RunResult(outcome=outcome, run_dir=self.run_dir, steps=account.step, summary=summary, error=error)

    @contextmanager
    def _own_folder(self) -> Iterator[list[Sink]]:
        """The run directory, for nobody else while this run lasts, with its configuration and its log, and the sinks.
        A start that is refused leaves no run behind, which the next would have to go on with."""
        lock, sinks = RunLock(self.run_dir), list[Sink]()
        try:
            lock.acquire()
            sinks += self._sinks()
            write_config(self.config)
            attach_log(self.run_dir, "main")
            start_recording(self.config.observe, self.run_dir, "main")
        except (OSError, RunLocked, ConfigError) as error:
            for sink in sinks:
                sink.close()
            lock.release()
            if isinstance(error, ConfigError):
                raise
            remedy = str(error)
            if isinstance(error, OSError):
                remedy = f"it cannot be written ({error.strerror}): give another folder"
            raise ConfigError("run_dir", str(self.run_dir), remedy) from error
        try:
            yield sinks
        finally:
            end_recording()
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

    def request_stop(self) -> None:
        """Finish the step, save and end; a second request ends at once. As Ctrl-C does, from any thread."""
        with self._stop_lock:
            if self._loop is None:  # Ray is being started
                self._stop_requested = True
                return
        with suppress(RuntimeError):  # the loop has closed: the run is over
            self._loop.call_soon_threadsafe(self._interrupted)

    async def _whole(self) -> None:
        self._working = asyncio.ensure_future(self._work())
        with self._stop_lock:
            self._loop = asyncio.get_running_loop()
        with self._signals():
            if self._stop_requested:
                self._interrupted()
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
            await call(self._supervisor.handles["trainer"], "export", str(self.run_dir / FINAL), deadline_s=START_S)
        return outcome

    async def _let_trainer_save(self) -> None:
        """Where the trainer lives, what it learned outlives the failure of another."""
        trainer = self._supervisor.loops.get("trainer")
        if trainer is None or trainer.done() or "trainer" in self._supervisor.opening:
            return
        if (
            "queue" not in self._supervisor.loops
        ):  # it died for good: without it no checkpoint can say which prompts ended
            return
        self._account.say("The run has failed: finishing the step and saving before it ends")
        with suppress(NoAnswer, RayError):  # it may be about to end by itself
            await call(self._supervisor.handles["trainer"], "request_stop", deadline_s=self.config.recovery.silent_s)
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
        trainer = self._supervisor.loops.get("trainer")
        if self._stopping > 1 or trainer is None or trainer.done() or "trainer" in self._supervisor.opening:
            self._working.cancel()  # also where the trainer died: what it had not saved is in the journal
            return
        self._account.say("Finishing the step and saving; once more ends at once")
        self._stop = asyncio.ensure_future(self._supervisor.stop_trainer())

    # -- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        resumed = self._resumed() if self._resume else None
        self._account.begin(resumed.step if resumed else 0)
        shared = self.plan.shared_gpu
        self._account.note(f"Training and generation share {'a' if shared else 'no'} GPU", shared_gpu=shared)
        for note in (*self.plan.notes, *(f"Changed: {line}" for line in self._changed)):
            self._account.say(note)
        for note in await self._supervisor.start(resumed):
            self._account.say(note)
        if self._resume:
            queue = await call(self._supervisor.handles["queue"], "stats")
            self._account.went_as_far_as(queue["step"])
        self._account.started()

    def _resumed(self) -> Resumed | None:
        found = newest_checkpoint(self.run_dir, self.config)
        if found is not None:
            log.info("Resuming from %s (step %d, version %d)", found.path, found.step, found.version)
            return found
        damaged = bool(saved_steps(self.run_dir))
        if damaged:
            check_journal(self.run_dir)
        why = "No checkpoint can be loaded" if damaged else "There is no checkpoint yet"
        self._account.say(f"{why}: beginning anew, with what the journal has")
        return None

    # -- watch --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> Outcome:
        loops = self._supervisor.loops
        while True:
            await asyncio.wait(loops.values(), timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            for name in [name for name, loop in loops.items() if loop.done()]:
                ended = loops.pop(name)
                error = ended.exception()
                if error is None and name == "trainer":
                    outcome: Outcome = ended.result()
                    return outcome
                if (
                    name == "trainer"
                    and self._stopping
                    and error
                    and died(error)
                    and self._supervisor.can_replace(name)
                ):
                    return "stopped"  # what it was to save is in the journal
                self._ended(name, error)
            await self._look()

    def _ended(self, name: str, error: BaseException | None) -> None:
        """A component's loop is over while the run is not."""
        unready = type(error) is NoAnswer  # what took its place was not ready in time, or waited for another in vain
        if error is None or not (died(error) or unready):
            raise error or RuntimeError(f"{name} ended by itself")
        why = str(error).splitlines()[0]
        if dead := lost_processes():
            raise RayDied(f"Ray itself died ({', '.join(dead)}), and everything with it: resume the run") from error
        if not isinstance(error, ActorDiedError):  # it may live, and of two with one name the elder must not
            self._kill(name, why)
        if not self._supervisor.can_replace(name):
            raise NotRecorded(
                f"{name} died ({why}), and what it had was in no journal (journal.enabled = false): resume the run, "
                "which goes on from its last checkpoint, or begin one with journal.enabled=true"
            ) from error
        wait_s = self._restarts.died(name, step=self._account.step)
        if wait_s is None:
            raise KeepsDying(
                f"{name} died {self.config.recovery.max_restarts + 1} times without a step trained in between "
                f"(recovery.max_restarts); the last time: {why}"
            ) from error
        self._account.say(f"{name} died and is started anew: {why}")
        log.error("%s died and is started anew in %g s: %s", name, wait_s, why)
        self._poller.forget(name)
        self._supervisor.replace(name, after_s=wait_s)

    async def _look(self, *, last: bool = False) -> None:
        """Statistics and rows from everybody who answers; who died is told by its loop."""
        stats: dict[str, Any] = {}
        rows: list[Any] = []
        syncs: list[dict[str, Any]] = []
        for _ in range(2 if last and self._poller.pending else 1):  # what is still owed does not tell the latest
            found = await self._poller.round(self._questions(), wait_s=ANSWER_S, late=last)
            rows += found.pop(ROWS, None) or []
            syncs += found.pop(SYNCS, None) or []
            stats |= {name: answer for name, answer in found.items() if answer is not None}
        due = self._account.look(stats, rows, self._clock(), last=last)
        self._account.synced(syncs)
        if due:
            for line in component_statistics(self._account.statistics):
                log.info("%s", line)
            self._call_monitor()
        if not last:
            self._end_the_silent()
            self._judge(stats)

    def _questions(self) -> dict[str, Callable[[], Any]]:
        answering = [name for name in self._supervisor.handles if name not in self._supervisor.opening]
        deadline_s = self.config.recovery.silent_s / SILENT_TIMES
        questions: dict[str, Callable[[], Any]]
        questions = {name: partial(self._ask, name, "stats", deadline_s) for name in answering}
        if "trainer" in answering:  # asked once: they are told once
            questions[ROWS] = partial(self._ask, "trainer", "rows", START_S)
        if "sync" in answering:
            questions[SYNCS] = partial(self._ask, "sync", "rows", START_S)
        return questions

    async def _ask(self, name: str, method: str, deadline_s: float) -> Any:
        """The answer; None of one that died."""
        try:
            return await call(self._supervisor.handles[name], method, deadline_s=deadline_s)
        except RayActorError:
            return None

    def _end_the_silent(self) -> None:
        """A part that does not answer is as good as dead; its end makes it so, and it is replaced."""
        for name in [name for name in self._supervisor.handles if self._poller.silent[name] >= SILENT_TIMES]:
            self._kill(name, f"it was silent for {self.config.recovery.silent_s:g} s")

    def _kill(self, name: str, why: str) -> None:
        self._poller.forget(name)
        self._account.say(f"{name} is ended: {why}")
        self._supervisor.kill(name)

    def _judge(self, stats: Mapping[str, Any]) -> None:
        """Ends a run that gets nowhere, after what stands still was started anew in vain."""
        if self._account.hopeless:
            raise NothingToTrainOn(self._account.hopeless)
        stalled = self._account.progress.stalled(self._clock(), patience_s=self._patience_s)
        if stalled is None:
            return
        where = stats.get("queue", {}).get("waiting_for", "the queue does not answer")
        if self._account.progress.stalls > 1:
            raise Stalled(f"{stalled.why}: {where}")
        for name in ["trainer"] if stalled.training else self._supervisor.replicas:
            if name not in self._supervisor.opening:
                self._kill(name, f"{stalled.why}: {where}")

    @property
    def _patience_s(self) -> float:
        """Longer than anything may take that shows no progress."""
        a, reward = self.config.async_training, self.config.reward
        hook_s = HOOK_TIMEOUTS * a.generation_timeout if self.config.rollout.rollouter_class else 0.0
        return PATIENCE * max(a.batch_timeout, a.generation_timeout) + 2 * reward.timeout_s + hook_s

    def _tell(self, name: str, process: int, node: str) -> None:
        """Where a part runs: for whoever looks at, or after, a run's processes."""
        self._account.note(f"{name} is process {process}", process=process, role=name, node=node)

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
        await self._poller.close()
        handles = self._supervisor.handles
        asked: list[Any] = [call(handle, "close", deadline_s=STOP_S) for handle in handles.values()]
        ends: list[Any] = [asyncio.gather(*asked, return_exceptions=True), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(ends, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for loop in self._supervisor.loops.values():
            loop.cancel()
        await asyncio.gather(*self._supervisor.loops.values(), return_exceptions=True)
        for handle in handles.values():
            ray.kill(handle)
        self._supervisor.release()
