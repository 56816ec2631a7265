"""The other training processes, ranks 1 and up: rank 0 starts, commands, watches and ends them as Ray actors.

    TrainerActor.open ─▶ Ranks.start ─▶ RankActor 1, 2, … ─▶ a meeting on one of their machines ─▶ all load at once
    Leader ── ask ──▶ RankActor.obey: a thread for training, one for writing            (waits for every answer)
    rank 0 ── beat, once a second ──▶ each rank

A dead or silent rank ends rank 0's process, and `Supervisor` restarts the trainer. A rank that hears nothing from
rank 0 ends itself. Ray ends the ranks with rank 0, which owns their actors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from freewheel.runtime.config import TrainConfig
from freewheel.runtime.remote import START_S, NoAnswer, call, kill_process, unwrap
from freewheel.trainer.ranks import Asked, Follower, Leader, Liveness, RankLost
from freewheel.utils.registry import objects_in_memory, receive_in_memory

if TYPE_CHECKING:
    from freewheel.runtime.run_plan import RunPlan
    from freewheel.trainer.fsdp import Meeting, MeetingHost

log = logging.getLogger("freewheel.runtime")

T = TypeVar("T")

_MAX_CALLS = 100
"""Calls that a rank may have in progress: it answers beats while it obeys."""
_BEAT_S = 1.0
"""Time between two beats, and longest wait for an answer to one."""
_ANSWER_S = 600.0
"""Longest time for a rank's answer after rank 0 has finished its own part."""
_WRITE_S = 1800.0
"""The same for its part of a checkpoint: a slow disk must not end a run."""
_FAREWELL_S = 0.5
"""A failed rank sends its answer before it ends. Others may be waiting for that end."""
_TOGETHER_S = 1.0
"""Ends of ranks within this time have the same cause."""
_GROUP_BROKEN = 4
"""Exit code of a process whose group of ranks is broken."""
_WRITE = "write"
"""The command that may run during others."""


class RankActor:
    """One training process besides rank 0's. Any error ends it, because the others cannot know its progress."""

    def __init__(self, name: str, run_dir: str, objects: Mapping[str, Any]) -> None:
        """`objects`: what settings name as `in_memory:name`."""
        from freewheel.observe.logs import attach_log

        attach_log(run_dir, name)
        receive_in_memory(objects)
        self._name = name
        self._follower: Follower | None = None
        self._pulse = Liveness(silent_s=START_S, now=time.monotonic())
        self._watching: asyncio.Task[None] | None = None
        self._training = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="save")

    async def process(self) -> tuple[int, str]:
        """Return process id and Ray node. From now on this rank must hear from rank 0."""
        self._watching = asyncio.ensure_future(self._watch())
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def open(self, config: TrainConfig, plan: RunPlan, rank: int, meeting: Meeting) -> None:
        self._follower = await self._in(self._training, lambda: _follower(config, plan, rank, meeting))

    async def obey(self, command: str, args: Sequence[Any]) -> Any:
        assert self._follower is not None
        follower, thread = self._follower, self._writing if command == _WRITE else self._training
        try:
            return await self._in(thread, lambda: follower.obey(command, *args))
        except BaseException as error:
            log.exception("%s failed in %s and ends", self._name, command)
            asyncio.get_running_loop().call_later(_FAREWELL_S, os._exit, _GROUP_BROKEN)
            raise RankLost(f"{type(error).__name__}: {error}") from error

    async def beat(self, silent_s: float) -> None:
        self._pulse.silent_s = silent_s
        self._pulse.heard(time.monotonic())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            if self._pulse.is_silent(time.monotonic()):
                log.error("%s has not heard from the trainer and ends", self._name)
                os._exit(_GROUP_BROKEN)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, work)


def _follower(config: TrainConfig, plan: RunPlan, rank: int, meeting: Meeting) -> Follower:
    from freewheel.rollout.engine_factories import load_causal_lm
    from freewheel.runtime.building import backend_settings, use_threads
    from freewheel.runtime.model_size import model_folder
    from freewheel.trainer.fsdp import FsdpBackend, join

    use_threads(config.trainer.threads)
    model = load_causal_lm(model_folder(config), "auto", trust_remote_code=config.model.trust_remote_code)
    world = join(meeting, rank=rank, device=plan.device_trainer)
    return Follower(FsdpBackend(model, world=world, **backend_settings(config, plan)))


