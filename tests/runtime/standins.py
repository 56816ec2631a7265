"""The components of a run without Ray: stand-ins behind handles like Ray's, that die when a test says so.

FullyAsyncMain ─▶ StandInSupervisor (all of `Supervisor`, but for processes) ─▶ Handle ─▶ Part, or an ActorDiedError
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from ray.exceptions import ActorDiedError

from freewheel.data.group import Ticket
from freewheel.observe.snapshot import RunSnapshot
from freewheel.runtime import actors
from freewheel.runtime.supervisor import Supervisor
from freewheel.trainer.backend import MetricsRow

WAIT_S = 30.0


class View:
    """Keeps what a run shows."""

    def __init__(self) -> None:
        self.snapshots: list[RunSnapshot] = []
        self.said: list[str] = []
        self.end = ""

    def update(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)

    def say(self, text: str) -> None:
        self.said.append(text)

    def finish(self, snapshot: RunSnapshot, summary: str) -> None:
        self.end = summary


class Handle:
    """Calls like a Ray handle, without a process. A call to a dead part, or to one that dies during it, raises."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: asyncio.ensure_future(self._call(method, args, kwargs)))

    async def _call(self, method: str, args: Any, kwargs: Any) -> Any:
        called = asyncio.ensure_future(getattr(self.part, method)(*args, **kwargs))
        dying = asyncio.ensure_future(self.part.dead.wait())
        try:
            await asyncio.wait([called, dying], return_when=asyncio.FIRST_COMPLETED)
            if self.part.dead.is_set():
                raise ActorDiedError
            return called.result()
        finally:
            called.cancel()
            dying.cancel()
            await asyncio.gather(called, dying, return_exceptions=True)


class Mortal:
    """What a handle calls."""

    def __init__(self) -> None:
        self.dead = asyncio.Event()

    def die(self) -> None:
        self.dead.set()


class Part(Mortal):
    """A component whose end and statistics a test sets."""

    def __init__(self, name: str = "part", **given: Any) -> None:
        super().__init__()
        self.name = name
        self.given = given
        """Arguments of the constructor."""
        self.statistics: dict[str, Any] = {}
        self.end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.opens = asyncio.Event()
        self.opens.set()
        self.opened: tuple[Any, ...] | None = None
        self.met: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []
        """Other calls."""
        self.running = self.closed = False

    async def process(self) -> tuple[int, str]:
        return 0, "nowhere"

    async def open(self, *args: Any) -> Any:
        await self.opens.wait()
        self.opened = args
        return self.answer

    answer: Any = None
    """The answer to `open`."""

    async def connect(self, handles: dict[str, Any]) -> None:
        self.met |= handles

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        return await getattr(self, method)(*args, **kwargs)

    async def run(self) -> Any:
        self.running = True
        return await asyncio.shield(self.end)

    async def stats(self) -> dict[str, Any]:
        return self.statistics

    async def close(self) -> None:
        self.closed = True


class Trainer(Part):
    """Is at step 3 and has saved step 2. It saves when it is asked to stop."""

    saves = True
    answer = "as usual"

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name, **given)
        self.statistics = {"global_steps": 3, "saved_step": 2}

    async def request_stop(self) -> None:
        self.calls.append(("request_stop",))
        if self.saves and not self.end.done():
            self.statistics["saved_step"] = 3
            self.end.set_result("stopped")

    async def rows(self) -> list[MetricsRow]:
        return [MetricsRow("step", 3, {})] if self.end.done() else []

    async def publish_again(self) -> None:
        self.calls.append(("publish_again",))

    async def export(self, folder: str) -> None:
        self.calls.append(("export", folder))


class Queue(Part):
    answer = ("found as it was",)

    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name, **given)
        self.statistics = {"step": 3, "abandoned": {}, "published_version": 0}

    async def call(self, method: str, args: Any, kwargs: Any) -> Any:
        self.calls.append((method, *args))
        return 0


class Sync(Part):
    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(name, **given)
        self.announces = asyncio.Event()
        self.announces.set()

    async def announce(self) -> None:
        self.calls.append(("announce",))
        await self.announces.wait()

    async def join(self, name: str, handle: Handle) -> None:
        self.calls.append(("join", name, handle))

    async def rows(self) -> list[dict[str, Any]]:
        return []


class Rollouter(Part):
    answer: ClassVar = {"total_prompts": 96, "prompts": 96}

    async def tickets(self) -> list[Ticket]:
        return [Ticket(ordinal=7, sequence=70, attempt=0)]


KINDS: dict[type, type[Part]] = {
    actors.QueueActor: Queue,
    actors.SynchronizerActor: Sync,
    actors.TrainerActor: Trainer,
    actors.RollouterActor: Rollouter,
}


class StandInSupervisor(Supervisor):
    """A supervisor with parts in this process. `on_made` is called with each new part, before anybody calls it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"on_process": lambda name, *_: self.reported.append(name), **given})
        self.reported: list[str] = []
        self.made: list[Part] = []
        self.killed: list[str] = []
        self.on_made: Callable[[Any], None] = lambda _: None

    def _actor(self, kind: type, name: str, resources: Any = None, **settings: Any) -> Any:
        part = KINDS[kind](name, **settings)
        self.made.append(part)
        self.on_made(part)
        return Handle(part)

    def __getitem__(self, name: str) -> Any:
        """Return the current part of this name."""
        return self.handles[name].part

    def kill(self, name: str) -> None:
        self.killed.append(name)
        self[name].die()


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def successor(supervisor: StandInSupervisor, before: Part) -> Any:
    """Wait until the replacement of `before` runs, and return it."""
    await until(lambda: supervisor[before.name] is not before and supervisor[before.name].running)
    return supervisor[before.name]
