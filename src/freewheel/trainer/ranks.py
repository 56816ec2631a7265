"""Several processes that train as one: rank 0 leads, the others follow. Pure coordination: no torch, no Ray.

    FullyAsyncTrainer ─▶ Leader ─┬─ ask(command) ─▶ Follower of rank 1, 2, … ─▶ its backend ─┐
                                 └──────────────────────────────────────────▶ backend of rank 0 ┘ meet in collectives

All ranks run every command in the same order. A failure on one rank leaves the others in the middle of a collective.
Then the group is broken, and `fail` ends rank 0's process, so that a new group starts from the newest checkpoint. Used
by `TrainSide` (rank 0) and by the rank actors.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from freewheel.data.group import EncodedGroups, PromptGroup
from freewheel.errors import DataError
from freewheel.trainer.backend import Backend, BackendState, NonFiniteLoss

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("freewheel.trainer")

T = TypeVar("T")

ALIKE = (NonFiniteLoss, DataError)
"""Errors that all ranks raise at the same place, so that the group stays intact."""
WITNESS_S = 5.0
"""How long rank 0 looks for a dead rank before it reports a failure as its own. Ray reports a death within a second or
two, and the others wait for rank 0 meanwhile."""
KEPT_STATES = 2
"""Copies of the training state that a rank keeps: one being written, and the next."""


class RankLost(RuntimeError):
    """A training process died, raised, or did not answer. The others cannot continue without it."""


class ShardsNotWritten(OSError):
    """A rank could not write its part of a checkpoint. The message names the rank and the reason."""


class Asked(Protocol):
    """A command that was sent to the other ranks."""

    def wait(self) -> list[Any]:
        """Return their answers in order, when all have finished. Raises `RankLost`."""

    def lost(self, wait_s: float) -> str:
        """Describe a rank that ends or fails within `wait_s`; empty if none does."""


class Others(Protocol):
    """The other ranks, seen from rank 0."""

    def ask(self, command: str, *args: Any) -> Asked:
        """Send a command and return at once. Commands arrive in order; `write` runs next to the others."""


class Leader:
    """All ranks as one `Backend`, in rank 0's process."""

    def __init__(self, backend: Backend, others: Others, *, fail: Callable[[RankLost], NoReturn]) -> None:
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

    def weights(self, stored: bool = False) -> Mapping[str, Tensor]:
        return self._together(partial(self.backend.weights, stored), "weights", stored)

    def state(self) -> BackendState:
        """Copy the tensors on every rank. They stay there until `write` puts them into a folder."""
        self._states += 1
        number = self._states
        own = self._together(self.backend.state, "state", number)
        return BackendState(values=own.values, write=partial(self._write, number, own))

    def _write(self, number: int, own: BackendState, folder: Path) -> str:
        """A full disk makes only the checkpoint fail."""
        asked = self._others.ask("write", number, folder)
        written = _try_to_write(own, folder)
        for rank, result in enumerate([written, *self._answered(asked)]):
            if isinstance(result, ShardsNotWritten):
                raise ShardsNotWritten(result.errno, f"rank {rank}: {result.strerror}")
            if result and not (folder / result).is_file():
                raise ShardsNotWritten(
                    errno.ENOENT,
                    f"rank {rank}: rank 0 cannot see its file: run_dir must be on a file system that "
                    "all machines of the training share",
                )
        return str(written)

    def load_files(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        self._together(partial(self.backend.load_files, files, values), "load_files", files, values)

    def describe(self) -> str:
        return self.backend.describe()

    def _together(self, work: Callable[[], T], command: str, *args: Any) -> T:
        asked = self._others.ask(command, *args)
        try:
            done = work()
        except ALIKE:
            self._answered(asked)
            raise
        except BaseException as error:  # noqa: BLE001  # whatever it is, the group is broken
            self._fail(self._cause(asked, command, error))
        self._answered(asked)
        return done

    def _cause(self, asked: Asked, command: str, error: BaseException) -> RankLost:
        """Return the cause of an error on rank 0. A rank's death breaks a collective here, so name that rank."""
        met = f"{type(error).__name__}: {error}"
        if other := asked.lost(WITNESS_S):
            log.error("Another rank ended while rank 0 ran %s (%s)", command, met)
            return RankLost(f"{other} in {command}")
        log.error("Rank 0 failed in %s", command, exc_info=error)
        return RankLost(f"rank 0 failed in {command} ({met})")

    def _answered(self, asked: Asked) -> list[Any]:
        try:
            return asked.wait()
        except RankLost as lost:
            self._fail(lost)


def _try_to_write(state: BackendState, folder: Path) -> str | ShardsNotWritten:
    """Return the name of the rank's file, empty if it has no part of the state, or why it cannot be written."""
    try:
        return state.write(folder)
    except Exception as error:  # noqa: BLE001  # safetensors has its own errors; training continues in any case
        return ShardsNotWritten(getattr(error, "errno", None) or errno.EIO, f"{type(error).__name__}: {error}")


class Follower:
    """Runs commands on the other ranks. `write` may arrive while another command runs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._states: dict[int, BackendState] = {}

    def obey(self, command: str, *args: Any) -> Any:
        """Run a command. An error that all ranks raise is logged, because rank 0 raises it. Other errors are raised."""
        own: Callable[..., Any] | None = getattr(self, f"_{command}", None)
        try:
            if own is not None:
                return own(*args)
            getattr(self._backend, command)(*args)  # rank 0 has the complete result, so none is returned
        except ALIKE as error:
            log.warning("%s: %s", command, error)
        return None

    def _step(self, groups: EncodedGroups, version: int | None, step: int, total_steps: int) -> None:
        self._backend.step(groups.decode(), version=version, step=step, total_steps=total_steps)

    def _state(self, number: int) -> None:
        self._states[number] = self._backend.state()
        for old in sorted(self._states)[:-KEPT_STATES]:
            del self._states[old]

    def _write(self, number: int, folder: Path) -> str | ShardsNotWritten:
        return _try_to_write(self._states.pop(number), folder)


class Liveness:
    """Tells whether another process still sends signs of life. The caller provides the clock."""

    def __init__(self, *, silent_s: float, now: float) -> None:
        self.silent_s = silent_s
        """How long it may be silent. A change takes effect at once."""
        self._heard = now

    def heard(self, now: float) -> None:
        self._heard = now

    def is_silent(self, now: float) -> bool:
        return now - self._heard > self.silent_s
