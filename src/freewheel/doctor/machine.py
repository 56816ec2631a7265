"""Checks the machine: limits of the operating system, shared memory, disks, and GPUs.

limits        open files, processes, memory, CPUs
/dev/shm      weights on their way to engines, Ray's objects, vLLM's messages; files that dead processes left
run_dir       journal, checkpoints, records: free space, kind of disk, time of an fsync
Ray's folder  objects that do not fit into memory
GPUs          driver, free memory and its users, by nvidia-smi; a stuck driver only hangs a child with a time limit
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from freewheel.runtime.placement import Machine
from freewheel.utils.findings import GIB, MIB, Finding, State, count_of, ok, problem, shell_words, size, warning

# -- limits -----------------------------------------------------------------------------------------------------------

FILES_ASIDE = 512
"""Open files of a process apart from connections: libraries, logs, Ray's sockets."""
FILES_OF_RAY = 4096
"""Ray warns below this."""
RAISED_TO = 65536
"""Ray raises the limit of a run's processes to this, or to the user's maximum."""
PROCESSES_OF_A_RUN = 600
"""Processes and threads of the smallest run: Ray's nine processes and the actors."""
THREADS_OF_AN_ACTOR = 32
"""Processes and threads of one actor: its process, threads of Ray and torch, and its judge."""
MEMORY_OF_RAY = int(0.7 * GIB)
"""Ray's processes without a run (measured, Ray 2.60)."""
MEMORY_OF_AN_ACTOR = int(0.4 * GIB)
"""Memory of an actor that has imported torch and transformers but has no model yet."""
ACTORS = 4
"""Actors of the smallest run: queue, synchronizer, trainer, one rollouter."""
SMALLER_RUN = "model.path=A_SMALLER_MODEL rollout.replicas=1"
UNLIMITED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Host:
    """This machine's limits for this process."""

    files: int
    """Open files that a process may have."""
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
    gpu_bytes: int = 0
    """Memory of one GPU, by the plan's estimate; 0 if it needs none here or it is unknown."""
    weights_bytes: int = 0
    """A version of the weights in shared memory; 0 if it takes another path or is unknown."""
    checkpoint_bytes: int = 0
    """The most that checkpoints take: those kept, the one being written, `best` and `final`."""


