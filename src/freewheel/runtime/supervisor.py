"""`Supervisor`: the components of a run as Ray actors: started, introduced to each other, and replaced when they die.

    start:    actors, all at once ─▶ opened in the order of their needs ─▶ introduced ─▶ their loops
    replace:  (back-off) ─▶ a new actor ─▶ opened with what the others know ─▶ introduced ─▶ its loop

    rollouter  what it worked on is issued again; it has the newest weights before it gets any work
    queue      restored from the journal, and told what live rollouters have in hand; the synchronizer announces anew
    sync       told what each engine holds; the trainer publishes its last version again
    trainer    the newest checkpoint; steps since are in the queue's journal and are trained again as they were

A replacement waits for: its own start, and for peers that are being replaced at the same time. The watch continues
meanwhile. Called by `FullyAsyncMain`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from freewheel.data.group import Ticket
from freewheel.queue.journal import CheckpointMark
from freewheel.runtime import actors
from freewheel.runtime.actors import MANY
from freewheel.runtime.building import model_folder
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.placement import Pools
from freewheel.runtime.remote import START_S, ActorDirectory, NoAnswer, RemoteQueue, call
from freewheel.trainer.checkpoint import CheckpointStore, Resumed
from freewheel.utils.registry import objects_in_memory

if TYPE_CHECKING:
    from freewheel.runtime.plan import Plan


log = logging.getLogger("freewheel.runtime")

ASK_S = 10.0
"""Longest time for a component to say what another's successor must know; one that does not say it is as good as dead,
and what it works on is issued again."""

Tell = Callable[[str, int, str], None]
"""(name, process, node): called for each component that is started."""


class Supervisor:
    """Everybody by name: `queue`, `sync`, `trainer`, `rollouter-0` and so on."""

    def __init__(self, *, config: TrainConfig, plan: Plan, run_dir: Path, tell: Tell) -> None:
        self.handles: dict[str, Any] = {}
        self.loops: dict[str, asyncio.Task[Any]] = {}
        """Each ends with its component, or is its replacement under way."""
        self.opening: set[str] = set()
        """Those that load what they need, and cannot answer."""
        self.peers = ActorDirectory()
        self._config = config
        self._plan = plan
        self._run_dir = run_dir
        self._tell = tell
        self._processes: dict[str, tuple[int, str]] = {}
        self._total_prompts: int | None = None
        self._start_from: tuple[str, int] = ("", 0)
        self._pools = Pools(plan)
        self._objects = objects_in_memory()

    @property
    def replicas(self) -> list[str]:
        return [f"rollouter-{index}" for index in range(self._plan.replicas)]

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self, resumed: Resumed | None) -> list[str]:
        """All of them, from a checkpoint or from the beginning. Gives what is to be said of it."""
        self._start_from = (resumed.path, resumed.version) if resumed else (model_folder(self._config), 0)
        mark = CheckpointMark(resumed.step, resumed.version, resumed.frontier) if resumed else CheckpointMark()
        await self._pools.reserve()
        self.handles = {
            "queue": self._actor(actors.QueueActor, "queue"),
            "sync": self._actor(actors.SynchronizerActor, "sync"),
            "trainer": self._new_trainer(resumed),
            **{name: self._new_rollouter(name) for name in self.replicas},
        }
        await asyncio.gather(*(self._identified(name) for name in self.handles))
        described, opened, *_ = await asyncio.gather(
            call(self.handles["trainer"], "open", self.replicas, deadline_s=START_S),
            *(call(self.handles[name], "open", deadline_s=START_S) for name in self.replicas),
        )
        await self._tell_of_ranks()
        self._total_prompts = opened["total_prompts"]
        opening = (self._config, self._total_prompts, mark, None)
        notes = await call(self.handles["queue"], "open", *opening, deadline_s=START_S)
        rollouters = {name: self.handles[name] for name in self.replicas}
        await call(self.handles["sync"], "open", self._config, rollouters, self._start_from[1], None)
        await self._introduce()
        log.info("Training: %s", described)
        for name, handle in self.handles.items():
            self.loops[name] = asyncio.ensure_future(_run(handle))
        return list(notes)

    def _actor(self, kind: type, name: str, *args: Any, **needs: Any) -> Any:
        """`needs`: what it asks Ray for."""
        options = {"num_cpus": 0, "max_concurrency": MANY} | needs
        return ray.remote(kind).options(**options).remote(name, str(self._run_dir), *args)

    def _new_rollouter(self, name: str) -> Any:
        path, version = self._start_from
        if not Path(path).exists():  # a checkpoint that was resumed from, and pruned since: `join` brings newer weights
            path = model_folder(self._config)
        return self._actor(
            actors.RollouterActor,
            name,
            *(self._config, self._plan, self._objects, path, version),
            num_cpus=self._plan.threads_rollout,
            num_gpus=self._plan.gpus_per_replica,
            **self._pools.options("rollout", self.replicas.index(name)),
        )

    def _new_trainer(self, resumed: Resumed | None) -> Any:
        return self._actor(
            actors.TrainerActor,
            "trainer",
            *(self._config, self._plan, self._objects, self._rank_options(), resumed.path if resumed else None),
            **self._training(0),
        )

    def _training(self, rank: int) -> dict[str, Any]:
        """What a training process asks Ray for."""
        needs = {"num_cpus": self._plan.threads_trainer, "num_gpus": self._plan.gpus_trainer}
        return needs | self._pools.options("trainer", rank)

    def _rank_options(self) -> list[dict[str, Any]]:
        """Of each training process beside the trainer's own, which starts them and is their end."""
        return [self._training(rank) for rank in range(1, self._plan.world_size)]

    async def _tell_of_ranks(self) -> None:
        if self._plan.world_size > 1:
            for name, found in (await call(self.handles["trainer"], "ranks", deadline_s=ASK_S)).items():
                self._tell(name, *found)

    async def _identified(self, name: str) -> None:
        self._processes[name] = await call(self.handles[name], "process", deadline_s=START_S)
        self._tell(name, *self._processes[name])

    async def _introduce(self) -> None:
        """Everybody to everybody, those that are opened. One that does not hear it has died, or will ask in vain until
        it is replaced itself."""
        known = {name: handle for name, handle in self.handles.items() if name not in self.opening}
        self.peers.meet(known)
        met = [call(handle, "meet", known, deadline_s=ASK_S) for handle in known.values()]
        await asyncio.gather(*(_if_alive(one) for one in met))

    # -- replacements -------------------------------------------------------------------------------------------------

    def can_replace(self, name: str) -> bool:
        """Without a journal a queue's death is the loss of what it held, and nobody can give a trainer's successor the
        steps since its checkpoint."""
        return name not in ("queue", "trainer") or self._config.journal.enabled

    def replace(self, name: str, *, after_s: float) -> None:
        """Starts `name` anew. Its loop is the replacement from now on, and then the new one's own."""
        self.opening.add(name)
        self._processes.pop(name, None)
        self.loops[name] = asyncio.ensure_future(self._replaced(name, after_s))

    async def _replaced(self, name: str, after_s: float) -> Any:
        await asyncio.sleep(after_s)
        role = name if name in _ROLES else "rollouter"
        return await _ROLES[role](self, name)

    async def _started(
        self, name: str, handle: Any, *args: Any, then: Callable[[], Awaitable[Any]] | None = None
    ) -> Any:
        """A new actor in the place of `name`, opened, and everybody knows it; `then`: before anybody does."""
        self.handles[name] = handle
        await self._identified(name)
        answer = await call(handle, "open", *args, deadline_s=START_S)
        if then is not None:
            await then()
        self.opening.discard(name)
        await self._introduce()
        return answer

    async def _rollouter(self, name: str) -> Any:
        lost = await RemoteQueue(self.peers).release_replica(name)
        log.error("%s died; %d groups are issued again", name, lost)
        handle = self._new_rollouter(name)
        joining = partial(self.peers.call, "sync", "join", name, handle, deadline_s=START_S)
        await self._started(name, handle, then=joining)
        return await _run(handle)

    async def _queue(self, name: str) -> Any:
        handle = self._actor(actors.QueueActor, name)
        in_flight = await self._in_flight()
        for note in await self._started(name, handle, self._config, self._total_prompts, None, in_flight):
            log.info("%s", note)
        # A synchronizer that does not hear it has died: its successor announces by itself.
        return await _run(handle, beside=_if_alive(self.peers.call("sync", "announce")))

    async def _in_flight(self) -> dict[str, list[Ticket]]:
        asked = [name for name in self.replicas if name not in self.opening]
        answers = await asyncio.gather(
            *(_if_alive(call(self.handles[name], "tickets", deadline_s=ASK_S)) for name in asked)
        )
        return {name: tickets for name, tickets in zip(asked, answers, strict=True) if tickets is not None}

    async def _sync(self, name: str) -> Any:
        handle = self._actor(actors.SynchronizerActor, name)
        queue = await self.peers.call("queue", "stats")
        living = [one for one in self.replicas if one not in self.opening]
        stats = await asyncio.gather(*(_if_alive(call(self.handles[one], "stats", deadline_s=ASK_S)) for one in living))
        versions = {one: found["version"] for one, found in zip(living, stats, strict=True) if found}
        rollouters = {one: self.handles[one] for one in self.replicas}
        # What every engine holds is published, also where the queue is a successor that was not told so.
        published = max(queue["published_version"], min(versions.values(), default=0))
        await self._started(name, handle, self._config, rollouters, published, versions)
        return await _run(handle, beside=self._brought_up(handle))

    async def _brought_up(self, sync: Any) -> None:
        await call(sync, "announce", deadline_s=START_S)
        await _if_alive(call(self.handles["trainer"], "publish_again", deadline_s=START_S))

    async def _trainer(self, name: str) -> Any:
        resumed = await asyncio.to_thread(newest_checkpoint, self._run_dir, self._config)
        log.info("A trainer begins anew from %s", f"step {resumed.step}" if resumed else "the beginning")
        handle = self._new_trainer(resumed)
        await self._started(name, handle, self.replicas, then=self._tell_of_ranks)
        return await _run(handle)

    # -- ends ---------------------------------------------------------------------------------------------------------

    async def stop_trainer(self) -> None:
        """One that does not hear it has died, and its end is told by its loop."""
        await _if_alive(self.peers.call("trainer", "request_stop"))

    def release(self) -> None:
        """Nobody is left: others may have the machines."""
        self._pools.release()

    def kill(self, name: str) -> None:
        """Ends a component that does not end by itself. A process that is stopped does not hear Ray: it is killed by
        its number where it is on this machine."""
        process, node = self._processes.get(name, (0, ""))
        if process and node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ray.kill(self.handles[name])


