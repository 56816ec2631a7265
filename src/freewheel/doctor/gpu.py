"""The GPUs of this machine by nvidia-smi: their driver, how much memory is free, and who has the rest.

`look` asks; `memory` judges. Needs no torch: a driver that is stuck hangs a child, which has a limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from freewheel.doctor.finding import MIB, Finding, ok, problem, size, warning

SMI_S = 10.0
"""A driver that is well answers in a second."""
DEVICE = Path("/dev/nvidia0")
QUERY = "index,uuid,name,memory.total,memory.used,driver_version"
APPS = "gpu_uuid,pid,used_memory,process_name"
TAKEN = 0.05
"""Of a GPU's memory in use: less is the driver's own, more is somebody's work."""
LESS = "trainer.micro_batch_tokens=8192 model.gradient_checkpointing=true"
"""What makes a run smaller whose model stays as it is."""

_CUDA = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process with memory on a GPU."""

    process: int
    name: str
    n_bytes: int
    """0 where the driver does not tell."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU."""

    index: str
    name: str
    total_bytes: int
    used_bytes: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What nvidia-smi tells. Without GPUs all is empty."""

    release: str = ""
    cuda: tuple[int, int] | None = None
    """The highest that it can run."""
    gpus: tuple[Card, ...] = ()
    why: str = ""
    """Why nothing is known although there may be a GPU."""


def look() -> Driver:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Driver(why="nvidia-smi is not installed" if DEVICE.exists() else "")
    table, why = _asked(program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    if why:
        return Driver(why=why)
    apps, _ = _asked(program, f"--query-compute-apps={APPS}", "--format=csv,noheader,nounits")
    banner, _ = _asked(program)
    return read(table, apps, banner)


def _asked(program: str, *arguments: str) -> tuple[str, str]:
    """What it prints, or why it does not."""
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


def read(table: str, apps: str, banner: str) -> Driver:
    """nvidia-smi's three answers as one."""
    holders: dict[str, list[Holder]] = {}
    for uuid, process, used, name in _rows(apps, APPS):
        if process.isdecimal():
            held = int(used) * MIB if used.isdecimal() else 0
            holders.setdefault(uuid, []).append(Holder(process=int(process), name=Path(name).name, n_bytes=held))
    cards, release = [], ""
    for index, uuid, name, total, used, driver in _rows(table, QUERY):
        release = driver
        total_bytes, used_bytes = (int(cell) * MIB if cell.isdecimal() else 0 for cell in (total, used))
        there = tuple(holders.get(uuid, ()))
        card = Card(index=index, name=name, total_bytes=total_bytes, used_bytes=used_bytes, holders=there)
        cards.append(card)
    found = _CUDA.search(banner)
    return Driver(release=release, cuda=(int(found[1]), int(found[2])) if found else None, gpus=tuple(cards))


def _rows(text: str, columns: str) -> Iterator[list[str]]:
    width = len(columns.split(","))
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", width - 1)]  # only the last, a command, may have commas
        if len(cells) == width:
            yield cells


def memory(driver: Driver, environ: Mapping[str, str] = os.environ, *, needed_bytes: int = 0) -> Iterator[Finding]:
    """Each GPU, and who is on it. `needed_bytes`: what a run wants of one."""
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
        yield _card(card, needed_bytes, too_large=too_large)


def _card(card: Card, needed: int, *, too_large: bool) -> Finding:
    """`too_large`: the run fits on no GPU here, even where it is alone there."""
    what, left = f"GPU {card.index}", card.total_bytes - card.used_bytes
    said = f"{card.name}, {size(left)} of {size(card.total_bytes)} free"
    if needed > left:
        said += f", and the run wants about {size(needed)}"
    if too_large:
        return problem(what, f"{said}: more than any GPU here has", LESS)
    if card.used_bytes <= TAKEN * card.total_bytes:
        return warning(what, said, LESS) if needed > left else ok(what, said)
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