def read_host() -> Host:
    files, files_at_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    files, files_at_most, processes = (
        UNLIMITED if limit == resource.RLIM_INFINITY else limit for limit in (files, files_at_most, processes)
    )
    allowed, now, used = (_read(f"/sys/fs/cgroup/{name}") for name in ("pids.max", "pids.current", "memory.current"))
    # File cache counts as used by the container, although the kernel would release it.
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return Host(
        files=files,
        files_at_most=files_at_most,
        processes=min(processes, int(allowed)) if allowed.isdecimal() else processes,
        processes_now=int(now or 0),
        memory_free=memory_free(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max"), int(used or 0) - cache),
    )


def _read(path: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="ascii").strip()
    return ""


def memory_free(meminfo: str, limit: str, used: int) -> int:
    """Return the free memory of the machine, or of the container if it has a limit."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    machine = int(fields.get("MemAvailable", "0").split()[0]) * 1024
    return min(machine, max(0, int(limit) - max(0, used))) if limit.isdecimal() else machine


def check_limits(host: Host, needs: Needs) -> Iterator[Finding]:
    """Check the limits of open files and of processes."""
    wanted = max(FILES_OF_RAY, needs.connections + FILES_ASIDE)
    in_a_run = max(host.files, min(host.files_at_most, RAISED_TO))
    detail = f"a process may have {_limit(host.files)}"
    detail += f", in a run {_limit(in_a_run)}" if in_a_run > host.files else ""
    if in_a_run >= wanted:
        yield ok("open files", detail)
    else:
        why = f"{needs.connections:,} simultaneous connections need" if needs.connections else "Ray needs"
        detail += f", and {why} {wanted:,}: only the administrator can raise it further"
        yield warning("open files", detail, f"sudo prlimit --pid $$ --nofile={wanted}:{wanted}")
    wanted = PROCESSES_OF_A_RUN + THREADS_OF_AN_ACTOR * max(0, needs.actors - ACTORS)
    detail = f"{_limit(host.processes)} allowed" + (f", {host.processes_now:,} there" if host.processes_now else "")
    if host.processes - host.processes_now >= wanted:
        yield ok("processes", detail)
    else:
        detail += f": a run needs room for {wanted:,}, including threads"
        yield warning("processes", detail, "ulimit -u unlimited; in a container: docker run --pids-limit=-1")


def check_memory_and_cpus(host: Host, machine: Machine, needs: Needs) -> Iterator[Finding]:
    wanted = MEMORY_OF_RAY + needs.actors * MEMORY_OF_AN_ACTOR + needs.memory_bytes
    detail = f"{size(host.memory_free)} of {size(machine.memory_bytes)} free"
    if host.memory_free >= wanted:
        yield ok("memory", detail)
    else:
        detail += f", and a run needs about {size(wanted)} ({count_of(needs.actors, 'actor')}, Ray, models)"
        if 0 < machine.memory_bytes < wanted:
            yield problem("memory", f"{detail}: more than this machine has", SMALLER_RUN)
        else:
            yield warning("memory", detail, "ps -eo pid,user,rss,args --sort=-rss | head")
    detail = count_of(machine.cpus, "CPU")
    if needs.threads <= machine.cpus:
        yield ok("CPUs", detail)
    else:
        detail += f" for {needs.threads} computing threads, which share them"
        yield warning("CPUs", detail, "rollout.replicas=1 rollout.threads=1 trainer.threads=1")


def _limit(count: int) -> str:
    return "any number" if count >= UNLIMITED else f"{count:,}"


# -- shared memory ----------------------------------------------------------------------------------------------------

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


def check_shared_memory(*, needed_bytes: int = 0, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Check shared memory. `needed_bytes`: what a run's weights take there."""
    what = "shared memory"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield problem(what, f"{folder} cannot be used: {error.strerror}")
        return
    wanted = max(SMALL_SHARED, 2 * needed_bytes)  # a version on its way, and the one before
    larger = f"mount -o remount,size={max(4, -(-wanted // GIB))}G {folder}"
    in_container = "in a container: docker run --shm-size=…"
    detail = f"{folder}: {size(usage.free)} of {size(usage.total)} free"
    if needed_bytes and usage.free < needed_bytes:
        detail += f", and a version of the weights takes {size(needed_bytes)}, on a disk instead ({in_container})"
        yield warning(what, detail, larger)
    elif usage.total < SMALL_SHARED:
        detail = f"{folder} has {size(usage.total)}: Ray and vLLM need {size(SMALL_SHARED)} or more ({in_container})"
        yield warning(what, detail, larger)
    else:
        yield ok(what, detail)
    found = find_leftovers(folder)
    if found:
        words, left = shell_words(sorted(found, key=lambda path: -found[path]), NAMED)
        total = sum(found.values())
        more = f"; the command has the largest {NAMED}" if left else ""
        detail = f"{count_of(len(found), 'file')}, {size(total)}, left by dead processes and used by no other{more}"
        state = State.WARNING if total >= MUCH_LEFT else State.OK
        yield Finding(what=what, state=state, detail=detail, remedy=f"rm -f {words}")


def find_leftovers(folder: Path = SHARED_MEMORY) -> dict[str, int]:
    """Return the bytes of this user's files by freewheel or Python that no visible process has open or mapped."""
    found: dict[str, int] = {}
    for path in (*folder.glob(f"{OURS}*"), *folder.glob(f"{PYTHONS}*")):
        owner = path.name.removeprefix(OURS).partition("-")[0]
        if path.name.startswith(OURS) and (not owner.isdecimal() or Path(f"/proc/{owner}").exists()):
            continue  # its process is alive, or the name does not tell which process it is
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > OLD_S:
                found[str(path)] = status.st_blocks * 512
    used = _find_used(folder) if found else set()
    return {path: n_bytes for path, n_bytes in found.items() if path not in used}


def _find_used(folder: Path) -> set[str]:
    """Return paths under `folder` that a process has open or mapped. Other users' processes may be hidden."""
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

LITTLE_DISK = 1 * GIB
"""With less space a run has no room for its records next to any checkpoint."""
NO_DISK = 64 * MIB
SLOW_SYNC_S = 0.05
"""Each commit and each batch of scored groups waits for the disk once. A local disk takes a few ms."""
SYNCS = 8
SYNC_S = 2.0
"""Longest time for the whole measurement."""
SYNC_BYTES = 4096
FULL = 0.95
"""Above this share of its disk Ray stores nothing more."""
SOCKET = "ray/session_2026-01-31_23-59-59_999999_{process}/sockets/plasma_store"
"""The longest path that Ray makes in its folder, with the date and the process number."""
SOCKET_BYTES = 107
"""Longest socket path on Linux. Ray does not start with a longer one."""
NETWORK_DISKS = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "glusterfs", "ceph", "fuse.s3fs", "afs")
"""File systems on which SQLite's log and locks are unreliable."""
LOCAL_DISK = "run_dir=A_FOLDER_ON_A_LOCAL_DISK"