_ROLES = {
    "queue": Supervisor._queue,
    "sync": Supervisor._sync,
    "trainer": Supervisor._trainer,
    "rollouter": Supervisor._rollouter,
}


def newest_checkpoint(run_dir: Path, config: TrainConfig) -> Resumed | None:
    """The newest that is whole."""
    store = CheckpointStore(run_dir, keep_last=config.trainer.keep_last)
    latest = store.latest()
    return None if latest is None else Resumed.of(latest, store.load(latest).state)


async def _run(handle: Any, *, beside: Coroutine[Any, Any, None] | None = None) -> Any:
    """Its loop. `beside`: what the others are told of it; should it die meanwhile, that is heard at once."""
    loop = asyncio.ensure_future(_ended(handle))
    telling = asyncio.ensure_future(beside or asyncio.sleep(0))
    try:
        await asyncio.wait([loop, telling], return_when=asyncio.FIRST_COMPLETED)
        if not loop.done():
            await telling
        return await loop
    finally:
        loop.cancel()
        telling.cancel()


async def _ended(handle: Any) -> Any:
    return await handle.run.remote()


async def _if_alive(asked: Any) -> Any:
    """The answer; None of one that died or is silent."""
    try:
        return await asked
    except (NoAnswer, RayError):
        return None


Question = Callable[[], Awaitable[Any]]


