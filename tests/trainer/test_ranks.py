"""How samples are shared, and what happens when one of several ranks fails. Without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from freewheel.data.group import PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.backend import BackendState, NonFiniteLoss
from freewheel.trainer.batching import Sample
from freewheel.trainer.checkpoint import _is_about_space
from freewheel.trainer.ranks import PIECES, Follower, Leader, Pulse, RankLost, ShardsNotWritten, share_out

from .groups import random_group

GROUPS = [random_group(ordinal) for ordinal in range(3)]


def samples_of(groups: Sequence[tuple[int, Sequence[int]]]) -> list[Sample]:
    """Of each group: the prompt's tokens, and each response's."""
    none = np.zeros(0, np.int64)
    return [
        Sample(
            key=(ordinal, index),
            prompt=np.zeros(n_prompt),
            tokens=np.zeros(n),
            made=none,
            behaviour=none,
            versions=none,
        )
        for ordinal, (n_prompt, lengths) in enumerate(groups)
        for index, n in enumerate(lengths)
    ]


def cost(samples: Sequence[Sample]) -> int:
    return sum(len(sample.prompt) + len(sample.tokens) for sample in samples)


def share_keys(samples: Sequence[Sample], world: int) -> list[list[tuple[int, int]]]:
    return [[sample.key for sample in share] for share in share_out(samples, world)]


GROUPED = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(1, 200), max_size=8)), max_size=12)


@given(groups=GROUPED, world=st.integers(1, 9))
def test_every_sample_has_one_rank_and_shares_are_even_to_within_a_piece(
    groups: list[tuple[int, list[int]]], world: int
) -> None:
    samples = samples_of(groups)
    keys = share_keys(samples, world)
    assert len(keys) == world
    assert sorted(key for share in keys for key in share) == [sample.key for sample in samples]
    assert keys == [sorted(share) for share in keys], "responses that share a prompt stay together"
    costs = [cost(share) for share in share_out(samples, world)]
    longest = max([cost([sample]) for sample in samples], default=0)
    assert max(costs) - min(costs) <= max(longest, cost(samples) // (PIECES * world))
    assert keys == share_keys(samples, world), "every rank computes the same shares"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_groups_stay_whole_if_there_are_enough_of_them(world: int) -> None:
    owned = [{ordinal for ordinal, _ in share} for share in share_keys(samples_of([(100, [10] * 8)] * 32), world)]
    assert sum(map(len, owned)) == 32


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

    def step(self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int) -> Any:
        self._call("step", [group.ordinal for group in groups], version, step, total_steps)
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

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        self._call("load_files", list(files), dict(values))


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
    assert first == [("step", [0, 1, 2], 3, 2, 9), ("weights", False), ("weights", True), loaded]
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


@pytest.mark.parametrize("rank", [0, 1, 2])
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
    pulse = Pulse(silent_s=60.0, now=0.0)
    assert not pulse.is_silent(60.0) and pulse.is_silent(60.1)
    pulse.heard(100.0)
    assert not pulse.is_silent(160.0) and pulse.is_silent(160.1)
    pulse.silent_s = 5.0
    assert not pulse.is_silent(105.0) and pulse.is_silent(105.1), "also for what was heard before"