def check_run_folder(run_dir: str, *, needed_bytes: int = 0, timed: bool = True) -> Iterator[Finding]:
    """Check the run directory. `needed_bytes`: for its checkpoints. `timed`: also measure an fsync."""
    what, other = "run directory", "run_dir=A_FOLDER_ON_ANOTHER_DISK"
    folder = nearest_folder(Path(run_dir))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            sync_s = measure_sync_s(file.fileno()) if timed else 0.0
    except OSError as error:
        yield problem(what, f"{folder} cannot be written: {error.strerror}", "run_dir=A_FOLDER_OF_YOURS")
        return
    free, kind = shutil.disk_usage(folder).free, find_file_system(folder)
    detail = f"{folder}: {size(free)} free"
    if free < NO_DISK:
        yield problem(what, detail, other)
    elif free < needed_bytes:
        yield warning(what, f"{detail}, and the run's checkpoints take about {size(needed_bytes)}", other)
    elif free < LITTLE_DISK:
        yield warning(what, f"{detail}: records and checkpoints grow with the run", other)
    else:
        yield ok(what, detail + (f", {sync_s * 1e3:.1f} ms for an fsync" if timed else ""))
    if kind in NETWORK_DISKS:
        detail = f"{folder} is on a network disk ({kind}), where SQLite cannot keep a journal safe"
        yield warning(what, detail, LOCAL_DISK)
    if sync_s > SLOW_SYNC_S:
        detail = f"an fsync in {folder} takes {sync_s * 1e3:.0f} ms, and each step waits for one"
        yield warning(what, detail, LOCAL_DISK)


def nearest_folder(path: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    path = path.expanduser().absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def measure_sync_s(descriptor: int) -> float:
    """Return the median time of an fsync."""
    took: list[float] = []
    until = time.monotonic() + SYNC_S
    while len(took) < SYNCS and (not took or time.monotonic() < until):
        os.write(descriptor, bytes(SYNC_BYTES))
        began = time.monotonic()
        os.fsync(descriptor)
        took.append(time.monotonic() - began)
    return statistics.median(took)


def find_file_system(folder: Path, mounts: Iterable[str] | None = None) -> str:
    """Return the file system of the last, longest mount point above `folder`. `mounts`: this machine's by default."""
    mounts = _read("/proc/self/mounts").splitlines() if mounts is None else mounts
    found: tuple[int, str] = (-1, "")
    for line in mounts:
        _, point, kind, *_ = [*line.split(), "", "", ""]
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point or "-") and len(point) >= found[0]:
            found = (len(point), kind)
    return found[1]


