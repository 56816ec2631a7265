"""`FullyAsyncMain`: the whole life of a run, in the user's own process.

    start:  Ray ─▶ Supervisor: queue, synchronizer, trainer, rollouters
    watch:  once a second: rows to the recorder, statistics to log and view, progress to the watchdog
            a component that died, is silent or stalls ─▶ restarted, while its budget lasts
    end:    the trainer's loop ended ─▶ export ─▶ queue closed ─▶ everything released, whatever happened before

It waits for the components' loops to end, and each look at them takes a bounded time. SIGTERM, Ctrl-C and
`request_stop` finish the step, save and end the run; a second one ends it at once. The wait also ends when the trainer
ends or a component dies. A component that raises an error ends the run. In that case the trainer first finishes its
step and saves.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
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
from freewheel.rollout.rollouter import HOOK_TIMEOUTS
from freewheel.runtime.account import Outcome, RunAccount, RunResult
from freewheel.runtime.building import check_journal, end_recording, find_monitor, start_recording
from freewheel.runtime.cluster import cluster, lost_processes
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.recovery import KeepsDying, NothingToTrainOn, NotRecorded, RayDied, Restarts, Stalled
from freewheel.runtime.remote import START_S, NoAnswer, call, is_death, unwrap
from freewheel.runtime.start import new_run, write_config
from freewheel.runtime.supervisor import Poller, Supervisor, newest_checkpoint
from freewheel.trainer.checkpoint import Resumed, RunLock, RunLocked

if TYPE_CHECKING:
    from freewheel.runtime.run_plan import RunPlan

log = logging.getLogger("freewheel.runtime")

LOOK_EVERY_S = 1.0
"""Time between two looks at the components. A look costs them a few milliseconds."""
ANSWER_S = 5.0
"""Longest time that a look waits for an answer. A later answer is used by a later look."""
SILENT_QUESTIONS = 3
"""A component is silent after this many unanswered questions in a row, asked over `recovery.silent_s`. One question may
get lost."""
STOP_S = 10.0
"""Longest time for a component to close when a run ends."""
SAVE_S = 120.0
"""Longest time for the trainer to save after another component failed, without its current step."""
_PATIENCE = 10
"""A run without any progress for this many generation or batch timeouts is stuck."""
_TRAINER_ROWS, _SYNC_ROWS = "rows", "syncs"
"""Names of the two questions that ask for rows. Every component is also asked for its statistics."""


class FullyAsyncMain:
    """Runs a training run. Nothing that it started outlives it. Hook: `custom_monitor`."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        plan: RunPlan,
        resume: bool = False,
        changed: Sequence[str] = (),
        view: Any = None,
        alongside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`changed`: settings that differ from the resumed run's, in words. `alongside`: entered while the run lasts,
        once the run directory is locked; it serves the run's page."""
        self.config = config if config.run_dir else new_run(config)
        self.plan = plan
        self.run_dir = Path(self.config.run_dir or "").absolute()
        self._resume = resume
        self._changed = changed
        self._clock = time.monotonic
        self._view = view
        self._alongside = alongside
        self._monitor = find_monitor(config)
        self._supervisor = Supervisor(
            config=self.config, plan=plan, run_dir=self.run_dir, on_process=self._record_process
        )
        recovery = config.recovery
        self._restarts = Restarts(max_restarts=recovery.max_restarts, backoff_s=recovery.backoff_s)
        self._poller = Poller()
        self._ending: tuple[Outcome, BaseException | None] = ("stopped", None)
        self._interrupts = 0
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested = False
        self._stop_lock = threading.Lock()

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Run to the end. Raises `ConfigError` if the run cannot begin."""
        alerts = Alerts(self.config.observe.alerts)
        with self._own_run_dir() as sinks:
            recorder = Recorder(run_dir=self.run_dir, sinks=sinks, alerts=alerts)
            with closing(recorder), self._alongside():
                account = RunAccount(config=self.config, run_dir=self.run_dir, recorder=recorder, view=self._view)
                self._account = account
                rollout, trainer = self.config.rollout, self.config.trainer
                cpus = self.plan.replicas * rollout.threads + self.plan.world_size * trainer.threads
                try:
                    with cluster(address=self.config.ray.address, cpus=cpus):
                        asyncio.run(self._live())
                except KeyboardInterrupt:
                    log.warning("Stopped while Ray was being started or ended")
                except SystemExit as asked:  # from Ray's SIGTERM handler, before ours replaces it
                    if asked.code != signal.SIGTERM:
                        raise
            outcome, error = self._ending
            summary = account.finish(outcome, error)
            return RunResult(outcome=outcome, run_dir=self.run_dir, steps=account.step, summary=summary, error=error)

    def request_stop(self) -> None:
        """Finish the step, save and end, as Ctrl-C does. May be called from any thread; a second call ends at once."""
        with self._stop_lock:
            if self._loop is None:  # Ray is being started
                self._stop_requested = True
                return
        with suppress(RuntimeError):  # the loop has closed: the run is over
            self._loop.call_soon_threadsafe(self._interrupt)

    @contextmanager
    def _own_run_dir(self) -> Iterator[list[Sink]]:
        """Lock the run directory, and write configuration and log into it. A refused start leaves no run behind."""
        with ExitStack() as stack:
            try:
                stack.enter_context(RunLock(self.run_dir))
                with ExitStack() as unused:  # closes the sinks if the start fails; otherwise the recorder closes them
                    sinks = self._open_sinks()
                    for sink in sinks:
                        unused.callback(sink.close)
                    write_config(self.config)
                    attach_log(self.run_dir, "main")
                    stack.callback(detach_log)
                    start_recording(self.config.observe, self.run_dir, "main")
                    stack.callback(end_recording)
                    unused.pop_all()
            except (OSError, RunLocked) as error:
                remedy = str(error)
                if isinstance(error, OSError):
                    remedy = f"it cannot be written ({error.strerror}): give another folder"
                raise ConfigError("run_dir", str(self.run_dir), remedy) from error
            yield sinks

    def _open_sinks(self) -> list[Sink]:
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

    async def _live(self) -> None:
        self._working = asyncio.ensure_future(self._work())
        with self._stop_lock:
            self._loop = asyncio.get_running_loop()
        with self._signal_handlers():
            if self._stop_requested:
                self._interrupt()
            try:
                self._ending = (await self._working, None)
            except asyncio.CancelledError:
                self._ending = ("stopped", None)
            except Exception as caught:  # reported to the user, whatever it is
                error = unwrap(caught)
                self._ending = ("failed", error)
                log.error("The run ended: %s: %s", type(error).__name__, error, exc_info=caught)
            finally:
                await self._end()

    async def _work(self) -> Outcome:
        await self._start()
        try:
            outcome = await self._watch()
        except Exception:
            with suppress(asyncio.CancelledError):  # the run has failed, also if an interrupt cuts this short
                await self._let_trainer_save()
                with suppress(Exception):  # other components may know the cause by now
                    await self._look(last=True)
            raise
        await self._look(last=True)
        if outcome == "finished" and self._account.step == 0:
            raise NothingToTrainOn("every prompt was abandoned and no step was taken: see the warnings in the log")
        if outcome == "finished":
            await call(self._supervisor.handles["trainer"], "export", str(self.run_dir / FINAL), deadline_s=START_S)
        return outcome

    async def _let_trainer_save(self) -> None:
        """After another component failed: save what the trainer learned, if it can."""
        trainer = self._supervisor.loops.get("trainer")
        if trainer is None or trainer.done() or "trainer" in self._supervisor.opening:
            return
        if "queue" not in self._supervisor.loops:  # only the queue knows which prompts a checkpoint covers
            return
        self._account.say("The run has failed: finishing the step and saving before it ends")
        with suppress(NoAnswer, RayError):  # the trainer may already be ending
            await call(self._supervisor.handles["trainer"], "request_stop", deadline_s=self.config.recovery.silent_s)
        limit_s = SAVE_S + self._account.progress.longest_step_s
        await asyncio.wait([trainer], timeout=limit_s)
        if not trainer.done():
            log.error("The trainer did not end within %.0f s: steps since its last save are lost", limit_s)

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM in the main thread. Replaces the handlers that Ray has set."""
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        """SIGTERM or Ctrl-C. The first finishes the step and saves, the second ends the run now. While the run closes,
        a signal ends the waiting."""
        self._interrupts += 1
        if self._working.done():
            self._hurry.set()
            return
        trainer = self._supervisor.loops.get("trainer")
        if self._interrupts > 1 or trainer is None or trainer.done() or "trainer" in self._supervisor.opening:
            self._working.cancel()  # unsaved steps of a dead trainer are in the journal
            return
        self._account.say("Finishing the step and saving; interrupt again to end at once")
        self._stopping = asyncio.ensure_future(self._supervisor.stop_trainer())

    # -- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        resumed = self._find_checkpoint() if self._resume else None
        self._account.begin(resumed.step if resumed else 0)
        shared = self.plan.shared_gpu
        self._account.note(f"Training and generation share {'a' if shared else 'no'} GPU", shared_gpu=shared)
        for note in (*self.plan.notes, *(f"Changed: {line}" for line in self._changed)):
            self._account.say(note)
        for note in await self._supervisor.start(resumed):
            self._account.say(note)
        if self._resume:
            queue = await call(self._supervisor.handles["queue"], "stats")
            self._account.skip_known_rows(queue["step"])
        self._account.started()

    def _find_checkpoint(self) -> Resumed | None:
        found = newest_checkpoint(self.run_dir, self.config)
        if found is not None:
            log.info("Resuming from %s (step %d, version %d)", found.path, found.step, found.version)
            return found
        damaged = bool(saved_steps(self.run_dir))
        if damaged:
            check_journal(self.run_dir)
        why = "No checkpoint can be loaded" if damaged else "There is no checkpoint yet"
        self._account.say(f"{why}: starting from the beginning, with the groups in the journal")
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
                dies_while_stopping = name == "trainer" and self._interrupts and error and is_death(error)
                if dies_while_stopping and self._supervisor.can_replace(name):
                    return "stopped"  # its unsaved steps are in the journal
                self._recover(name, error)
            await self._look()

    def _recover(self, name: str, error: BaseException | None) -> None:
        """Restart a component whose loop ended while the run continues, or raise why the run cannot continue."""
        was_not_ready = type(error) is NoAnswer  # a replacement that did not open in time
        if error is None or not (is_death(error) or was_not_ready):
            raise error or RuntimeError(f"{name} ended by itself")
        why = str(error).splitlines()[0]
        if dead := lost_processes():
            raise RayDied(f"Ray itself died ({', '.join(dead)}), and everything with it: resume the run") from error
        if not isinstance(error, ActorDiedError):  # it may be alive, and two actors must not share a name
            self._kill(name, why)
        if not self._supervisor.can_replace(name):
            raise NotRecorded(
                f"{name} died ({why}), and its state was not journaled (journal.enabled = false): resume the run, "
                "which continues from its last checkpoint, or start one with journal.enabled=true"
            ) from error
        wait_s = self._restarts.died(name, step=self._account.step)
        if wait_s is None:
            raise KeepsDying(
                f"{name} died {self.config.recovery.max_restarts + 1} times without a step trained in between "
                f"(recovery.max_restarts); the last time: {why}"
            ) from error
        self._account.say(f"{name} died and is restarted: {why}")
        log.error("%s died and is restarted in %g s: %s", name, wait_s, why)
        self._poller.forget(name)
        self._supervisor.replace(name, after_s=wait_s)

    async def _look(self, *, last: bool = False) -> None:
        """Collect statistics and rows from every component that answers. Deaths are reported by the loops."""
        stats: dict[str, Any] = {}
        rows: list[Any] = []
        syncs: list[dict[str, Any]] = []
        # the first poll may only return answers to earlier questions: ask a second time
        for _ in range(2 if last and self._poller.is_waiting else 1):
            found = await self._poller.poll(self._questions(), wait_s=ANSWER_S, late=last)
            rows += found.pop(_TRAINER_ROWS, None) or []
            syncs += found.pop(_SYNC_ROWS, None) or []
            stats |= {name: answer for name, answer in found.items() if answer is not None}
        statistics_due = self._account.look(stats, rows, self._clock(), last=last)
        self._account.record_syncs(syncs)
        if statistics_due:
            for line in component_statistics(self._account.statistics):
                log.info("%s", line)
            self._call_monitor()
        if not last:
            self._kill_silent()
            self._check_progress(stats)

    def _questions(self) -> dict[str, Callable[[], Any]]:
        answering = [name for name in self._supervisor.handles if name not in self._supervisor.opening]
        deadline_s = self.config.recovery.silent_s / SILENT_QUESTIONS
        questions: dict[str, Callable[[], Any]]
        questions = {name: partial(self._ask, name, "stats", deadline_s) for name in answering}
        for name, question in (("trainer", _TRAINER_ROWS), ("sync", _SYNC_ROWS)):
            if name in answering:  # with a long deadline: rows are handed out only once, so a missed answer loses them
                questions[question] = partial(self._ask, name, "rows", START_S)
        return questions

    async def _ask(self, name: str, method: str, deadline_s: float) -> Any:
        """Return the answer, or None if the component is dead."""
        try:
            return await call(self._supervisor.handles[name], method, deadline_s=deadline_s)
        except RayActorError:
            return None

    def _kill_silent(self) -> None:
        """Kill components that do not answer, so that they are replaced."""
        for name in [name for name in self._supervisor.handles if self._poller.silent[name] >= SILENT_QUESTIONS]:
            self._kill(name, f"it was silent for {self.config.recovery.silent_s:g} s")

    def _kill(self, name: str, why: str) -> None:
        self._poller.forget(name)
        self._account.say(f"{name} is killed: {why}")
        self._supervisor.kill(name)

    def _check_progress(self, stats: Mapping[str, Any]) -> None:
        """Restart what stalls. End the run if that did not help, or if no step can be expected."""
        if self._account.hopeless:
            raise NothingToTrainOn(self._account.hopeless)
        stall = self._account.progress.stalled(self._clock(), patience_s=self._patience_s)
        if stall is None:
            return
        where = stats.get("queue", {}).get("waiting_for", "the queue does not answer")
        if self._account.progress.stalls > 1:
            raise Stalled(f"{stall.why}: {where}")
        for name in ["trainer"] if stall.is_training else self._supervisor.replicas:
            if name not in self._supervisor.opening:
                self._kill(name, f"{stall.why}: {where}")

    @property
    def _patience_s(self) -> float:
        """Longer than any operation may take without showing progress."""
        a, reward = self.config.async_training, self.config.reward
        hook_s = HOOK_TIMEOUTS * a.generation_timeout if self.config.rollout.rollouter_class else 0.0
        return _PATIENCE * max(a.batch_timeout, a.generation_timeout) + 2 * reward.timeout_s + hook_s

    def _record_process(self, name: str, process: int, node: str) -> None:
        self._account.note(f"{name} is process {process}", process=process, role=name, node=node)

    def _call_monitor(self) -> None:
        statistics = self._account.statistics
        try:
            self.custom_monitor(statistics.get("trainer", {}), statistics.get("rollouter", {}))
        except Exception:  # a user's hook; the run does not depend on it
            log.exception("custom_monitor failed")

    def custom_monitor(self, trainer_stats: Mapping[str, Any], rollouter_stats: Mapping[str, Any]) -> None:
        """Hook, called with each `Component Statistics`, empty for a component that did not answer in time. Calls the
        function named by `observe.custom_monitor`."""
        if self._monitor is not None:
            self._monitor(trainer_stats, rollouter_stats)

    # -- end ----------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Close all components at once, for at most `STOP_S` or until an interrupt; then kill what is left."""
        await self._poller.close()
        handles, loops = self._supervisor.handles, self._supervisor.loops
        closes = [call(handle, "close", deadline_s=STOP_S) for handle in handles.values()]
        waits: list[Any] = [asyncio.gather(*closes, return_exceptions=True), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(waits, timeout=STOP_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (*waits, *loops.values()):
            task.cancel()
        await asyncio.gather(*waits, *loops.values(), return_exceptions=True)
        for handle in handles.values():
            ray.kill(handle)
        self._supervisor.release()
