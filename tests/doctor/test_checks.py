"""What the doctor sees on a machine, and what it makes of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freewheel.doctor import machine, software
from freewheel.doctor.machine import GpuCard as Card
from freewheel.doctor.machine import GpuDriver
from freewheel.doctor.machine import GpuProcess as Holder
from freewheel.doctor.software import Requirement
from freewheel.runtime.placement import Machine
from freewheel.utils.findings import GIB, MIB, Check, ChildAnswer, Finding, State, ok, run_checks, run_in_child

OLD = 2 * machine.OLD_S
H200 = Card(index="0", name="NVIDIA H200", total_bytes=140 * GIB, used_bytes=0)
DRIVER = GpuDriver(release="570.1", cuda=(12, 8), gpus=(H200,))
TORCH = {"version": "2.13.0", "cuda": "12.8", "hip": None, "available": True, "why": ""}
HOST = machine.Host(files=1 << 20, files_at_most=1 << 20, processes=1 << 62, processes_now=0, memory_free=64 * GIB)
MACHINE = Machine(cpus=8, memory_bytes=128 * GIB)


def said(finding: Finding) -> tuple[str, str]:
    return finding.state.value, finding.remedy


# -- checks -----------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_or_breaks_is_a_finding_and_the_others_are_made() -> None:
    def breaks() -> list[Finding]:
        raise RuntimeError("odd")

    def hangs() -> list[Finding]:
        time.sleep(30)
        return []

    begun: list[str] = []
    checks = [
        Check(what="one", look=breaks),
        Check(what="two", look=hangs, limit_s=0.05),
        Check(what="three", look=lambda: [ok("three", "fine")]),
    ]
    found = run_checks(checks, begun=begun.append)
    assert begun == ["one", "two", "three"]
    assert [one.state for one in found] == [State.PROBLEM, State.PROBLEM, State.OK]
    assert "RuntimeError: odd" in found[0].detail and "no answer within 0.05 s" in found[1].detail


def test_a_child_says_what_it_found_or_why_it_could_not() -> None:
    assert run_in_child("import json; print('noise'); print(json.dumps({'a': 1}))", limit_s=20) == ChildAnswer(
        values={"a": 1}
    )
    assert (
        run_in_child("import no_such_package", limit_s=20).why
        == "ModuleNotFoundError: No module named 'no_such_package'"
    )
    assert "no answer within 0.2 s" in run_in_child("import time; time.sleep(20)", limit_s=0.2).why
    assert (
        run_in_child("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", limit_s=20).why
        == "it was killed by SIGSEGV"
    )
    assert "no message" in run_in_child("pass", limit_s=20).why


def test_a_child_does_not_take_files_of_the_working_directory_for_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadow')\n")
    monkeypatch.chdir(tmp_path)
    assert run_in_child("import json; print(json.dumps({'a': 1}))", limit_s=20).values == {"a": 1}


# -- software ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "state"),
    [((3, 10, 4), State.PROBLEM), ((3, 11, 0), State.OK), ((3, 13, 9), State.OK), ((3, 14, 0), State.PROBLEM)],
)
def test_python_is_held_against_what_the_package_says(release: tuple[int, ...], state: State) -> None:
    found = software.python_release(release, "<3.14,>=3.11")
    assert found.state is state
    if state is State.PROBLEM:
        assert ">=3.11,<3.14" in found.detail and found.remedy == "python3.11 -m venv .venv"


def test_this_python_will_do() -> None:
    assert software.python_release().state is State.OK


def test_requirements_are_read_as_the_metadata_has_them() -> None:
    assert software.parsed("torch>=2.11; extra == 'train'") == Requirement("torch", ((">=", "2.11"),), "train")
    assert software.parsed("verl==0.9.1; extra == 'verl'") == Requirement("verl", (("==", "0.9.1"),), "verl")
    assert software.parsed("aiohttp>=3.12") == Requirement("aiohttp", ((">=", "3.12"),))
    line = "uvloop>=0.21; sys_platform != 'win32' and implementation_name == 'cpython'"
    assert software.parsed(line) == Requirement("uvloop", ((">=", "0.21"),))
    assert {"torch", "ray", "transformers"} <= {one.name for one in software.requirements() if one.extra == "train"}


NEEDS = [
    Requirement("aiohttp", ((">=", "3.12"),)),
    Requirement("torch", ((">=", "2.11"),), "train"),
    Requirement("ray", ((">=", "2.50"),), "train"),
    Requirement("math-verify", ((">=", "0.8"),), "math"),
]


@pytest.mark.parametrize(
    ("have", "states", "says"),
    [
        ({"aiohttp": "3.14.5", "torch": "2.13.0+cpu", "ray": "2.60.0"}, ["ok"], "extras: train; not installed: math"),
        ({"aiohttp": "3.14.5", "torch": "2.9.1", "ray": "2.60.0"}, ["ok", "problem"], "torch 2.9.1 is installed, and"),
        ({"aiohttp": "3.14.5"}, ["ok", "problem"], "torch is missing; ray is missing"),
        ({"torch": "2.13", "ray": "3.0"}, ["problem"], "aiohttp is missing"),
    ],
)
def test_extras_are_complete_or_what_they_lack_is_named(have: dict[str, str], states: list[str], says: str) -> None:
    found = list(software.packages(needs=NEEDS, have=have.get))
    assert [one.state for one in found] == states and says in found[-1].detail
    if len(found) > 1:
        assert found[-1].remedy == "pip install 'freewheel[train]'"


def test_who_only_asks_a_judge_needs_no_torch() -> None:
    *_, found = software.packages(trains=False, needs=NEEDS, have={"aiohttp": "3.14"}.get)
    assert found.state is State.WARNING


def test_from_its_source_what_is_needed_is_not_known() -> None:
    (found,) = software.packages(have={"torch": "2.13"}.get)
    assert said(found) == ("warning", "pip install -e '.[train]'") and "not installed" in found.detail


def test_this_environment_is_complete() -> None:
    assert [one.state for one in software.packages()] == [State.OK]


@pytest.mark.parametrize(
    ("values", "driver", "state", "says"),
    [
        ({}, DRIVER, "ok", "built for CUDA 12.8; driver 570.1"),
        ({"cuda": None, "available": False}, GpuDriver(), "ok", "built without CUDA"),
        ({"cuda": None, "available": False}, DRIVER, "problem", "NVIDIA H200 is here and cannot be used"),
        ({"cuda": "13.0", "available": False}, DRIVER, "problem", "goes up to CUDA 12.8"),
        ({"cuda": "12.9"}, DRIVER, "ok", "a later minor release runs on an earlier driver"),
        ({"available": False, "why": "no device"}, DRIVER, "problem", "it cannot use NVIDIA H200: no device"),
    ],
)
def test_torch_is_held_against_driver_and_gpus(
    values: dict[str, Any], driver: GpuDriver, state: str, says: str
) -> None:
    found = software.judged_torch(ChildAnswer(values=TORCH | values), driver)
    assert found.state == state and (says in found.detail or state == "ok"), found
    if state == "problem" and "why" not in values:
        assert found.remedy.endswith("/whl/cu128")


def test_a_torch_that_cannot_be_imported_is_a_problem() -> None:
    found = software.judged_torch(ChildAnswer(why="ImportError: libcudart.so.12"), GpuDriver())
    assert found.state is State.PROBLEM and "libcudart.so.12" in found.detail


def test_torch_here_is_well() -> None:
    (found,) = software.torch(machine.read_driver())
    assert found.state is State.OK, found


def test_what_a_vllm_can_is_read_in_its_files(tmp_path: Path) -> None:
    assert software.features(None) == software.features(tmp_path)
    for file, text in (software.LABELS, software.AT_ONCE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"class A:\n    async {text}(self) -> None: ...\n")
    assert software.features(tmp_path) == ["each token labelled with its weights", "pauses at once"]


@pytest.mark.parametrize(("release", "states"), [(None, ["ok"]), ("0.9.2", ["warning"]), ("0.24.0", ["ok"])])
def test_a_vllm_that_nobody_asked_for_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, release: str | None, states: list[str]
) -> None:
    from freewheel.rollout.vllm import api

    monkeypatch.setattr(api, "installed", lambda: release)
    assert [one.state for one in software.vllm(wanted=False)] == states


# -- GPUs -------------------------------------------------------------------------------------------------------------

TABLE = """0, GPU-aa, NVIDIA H200, 143771, 512, 570.86.10
1, GPU-bb, NVIDIA H200, 143771, 90000, 570.86.10
"""
BANNER = "| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   CUDA Version: 12.8 |"


def test_nvidia_smi_is_read() -> None:
    driver = machine.parse_driver(TABLE, "GPU-bb, 4711, 89000, /usr/bin/python, a\nGPU-bb, [N/A], 1, x\n", BANNER)
    assert (driver.release, driver.cuda, len(driver.gpus)) == ("570.86.10", (12, 8), 2)
    assert driver.gpus[1].holders == (Holder(process=4711, name="python, a", n_bytes=89000 * MIB),)
    free, taken = machine.check_gpus(driver, {})
    assert free.state is State.OK and "139.9 GiB of 140.4 GiB free" in free.detail
    assert taken.state is State.WARNING and "process 4711 (python, a, 86.9 GiB) holds the rest" in taken.detail
    assert taken.remedy == "ps -o pid,user,etime,args -p 4711"


def test_a_run_that_wants_more_than_is_free_is_told() -> None:
    little = GpuDriver(gpus=(replace(H200, used_bytes=5 * GIB),))
    (well,) = machine.check_gpus(little, {}, needed_bytes=100 * GIB)
    (short,) = machine.check_gpus(little, {}, needed_bytes=138 * GIB)
    assert well.state is State.OK
    assert said(short) == ("warning", machine.SMALLER_STEP) and "the run wants about 138.0 GiB" in short.detail


@pytest.mark.parametrize("used", [0, 100 * GIB])
def test_a_run_that_fits_on_no_gpu_here_is_a_problem(used: int) -> None:
    full, small = replace(H200, used_bytes=used), replace(H200, index="1", total_bytes=24 * GIB)
    found = list(machine.check_gpus(GpuDriver(gpus=(full, small)), {}, needed_bytes=200 * GIB))
    assert [said(one) for one in found] == [("problem", machine.SMALLER_STEP)] * 2
    assert "the run wants about 200.0 GiB: more than any GPU here has" in found[0].detail
    large, beside = machine.check_gpus(GpuDriver(gpus=(H200, small)), {}, needed_bytes=100 * GIB)
    assert large.state is State.OK and beside.state is State.WARNING, "it may get the large one"
    (unknown,) = machine.check_gpus(GpuDriver(gpus=(replace(H200, total_bytes=0),)), {}, needed_bytes=GIB)
    assert unknown.state is State.WARNING, "the driver does not tell how large it is"


def test_memory_that_somebody_unseen_holds_is_told() -> None:
    _, taken = machine.check_gpus(machine.parse_driver(TABLE, "", BANNER), {})
    assert taken.state is State.WARNING and "cannot be seen from here" in taken.detail


def test_a_driver_that_does_not_answer_is_a_problem_and_no_gpu_is_none() -> None:
    (stuck,) = machine.check_gpus(GpuDriver(why="nvidia-smi gave no answer within 10 s: the driver is stuck"), {})
    (none,) = machine.check_gpus(GpuDriver(), {})
    (hidden,) = machine.check_gpus(DRIVER, {"CUDA_VISIBLE_DEVICES": ""})
    assert said(stuck) == ("problem", "nvidia-smi") and none.state is State.OK
    assert said(hidden) == ("warning", "unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sleep 30", "gave no answer"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "NVIDIA-SMI has failed"),
        (r"printf '\377 is no text\n'; exit 9", " is no text"),
    ],
)
def test_nvidia_smi_itself_may_hang_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "SMI_S", 0.5)
    assert why in machine.read_driver().why


# -- shared memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A small disk in memory of our own."""
    folder = tmp_path / "shm"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_shared_memory_of_a_container_is_too_small(shared: Path) -> None:
    (found,) = machine.check_shared_memory(folder=shared)
    assert found.state is State.WARNING and f"{shared} has 16 MiB: " in found.detail
    assert found.remedy == f"mount -o remount,size=4G {shared}"
    (found,) = machine.check_shared_memory(folder=shared, needed_bytes=3 * GIB)
    assert "a version of the weights takes 3.0 GiB" in found.detail and "size=6G" in found.remedy