def check_ray_folder(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check where Ray puts its sockets, its logs, and objects that do not fit into memory."""
    what = "Ray's folder"
    given = Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or "/tmp").expanduser()
    length = len(os.fsencode(given / SOCKET.format(process=os.getpid())))
    if length > SOCKET_BYTES:
        detail = f"{given}: Ray's sockets in it would have paths of {length} bytes, and {SOCKET_BYTES} are possible"
        yield problem(what, detail, "export RAY_TMPDIR=/tmp")
        return
    folder = nearest_folder(given / "ray")
    try:
        with tempfile.TemporaryFile(dir=folder):
            usage = shutil.disk_usage(folder)
    except OSError as error:
        detail = f"{folder} cannot be written: {error.strerror}"
        yield problem(what, detail, "export RAY_TMPDIR=A_FOLDER_OF_YOURS")
        return
    detail = f"{folder}: {size(usage.free)} free, {1 - usage.free / max(usage.total, 1):.0%} used"
    if usage.free < (1 - FULL) * usage.total:
        detail += f": above {FULL:.0%} Ray stores no objects there"
        yield warning(what, detail, "export RAY_TMPDIR=A_FOLDER_ON_ANOTHER_DISK")
    else:
        yield ok(what, detail)


# -- GPUs -------------------------------------------------------------------------------------------------------------

SMI_S = 20.0
"""A healthy driver answers in a second."""
DEVICE = Path("/dev/nvidia0")
IN_USE_SHARE = 0.05
"""Share of a GPU's memory: a driver alone uses less, other processes use more."""
SMALLER_STEP = "trainer.micro_batch_tokens=8192 model.gradient_checkpointing=true"
"""Settings that make a step smaller without changing the model."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process with memory on a GPU."""

    process: int
    name: str
    n_bytes: int
    """Bytes that it uses; 0 if the driver does not report them."""


@dataclass(frozen=True, kw_only=True)
class GpuCard:
    """One GPU."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    holders: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuDriver:
    """What nvidia-smi reports. Empty without GPUs."""

    release: str = ""
    cuda: str = ""
    """The highest CUDA version that it supports."""
    gpus: tuple[GpuCard, ...] = ()
    why: str = ""
    """Why nothing is known although there may be a GPU."""


def read_driver() -> GpuDriver:
    program = shutil.which("nvidia-smi")
    if program is None:
        return GpuDriver(why="nvidia-smi is not installed" if DEVICE.exists() else "")
    try:
        done = subprocess.run([program, "-q", "-x"], capture_output=True, timeout=SMI_S, check=False)
        if done.returncode == 0:
            return parse_driver(done.stdout)
    except subprocess.TimeoutExpired:
        return GpuDriver(why=f"nvidia-smi gave no answer within {SMI_S:g} s: the driver is stuck")
    except (OSError, ElementTree.ParseError) as error:
        return GpuDriver(why=f"nvidia-smi cannot be run: {error}")
    text = (done.stdout.strip() or done.stderr.strip()).decode(errors="replace")
    return GpuDriver(why=text.partition("\n")[0] or "nvidia-smi failed")


def parse_driver(xml: bytes | str) -> GpuDriver:
    """Parse the output of `nvidia-smi -q -x`."""
    log = ElementTree.fromstring(xml)

    def n_bytes(node: ElementTree.Element, path: str) -> int:
        amount = node.findtext(path, "").removesuffix(" MiB")
        return int(amount) * MIB if amount.isdecimal() else 0

    def processes(gpu: ElementTree.Element) -> Iterator[GpuProcess]:
        for one in gpu.iter("process_info"):
            name = Path(one.findtext("process_name", "")).name
            yield GpuProcess(process=int(one.findtext("pid", "0")), name=name, n_bytes=n_bytes(one, "used_memory"))

    cards = [
        GpuCard(
            index=index,
            name=gpu.findtext("product_name", ""),
            total_bytes=n_bytes(gpu, "fb_memory_usage/total"),
            used_bytes=n_bytes(gpu, "fb_memory_usage/used"),
            holders=tuple(processes(gpu)),
        )
        for index, gpu in enumerate(log.iter("gpu"))
    ]
    return GpuDriver(
        release=log.findtext("driver_version", ""), cuda=log.findtext("cuda_version", ""), gpus=tuple(cards)
    )


def check_gpus(
    driver: GpuDriver, environ: Mapping[str, str] = os.environ, *, needed_bytes: int = 0
) -> Iterator[Finding]:
    """Check each GPU and its users. `needed_bytes`: what a run needs of one."""
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if driver.why:
        yield problem("GPU", driver.why, "nvidia-smi")
    elif not driver.gpus:
        yield ok("GPU", "none: training and generation are on the CPU")
    elif allowed is not None and not allowed.strip():
        detail = f"{len(driver.gpus)} here, and CUDA_VISIBLE_DEVICES hides them all"
        yield warning("GPU", detail, "unset CUDA_VISIBLE_DEVICES")
    else:
        is_too_large = all(0 < card.total_bytes < needed_bytes for card in driver.gpus)
        yield from (_check_card(card, needed_bytes, is_too_large=is_too_large) for card in driver.gpus)


def _check_card(card: GpuCard, needed: int, *, is_too_large: bool) -> Finding:
    """Check one GPU. `is_too_large`: the run fits on no GPU here, even with nothing else on it."""
    what, left = f"GPU {card.index}", card.total_bytes - card.used_bytes
    detail = f"{card.name}, {size(left)} of {size(card.total_bytes)} free"
    if needed > left:
        detail += f", and the run needs about {size(needed)}"
    if is_too_large:
        return problem(what, f"{detail}: more than any GPU here has", SMALLER_STEP)
    if card.used_bytes <= IN_USE_SHARE * card.total_bytes:
        return warning(what, detail, SMALLER_STEP) if needed > left else ok(what, detail)
    if not card.holders:
        return warning(what, f"{detail}: processes that are not visible here use the rest", "nvidia-smi")
    listed = ", ".join(
        f"{holder.process} ({holder.name}" + (f", {size(holder.n_bytes)})" if holder.n_bytes else ")")
        for holder in card.holders
    )
    numbers = ",".join(str(holder.process) for holder in card.holders)
    one = len(card.holders) == 1
    detail += f": {'process' if one else 'processes'} {listed} use{'s' * one} the rest"
    return warning(what, detail, f"ps -o pid,user,etime,args -p {numbers}")
