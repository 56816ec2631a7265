"""What the operating system allows a run: open files, processes, memory, CPUs, threads; and whether its clock is right.

`look` reads it into `Host`; each judgement is a pure function of that and of what a run needs.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from freewheel.doctor.finding import GIB, Finding, counted, ok, problem, size, warning
from freewheel.runtime.placement import Machine

FILES_ASIDE = 512
"""Open files of a process beside its connections: libraries, logs, Ray's sockets."""
FILES_OF_RAY = 4096
"""What Ray asks for before it warns by itself."""
RAISED_TO = 65536
"""Ray raises the limit of a run's processes to this, or as far as the user may."""
PROCESSES_OF_A_RUN = 600
"""Processes and threads of the smallest run: Ray's nine with their own, and its actors'."""
THREADS_OF_AN_ACTOR = 32
"""Its process, Ray's and torch's threads in it, and its judge's."""
MEMORY_OF_RAY = int(0.7 * GIB)
"""Its processes without a run (measured, Ray 2.60)."""
MEMORY_OF_AN_ACTOR = int(0.4 * GIB)
"""With torch and transformers imported, before a model."""
ACTORS = 4
"""Of the smallest run: queue, synchronizer, trainer, one rollouter."""
FIRST_YEAR = 2026
"""Of freewheel's first release: a clock before it is wrong."""
YEAR_S = 365.25 * 86400
LESS = "model.path=A_SMALLER_MODEL rollout.replicas=1"
VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class Host:
    """This machine's limits, for this process."""

    files: int
    """Open files that a process may have; a very large number for no limit."""
    files_at_most: int
    """What the user may raise that to."""
    processes: int
    """Processes and threads of the user, or of the container."""
    processes_now: int
    memory_free: int
    """Bytes that can be had without swapping."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of a machine. The defaults are the smallest run's."""

    connections: int = 0
    """To a judge or to servers, at once, by a process."""
    actors: int = ACTORS
    memory_bytes: int = 0
    """On the host, of models and what belongs to them."""
    threads: int = 2
    """That compute."""


def look() -> Host:
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
    """What the container has taken, less what it would give back at once: pages of files."""
    used, back = _read("/sys/fs/cgroup/memory.current"), 0
    for line in _read("/sys/fs/cgroup/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        back += int(value) if name in ("inactive_file", "active_file") and value.isdecimal() else 0
    return max(0, int(used) - back) if used.isdecimal() else 0


def memory_free(meminfo: str, limit: str, used: int) -> int:
    """Of the machine, and of the container where that has a limit."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    machine = int(fields.get("MemAvailable", "0").split()[0]) * 1024
    return min(machine, max(0, int(limit) - used)) if limit.isdecimal() else machine


# -- judgements -------------------------------------------------------------------------------------------------------


def files(host: Host, needs: Needs) -> Finding:
    wanted = max(FILES_OF_RAY, needs.connections + FILES_ASIDE)
    in_a_run = max(host.files, min(host.files_at_most, RAISED_TO))
    said = f"a process may have {_limit(host.files)}"
    said += f", in a run {_limit(in_a_run)}" if in_a_run > host.files else ""
    if in_a_run >= wanted:
        return ok("open files", said)
    why = f"{needs.connections:,} connections at once want" if needs.connections else "Ray wants"
    detail = f"{said}, and {why} {wanted:,}: only the administrator can raise it further"
    return warning("open files", detail, f"sudo prlimit --pid $$ --nofile={wanted}:{wanted}")


def processes(host: Host, needs: Needs) -> Finding:
    left = host.processes - host.processes_now
    said = f"{_limit(host.processes)} allowed" + (f", {host.processes_now:,} there" if host.processes_now else "")
    wanted = PROCESSES_OF_A_RUN + THREADS_OF_AN_ACTOR * max(0, needs.actors - ACTORS)
    if left >= wanted:
        return ok("processes", said)
    detail = f"{said}: a run wants room for {wanted:,}, threads counted"
    return warning("processes", detail, "ulimit -u unlimited; in a container: docker run --pids-limit=-1")


def memory(host: Host, machine: Machine, needs: Needs) -> Finding:
    wanted = MEMORY_OF_RAY + needs.actors * MEMORY_OF_AN_ACTOR + needs.memory_bytes
    said = f"{size(host.memory_free)} of {size(machine.memory_bytes)} free"
    if host.memory_free >= wanted:
        return ok("memory", said)
    detail = f"{said}, and about {size(wanted)} are wanted ({counted(needs.actors, 'actor')}, Ray, models)"
    if 0 < machine.memory_bytes < wanted:
        return problem("memory", f"{detail}: more than this machine has", LESS)
    return warning("memory", detail, "ps -eo pid,user,rss,args --sort=-rss | head")


def cpus(machine: Machine, needs: Needs) -> Finding:
    said = counted(machine.cpus, "CPU")
    if needs.threads <= machine.cpus:
        return ok("CPUs", said)
    detail = f"{said} for {needs.threads} threads that compute: they take turns"
    return warning("CPUs", detail, "rollout.replicas=1 rollout.threads=1 trainer.threads=1")


def threads(environ: Mapping[str, str]) -> Finding:
    given = environ.get(VARIABLE)
    if given is None:
        return ok("threads", f"{VARIABLE} is not set: trainer.threads and rollout.threads say it")
    if not given.isdecimal() or int(given) < 1:
        return warning("threads", f"{VARIABLE}={given!r} is no number of threads", f"unset {VARIABLE}")
    return ok("threads", f"{VARIABLE}={given}; in a run trainer.threads and rollout.threads say it")


def clock(wall_s: float | None = None) -> Finding:
    """Certificates, ages of samples and the names of runs go by it."""
    wall_s = time.time() if wall_s is None else wall_s
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall_s))
    if wall_s < (FIRST_YEAR - 1970) * YEAR_S:
        return problem("clock", f"it says {said}, which is long past", "timedatectl set-ntp true")
    return ok("clock", said)


def judged(host: Host, machine: Machine, needs: Needs) -> Iterator[Finding]:
    """All of what a run needs of the machine."""
    yield files(host, needs)
    yield processes(host, needs)
    yield memory(host, machine, needs)
    yield cpus(machine, needs)


def _limit(count: int) -> str:
    return "any number" if count >= 1 << 60 else f"{count:,}"
