"""How samples are shared, and what happens when one of several ranks fails. Without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
            prompt=np.zeros(n_prompt, np.int64),
            tokens=np.zeros(length, np.int64),
            made=none,
            behaviour=none,
            versions=none,
            reward=0.0,
            advantage=0.0,
            weight=0.0,
        )
        for ordinal, (n_prompt, lengths) in enumerate(groups)
        for index, length in enumerate(lengths)
    ]


def cost(samples: Sequence[Sample]) -> int:
    return sum(len(sample.prompt) + len(sample.tokens) for sample in samples)


GROUPED = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(1, 200), max_size=8)), max_size=12)


@given(groups=GROUPED, world=st.integers(1, 9))
def test_every_sample_has_one_rank_and_shares_are_even_to_within_a_piece(
    groups: list[tuple[int, list[int]]], world: int
) -> None:
    samples = samples_of(groups)
    shares = share_out(samples, world)
    assert len(shares) == world
    assert sorted(sample.key for share in shares for sample in share) == [sample.key for sample in samples]
    for share in shares:
        keys = [sample.key for sample in share]
        assert keys == sorted(keys), "responses that share a prompt stand side by side"
    longest = max([cost([sample]) for sample in samples], default=0)
    piece = max(longest, cost(samples) // (PIECES * world))
    assert max(map(cost, shares)) - min(map(cost, shares)) <= piece
    assert [[sample.key for sample in share] for share in share_out(samples, world)] == [
        [sample.key for sample in share] for share in shares
    ]


def test_groups_stay_whole_if_there_are_enough_of_them() -> None:
    """A prompt that several responses share is computed once a rank that has one of them."""
    samples = samples_of([(100, [10] * 8)] * 32)
    for world in (2, 4, 8):
        owners: dict[int, set[int]] = {}
        for rank, share in enumerate(share_out(samples, world)):
            for sample in share:
                owners.setdefault(sample.key[0], set()).add(rank)
        assert all(len(ranks) == 1 for ranks in owners.values())


class FakeBackend:
    """Notes what it is called with. `raises`: by method."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.raises: dict[str, BaseException] = {}
        self.writes = ""
        """A file, to which it writes its state."""
        self.updates_applied = 0

    def _call(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.raises:
            raise self.raises[name]

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        self._call("step", [group.ordinal for group in groups], version, step, total_steps)
        return {"actor/loss": 0.5}

    def weights(self, stored: bool = False) -> Mapping[str, Any]:
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

    def describe(self) -> str:
        return "learns"


class Failed(Exception):
    """Stands where a process would end."""


class Here:
    """Other ranks in this process: they obey when their answer is waited for."""

    def __init__(self, followers: Sequence[Follower]) -> None:
        self._followers = followers
        self.died = ""
        """Who ended while rank 0 did its part."""

    def ask(self, command: str, *args: Any) -> Obeying:
        work = [lambda follower=one: follower.obey(command, *args) for one in self._followers]
        return Obeying(work, self.died)


class Obeying:
    def __init__(self, work: Sequence[Callable[[], Any]], died: str) -> None:
        self._work = work
        self.died = died

    def wait(self) -> list[Any]:
        try:
            return [one() for one in self._work]
        except BaseException as error:
            raise RankLost(str(error)) from error

    def lost(self, wait_s: float) -> str:
        return self.died


class Group:
    """A leader and two followers."""

    def __init__(self) -> None:
        self.backends = [FakeBackend() for _ in range(3)]
        first, *others = self.backends
        self.failures: list[str] = []
        self.others = Here([Follower(one) for one in others])
        self.leader = Leader(first, self.others, fail=self._fail)

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
    leader = group.leader
    assert leader.step(GROUPS, version=3, step=2, total_steps=9) == {"actor/loss": 0.5}
    assert leader.weights() == {"w": 1}
    leader.load_files([tmp_path / "a"], {"nonfinite": 0})
    leader.weights(stored=True)
    first, *others = group.calls
    assert first[0] == ("step", [0, 1, 2], 3, 2, 9)
    assert [name for name, *_ in first] == ["step", "weights", "load_files", "weights"]
    assert all(other == first for other in others)
    assert not group.failures


def test_each_rank_writes_what_it_copied_when_the_leader_did(group: Group, tmp_path: Path) -> None:
    first = group.leader.state()
    group.leader.step(GROUPS, version=0, step=0, total_steps=9)
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
        group.leader.step(GROUPS, version=0, step=0, total_steps=9)
    assert group.leader.weights() == {"w": 1}
    assert all(calls[-1] == ("weights", False) for calls in group.calls)
    assert not group.failures


def test_an_error_on_rank_0_breaks_the_group(group: Group) -> None:
    group.backends[0].raises["step"] = MemoryError("no memory")
    with pytest.raises(Failed):
        group.leader.step(GROUPS, version=0, step=0, total_steps=9)
    assert group.failures == ["rank 0 failed in step (MemoryError: no memory)"]


def test_the_death_of_another_rank_is_not_blamed_on_rank_0(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 meets it in a collective that breaks."""
    group.others.died = "rank-1 died (killed)"
    group.backends[0].raises["step"] = RuntimeError("Connection closed by peer")
    with pytest.raises(Failed):
        group.leader.step(GROUPS, version=0, step=0, total_steps=9)
    assert group.failures == ["rank-1 died (killed) in step"]
    assert "Rank 0 failed" not in caplog.text and "Connection closed by peer" in caplog.text


@pytest.mark.parametrize("command", ["step", "weights", "state"])
def test_an_error_on_another_rank_breaks_the_group(group: Group, command: str) -> None:
    group.backends[2].raises[command] = MemoryError("no memory there")
    given = {"version": 0, "step": 0, "total_steps": 9}
    with pytest.raises(Failed):
        group.leader.step(GROUPS, **given) if command == "step" else getattr(group.leader, command)()
    assert group.failures == ["no memory there"]


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
    assert all(calls[-1][0] == "write" for calls in group.calls), "each tried"
    assert not group.failures
    assert group.leader.weights() == {"w": 1}


def test_a_file_that_rank_0_cannot_see_fails_the_checkpoint(group: Group, tmp_path: Path) -> None:
    """Under the same name, on a disk of its own."""
    state = group.leader.state()
    group.backends[0].writes = "shard_1"
    state.write(tmp_path)
    group.backends[2].writes = "shard_3"
    state = group.leader.state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "touch", lambda path: None)
        with pytest.raises(ShardsNotWritten, match=r"rank 2.*all machines of the training share"):
            state.write(tmp_path)
    assert not group.failures


def test_a_pulse_is_silent_after_the_allowed_time() -> None:
    pulse = Pulse(silent_s=60.0, now=0.0)
    assert not pulse.is_silent(60.0) and pulse.is_silent(60.1)
    pulse.heard(100.0)
    assert not pulse.is_silent(160.0) and pulse.is_silent(160.1)
    pulse.silent_s = 5.0
    assert not pulse.is_silent(105.0) and pulse.is_silent(105.1), "also for what was heard before"
