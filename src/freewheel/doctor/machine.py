"""Checks the machine: limits of the operating system, shared memory, disks, and GPUs.

Each check asks the operating system (thin, bounded in time), and a pure function judges the answer.

    limits        open files, processes, memory, CPUs, threads, clock
    /dev/shm      weights on their way to engines, Ray's objects, vLLM's messages; files that dead processes left
    run_dir       journal, checkpoints, records: free space, kind of disk, time of an fsync
    Ray's folder  objects that do not fit into memory
    GPUs          driver, free memory and its users, by nvidia-smi; a stuck driver only hangs a child with a time limit
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from freewheel.runtime.placement import Machine
from freewheel.utils.findings import GIB, MIB, Finding, State, count_of, ok, problem, shell_words, size, warning

FILES_ASIDE = 512
"""Open files of a process apart from connections: libraries, logs, Ray's sockets."""
FILES_OF_RAY = 4096
"""Ray warns below this."""
RAISED_TO = 65536
"""Ray raises the limit of a run's processes to this, or as far as the user may."""
PROCESSES_OF_A_RUN = 600
"""Processes and threads of the smallest run: Ray's nine processes and the actors."""
THREADS_OF_AN_ACTOR = 32
"""Its process, threads of Ray and torch, and its judge."""
MEMORY_OF_RAY = int(0.7 * GIB)
"""Ray's processes without a run (measured, Ray 2.60)."""
MEMORY_OF_AN_ACTOR = int(0.4 * GIB)
"""With torch and transformers imported, before a model."""
ACTORS = 4
"""Actors of the smallest run: queue, synchronizer, trainer, one rollouter."""
FIRST_YEAR = 2026
"""Year of freewheel's first release: an earlier clock is wrong."""
YEAR_S = 365.25 * 86400
SMALLER_RUN = "model.path=A_SMALLER_MODEL rollout.replicas=1"
VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class Host:
    """This machine's limits for this process."""

    files: int
    """Open files that a process may have; a very large number means no limit."""
    files_at_most: int
    """The limit to which the user may raise it."""
    processes: int
    """Processes and threads of the user, or of the container."""
    processes_now: int
    memory_free: int
    """Bytes that are available without swapping."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs of a machine. The defaults are those of the smallest run."""

    connections: int = 0
    """Simultaneous connections of a process to a judge or to servers."""
    actors: int = ACTORS
    memory_bytes: int = 0
    """Host memory of models and their optimizer state."""
    threads: int = 2
    """Threads that compute."""