class Poller:
    """One open question to each peer; every answer is heard once."""

    def __init__(self) -> None:
        self.silent: Counter[str] = Counter()
        """By name: questions in a row that were never answered."""
        self._open: dict[str, asyncio.Future[Any]] = {}

    @property
    def pending(self) -> bool:
        return bool(self._open)

    async def round(self, questions: Mapping[str, Question], *, wait_s: float, late: bool = False) -> dict[str, Any]:
        """Answers by name. `late`: those who owe one since an earlier round are waited for too."""
        fresh = {name: asyncio.ensure_future(ask()) for name, ask in questions.items() if name not in self._open}
        self._open |= fresh
        waited_for = [*(self._open if late else fresh).values()]
        if waited_for:
            await asyncio.wait(waited_for, timeout=wait_s)
        done = {name: self._open.pop(name) for name in list(self._open) if self._open[name].done()}
        for name, asked in done.items():
            error = asked.exception()
            if error is None:
                del self.silent[name]
            elif isinstance(error, NoAnswer):
                self.silent[name] += 1
                log.warning("%s: %s", name, error)
            else:
                raise error
        return {name: asked.result() for name, asked in done.items() if asked.exception() is None}

    def forget(self, name: str) -> None:
        """What was asked of it no longer matters: another takes its place."""
        del self.silent[name]
        if name in self._open:
            self._open.pop(name).cancel()

    async def close(self) -> None:
        open_, self._open = self._open, {}
        for asked in open_.values():
            asked.cancel()
        await asyncio.gather(*open_.values(), return_exceptions=True)