def test_shared_memory_with_room_is_well() -> None:
    assert machine.judge_shared_memory(8 * GIB, 7 * GIB, GIB).state is State.OK
    assert machine.judge_shared_memory(8 * GIB, GIB // 2, GIB).state is State.WARNING


def left(folder: Path, name: str, n_bytes: int = 8192) -> Path:
    """As a process leaves it that was killed a while ago."""
    path = folder / name
    path.write_bytes(bytes(n_bytes))
    os.utime(path, (time.time() - OLD, time.time() - OLD))
    return path


def test_what_dead_processes_left_is_found_and_nothing_that_lives(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = [left(tmp_path, f"freewheel-weights-{gone.pid}-ab"), left(tmp_path, "psm_0123abcd", 1 << 20)]
    left(tmp_path, f"freewheel-weights-{os.getpid()}-cd")
    left(tmp_path, "somebody_elses")
    (tmp_path / "psm_young").write_bytes(b"1")
    mapped, opened = left(tmp_path, "psm_mapped"), left(tmp_path, "psm_opened")
    with mapped.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with opened.open("rb"):
        found = machine.find_leftovers(tmp_path)
    memory.close()
    assert [one.path for one in found] == sorted(map(str, dead))
    finding = machine.judge_leftovers(found)
    assert finding.state is State.OK and "2 files, 1 MiB, that no process here uses" in finding.detail
    assert finding.remedy == f"rm -f {dead[1]} {dead[0]}", "the largest first"
    subprocess.run(finding.remedy, shell=True, check=True)
    assert [one.path for one in machine.find_leftovers(tmp_path)] == sorted([str(mapped), str(opened)])


def test_a_command_lists_the_largest_only() -> None:
    found = [machine.Leftover(path=f"/dev/shm/psm_{n}", n_bytes=n * 16 * MIB) for n in range(machine.NAMED + 5)]
    finding = machine.judge_leftovers(found)
    assert finding.state is State.WARNING
    assert len(finding.remedy.split()) == 2 + machine.NAMED and f"psm_{machine.NAMED + 4}" in finding.remedy
    assert f"the largest {machine.NAMED}" in finding.detail


# -- disks ------------------------------------------------------------------------------------------------------------


def test_a_small_disk_is_a_problem_and_what_is_asked_of_it_is_told(shared: Path) -> None:
    (found,) = machine.check_run_folder(str(shared / "runs" / "one"))
    assert found.state is State.PROBLEM and f"{shared}: 16 MiB free" in found.detail
    assert not list(shared.iterdir()), "it was looked at, and left as it was"


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    first, *_ = machine.check_run_folder(str(tmp_path / "runs"))
    assert first.state is State.OK and "ms until something is safe there" in first.detail
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    (found,) = machine.check_run_folder("/proc/nothing/here")
    assert found.state is State.PROBLEM and "cannot be written" in found.detail


@pytest.mark.parametrize(
    ("facts", "needed", "states"),
    [
        ({}, 0, ["ok"]),
        ({}, 200 * GIB, ["warning"]),
        ({"free_bytes": MIB}, 0, ["problem"]),
        ({"free_bytes": GIB // 2}, 0, ["warning"]),
        ({"sync_s": 0.3}, 0, ["ok", "warning"]),
        ({"kind": "nfs4"}, 0, ["ok", "warning"]),
        ({"kind": "ext4", "skew_s": 40.0}, 0, ["ok", "warning"]),
    ],
)
def test_a_disk_is_judged_by_room_speed_kind_and_clock(facts: dict[str, Any], needed: int, states: list[str]) -> None:
    disk = machine.Disk(**{"folder": Path("/data"), "free_bytes": 100 * GIB, **facts})
    assert [one.state for one in machine.judge_disk(disk, needed)] == states


def test_the_kind_of_a_disk_is_that_of_its_mount() -> None:
    mounts = ["overlay / overlay rw 0 0", "srv:/x /data nfs4 rw 0 0", "tmpfs /data/fast tmpfs rw 0 0"]
    assert machine.find_file_system(Path("/data/runs"), mounts) == "nfs4"
    assert machine.find_file_system(Path("/data/fast/runs"), mounts) == "tmpfs"
    assert machine.find_file_system(Path("/database"), mounts) == "overlay"


def test_a_full_disk_stops_ray() -> None:
    assert machine.judge_ray_folder(Path("/tmp"), 100 * GIB, 4 * GIB).state is State.WARNING
    assert machine.judge_ray_folder(Path("/tmp"), 100 * GIB, 40 * GIB).state is State.OK


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_folder_in_which_ray_cannot_start_is_a_problem(variable: str) -> None:
    (found,) = machine.check_ray_folder({variable: "/proc/nothing/here"})
    assert said(found) == ("problem", "export RAY_TMPDIR=A_FOLDER_OF_YOURS") and "cannot be written" in found.detail
    room = machine.SOCKET_BYTES - len("/" + machine.SOCKET.format(process=os.getpid()))
    longest = "/tmp/é" + "x" * (room - len("/tmp/é".encode()))
    (found,) = machine.check_ray_folder({variable: longest})
    assert found.state is not State.PROBLEM
    (found,) = machine.check_ray_folder({variable: longest + "x"})
    assert said(found) == ("problem", "export RAY_TMPDIR=/tmp") and "paths of 108 bytes" in found.detail


# -- the host ---------------------------------------------------------------------------------------------------------


def changed(**facts: Any) -> machine.Host:
    return machine.Host(**{**HOST.__dict__, **facts})


def test_this_host_can_be_looked_at() -> None:
    here = machine.read_host()
    assert here.files > 0 and here.files_at_most >= here.files and 0 < here.memory_free < 1 << 60
    assert len(list(machine.check_limits(here, Machine.of_host(), machine.Needs()))) == 4


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "state"),
    [(1024, 1 << 20, 2048, "ok"), (1024, 1024, 0, "warning"), (4096, 4096, 4000, "warning"), (8192, 8192, 4000, "ok")],
)
def test_open_files_are_held_against_a_judges_connections(soft: int, hard: int, connections: int, state: str) -> None:
    found = machine.check_files(changed(files=soft, files_at_most=hard), machine.Needs(connections=connections))
    assert found.state == state
    if state == "warning" and connections:
        assert "4,000 connections at once want 4,512" in found.detail


def test_limits_of_processes_memory_and_cpus() -> None:
    assert machine.check_processes(changed(processes=700, processes_now=300), machine.Needs()).state is State.WARNING
    assert machine.check_processes(HOST, machine.Needs()).state is State.OK
    assert machine.check_memory(changed(memory_free=GIB), MACHINE, machine.Needs()).state is State.WARNING
    assert machine.check_memory(HOST, MACHINE, machine.Needs(memory_bytes=40 * GIB)).state is State.OK
    large = machine.Needs(memory_bytes=130 * GIB)
    found = machine.check_memory(HOST, MACHINE, large)
    assert said(found) == ("problem", machine.SMALLER_RUN) and "more than this machine has" in found.detail
    assert machine.check_memory(HOST, replace(MACHINE, memory_bytes=0), large).state is State.WARNING, (
        "its size is not known"
    )
    assert machine.check_cpus(MACHINE, machine.Needs(threads=9)).state is State.WARNING
    assert machine.check_cpus(MACHINE, machine.Needs(threads=8)).state is State.OK


@pytest.mark.parametrize(("value", "state"), [(None, "ok"), ("4", "ok"), ("0", "warning"), ("many", "warning")])
def test_a_number_of_threads_that_is_none_is_noticed(value: str | None, state: str) -> None:
    assert machine.check_threads({} if value is None else {"OMP_NUM_THREADS": value}).state == state


def test_a_container_has_what_it_was_given() -> None:
    meminfo = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"
    assert machine.memory_free(meminfo, "max", 0) == 8 * GIB
    assert machine.memory_free(meminfo, str(2 * GIB), GIB) == GIB
    assert machine.memory_free(meminfo, str(64 * GIB), GIB) == 8 * GIB


def test_a_clock_that_was_never_set_is_noticed() -> None:
    assert machine.check_clock().state is State.OK
    assert machine.check_clock(0.0).state is State.PROBLEM
