"""Several processes that train as one: rank 0 leads, the others follow. Pure coordination: no torch, no Ray.

    FullyAsyncTrainer ─▶ Leader ─┬─ ask(command) ─▶ Follower of rank 1, 2, … ─▶ its backend ─┐
                                 └──────────────────────────────────────────▶ backend of rank 0 ┘ meet in collectives

Every command is obeyed by all ranks, rank 0 included, in the same order. What goes wrong on one of them leaves the
others in the middle of something: then the group is broken, and `fail` ends rank 0's process, so that a whole new group
begins from the newest checkpoint. Used by `TrainSide` (rank 0) and by the rank actors.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from freewheel.data.group import EncodedGroups, PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.backend import Backend, BackendState, NonFiniteLoss

if TYPE_CHECKING:
    from torch import Tensor

    from freewheel.trainer.batching import Sample

log = logging.getLogger("freewheel.trainer")

T = TypeVar("T")

PIECES = 4
"""Pieces that a rank's share is made of at least: a group is cut where it is larger. Fewer would leave shares unequal,
more would part responses from the prompt that they share."""
ALIKE = (NonFiniteLoss, DataError)
"""What every rank finds, at the same place: it leaves them together."""
WITNESS_S = 5.0
"""How long rank 0 looks for one that ended before it takes a failure for its own: Ray tells of a death within a second
or two, and the others wait for rank 0 meanwhile."""
KEPT_STATES = 2
"""Copies of the training state that a rank holds: one that is being written, and the next."""


class RankLost(RuntimeError):
    """A training process died, raised, or gave no answer: the others cannot go on without it."""


def share_out(samples: Sequence[Sample], world: int) -> list[list[Sample]]:
    """Each rank's samples, about as many tokens for each, in the order given. The same on every rank."""
    costs = [len(sample.prompt) + len(sample.tokens) for sample in samples]
    largest = sum(costs) // (PIECES * world)
    pieces: list[list[int]] = []
    filled = 0
    for place, (sample, cost) in enumerate(zip(samples, costs, strict=True)):
        begins = not place or sample.key[0] != samples[place - 1].key[0]
        if begins or filled + cost > largest:
            pieces.append([])
            filled = 0
        pieces[-1].append(place)
        filled += cost
    weights = [sum(costs[place] for place in piece) for piece in pieces]
    loads, shares = [0] * world, [list[int]() for _ in range(world)]
    for number in sorted(range(len(pieces)), key=lambda number: (-weights[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += weights[number]
        shares[rank] += pieces[number]
    return [[samples[place] for place in sorted(share)] for share in shares]


class ShardsNotWritten(OSError):
    """One rank could not write its part of a checkpoint; the message says which and why."""


class ShardedBackend(Backend, Protocol):
    """A `Backend` whose methods every rank calls with the same arguments. Gives on rank 0 what is complete."""

    def write_state(self, state: BackendState, folder: Path) -> str:
        """This rank's part of what `state` gave, to a file of its own, whose name it gives; empty: it has no part. May
        run beside training: it asks nothing of the other ranks."""

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        """What `write_state` wrote on any number of ranks, or a backend of one process."""


@dataclass(frozen=True)
class Written:
    """What a rank says of its part of a checkpoint."""

    name: str = ""
    """Of its file. Empty: it has no part, or could not write it."""
    errno: int = 0
    error: str = ""
    """Why it could not."""


class Asked(Protocol):
    """A command that the other ranks were given."""

    def wait(self) -> list[Any]:
        """Their answers, in their order, when all have obeyed. Raises `RankLost`."""

    def lost(self, wait_s: float) -> str:
        """Who of them has ended or failed, and how; empty where nobody has within so long."""


class Others(Protocol):
    """The other ranks, as rank 0 sees them."""

    def ask(self, command: str, *args: Any) -> Asked:
        """Returns at once. Commands arrive in the order given, those to write beside the rest."""


class Leader:
    """All ranks as one `Backend`, for whoever is in rank 0's process."""

    def __init__(self, backend: ShardedBackend, others: Others, *, fail: Callable[[RankLost], NoReturn]) -> None:
        self.backend = backend
        self._others = others
        self._fail = fail
        self._states = 0

    @property
    def updates_applied(self) -> int:
        return self.backend.updates_applied

    def step(
        self, groups: Sequence[PromptGroup], *, version: int | None, step: int, total_steps: int
    ) -> dict[str, float]:
        work = partial(self.backend.step, groups, version=version, step=step, total_steps=total_steps)
        return self._together(work, "step", EncodedGroups.encode(groups), version, step, total_steps)

    def weights(self) -> Mapping[str, Tensor]:
        return self._together(self.backend.weights, "weights")

    def state(self) -> BackendState:
        """Its tensors stay where they are, copied, on every rank, until `write` puts them into a folder."""
        self._states += 1
        number = self._states
        own = self._together(self.backend.state, "state", number)
        return BackendState(tensors={}, values=own.values, write=partial(self._write, number, own))

    def _write(self, number: int, own: BackendState, folder: Path) -> None:
        """A disk that is full costs the checkpoint alone."""
        asked = self._others.ask("write", number, str(folder))
        written = _written(self.backend, own, folder)
        for rank, told in enumerate([written, *self._answered(asked)]):
            if told.error:
                raise ShardsNotWritten(told.errno, f"rank {rank}: {told.error}")
            if told.name and not (folder / told.name).is_file():
                raise ShardsNotWritten(
                    errno.ENOENT,
                    f"rank {rank}: what it wrote is not to be seen from rank 0: run_dir must be on a file system that "
                    "all machines of the training share",
                )

    def load_state(self, state: BackendState) -> None:
        if state.write is not None:
            raise DataError("this state lies in shards: write it to a folder, and load its files")
        self._together(partial(self.backend.load_state, state), "load_state", state)

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        work = partial(self.backend.load_files, files, values)
        self._together(work, "load_files", [str(file) for file in files], dict(values))

    def save_hf(self, folder: Path, tokenizer: Any = None) -> None:
        """What rank 0 writes is gathered before: a disk that is full breaks nothing."""
        work = partial(self.backend.save_hf, folder, tokenizer)
        self._together(work, "save_hf", str(folder), harmless=(Exception,))

    def describe(self) -> str:
        return self.backend.describe()

    def _together(
        self, work: Callable[[], T], command: str, *args: Any, harmless: tuple[type[Exception], ...] = ALIKE
    ) -> T:
        asked = self._others.ask(command, *args)
        try:
            done = work()
        except harmless:
            self._answered(asked)
            raise
        except BaseException as error:  # noqa: BLE001  # the group is broken, whatever it was
            self._fail(self._cause(asked, command, error))
        self._answered(asked)
        return done

    def _cause(self, asked: Asked, command: str, error: BaseException) -> RankLost:
        """Another's end is met by rank 0 in a collective that breaks: then it is the other who is named."""
        met = f"{type(error).__name__}: {error}"
        if other := asked.lost(WITNESS_S):
            log.error("Rank 0 met the end of another in %s (%s)", command, met)
            return RankLost(f"{other} in {command}")
        log.error("Rank 0 failed in %s", command, exc_info=error)
        return RankLost(f"rank 0 failed in {command} ({met})")

    def _answered(self, asked: Asked) -> list[Any]:
        try:
            return asked.wait()
        except RankLost as lost:
            self._fail(lost)


def _written(backend: ShardedBackend, state: BackendState, folder: Path) -> Written:
    try:
        return Written(backend.write_state(state, folder))
    except Exception as error:  # noqa: BLE001  # safetensors has errors of its own; whatever it is, training goes on
        return Written(errno=getattr(error, "errno", None) or errno.EIO, error=f"{type(error).__name__}: {error}")


class Follower:
    """What a rank beside rank 0 does with a command. `write` may come while another is obeyed."""

    def __init__(self, backend: ShardedBackend) -> None:
        self._backend = backend
        self._states: dict[int, BackendState] = {}

    def obey(self, command: str, *args: Any) -> Any:
        """Returns also where rank 0 raises what all ranks found alike. Anything else that goes wrong is raised."""
        try:
            return getattr(self, f"_{command}")(*args)
        except ALIKE as error:
            log.warning("%s: %s", command, error)
            return None

    def _step(self, groups: EncodedGroups, version: int | None, step: int, total_steps: int) -> None:
        self._backend.step(groups.decode(), version=version, step=step, total_steps=total_steps)

    def _weights(self) -> None:
        self._backend.weights()

    def _state(self, number: int) -> None:
        self._states[number] = self._backend.state()
        for old in sorted(self._states)[:-KEPT_STATES]:
            del self._states[old]

    def _write(self, number: int, folder: str) -> Written:
        return _written(self._backend, self._states.pop(number), Path(folder))

    def _load_state(self, state: BackendState) -> None:
        self._backend.load_state(state)

    def _load_files(self, files: Sequence[str], values: Mapping[str, Any]) -> None:
        self._backend.load_files([Path(file) for file in files], values)

    def _save_hf(self, folder: str) -> None:
        self._backend.save_hf(Path(folder))


class Pulse:
    """Whether another process is still heard of. The caller brings the clock."""

    def __init__(self, *, silent_s: float, now: float) -> None:
        self.silent_s = silent_s
        """How long it may be silent; what is set here holds at once."""
        self._heard = now

    def heard(self, now: float) -> None:
        self._heard = now

    def is_silent(self, now: float) -> bool:
        return now - self._heard > self.silent_s