class _Answers:
    """Answers of all ranks to a command. See `freewheel.trainer.ranks.Asked`."""

    def __init__(self, command: str, references: Mapping[str, Any]) -> None:
        self._command = command
        self._names = {reference: name for name, reference in references.items()}

    def wait(self) -> list[Any]:
        limit_s = _WRITE_S if self._command == _WRITE else _ANSWER_S
        pending, until = list(self._names), time.monotonic() + limit_s
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not done:
                silent = ", ".join(self._names[one] for one in pending)
                raise RankLost(f"{silent} gave no answer to {self._command} within {limit_s:g} s")
            if error := self._error_of(done[0]):
                raise RankLost(f"{self._describe(done[0], error)} in {self._command}")
        return list(ray.get(list(self._names)))

    def lost(self, wait_s: float) -> str:
        """Describe the ranks that died, or else failed: a death makes the others fail."""
        pending, until = list(self._names), time.monotonic() + wait_s
        died, failed = list[str](), list[str]()
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not done:
                break
            if error := self._error_of(done[0]):
                (failed if isinstance(error, RayTaskError) else died).append(self._describe(done[0], error))
                until = min(until, time.monotonic() + _TOGETHER_S)
        return "; ".join(died or failed)

    def _error_of(self, reference: Any) -> RayActorError | RayTaskError | None:
        """Return how the rank ended, or None if it answered. A rank that called a dead one has failed itself."""
        try:
            ray.get(reference)
        except (RayTaskError, RayActorError) as error:
            return error
        return None

    def _describe(self, reference: Any, error: RayActorError | RayTaskError) -> str:
        if isinstance(error, RayTaskError):
            return f"{self._names[reference]} failed ({unwrap(error)})"
        return f"{self._names[reference]} died ({_first_line(error)})"


class Ranks:
    """Ranks 1 and up, in rank 0's process. See `freewheel.trainer.ranks.Others`."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = dict(handles)
        self._silent_s = START_S
        """Long at first: a process that loads a model may have no time to answer."""
        self.processes: dict[str, tuple[int, str]] = {}
        """Process id and Ray node by name."""
        self._watching: list[asyncio.Task[NoReturn]] = []
        self._host: MeetingHost | None = None

    @classmethod
    async def start(cls, run_dir: str, options: Sequence[Mapping[str, Any]]) -> Ranks:
        """`options`: Ray's options of each."""
        kind = ray.remote(RankActor)
        names = [f"rank-{number}" for number in range(1, len(options) + 1)]
        handles = {
            name: kind.options(max_concurrency=_MAX_CALLS, **own).remote(name, run_dir, objects_in_memory())
            for name, own in zip(names, options, strict=True)
        }
        made = cls(handles)
        found = await asyncio.gather(*(call(handle, "process", deadline_s=START_S) for handle in handles.values()))
        made.processes = dict(zip(names, found, strict=True))
        made._watching = [asyncio.create_task(made._watch(name)) for name in names]
        for watching in made._watching:
            watching.add_done_callback(_end_with_watch)
        return made

    async def opened(self, config: TrainConfig, plan: RunPlan, build: Callable[[], T]) -> T:
        """Load all ranks' parts of the model at the same time, rank 0's with `build` in a thread: they meet."""
        from freewheel.trainer.fsdp import MeetingHost

        self._host = MeetingHost(self._address(), len(self._handles) + 1)
        meeting = self._host.meeting
        opening: list[Awaitable[Any]] = [
            call(handle, "open", config, plan, rank, meeting, deadline_s=START_S)
            for rank, handle in enumerate(self._handles.values(), start=1)
        ]
        own = asyncio.ensure_future(asyncio.to_thread(build))
        await asyncio.gather(own, *opening)
        self._silent_s = config.recovery.silent_s
        return own.result()

    def _address(self) -> str:
        """Return the address of this machine for the other ranks: loopback if all are on it."""
        from freewheel.trainer.fsdp import LOCAL_HOST

        here = ray.get_runtime_context().get_node_id()
        together = all(node == here for _, node in self.processes.values())
        return LOCAL_HOST if together else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def lead(self, model: Any, *, device: str, settings: Mapping[str, Any]) -> Leader:
        """Return rank 0's backend, which leads all ranks."""
        from freewheel.trainer.fsdp import FsdpBackend, join

        assert self._host is not None
        world = join(self._host.meeting, rank=0, device=device, host=self._host)
        return Leader(FsdpBackend(model, world=world, **settings), self, fail=_end_process)

    def ask(self, command: str, *args: Any) -> Asked:
        reference = ray.put(args)  # stored once for all ranks
        asked = {name: handle.obey.remote(command, reference) for name, handle in self._handles.items()}
        return _Answers(command, asked)

    async def _watch(self, name: str) -> NoReturn:
        pulse = Liveness(silent_s=self._silent_s, now=time.monotonic())
        while True:
            pulse.silent_s = self._silent_s
            try:
                await call(self._handles[name], "beat", self._silent_s, deadline_s=_BEAT_S)
                pulse.heard(time.monotonic())
            except NoAnswer:
                if pulse.is_silent(time.monotonic()):
                    kill_process(*self.processes[name])
                    raise RankLost(f"{name} was silent for {self._silent_s:g} s") from None
            except RayActorError as error:
                raise RankLost(f"{name} died: {_first_line(error)}") from error
            await asyncio.sleep(_BEAT_S)

    def close(self) -> None:
        """Kill all ranks. Rank 0 has made sure that they have nothing left to do."""
        for watching in self._watching:
            watching.cancel()
        for name, handle in self._handles.items():
            kill_process(*self.processes[name])
            ray.kill(handle)


def _end_with_watch(watching: asyncio.Task[NoReturn]) -> None:
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _end_process(error)


def _end_process(error: BaseException) -> NoReturn:
    """End rank 0's process from any thread: another thread may be in a collective that nobody will join."""
    log.error("The training processes cannot continue, so the trainer ends: %s", error)
    os._exit(_GROUP_BROKEN)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
