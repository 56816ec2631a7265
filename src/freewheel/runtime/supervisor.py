"""`Supervisor`: starts the components of a run as Ray actors, connects them, polls them, and replaces dead ones.

    start:    all actors at once ─▶ open, in the order of their dependencies ─▶ connect ─▶ their loops run
    replace:  (back-off) ─▶ a new actor ─▶ open with what the others know ─▶ connect ─▶ its loop runs

    rollouter  its groups are issued again; it loads the newest weights before it gets any work
    queue      restored from the journal and the tickets that live rollouters hold; the synchronizer announces again
    sync       receives the version that each engine holds; the trainer publishes its last version again
    trainer    loads the newest checkpoint; later steps are in the queue's journal and are replayed as they were

A replacement waits for its own start, and for actors that are replaced at the same time. Watching continues meanwhile.
Used by `FullyAsyncMain`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from freewheel.queue.journal import CheckpointMark
from freewheel.runtime import actors
from freewheel.runtime.actors import MAX_CALLS
from freewheel.runtime.cluster import Pools
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.model_size import model_folder
from freewheel.runtime.remote import START_S, ActorDirectory, NoAnswer, RemoteReplica, call, kill_process, remote_queue
from freewheel.trainer.checkpoint import CheckpointStore, Resumed
from freewheel.utils.registry import objects_in_memory
from freewheel.utils.waiting import unless_failed

if TYPE_CHECKING:
    from freewheel.runtime.run_plan import RunPlan

log = logging.getLogger("freewheel.runtime")

_HANDOVER_S = 10.0
"""Longest time for an actor to report what a replaced one must know. An actor that does not answer counts as dead, and
its groups are issued again."""

OnProcess = Callable[[str, int, str], None]
"""(name, process id, node): called for each process that is started."""


class Supervisor:
    """Owns the actors by name: `queue`, `sync`, `trainer`, `rollouter-0` and so on."""

    def __init__(self, *, config: TrainConfig, plan: RunPlan, run_dir: Path, on_process: OnProcess) -> None:
        self.handles: dict[str, Any] = {}
        self.loops: dict[str, asyncio.Task[Any]] = {}
        """A task for each component. It ends when the component does; it includes a replacement in progress."""
        self.opening: set[str] = set()
        """Components that are loading and cannot answer."""
        self.directory = ActorDirectory()
        self._config = config
        self._plan = plan
        self._objects = objects_in_memory()
        self._run_dir = run_dir
        self._on_process = on_process
        self._processes: dict[str, tuple[int, str]] = {}
        self._total_prompts: int | None = None
        self._start_from: tuple[str, int] = ("", 0)
        self._pools = Pools(plan)

    @property
    def replicas(self) -> list[str]:
        return [f"rollouter-{index}" for index in range(self._plan.replicas)]

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self, resumed: Resumed | None) -> list[str]:
        """Start all components, from a checkpoint or from the beginning. Returns notes about the journal."""
        self._start_from = (resumed.path, resumed.version) if resumed else (model_folder(self._config), 0)
        mark = CheckpointMark(resumed.step, resumed.version, resumed.frontier) if resumed else CheckpointMark()
        await self._pools.reserve()
        self.handles = {
            "queue": self._actor(actors.QueueActor, "queue"),
            "sync": self._actor(actors.SynchronizerActor, "sync"),
            "trainer": self._new_trainer(resumed),
            **{name: self._new_rollouter(name) for name in self.replicas},
        }
        await asyncio.gather(*(self._report_process(name) for name in self.handles))
        described, opened, *_ = await asyncio.gather(
            call(self.handles["trainer"], "open", self.replicas, deadline_s=START_S),
            *(call(self.handles[name], "open", deadline_s=START_S) for name in self.replicas),
        )
        await self._report_ranks()
        self._total_prompts = opened["total_prompts"]
        opening = (self._config, self._total_prompts, mark, None)
        notes = await call(self.handles["queue"], "open", *opening, deadline_s=START_S)
        await call(self.handles["sync"], "open", self._config, self._remote_replicas, self._start_from[1], None)
        await self._connect()
        log.info("Training: %s", described)
        for name, handle in self.handles.items():
            self.loops[name] = asyncio.ensure_future(_run(handle))
        return list(notes)

    @property
    def _remote_replicas(self) -> dict[str, RemoteReplica]:
        return {name: RemoteReplica(self.handles[name]) for name in self.replicas}

    def _actor(self, kind: type, name: str, resources: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        options = {"num_cpus": 0, "max_concurrency": MAX_CALLS} | dict(resources or {})
        if settings:
            settings |= {"config": self._config, "plan": self._plan, "objects": self._objects}
        return ray.remote(kind).options(**options).remote(name, str(self._run_dir), **settings)

    def _new_rollouter(self, name: str) -> Any:
        path, version = self._start_from
        if not Path(path).exists():  # a checkpoint that was pruned since; `join` brings newer weights
            path = model_folder(self._config)
        needs = {"num_cpus": self._config.rollout.threads, "num_gpus": self._plan.gpus_per_replica}
        needs |= self._pools.options("rollout", self.replicas.index(name))
        return self._actor(actors.RollouterActor, name, needs, model_path=path, version=version)

    def _new_trainer(self, resumed: Resumed | None) -> Any:
        others = [self._rank_resources(rank) for rank in range(1, self._plan.world_size)]
        path = resumed.path if resumed else None
        return self._actor(actors.TrainerActor, "trainer", self._rank_resources(0), rank_options=others, resume=path)

    def _rank_resources(self, rank: int) -> dict[str, Any]:
        needs = {"num_cpus": self._config.trainer.threads, "num_gpus": self._plan.gpus_trainer}
        return needs | self._pools.options("trainer", rank)

    async def _report_ranks(self) -> None:
        """The trainer's actor starts the other training processes, and ends them."""
        if self._plan.world_size > 1:
            for name, process in (await call(self.handles["trainer"], "ranks", deadline_s=_HANDOVER_S)).items():
                self._on_process(name, *process)

    async def _report_process(self, name: str) -> None:
        self._processes[name] = await call(self.handles[name], "process", deadline_s=START_S)
        self._on_process(name, *self._processes[name])

    async def _connect(self) -> None:
        """Give every open actor the handles of all others. One that misses it has died, and is replaced itself."""
        known = {name: handle for name, handle in self.handles.items() if name not in self.opening}
        self.directory.update(known)
        connecting = [call(handle, "connect", known, deadline_s=_HANDOVER_S) for handle in known.values()]
        await asyncio.gather(*(_if_alive(one) for one in connecting))

    # -- replacements -------------------------------------------------------------------------------------------------

    def can_replace(self, name: str) -> bool:
        """Without a journal, a dead queue's groups are lost, and so are the steps since the trainer's checkpoint."""
        return name not in ("queue", "trainer") or self._config.journal.enabled

    def replace(self, name: str, *, after_s: float) -> None:
        """Restart `name`. Its loop is now the replacement's work, and then the new component's loop."""
        self.opening.add(name)
        self._processes.pop(name, None)
        self.loops[name] = asyncio.ensure_future(self._replace(name, after_s))

    async def _replace(self, name: str, after_s: float) -> Any:
        await asyncio.sleep(after_s)
        restart = {"queue": self._restart_queue, "sync": self._restart_sync, "trainer": self._restart_trainer}
        return await (restart[name]() if name in restart else self._restart_rollouter(name))

    async def _open(self, name: str, handle: Any, *args: Any, then: Callable[[], Awaitable[Any]] | None = None) -> Any:
        """Open a new actor under `name` and connect it. `then` runs before other components can call it."""
        self.handles[name] = handle
        await self._report_process(name)
        answer = await call(handle, "open", *args, deadline_s=START_S)
        if then is not None:
            await then()
        self.opening.discard(name)
        await self._connect()
        return answer

    async def _restart_rollouter(self, name: str) -> Any:
        lost = await remote_queue(self.directory).release_replica(name)
        log.error("%s died; %d groups are issued again", name, lost)
        handle = self._new_rollouter(name)
        join = partial(self.directory.ask, "sync", "join", name, RemoteReplica(handle), deadline_s=START_S)
        await self._open(name, handle, then=join)
        return await _run(handle)

    async def _restart_queue(self) -> Any:
        handle = self._actor(actors.QueueActor, "queue")
        in_flight = await self._ask_rollouters("tickets")
        for note in await self._open("queue", handle, self._config, self._total_prompts, None, in_flight):
            log.info("%s", note)
        # If the synchronizer does not receive this, it has died, and its replacement announces it.
        return await _run(handle, inform=_if_alive(self.directory.ask("sync", "announce")))

    async def _restart_sync(self) -> Any:
        handle = self._actor(actors.SynchronizerActor, "sync")
        queue = await self.directory.call("queue", "stats")
        versions = {name: stats["version"] for name, stats in (await self._ask_rollouters("stats")).items() if stats}
        # A version that every engine holds is published, also if a restarted queue does not know it.
        published = max(queue["published_version"], min(versions.values(), default=0))
        await self._open("sync", handle, self._config, self._remote_replicas, published, versions)
        return await _run(handle, inform=self._bring_sync_up_to_date(handle))

    async def _bring_sync_up_to_date(self, sync: Any) -> None:
        await call(sync, "call", "announce", (), {}, deadline_s=START_S)
        await _if_alive(call(self.handles["trainer"], "publish_again", deadline_s=START_S))

    async def _restart_trainer(self) -> Any:
        resumed = await asyncio.to_thread(newest_checkpoint, self._run_dir, self._config)
        log.info("The trainer restarts from %s", f"step {resumed.step}" if resumed else "the beginning")
        handle = self._new_trainer(resumed)
        await self._open("trainer", handle, self.replicas, then=self._report_ranks)
        return await _run(handle)

    async def _ask_rollouters(self, method: str) -> dict[str, Any]:
        """Return the answers of the rollouters that are alive."""
        names = [name for name in self.replicas if name not in self.opening]
        asked = (_if_alive(call(self.handles[name], method, deadline_s=_HANDOVER_S)) for name in names)
        answers = zip(names, await asyncio.gather(*asked), strict=True)
        return {name: answer for name, answer in answers if answer is not None}

    # -- ends ---------------------------------------------------------------------------------------------------------

    async def stop_trainer(self) -> None:
        """Ask the trainer to stop. If it does not hear this, it has died, and its loop reports that."""
        await _if_alive(self.directory.call("trainer", "request_stop"))

    def release(self) -> None:
        """Return the reserved machines to the cluster."""
        self._pools.release()

    def kill(self, name: str) -> None:
        kill_process(*self._processes.get(name, (0, "")))
        ray.kill(self.handles[name])


