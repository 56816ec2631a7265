"""Checks the installed software and whether it fits together: Python, freewheel's extras, torch, vLLM, Ray.

The required releases come from freewheel's own metadata. torch is asked in a child process.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import freewheel
from freewheel.doctor.machine import GpuDriver
from freewheel.errors import ConfigError
from freewheel.utils.findings import Finding, ok, problem, warning
from freewheel.utils.processes import run_in_child

PACKAGE = "freewheel"
TRAIN = "train"
"""The extra that training needs."""
EXTRAS = (TRAIN, "math", "tensorboard", "prometheus", "wandb", "verl", "trl")
"""Extras that add something to a run. vLLM has its own check, under either of its names."""
TORCH_S = 60.0
"""Time limit for `import torch` on a cold disk and the start of CUDA."""
BUILDS = {11: "cu118", 12: "cu128", 13: "cu130"}
"""Builds of torch in PyTorch's index, by the driver's CUDA version. Later minor releases run on earlier drivers."""

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([<>=!~,.\d\s]*)(?:;(.*))?$")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_BOUND = re.compile(r"(>=|==|<)\s*([\d.]+)")

Installed = Callable[[str], str | None]
"""Returns the release of a distribution; None if it is not installed."""


# -- what is there ----------------------------------------------------------------------------------------------------


def find_release(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Requirement:
    """One requirement of a package's metadata."""

    name: str
    bounds: tuple[tuple[str, str], ...]
    extra: str = ""

    def allows(self, release: str) -> bool:
        return all(_holds(release, sign, bound) for sign, bound in self.bounds)

    def __str__(self) -> str:
        return self.name + ",".join(f"{sign}{bound}" for sign, bound in self.bounds)


def requirements() -> list[Requirement]:
    """Return freewheel's own requirements, of every extra."""
    return [one for line in importlib.metadata.requires(PACKAGE) or () if (one := parse_requirement(line)) is not None]


def parse_requirement(line: str) -> Requirement | None:
    found = _REQUIREMENT.match(line.strip())
    if found is None:
        return None
    extra = _EXTRA.search(found[3] or "")
    return Requirement(found[1], tuple(_BOUND.findall(found[2])), extra[1] if extra else "")


def _holds(release: str, sign: str, bound: str) -> bool:
    have, want = numbers(release), numbers(bound)
    if sign == "==":
        return have[: len(want)] == want
    return have < want if sign == "<" else have >= want


def numbers(release: str) -> tuple[int, ...]:
    """Parse `2.13.0+cpu` as (2, 13, 0)."""
    leading = re.match(r"[\d.]*", release)
    return tuple(int(part) for part in (leading[0] if leading else "").split(".") if part)


# -- Python and packages ----------------------------------------------------------------------------------------------


def python_release() -> Finding:
    """Report Python. pip refuses releases that freewheel does not support."""
    return ok("Python", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def packages(
    *, trains: bool = True, needs: Iterable[Requirement] | None = None, have: Installed = find_release
) -> Iterator[Finding]:
    """Check freewheel and its extras. `trains`: the extra `train` must be installed."""
    if needs is None and have(PACKAGE) is None:
        detail = f"{freewheel.__version__}, run from its source without installation, so its requirements are unknown"
        yield warning(PACKAGE, detail, f"pip install -e '.[{TRAIN}]'")
        return
    faults: dict[str, list[str]] = {}
    for need in requirements() if needs is None else needs:
        release = have(need.name)
        found = faults.setdefault(need.extra, [])
        if release is None:
            found.append(f"{need.name} is missing")
        elif not need.allows(release):
            found.append(f"{need.name} {release} is installed, and {need} is needed")
    complete = [name for name in EXTRAS if faults.get(name) == []]
    missing = [name for name in EXTRAS if name != TRAIN and name not in complete]
    detail = f"{freewheel.__version__}; extras: {', '.join(complete) or 'none'}"
    detail += f"; not installed: {', '.join(missing)}" if missing else ""
    if faults.get(""):
        yield problem(PACKAGE, f"{detail}; {'; '.join(faults[''])}", f"pip install --upgrade {PACKAGE}")
    else:
        yield ok(PACKAGE, detail)
    if faults.get(TRAIN):
        state = problem if trains else warning
        yield state("training", f"not possible here: {'; '.join(faults[TRAIN])}", f"pip install '{PACKAGE}[{TRAIN}]'")


# -- torch ------------------------------------------------------------------------------------------------------------

LOOK_AT_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "why": ""}
found["available"] = torch.cuda.is_available()
if torch.version.cuda and not found["available"]:
    try:
        torch.cuda.init()
    except Exception as error:
        found["why"] = (str(error).splitlines() or [type(error).__name__])[0]
print(json.dumps(found))
"""


def torch(driver: GpuDriver | None) -> Iterator[Finding]:
    """Check torch against the GPUs and the driver. `driver`: None if it is unknown."""
    if find_spec("torch") is None:
        return  # `packages` reports it
    answer, driver = run_in_child(LOOK_AT_TORCH, limit_s=TORCH_S), driver or GpuDriver()
    if answer.why:
        yield problem("torch", f"it cannot be imported: {answer.why}", "pip install --force-reinstall torch")
        return
    version, cuda = str(answer.values["version"]), answer.values["cuda"]
    detail = f"{version}, built for CUDA {cuda}" if cuda else f"{version}, built without CUDA"
    gpus = ", ".join(sorted({gpu.name for gpu in driver.gpus}))
    build = BUILDS.get(numbers(driver.cuda)[0]) if driver.cuda else None
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    other_build = f"pip install --force-reinstall torch{index}"
    if not driver.gpus or answer.values.get("hip"):
        yield ok("torch", detail)
    elif not cuda:
        yield problem("torch", f"{detail}: {gpus} is here and cannot be used", other_build)
    elif driver.cuda and numbers(cuda)[0] > numbers(driver.cuda)[0]:
        detail += f", but the driver ({driver.release}) supports CUDA up to {driver.cuda}"
        yield problem("torch", detail, other_build)
    elif not answer.values["available"]:
        why = answer.values["why"] or "no reason was given"
        yield problem("torch", f"{detail}, and it cannot use {gpus}: {why}", "nvidia-smi")
    else:
        yield ok("torch", f"{detail}; driver {driver.release}")


# -- vLLM and Ray -----------------------------------------------------------------------------------------------------


def vllm(*, wanted: bool) -> Iterator[Finding]:
    """Check vLLM. `wanted`: the run generates with it, and the check of the configuration reports what it lacks."""
    from freewheel.rollout.vllm import api

    release = api.find_release()
    try:
        api.require()
        yield ok("vLLM", f"{release}")
    except ConfigError as error:
        if not wanted and release is None:
            yield ok("vLLM", "not installed; rollout.engine=native generates")
        elif not wanted:
            yield warning("vLLM", str(error).partition(": ")[2], "pip install --upgrade 'freewheel[vllm]'")


def ray(address: str | None, environ: Mapping[str, str], *, have: Installed = find_release) -> Iterator[Finding]:
    from freewheel.runtime.cluster import START_COMMAND, check_cluster, find_head

    release = have("ray")
    if release is None:
        return  # `packages` reports it
    if address is None:
        yield ok("Ray", f"{release}; a run starts its own, and ends it")
        return
    try:
        check_cluster(address, environ)
    except ConfigError as error:
        yield problem("Ray", str(error), START_COMMAND)
        return
    yield ok("Ray", f"{release}; a cluster answers at {find_head(address, environ) or address}")
