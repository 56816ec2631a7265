"""Where a run keeps things: shared memory, and the disks of its folder and of Ray.

    /dev/shm      weights on their way to engines, Ray's objects, vLLM's messages; what dead processes left there
    run_dir       journal, checkpoints, records: room, kind of disk, how long it takes until something is safe
    Ray's folder  objects that do not fit into memory

Asks the operating system; each judgement is a pure function of what it says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freewheel.doctor.finding import GIB, MIB, Finding, State, counted, ok, problem, shell_words, size, warning

SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED = 1 * GIB
"""Containers have 64 MiB unless they are told otherwise: Ray then keeps its objects on a disk, and says so in a log."""
OURS = "freewheel-weights-"
"""How the files are named that take weights to vLLM, before their process's number (`freewheel.rollout.vllm`)."""
PYTHONS = "psm_"
"""The same for Python's shared memory, by which vLLM's processes talk."""
OLD_S = 60.0
"""A file that is younger may be between its making and its first use."""
MUCH_LEFT = 64 * MIB
"""From here on leftovers are worth a warning: it is all that many containers have."""
NAMED = 10
"""Leftovers that a command lists: the largest."""

LITTLE_DISK = 1 * GIB
"""Under it a run has no room for its records beside a checkpoint of any size."""
NO_DISK = 64 * MIB
SLOW_SYNC_S = 0.05
"""A step's commit, and each batch of scored groups, waits for the disk once. On a local one it takes some ms."""
SYNCS = 8
SYNC_S = 2.0
"""Longest time for all of them."""
SYNC_BYTES = 4096
SKEW_S = 2.0
"""Between this machine's clock and that of the disk. Freshness is told in seconds."""
FULL = 0.95
"""Of Ray's disk: from there on it stores nothing more."""
SOCKET = "ray/session_2026-01-31_23-59-59_999999_{process}/sockets/plasma_store"
"""The longest path that Ray makes in its folder, the date and the process's number in it."""
SOCKET_BYTES = 107
"""Of a socket's path, at most: Linux has room for that, and Ray does not start with a longer one."""
OF_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "glusterfs", "ceph", "fuse.s3fs", "afs")
"""Kinds of file systems on which SQLite's log and its locks are not to be relied on."""


# -- shared memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A file in shared memory that no process uses."""

    path: str
    n_bytes: int


