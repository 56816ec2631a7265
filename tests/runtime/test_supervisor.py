"""Replacements of dead components receive what they must know and are connected to all others. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from freewheel.data.group import Ticket
from freewheel.queue.journal import CheckpointMark
from freewheel.queue.ledger import Frontier
from freewheel.runtime.model_size import model_folder
from freewheel.runtime.remote import NoAnswer
from freewheel.runtime.supervisor import Poller
from freewheel.trainer.checkpoint import Resumed

from .pipeline import plan_of, small_config
from .standins import WAIT_S, StandInSupervisor, successor, until

pytestmark = pytest.mark.timeout(60)

ALL = ("queue", "sync", "trainer", "rollouter-0", "rollouter-1")


def make_supervisor(folder: Path, **sections: Any) -> StandInSupervisor:
    config = small_config(run_dir=str(folder), rollout={"replicas": 2}, **sections)
    return StandInSupervisor(config=config, plan=plan_of(config), run_dir=folder)


async def end(supervisor: StandInSupervisor) -> None:
    for loop in supervisor.loops.values():
        loop.cancel()
    await asyncio.gather(*supervisor.loops.values(), return_exceptions=True)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[StandInSupervisor]:
    made = make_supervisor(tmp_path)
    await made.start(None)
    await until(lambda: all(made[name].running for name in ALL))
    yield made
    await end(made)


async def replaced(supervisor: StandInSupervisor, name: str, *, after_s: float = 0.0) -> tuple[Any, Any]:
    """Return the dead part and its replacement."""
    first = supervisor[name]
    first.die()
    await asyncio.gather(supervisor.loops[name], return_exceptions=True)
    supervisor.replace(name, after_s=after_s)
    return first, await successor(supervisor, first)


async def test_a_start_opens_every_component_and_connects_all_of_them(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path)
    assert await supervisor.start(None) == ["found as it was"]
    assert sorted(supervisor.handles) == sorted(supervisor.loops) == sorted(supervisor.reported) == sorted(ALL)
    assert supervisor["queue"].opened[1:] == (96, CheckpointMark(), None)
    assert supervisor["sync"].opened[2:] == (0, None)
    assert all(supervisor[name].met == supervisor.handles for name in ALL)
    supervisor.on_made = lambda part: part.die()
    supervisor["trainer"].die()
    await asyncio.gather(supervisor.loops["trainer"], return_exceptions=True)
    supervisor.replace("trainer", after_s=0.0)
    with pytest.raises(ActorDiedError):  # the replacement died while it was opened
        await supervisor.loops["trainer"]
    assert "trainer" in supervisor.opening, "so it is not polled"
    await end(supervisor)


@pytest.mark.parametrize("name", ALL)
async def test_every_component_is_connected_to_a_replacement(supervisor: StandInSupervisor, name: str) -> None:
    _, second = await replaced(supervisor, name)
    assert name not in supervisor.opening
    assert await supervisor.directory.call(name, "process") == (0, "nowhere") and supervisor[name] is second
    for one in ALL:
        assert supervisor[one].met[name] is supervisor.handles[name]
    assert supervisor.reported.count(name) == 2
    if name == "trainer":
        assert (second.given["resume"], second.opened) == (None, (["rollouter-0", "rollouter-1"],)), (
            "there is no checkpoint"
        )


async def test_a_dead_rollouters_groups_are_released_and_its_replacement_joins_before_it_works(
    supervisor: StandInSupervisor,
) -> None:
    joined_while_running = []

    async def join(name: str, handle: Any) -> None:
        joined_while_running.append((name, handle._handle.part.running))

    supervisor["sync"].join = join
    await replaced(supervisor, "rollouter-1")
    assert ("release_replica", "rollouter-1") in supervisor["queue"].calls
    assert joined_while_running == [("rollouter-1", False)]


async def test_a_restarted_queue_receives_the_tickets_of_live_rollouters(supervisor: StandInSupervisor) -> None:
    supervisor["rollouter-1"].die()  # not noticed yet
    _, second = await replaced(supervisor, "queue")
    _, total, checkpoint, in_flight = second.opened
    assert (total, checkpoint) == (96, None)
    assert in_flight == {"rollouter-0": [Ticket(ordinal=7, sequence=70, attempt=0)]}
    await until(lambda: ("announce",) in supervisor["sync"].calls)


async def test_a_restarted_synchronizer_receives_engine_versions_and_the_last_weights(
    supervisor: StandInSupervisor,
) -> None:
    supervisor["queue"].statistics["published_version"] = 3
    supervisor["rollouter-0"].statistics["version"] = 4
    supervisor["rollouter-1"].statistics["version"] = 5
    _, second = await replaced(supervisor, "sync")
    _, rollouters, published, versions = second.opened
    assert {name: one._handle for name, one in rollouters.items()} == {
        name: supervisor.handles[name] for name in supervisor.replicas
    }
    assert (published, versions) == (4, {"rollouter-0": 4, "rollouter-1": 5})
    await until(lambda: ("announce",) in second.calls and ("publish_again",) in supervisor["trainer"].calls)


async def test_components_that_die_together_are_all_replaced(supervisor: StandInSupervisor) -> None:
    first = {name: supervisor[name] for name in ALL}
    for one in first.values():
        one.die()
    await asyncio.gather(*supervisor.loops.values(), return_exceptions=True)
    for name in ALL:
        supervisor.replace(name, after_s=0.0)
    for one in first.values():
        await successor(supervisor, one)
    await until(lambda: all(supervisor[name].met == supervisor.handles for name in ALL))
    await until(lambda: ("announce",) in supervisor["sync"].calls)


@pytest.mark.parametrize("name", ["queue", "sync"])
async def test_a_component_that_dies_while_others_hear_of_it_ends_its_loop(
    supervisor: StandInSupervisor, name: str
) -> None:
    waiting = asyncio.Event()

    async def publish_again() -> None:
        waiting.set()
        await asyncio.Event().wait()

    supervisor["sync"].announces.clear()  # it waits for a sync in progress, which waits for the queue
    supervisor["trainer"].publish_again = publish_again
    _, second = await replaced(supervisor, name)
    if name == "sync":
        await waiting.wait()
    second.die()
    with pytest.raises(ActorDiedError):
        await supervisor.loops[name]


async def test_a_rollouter_starts_from_the_first_model_after_the_checkpoint_was_pruned(tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path)
    saved = tmp_path / "step_000002"
    saved.mkdir()
    await supervisor.start(Resumed(path=str(saved), step=2, version=2, frontier=Frontier(low=8, trained=8)))
    assert supervisor["rollouter-0"].given == {"model_path": str(saved), "version": 2}
    assert supervisor["queue"].opened[2] == CheckpointMark(2, 2, Frontier(low=8, trained=8))
    saved.rmdir()
    _, second = await replaced(supervisor, "rollouter-0")
    assert second.given["model_path"] == model_folder(supervisor._config)
    await end(supervisor)


async def test_a_late_answer_is_returned_once_and_does_not_delay_others() -> None:
    poller, gate, asked = Poller(), asyncio.Event(), []

    async def slow() -> str:
        asked.append("slow")
        await gate.wait()
        return "late"

    async def quick() -> str:
        return "now"

    questions = {"slow": slow, "quick": quick}
    assert await poller.poll(questions, wait_s=0.01) == {"quick": "now"}
    assert await poller.poll(questions, wait_s=WAIT_S) == {"quick": "now"}  # does not wait for the late answer
    gate.set()
    assert await poller.poll(questions, wait_s=WAIT_S, late=True) == {"slow": "late", "quick": "now"}
    assert asked == ["slow"]


async def test_an_answer_clears_the_count_of_silent_questions() -> None:
    poller, answers = Poller(), [NoAnswer("1"), NoAnswer("2"), None, NoAnswer("3")]

    async def ask() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    counts = []
    for _ in range(4):
        await poller.poll({"peer": ask}, wait_s=WAIT_S)
        counts.append(poller.silent["peer"])
    assert counts == [1, 2, 0, 1]
