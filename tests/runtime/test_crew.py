"""Who takes a dead one's place is told what it must know, and everybody is told of it. Without Ray."""

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
from freewheel.runtime.building import model_folder
from freewheel.trainer.checkpoint import Resumed

from .pipeline import plan_of, small_config
from .standins import StandInSupervisor, successor, until

pytestmark = pytest.mark.timeout(60)

ALL = ("queue", "sync", "trainer", "rollouter-0", "rollouter-1")


def crew_of(folder: Path, **sections: Any) -> StandInSupervisor:
    config = small_config(run_dir=str(folder), rollout={"replicas": 2}, **sections)
    return StandInSupervisor(config=config, plan=plan_of(config), run_dir=folder)


async def end(crew: StandInSupervisor) -> None:
    for loop in crew.loops.values():
        loop.cancel()
    await asyncio.gather(*crew.loops.values(), return_exceptions=True)


@pytest.fixture
async def crew(tmp_path: Path) -> AsyncIterator[StandInSupervisor]:
    made = crew_of(tmp_path)
    await made.start(None)
    await until(lambda: all(made[name].running for name in ALL))
    yield made
    await end(made)


async def replaced(crew: StandInSupervisor, name: str, *, after_s: float = 0.0) -> tuple[Any, Any]:
    """The dead one and its successor."""
    first = crew[name]
    first.die()
    await asyncio.gather(crew.loops[name], return_exceptions=True)
    crew.replace(name, after_s=after_s)
    return first, await successor(crew, first)


async def test_a_run_begins_with_everybody_opened_and_known_to_everybody(tmp_path: Path) -> None:
    crew = crew_of(tmp_path)
    assert await crew.start(None) == ["found as it was"]
    assert sorted(crew.handles) == sorted(crew.loops) == sorted(ALL)
    assert sorted(crew.told_of) == sorted(ALL)
    assert crew["queue"].opened[1:] == (96, CheckpointMark(), None)
    assert crew["sync"].opened[2:] == (0, None)
    for name in ALL:
        assert crew[name].met == crew.handles
    await end(crew)


@pytest.mark.parametrize("name", ALL)
async def test_everybody_knows_a_successor(crew: StandInSupervisor, name: str) -> None:
    _, second = await replaced(crew, name)
    assert name not in crew.opening
    assert crew.directory[name].part is second
    for one in ALL:
        assert crew[one].met[name] is crew.handles[name]
    assert crew.told_of.count(name) == 2


async def test_what_a_dead_rollouter_worked_on_is_lost_and_its_successor_joins_before_it_works(
    crew: StandInSupervisor,
) -> None:
    joined_while_running = []

    async def join(name: str, handle: Any) -> None:
        joined_while_running.append((name, handle.part.running))

    crew["sync"].join = join
    await replaced(crew, "rollouter-1")
    assert ("release_replica", "rollouter-1") in crew["queue"].calls
    assert joined_while_running == [("rollouter-1", False)]


async def test_a_queues_successor_is_told_what_live_rollouters_have_in_hand(crew: StandInSupervisor) -> None:
    crew["rollouter-1"].die()  # nobody has noticed yet
    _, second = await replaced(crew, "queue")
    _, total, checkpoint, in_flight = second.opened
    assert (total, checkpoint) == (96, None)
    assert in_flight == {"rollouter-0": [Ticket(ordinal=7, sequence=70, attempt=0)]}
    await until(lambda: ("announce",) in crew["sync"].calls)


async def test_a_synchronizers_successor_knows_what_engines_hold_and_gets_the_last_version_again(
    crew: StandInSupervisor,
) -> None:
    crew["queue"].told["published_version"] = 3
    crew["rollouter-0"].told["version"] = 4
    crew["rollouter-1"].told["version"] = 5
    _, second = await replaced(crew, "sync")
    _, rollouters, published, versions = second.opened
    assert rollouters == {name: crew.handles[name] for name in crew.replicas}
    assert (published, versions) == (4, {"rollouter-0": 4, "rollouter-1": 5})
    await until(lambda: ("announce",) in second.calls and ("publish_again",) in crew["trainer"].calls)


async def test_a_trainers_successor_begins_from_the_beginning_where_nothing_is_saved(crew: StandInSupervisor) -> None:
    _, second = await replaced(crew, "trainer")
    assert second.given[-1] is None
    assert second.opened == (["rollouter-0", "rollouter-1"],)


async def test_those_that_die_together_are_replaced_together(crew: StandInSupervisor) -> None:
    first = {name: crew[name] for name in ALL}
    for one in first.values():
        one.die()
    await asyncio.gather(*crew.loops.values(), return_exceptions=True)
    for name in ALL:
        crew.replace(name, after_s=0.0)
    for one in first.values():
        await successor(crew, one)
    await until(lambda: all(crew[name].met == crew.handles for name in ALL))
    await until(lambda: ("announce",) in crew["sync"].calls)


async def test_a_queue_that_dies_while_others_are_told_of_it_is_known_to_be_dead(crew: StandInSupervisor) -> None:
    crew["sync"].announces.clear()  # it waits for a sync that is under way, which waits for the queue
    _, second = await replaced(crew, "queue")
    second.die()
    with pytest.raises(ActorDiedError):
        await crew.loops["queue"]


async def test_a_synchronizer_that_dies_while_the_trainer_publishes_again_is_known_to_be_dead(
    crew: StandInSupervisor,
) -> None:
    publishing = asyncio.Event()

    async def publish_again() -> None:
        publishing.set()
        await asyncio.Event().wait()

    crew["trainer"].publish_again = publish_again
    _, second = await replaced(crew, "sync")
    await publishing.wait()
    second.die()
    with pytest.raises(ActorDiedError):
        await crew.loops["sync"]


async def test_who_dies_while_it_is_opened_is_known_to_be_dead(crew: StandInSupervisor) -> None:
    crew.on_made = lambda part: part.die()
    crew["trainer"].die()
    await asyncio.gather(crew.loops["trainer"], return_exceptions=True)
    crew.replace("trainer", after_s=0.0)
    with pytest.raises(ActorDiedError):
        await crew.loops["trainer"]
    assert "trainer" in crew.opening  # nobody asks it anything


async def test_a_rollouter_is_started_from_the_first_model_where_the_checkpoint_was_pruned(tmp_path: Path) -> None:
    crew = crew_of(tmp_path)
    saved = tmp_path / "step_000002"
    saved.mkdir()
    await crew.start(Resumed(path=str(saved), step=2, version=2, frontier=Frontier(low=8, trained=8)))
    assert crew["rollouter-0"].given[3:] == (str(saved), 2)
    assert crew["queue"].opened[2] == CheckpointMark(2, 2, Frontier(low=8, trained=8))
    saved.rmdir()
    _, second = await replaced(crew, "rollouter-0")
    assert second.given[3] == model_folder(crew._config)
    await end(crew)


def test_without_a_journal_who_holds_the_run_cannot_be_replaced(tmp_path: Path) -> None:
    with_journal, without = crew_of(tmp_path), crew_of(tmp_path, journal={"enabled": False})
    assert all(with_journal.can_replace(name) for name in ALL)
    assert [name for name in ALL if without.can_replace(name)] == ["sync", "rollouter-0", "rollouter-1"]