def shared_memory(*, needed_bytes: int = 0, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """`needed_bytes`: what a run's weights take there on their way."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield problem("shared memory", f"{folder} cannot be used: {error.strerror}")
        return
    yield judged_shared(usage.total, usage.free, needed_bytes, folder)
    found = leftovers(folder)
    if found:
        yield judged_leftovers(found)


def judged_shared(total: int, free: int, needed: int, folder: Path = SHARED_MEMORY) -> Finding:
    what, said = "shared memory", f"{folder}: {size(free)} of {size(total)} free"
    wanted = max(SMALL_SHARED, 2 * needed)  # a version on its way, and the one before
    larger = f"mount -o remount,size={max(4, -(-wanted // GIB))}G {folder}"
    in_container = "in a container: docker run --shm-size=…"
    if needed and free < needed:
        detail = f"{said}, and a version of the weights takes {size(needed)}: it goes over a disk ({in_container})"
        return warning(what, detail, larger)
    if total < SMALL_SHARED:
        detail = f"{folder} has {size(total)}: Ray and vLLM want {size(SMALL_SHARED)} or more ({in_container})"
        return warning(what, detail, larger)
    return ok(what, said)


def judged_leftovers(found: Sequence[Leftover]) -> Finding:
    largest = sorted(found, key=lambda one: -one.n_bytes)
    words, left = shell_words((one.path for one in largest), NAMED)
    total = sum(one.n_bytes for one in found)
    more = f"; the command has the largest {NAMED}" if left else ""
    detail = f"{counted(len(found), 'file')}, {size(total)}, that no process here uses: left by some that died{more}"
    state = State.WARNING if total >= MUCH_LEFT else State.OK
    return Finding(what="shared memory", state=state, detail=detail, remedy=f"rm -f {words}")


def leftovers(folder: Path = SHARED_MEMORY, *, now_s: float | None = None) -> list[Leftover]:
    """Of this user's files those that freewheel or Python made, and no process that can be seen has open or mapped."""
    now_s = time.time() if now_s is None else now_s
    mine: dict[str, os.stat_result] = {}
    for path in (*folder.glob(f"{OURS}*"), *folder.glob(f"{PYTHONS}*")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and now_s - status.st_mtime > OLD_S:
                mine[str(path)] = status
    used = _in_use(folder) if mine else set()
    return [
        Leftover(path=path, n_bytes=status.st_blocks * 512)
        for path, status in sorted(mine.items())
        if path not in used and not _owner_lives(path)
    ]


def _owner_lives(path: str) -> bool:
    """By the number in the name of one of ours. One without a number is not ours to judge."""
    name = Path(path).name
    if not name.startswith(OURS):
        return False
    number = name.removeprefix(OURS).partition("-")[0]
    return not number.isdecimal() or Path(f"/proc/{number}").exists()


def _in_use(folder: Path) -> set[str]:
    """Paths under `folder` that a process of this machine has open or mapped, as far as we may look."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            found.update(line[line.index("/") :] for line in maps.splitlines() if f"{folder}/" in line)
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(str(descriptor.readlink()))
    return found


# -- disks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk of a folder, as far as it was asked."""

    folder: Path
    """That is there: the run's own, or the nearest above it."""
    free_bytes: int
    kind: str = ""
    """Of file system."""
    sync_s: float | None = None
    """Until something small is safe, the median; None: not measured."""
    skew_s: float = 0.0
    """Its clock against this machine's."""


def run_folder(run_dir: str, *, needed_bytes: int = 0, timed: bool = True) -> Iterator[Finding]:
    """Where the run will be. `needed_bytes`: of its checkpoints. `timed`: also how long it takes to be safe there."""
    folder = nearest(Path(run_dir))
    try:
        with _unnamed(folder) as descriptor:
            sync_s, skew_s = _timed(descriptor) if timed else (None, 0.0)
    except OSError as error:
        yield problem("run directory", f"{folder} cannot be written: {error.strerror}", "run_dir=A_FOLDER_OF_YOURS")
        return
    free, kind = shutil.disk_usage(folder).free, _kind_of(folder)
    yield from judged_disk(Disk(folder=folder, free_bytes=free, kind=kind, sync_s=sync_s, skew_s=skew_s), needed_bytes)


def judged_disk(disk: Disk, needed: int = 0) -> Iterator[Finding]:
    what, said = "run directory", f"{disk.folder}: {size(disk.free_bytes)} free"
    other = "run_dir=A_FOLDER_ON_ANOTHER_DISK"
    if disk.free_bytes < NO_DISK:
        yield problem(what, said, other)
    elif disk.free_bytes < needed:
        yield warning(what, f"{said}, and the run's checkpoints take about {size(needed)}", other)
    elif disk.free_bytes < LITTLE_DISK:
        yield warning(what, f"{said}: records and checkpoints grow with the run", other)
    else:
        took = "" if disk.sync_s is None else f", {disk.sync_s * 1e3:.1f} ms until something is safe there"
        yield ok(what, said + took)
    if disk.kind in OF_A_NETWORK:
        detail = f"{disk.folder} is on a network disk ({disk.kind}), where SQLite cannot keep a journal safe"
        yield warning(what, detail, "run_dir=A_FOLDER_ON_A_LOCAL_DISK")
    if disk.sync_s is not None and disk.sync_s > SLOW_SYNC_S:
        detail = f"{disk.folder} takes {disk.sync_s * 1e3:.0f} ms until something is safe, and each step waits for that"
        yield warning(what, detail, "run_dir=A_FOLDER_ON_A_LOCAL_DISK")
    if abs(disk.skew_s) > SKEW_S:
        detail = f"the clock of the disk of {disk.folder} is {disk.skew_s:+.0f} s from this machine's"
        yield warning("clock", detail, "timedatectl set-ntp true")


def nearest(path: Path) -> Path:
    """The folder itself, or the one above it that is there."""
    path = path.expanduser().absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


@contextlib.contextmanager
def _unnamed(folder: Path) -> Iterator[int]:
    """A file that nobody sees, and that is gone with its descriptor."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        yield file.fileno()


def _timed(descriptor: int) -> tuple[float, float]:
    """Seconds until something is safe, and the disk's clock against ours."""
    took: list[float] = []
    until = time.monotonic() + SYNC_S
    while len(took) < SYNCS and (not took or time.monotonic() < until):
        os.write(descriptor, bytes(SYNC_BYTES))
        began = time.monotonic()
        os.fsync(descriptor)
        took.append(time.monotonic() - began)
    return statistics.median(took), os.fstat(descriptor).st_mtime - time.time()


def _kind_of(folder: Path) -> str:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return kind_of(folder, mounts.splitlines())


def kind_of(folder: Path, mounts: Iterable[str]) -> str:
    """The file system of the last, longest mount point that `folder` is under."""
    found: tuple[int, str] = (-1, "")
    for line in mounts:
        _, point, kind, *_ = [*line.split(), "", "", ""]
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point or "-") and len(point) >= found[0]:
            found = (len(point), kind)
    return found[1]


def ray_folder(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Where Ray puts its sockets, its logs, and objects that do not fit into memory."""
    given = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp").expanduser()
    length = len(os.fsencode(given / SOCKET.format(process=os.getpid())))
    if length > SOCKET_BYTES:
        detail = f"{given}: Ray's sockets in it would have paths of {length} bytes, and {SOCKET_BYTES} are possible"
        yield problem("Ray's folder", detail, "export RAY_TMPDIR=/tmp")
        return
    folder = nearest(given / "ray")
    try:
        with _unnamed(folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        other = "export RAY_TMPDIR=A_FOLDER_OF_YOURS"
        yield problem("Ray's folder", f"{folder} cannot be written: {error.strerror}", other)
        return
    yield judged_ray_folder(folder, usage.total, usage.free)


def judged_ray_folder(folder: Path, total: int, free: int) -> Finding:
    said = f"{folder}: {size(free)} free, {1 - free / max(total, 1):.0%} used"
    if free < (1 - FULL) * total:
        other = "export RAY_TMPDIR=A_FOLDER_ON_ANOTHER_DISK"
        return warning("Ray's folder", f"{said}: from {FULL:.0%} on Ray puts no objects there", other)
    return ok("Ray's folder", said)
