"""All ranks follow the leader, and one that fails breaks the group. Without processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from safetensors import SafetensorError

from freewheel.data.group import PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.backend import BackendState, NonFiniteLoss
from freewheel.trainer.checkpoint import _is_about_space
from freewheel.trainer.ranks import Follower, Leader, Liveness, RankLost, ShardsNotWritten

from .groups import random_group

GROUPS = [random_group(ordinal) for ordinal in range(3)]


class FakeBackend:
    """Records its calls. `raises`: by method."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.raises: dict[str, BaseException] = {}
        self.writes = ""
        """The name of the file that it writes its state to."""

    def _call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.raises:
            raise self.raises[name]

    def step(self, groups: Sequence[PromptGroup], **counters: Any) -> Any:
        self._call("step", [group.ordinal for group in groups], counters)
        return {"actor/loss": 0.5}

    def weights(self, stored: bool = False) -> Any:
        self._call("weights", stored)
        return {"w": 1}

    def state(self) -> BackendState:
        self._call("state")
        number = len(self.calls)

        def write(folder: Path) -> str:
            self._call("write", number, folder)
            if self.writes:
                (folder / self.writes).touch()
            return self.writes

        return BackendState(values={}, write=write)

    def load_files(self, *args: Any) -> None:
        self._call("load_files", *args)


class Failed(Exception):
    """Raised where a process would end."""


class Group:
    """A leader and two followers in this process, which obey when their answer is waited for."""

    def __init__(self) -> None:
        self.backends = [FakeBackend() for _ in range(3)]
        self.failures: list[str] = []
        self.died = ""
        """The rank that ended while rank 0 did its part."""
        self._followers = [Follower(backend) for backend in self.backends[1:]]  # type: ignore[arg-type]
        self.leader = Leader(self.backends[0], self, fail=self._fail)  # type: ignore[arg-type]

    def ask(self, command: str, *args: Any) -> Any:
        def wait() -> list[Any]:
            try:
                return [one.obey(command, *args) for one in self._followers]
            except BaseException as error:
                raise RankLost(str(error)) from error

        return SimpleNamespace(wait=wait, lost=lambda wait_s: self.died)

    def step(self) -> Any:
        return self.leader.step(GROUPS, version=3, step=2, total_steps=9)

    def _fail(self, lost: RankLost) -> NoReturn:
        self.failures.append(str(lost))
        raise Failed

    @property
    def calls(self) -> list[list[tuple[Any, ...]]]:
        return [backend.calls for backend in self.backends]


@pytest.fixture
def group() -> Group:
    return Group()


def test_every_rank_runs_the_leaders_commands(group: Group, tmp_path: Path) -> None:
    assert group.step() == {"actor/loss": 0.5}
    assert group.leader.weights() == group.leader.weights(stored=True) == {"w": 1}
    group.leader.load_files([tmp_path / "a"], {"nonfinite": 0})
    first, *others = group.calls
    loaded = ("load_files", [tmp_path / "a"], {"nonfinite": 0})
    stepped = ("step", [0, 1, 2], {"version": 3, "step": 2, "total_steps": 9})
    assert first == [stepped, ("weights", False), ("weights", True), loaded]
    assert all(other == first for other in others)
    assert not group.failures


def test_each_rank_writes_what_it_copied_when_the_leader_did(group: Group, tmp_path: Path) -> None:
    first = group.leader.state()
    group.step()
    second = group.leader.state()
    first.write(tmp_path / "first")
    second.write(tmp_path / "second")
    for calls in group.calls:
        written = [call[1:] for call in calls if call[0] == "write"]
        assert written == [(1, tmp_path / "first"), (3, tmp_path / "second")]


@pytest.mark.parametrize("error", [NonFiniteLoss("three in a row"), DataError("a bad group")])
def test_an_error_that_all_ranks_raise_leaves_the_group_intact(group: Group, error: Exception) -> None:
    for backend in group.backends:
        backend.raises["step"] = error
    with pytest.raises(type(error)):
        group.step()
    assert group.leader.weights() == {"w": 1}
    assert all(calls[-1] == ("weights", False) for calls in group.calls)
    assert not group.failures


@pytest.mark.parametrize(
    ("rank", "command", "died", "failure"),
    [
        (0, "step", "", "rank 0 failed in step (MemoryError: no memory)"),
        (0, "step", "rank-1 died (killed)", "rank-1 died (killed) in step"),  # rank 0 meets it in a collective
        (2, "step", "", "no memory"),
        (2, "weights", "", "no memory"),
        (2, "state", "", "no memory"),
    ],
)
def test_any_other_error_breaks_the_group_and_names_the_rank_that_caused_it(
    group: Group, caplog: pytest.LogCaptureFixture, rank: int, command: str, died: str, failure: str
) -> None:
    group.died = died
    group.backends[rank].raises[command] = MemoryError("no memory")
    with pytest.raises(Failed):
        group.step() if command == "step" else getattr(group.leader, command)()
    assert group.failures == [failure]
    assert ("Rank 0 failed" in caplog.text) is failure.startswith("rank 0 ")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error (os error 28)")])
def test_a_rank_that_cannot_write_fails_only_the_checkpoint(
    group: Group, tmp_path: Path, rank: int, error: Exception
) -> None:
    state = group.leader.state()
    group.backends[rank].raises["write"] = error
    with pytest.raises(ShardsNotWritten, match=f"rank {rank}") as caught:
        state.write(tmp_path)
    assert _is_about_space(caught.value)
    assert all(calls[-1][0] == "write" for calls in group.calls), "each rank tried"
    assert not group.failures
    assert group.leader.weights() == {"w": 1}


def test_a_file_that_rank_0_cannot_see_fails_the_checkpoint(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.backends[0].writes = "shard_1"
    assert group.leader.state().write(tmp_path) == "shard_1"
    group.backends[2].writes = "shard_3"
    monkeypatch.setattr(Path, "touch", lambda path: None)  # rank 2 writes to another disk
    with pytest.raises(ShardsNotWritten, match=r"rank 2.*all machines of the training share"):
        group.leader.state().write(tmp_path)
    assert not group.failures


def test_a_pulse_is_silent_after_the_allowed_time() -> None:
    pulse = Liveness(silent_s=60.0, now=0.0)
    assert not pulse.is_silent(60.0) and pulse.is_silent(60.1)
    pulse.heard(100.0)
    assert not pulse.is_silent(160.0) and pulse.is_silent(160.1)
    pulse.silent_s = 5.0
    assert not pulse.is_silent(105.0) and pulse.is_silent(105.1), "also for what was heard before"