def read_host() -> Host:
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    processes = _number(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    limit = _read("/sys/fs/cgroup/pids.max")
    now = _read("/sys/fs/cgroup/pids.current")
    return Host(
        files=soft,
        files_at_most=hard,
        processes=min(processes, int(limit)) if limit.isdecimal() else processes,
        processes_now=int(now) if now.isdecimal() else 0,
        memory_free=memory_free(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max"), _cgroup_used()),
    )


def _number(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


def _read(path: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="ascii").strip()
    return ""


def _cgroup_used() -> int:
    """Return the container's used memory, without file cache that it would release."""
    used, back = _read("/sys/fs/cgroup/memory.current"), 0
    for line in _read("/sys/fs/cgroup/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        back += int(value) if name in ("inactive_file", "active_file") and value.isdecimal() else 0
    return max(0, int(used) - back) if used.isdecimal() else 0


def memory_free(meminfo: str, limit: str, used: int) -> int:
    """Return the free memory of the machine, or of the container if it has a limit."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    machine = int(fields.get("MemAvailable", "0").split()[0]) * 1024
    return min(machine, max(0, int(limit) - used)) if limit.isdecimal() else machine


# -- judgements -------------------------------------------------------------------------------------------------------


def check_files(host: Host, needs: Needs) -> Finding:
    wanted = max(FILES_OF_RAY, needs.connections + FILES_ASIDE)
    in_a_run = max(host.files, min(host.files_at_most, RAISED_TO))
    said = f"a process may have {_limit(host.files)}"
    said += f", in a run {_limit(in_a_run)}" if in_a_run > host.files else ""
    if in_a_run >= wanted:
        return ok("open files", said)
    why = f"{needs.connections:,} connections at once want" if needs.connections else "Ray wants"
    detail = f"{said}, and {why} {wanted:,}: only the administrator can raise it further"
    return warning("open files", detail, f"sudo prlimit --pid $$ --nofile={wanted}:{wanted}")


def check_processes(host: Host, needs: Needs) -> Finding:
    left = host.processes - host.processes_now
    said = f"{_limit(host.processes)} allowed" + (f", {host.processes_now:,} there" if host.processes_now else "")
    wanted = PROCESSES_OF_A_RUN + THREADS_OF_AN_ACTOR * max(0, needs.actors - ACTORS)
    if left >= wanted:
        return ok("processes", said)
    detail = f"{said}: a run wants room for {wanted:,}, threads counted"
    return warning("processes", detail, "ulimit -u unlimited; in a container: docker run --pids-limit=-1")


def check_memory(host: Host, machine: Machine, needs: Needs) -> Finding:
    wanted = MEMORY_OF_RAY + needs.actors * MEMORY_OF_AN_ACTOR + needs.memory_bytes
    said = f"{size(host.memory_free)} of {size(machine.memory_bytes)} free"
    if host.memory_free >= wanted:
        return ok("memory", said)
    detail = f"{said}, and about {size(wanted)} are wanted ({count_of(needs.actors, 'actor')}, Ray, models)"
    if 0 < machine.memory_bytes < wanted:
        return problem("memory", f"{detail}: more than this machine has", SMALLER_RUN)
    return warning("memory", detail, "ps -eo pid,user,rss,args --sort=-rss | head")


def check_cpus(machine: Machine, needs: Needs) -> Finding:
    said = count_of(machine.cpus, "CPU")
    if needs.threads <= machine.cpus:
        return ok("CPUs", said)
    detail = f"{said} for {needs.threads} threads that compute: they take turns"
    return warning("CPUs", detail, "rollout.replicas=1 rollout.threads=1 trainer.threads=1")


def check_threads(environ: Mapping[str, str]) -> Finding:
    given = environ.get(VARIABLE)
    if given is None:
        return ok("threads", f"{VARIABLE} is not set: trainer.threads and rollout.threads say it")
    if not given.isdecimal() or int(given) < 1:
        return warning("threads", f"{VARIABLE}={given!r} is no number of threads", f"unset {VARIABLE}")
    return ok("threads", f"{VARIABLE}={given}; in a run trainer.threads and rollout.threads say it")


def check_clock(wall_s: float | None = None) -> Finding:
    """Check the date: certificates, sample ages and run names depend on it."""
    wall_s = time.time() if wall_s is None else wall_s
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))
    if wall_s < (FIRST_YEAR - 1970) * YEAR_S:
        return problem("clock", f"it says {said}, which is long past", "timedatectl set-ntp true")
    return ok("clock", said)


def check_limits(host: Host, machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Check everything that a run needs of the machine."""
    yield check_files(host, needs)
    yield check_processes(host, needs)
    yield check_memory(host, machine, needs)
    yield check_cpus(machine, needs)


def _limit(count: int) -> str:
    return "any number" if count >= 1 << 60 else f"{count:,}"


SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED = 1 * GIB
"""Containers have 64 MiB by default. Ray then keeps its objects on a disk and only logs it."""
OURS = "freewheel-weights-"
"""Prefix of the files that carry weights to vLLM, followed by a process number (`freewheel.rollout.vllm`)."""
PYTHONS = "psm_"
"""Prefix of Python's shared memory, which vLLM's processes use."""
OLD_S = 60.0
"""A younger file may not have been opened yet."""
MUCH_LEFT = 64 * MIB
"""Leftovers that are worth a warning: all that many containers have."""
NAMED = 10
"""Leftovers that a command lists: the largest."""

LITTLE_DISK = 1 * GIB
"""With less space a run has no room for its records next to any checkpoint."""
NO_DISK = 64 * MIB
SLOW_SYNC_S = 0.05
"""Each commit and each batch of scored groups waits for the disk once. A local disk takes a few ms."""
SYNCS = 8
SYNC_S = 2.0
"""Longest time for the whole measurement."""
SYNC_BYTES = 4096
SKEW_S = 2.0
"""Difference between this machine's clock and the disk's. Sample ages are in seconds."""
FULL = 0.95
"""Above this share of its disk Ray stores nothing more."""
SOCKET = "ray/session_2026-01-31_23-59-59_999999_{process}/sockets/plasma_store"
"""The longest path that Ray makes in its folder, with the date and the process number."""
SOCKET_BYTES = 107
"""Longest socket path on Linux. Ray does not start with a longer one."""
OF_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "glusterfs", "ceph", "fuse.s3fs", "afs")
"""File systems on which SQLite's log and locks are unreliable."""


# -- shared memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A file in shared memory that no process uses."""

    path: str
    n_bytes: int


def check_shared_memory(*, needed_bytes: int = 0, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Check shared memory. `needed_bytes`: what a run's weights take there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield problem("shared memory", f"{folder} cannot be used: {error.strerror}")
        return
    yield judge_shared_memory(usage.total, usage.free, needed_bytes, folder)
    found = find_leftovers(folder)
    if found:
        yield judge_leftovers(found)


def judge_shared_memory(total: int, free: int, needed: int, folder: Path = SHARED_MEMORY) -> Finding:
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


def judge_leftovers(found: Sequence[Leftover]) -> Finding:
    largest = sorted(found, key=lambda one: -one.n_bytes)
    words, left = shell_words((one.path for one in largest), NAMED)
    total = sum(one.n_bytes for one in found)
    more = f"; the command has the largest {NAMED}" if left else ""
    detail = f"{count_of(len(found), 'file')}, {size(total)}, that no process here uses: left by some that died{more}"
    state = State.WARNING if total >= MUCH_LEFT else State.OK
    return Finding(what="shared memory", state=state, detail=detail, remedy=f"rm -f {words}")


def find_leftovers(folder: Path = SHARED_MEMORY, *, now_s: float | None = None) -> list[Leftover]:
    """Return this user's files made by freewheel or Python that no visible process has open or mapped."""
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
    """Return whether the process in the name of one of our files is alive. True for a file without a number, which
    cannot be judged."""
    name = Path(path).name
    if not name.startswith(OURS):
        return False
    number = name.removeprefix(OURS).partition("-")[0]
    return not number.isdecimal() or Path(f"/proc/{number}").exists()


def _in_use(folder: Path) -> set[str]:
    """Return paths under `folder` that a process has open or mapped, as far as we may look."""
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
    """The disk of a folder."""

    folder: Path
    """An existing folder: the run's own, or the nearest above it."""
    free_bytes: int
    kind: str = ""
    """Kind of file system."""
    sync_s: float | None = None
    """Median time of an fsync; None: not measured."""
    skew_s: float = 0.0
    """Its clock minus this machine's."""


def check_run_folder(run_dir: str, *, needed_bytes: int = 0, timed: bool = True) -> Iterator[Finding]:
    """Check the run directory. `needed_bytes`: for its checkpoints. `timed`: also measure an fsync."""
    folder = nearest_folder(Path(run_dir))
    try:
        with _open_unnamed(folder) as descriptor:
            sync_s, skew_s = _time_sync(descriptor) if timed else (None, 0.0)
    except OSError as error:
        yield problem("run directory", f"{folder} cannot be written: {error.strerror}", "run_dir=A_FOLDER_OF_YOURS")
        return
    free, kind = shutil.disk_usage(folder).free, _file_system_of(folder)
    yield from judge_disk(Disk(folder=folder, free_bytes=free, kind=kind, sync_s=sync_s, skew_s=skew_s), needed_bytes)


def judge_disk(disk: Disk, needed: int = 0) -> Iterator[Finding]:
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


def nearest_folder(path: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    path = path.expanduser().absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


@contextlib.contextmanager
def _open_unnamed(folder: Path) -> Iterator[int]:
    """Open a file without a name, which disappears with its descriptor."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        yield file.fileno()


def _time_sync(descriptor: int) -> tuple[float, float]:
    """Return the seconds of an fsync, and the disk's clock minus ours."""
    took: list[float] = []
    until = time.monotonic() + SYNC_S
    while len(took) < SYNCS and (not took or time.monotonic() < until):
        os.write(descriptor, bytes(SYNC_BYTES))
        began = time.monotonic()
        os.fsync(descriptor)
        took.append(time.monotonic() - began)
    return statistics.median(took), os.fstat(descriptor).st_mtime - time.time()


def _file_system_of(folder: Path) -> str:
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return find_file_system(folder, mounts.splitlines())


def find_file_system(folder: Path, mounts: Iterable[str]) -> str:
    """Return the file system of the last, longest mount point above `folder`."""
    found: tuple[int, str] = (-1, "")
    for line in mounts:
        _, point, kind, *_ = [*line.split(), "", "", ""]
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point or "-") and len(point) >= found[0]:
            found = (len(point), kind)
    return found[1]


def check_ray_folder(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check where Ray puts its sockets, its logs, and objects that do not fit into memory."""
    given = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp").expanduser()
    length = len(os.fsencode(given / SOCKET.format(process=os.getpid())))
    if length > SOCKET_BYTES:
        detail = f"{given}: Ray's sockets in it would have paths of {length} bytes, and {SOCKET_BYTES} are possible"
        yield problem("Ray's folder", detail, "export RAY_TMPDIR=/tmp")
        return
    folder = nearest_folder(given / "ray")
    try:
        with _open_unnamed(folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        other = "export RAY_TMPDIR=A_FOLDER_OF_YOURS"
        yield problem("Ray's folder", f"{folder} cannot be written: {error.strerror}", other)
        return
    yield judge_ray_folder(folder, usage.total, usage.free)


def judge_ray_folder(folder: Path, total: int, free: int) -> Finding:
    said = f"{folder}: {size(free)} free, {1 - free / max(total, 1):.0%} used"
    if free < (1 - FULL) * total:
        other = "export RAY_TMPDIR=A_FOLDER_ON_ANOTHER_DISK"
        return warning("Ray's folder", f"{said}: from {FULL:.0%} on Ray puts no objects there", other)
    return ok("Ray's folder", said)


SMI_S = 10.0
"""A healthy driver answers in a second."""
DEVICE = Path("/dev/nvidia0")
QUERY = "index,uuid,name,memory.total,memory.used,driver_version"
APPS = "gpu_uuid,pid,used_memory,process_name"
IN_USE_SHARE = 0.05
"""Share of a GPU's memory in use: less is the driver's own, more is somebody's work."""
SMALLER_STEP = "trainer.micro_batch_tokens=8192 model.gradient_checkpointing=true"
"""Settings that make a step smaller without changing the model."""

_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process with memory on a GPU."""

    process: int
    name: str
    n_bytes: int
    """0 if the driver does not tell."""


@dataclass(frozen=True, kw_only=True)
class GpuCard:
    """One GPU."""

    index: str
    name: str
    total_bytes: int
    used_bytes: int
    holders: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuDriver:
    """What nvidia-smi reports. Empty without GPUs."""

    release: str = ""
    cuda: tuple[int, int] | None = None
    """The highest CUDA version that it supports."""
    gpus: tuple[GpuCard, ...] = ()
    why: str = ""
    """Why nothing is known although there may be a GPU."""


def read_driver() -> GpuDriver:
    program = shutil.which("nvidia-smi")
    if program is None:
        return GpuDriver(why="nvidia-smi is not installed" if DEVICE.exists() else "")
    table, why = _run_smi(program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    if why:
        return GpuDriver(why=why)
    apps, _ = _run_smi(program, f"--query-compute-apps={APPS}", "--format=csv,noheader,nounits")
    banner, _ = _run_smi(program)
    return parse_driver(table, apps, banner)


def _run_smi(program: str, *arguments: str) -> tuple[str, str]:
    """Return its output, or why there is none."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=SMI_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gave no answer within {SMI_S:g} s: the driver is stuck"
    except OSError as error:
        return "", f"nvidia-smi cannot be run: {error.strerror}"
    if done.returncode:
        return "", (done.stdout.strip() or done.stderr.strip() or "nvidia-smi failed").splitlines()[0]
    return done.stdout, ""


def parse_driver(table: str, apps: str, banner: str) -> GpuDriver:
    """Combine nvidia-smi's three answers."""
    holders: dict[str, list[GpuProcess]] = {}
    for uuid, process, used, name in _parse_csv(apps, APPS):
        if process.isdecimal():
            held = int(used) * MIB if used.isdecimal() else 0
            holders.setdefault(uuid, []).append(GpuProcess(process=int(process), name=Path(name).name, n_bytes=held))
    cards, release = [], ""
    for index, uuid, name, total, used, driver in _parse_csv(table, QUERY):
        release = driver
        total_bytes, used_bytes = (int(cell) * MIB if cell.isdecimal() else 0 for cell in (total, used))
        there = tuple(holders.get(uuid, ()))
        card = GpuCard(index=index, name=name, total_bytes=total_bytes, used_bytes=used_bytes, holders=there)
        cards.append(card)
    found = _CUDA.search(banner)
    return GpuDriver(release=release, cuda=(int(found[1]), int(found[2])) if found else None, gpus=tuple(cards))


def _parse_csv(text: str, columns: str) -> Iterator[list[str]]:
    width = len(columns.split(","))
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", width - 1)]  # only the last field may contain commas
        if len(cells) == width:
            yield cells


def check_gpus(
    driver: GpuDriver, environ: Mapping[str, str] = os.environ, *, needed_bytes: int = 0
) -> Iterator[Finding]:
    """Check each GPU and its users. `needed_bytes`: what a run needs of one."""
    if driver.why:
        yield problem("GPU", driver.why, "nvidia-smi")
        return
    if not driver.gpus:
        yield ok("GPU", "none: training and generation are on the CPU")
        return
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and not allowed.strip():
        here = f"{len(driver.gpus)} here"
        yield warning("GPU", f"{here}, and CUDA_VISIBLE_DEVICES hides them all", "unset CUDA_VISIBLE_DEVICES")
        return
    too_large = all(0 < card.total_bytes < needed_bytes for card in driver.gpus)
    for card in driver.gpus:
        yield _check_card(card, needed_bytes, too_large=too_large)


def _check_card(card: GpuCard, needed: int, *, too_large: bool) -> Finding:
    """Check one GPU. `too_large`: the run fits on no GPU here, even with nothing else on it."""
    what, left = f"GPU {card.index}", card.total_bytes - card.used_bytes
    said = f"{card.name}, {size(left)} of {size(card.total_bytes)} free"
    if needed > left:
        said += f", and the run wants about {size(needed)}"
    if too_large:
        return problem(what, f"{said}: more than any GPU here has", SMALLER_STEP)
    if card.used_bytes <= IN_USE_SHARE * card.total_bytes:
        return warning(what, said, SMALLER_STEP) if needed > left else ok(what, said)
    if not card.holders:
        detail = f"{said}: the rest is held by processes that cannot be seen from here"
        return warning(what, detail, "nvidia-smi")
    listed = ", ".join(
        f"{holder.process} ({holder.name}" + (f", {size(holder.n_bytes)})" if holder.n_bytes else ")")
        for holder in card.holders
    )
    numbers = ",".join(str(holder.process) for holder in card.holders)
    one = len(card.holders) == 1
    detail = f"{said}: {'process' if one else 'processes'} {listed} hold{'s' * one} the rest"
    return warning(what, detail, f"ps -o pid,user,etime,args -p {numbers}")