def newest_checkpoint(run_dir: Path, config: TrainConfig) -> Resumed | None:
    """Return the newest checkpoint that is whole."""
    store = CheckpointStore(run_dir, keep_last=config.trainer.keep_last)
    latest = store.latest()
    return None if latest is None else Resumed.of(latest, store.load(latest).state)


async def _run(handle: Any, *, inform: Coroutine[Any, Any, None] | None = None) -> Any:
    """Run the component's loop. `inform` tells others about it; a death during that is raised at once."""
    loop = asyncio.ensure_future(call(handle, "run", deadline_s=None))
    try:
        if inform is not None:
            await unless_failed(inform, loop)
        return await loop
    finally:
        loop.cancel()


async def _if_alive(answer: Awaitable[Any]) -> Any:
    """Return the answer, or None of an actor that is dead or silent."""
    try:
        return await answer
    except (NoAnswer, RayError):
        return None


class Poller:
    """Asks all components without waiting for a slow one. Each has one open question; each answer is returned once.

    poll ─▶ a question to each component without an open one ─▶ (waits briefly) ─▶ the answers so far
                                                     └─ late: returned by a later poll; too late: counted as silence
    """

    def __init__(self) -> None:
        self.silent: Counter[str] = Counter()
        """Unanswered questions in a row, by component."""
        self._open: dict[str, asyncio.Future[Any]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._open)

    async def poll(
        self, questions: Mapping[str, Callable[[], Awaitable[Any]]], *, wait_s: float, late: bool = False
    ) -> dict[str, Any]:
        """Return answers by name. `late`: also wait for answers to earlier questions."""
        fresh = {name: asyncio.ensure_future(ask()) for name, ask in questions.items() if name not in self._open}
        self._open |= fresh
        waited_for = [*(self._open if late else fresh).values()]
        if waited_for:
            await asyncio.wait(waited_for, timeout=wait_s)
        answers = {}
        for name in [name for name, question in self._open.items() if question.done()]:
            question = self._open.pop(name)
            error = question.exception()
            if error is None:
                del self.silent[name]
                answers[name] = question.result()
            elif isinstance(error, NoAnswer):
                self.silent[name] += 1
                log.warning("%s: %s", name, error)
            else:
                raise error
        return answers

    def forget(self, name: str) -> None:
        """Drop an open question to a component that is being replaced."""
        del self.silent[name]
        if name in self._open:
            self._open.pop(name).cancel()

    async def close(self) -> None:
        questions, self._open = self._open, {}
        for question in questions.values():
            question.cancel()
        await asyncio.gather(*questions.values(), return_exceptions=True)
