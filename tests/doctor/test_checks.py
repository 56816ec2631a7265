"""What the doctor finds on a machine."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freewheel.doctor import machine, software
from freewheel.doctor.machine import GpuCard, GpuDriver, GpuProcess, Host, Needs
from freewheel.rollout.vllm import api
from freewheel.runtime.placement import Machine
from freewheel.utils.findings import GIB, MIB, Check, Finding, State, ok, run_checks
from freewheel.utils.processes import ChildAnswer, run_in_child

H200 = GpuCard(index=0, name="NVIDIA H200", total_bytes=140 * GIB, used_bytes=0)
DRIVER = GpuDriver(release="570.1", cuda="12.8", gpus=(H200,))
TORCH = {"version": "2.13.0", "cuda": "12.8", "hip": None, "available": True, "why": ""}
HOST = Host(files=1 << 20, files_at_most=1 << 20, processes=1 << 62, processes_now=0, memory_free=64 * GIB)
MACHINE = Machine(cpus=8, memory_bytes=128 * GIB)


def states(findings: Iterable[Finding]) -> dict[str, str]:
    """Return the state of each finding by name, the last one if a name is there twice."""
    return {one.what: one.state.value for one in findings}


@pytest.fixture
def use_disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(total: int, free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=total, free=free))

    return use


# -- checks -----------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_or_fails_is_a_finding_and_the_others_run():
    def breaks() -> list[Finding]:
        raise RuntimeError("odd")

    def hangs() -> list[Finding]:
        time.sleep(30)
        return []

    begun: list[str] = []
    checks = [Check(what="one", look=breaks), Check(what="two", look=hangs, limit_s=0.05)]
    found = run_checks([*checks, Check(what="three", look=lambda: [ok("three", "fine")])], begun=begun.append)
    assert begun == ["one", "two", "three"]
    assert [one.state for one in found] == [State.PROBLEM, State.PROBLEM, State.OK]
    assert "RuntimeError: odd" in found[0].detail and "no answer within 0.05 s" in found[1].detail


@pytest.mark.parametrize(
    ("code", "limit_s", "why"),
    [
        ("import no_such_package", 20, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import time; time.sleep(20)", 0.2, "no answer within 0.2 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 20, "it was killed by SIGSEGV"),
        ("pass", 20, "it ended with exit code 0 and no message"),
    ],
)
def test_a_child_process_reports_why_it_has_no_answer(code, limit_s, why):
    assert run_in_child(code, limit_s=limit_s) == ChildAnswer(why=why)


def test_a_child_process_ignores_modules_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('shadow')\n")
    monkeypatch.chdir(tmp_path)
    assert run_in_child("import json; print('noise'); print(json.dumps({'a': 1}))", limit_s=20).values == {"a": 1}


# -- software ---------------------------------------------------------------------------------------------------------


METADATA = (
    "aiohttp>=3.12",
    "uvloop>=0.21; sys_platform != 'win32'",
    "torch>=2.11; extra == 'train'",
    "ray[default]>=2.50; extra == 'train'",
    "verl==0.9.1; extra == 'verl'",
    "math-verify>=0.8; extra == 'math'",
)
BASE = {"aiohttp": "3.14.5", "uvloop": "0.22"}


@pytest.mark.parametrize(
    ("have", "trains", "expected", "text"),
    [
        ({**BASE, "torch": "2.13.0+cpu", "ray": "2.60"}, True, ["ok"], "extras: train; not installed: math"),
        ({**BASE, "torch": "2.13", "ray": "3.0", "verl": "0.9.1"}, True, ["ok"], "extras: train, verl; not"),
        ({**BASE, "torch": "2.13", "ray": "3.0", "verl": "0.9.2"}, True, ["ok"], "extras: train; not"),
        ({**BASE, "torch": "2.9.1", "ray": "2.60"}, True, ["ok", "problem"], "2.9.1 is installed, and torch>=2.11 is"),
        (BASE, True, ["ok", "problem"], "torch is missing; ray is missing"),
        (BASE, False, ["ok", "warning"], "torch is missing; ray is missing"),
        ({"aiohttp": "3.14.5", "torch": "2.13", "ray": "3.0"}, True, ["problem"], "uvloop is missing"),
    ],
)
def test_incomplete_packages_are_named(have, trains, expected, text):
    found = list(software.packages(trains=trains, needs=map(software.parse_requirement, METADATA), have=have.get))
    assert [one.state for one in found] == expected and text in found[-1].detail
    assert len(found) == 1 or found[-1].remedy == "pip install 'freewheel[train]'"


def test_freewheel_run_from_its_source_does_not_know_its_packages():
    (found,) = software.packages(have={"torch": "2.13"}.get)
    assert found.state == "warning" and "without installation" in found.detail
    assert found.remedy == "pip install -e '.[train]'"


def test_python_packages_and_torch_of_this_environment_are_fine():
    found = [software.python_release(), *software.packages(), *software.torch(machine.read_driver())]
    assert set(states(found).values()) == {"ok"}, found


@pytest.mark.parametrize(
    ("answer", "driver", "state", "text"),
    [
        ({}, DRIVER, "ok", "built for CUDA 12.8; driver 570.1"),
        ({"cuda": "12.9"}, DRIVER, "ok", "built for CUDA 12.9; driver 570.1"),
        ({"cuda": None, "available": False}, None, "ok", "built without CUDA"),
        ({"cuda": None, "available": False}, DRIVER, "problem", "NVIDIA H200 is here and cannot be used"),
        ({"cuda": "13.0", "available": False}, DRIVER, "problem", "supports CUDA up to 12.8"),
        ({"available": False, "why": "no device"}, DRIVER, "problem", "it cannot use NVIDIA H200: no device"),
        (None, None, "problem", "it cannot be imported: ImportError: libcudart.so.12"),
    ],
)
def test_torch_is_compared_with_driver_and_gpus(monkeypatch, answer, driver, state, text):
    child = ChildAnswer(why="ImportError: libcudart.so.12") if answer is None else ChildAnswer(values=TORCH | answer)
    monkeypatch.setattr(software, "run_in_child", lambda code, limit_s: child)
    (found,) = software.torch(driver)
    assert found.state == state and text in found.detail
    if "cannot be used" in text or "goes up" in text:
        assert found.remedy.endswith("/whl/cu128")


@pytest.mark.parametrize(
    ("release", "wanted", "expected"),
    [(None, False, ["ok"]), (None, True, []), ("0.9.2", False, ["warning"]), ("0.24.0", True, ["ok"])],
)
def test_vllm_is_reported_unless_the_configuration_reports_it(monkeypatch, release, wanted, expected):
    monkeypatch.setattr(api, "find_release", lambda: release)
    assert [one.state for one in software.vllm(wanted=wanted)] == expected


# -- GPUs -------------------------------------------------------------------------------------------------------------

SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>570.86.10</driver_version><cuda_version>12.8</cuda_version>
<gpu id="0"><product_name>NVIDIA H200</product_name>
<fb_memory_usage><total>143771 MiB</total><used>512 MiB</used></fb_memory_usage><processes></processes></gpu>
<gpu id="1"><product_name>NVIDIA H200</product_name>
<fb_memory_usage><total>143771 MiB</total><used>90000 MiB</used></fb_memory_usage>
<bar1_memory_usage><used>1 MiB</used></bar1_memory_usage>
<processes><process_info><pid>4711</pid><process_name>/usr/bin/python, a</process_name>
<used_memory>89000 MiB</used_memory></process_info></processes></gpu>
</nvidia_smi_log>"""


def test_nvidia_smi_is_read():
    driver = machine.parse_driver(SMI)
    assert (driver.release, driver.cuda, len(driver.gpus)) == ("570.86.10", "12.8", 2)
    assert driver.gpus[1].holders == (GpuProcess(process=4711, name="python, a", n_bytes=89000 * MIB),)
    free, taken = machine.check_gpus(driver, {})
    assert free.state is State.OK and "139.9 GiB of 140.4 GiB free" in free.detail
    assert taken.state is State.WARNING and "process 4711 (python, a, 86.9 GiB) uses the rest" in taken.detail
    assert taken.remedy == "ps -o pid,user,etime,args -p 4711"


FULL, SMALL = replace(H200, used_bytes=100 * GIB), replace(H200, index=1, total_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("cards", "needed", "expected", "text"),
    [
        ((replace(H200, used_bytes=5 * GIB),), 100, ["ok"], "135.0 GiB of 140.0 GiB free"),
        ((replace(H200, used_bytes=5 * GIB),), 138, ["warning"], "the run needs about 138.0 GiB"),
        ((H200, SMALL), 200, ["problem", "problem"], "about 200.0 GiB: more than any GPU here has"),
        ((FULL, SMALL), 200, ["problem", "problem"], "about 200.0 GiB: more than any GPU here has"),
        ((H200, SMALL), 100, ["ok", "warning"], "the run needs about 100.0 GiB"),
        ((replace(H200, total_bytes=0),), 1, ["warning"], "the run needs about 1.0 GiB"),
        ((FULL,), 0, ["warning"], "processes that are not visible here use the rest"),
    ],
)
def test_a_gpu_is_compared_with_what_the_run_needs(cards, needed, expected, text):
    found = list(machine.check_gpus(GpuDriver(gpus=cards), {}, needed_bytes=needed * GIB))
    assert [one.state for one in found] == expected and text in found[-1].detail


@pytest.mark.parametrize(
    ("driver", "environ", "state", "remedy"),
    [
        (GpuDriver(why="the driver is stuck"), {}, "problem", "nvidia-smi"),
        (GpuDriver(), {}, "ok", ""),
        (DRIVER, {"CUDA_VISIBLE_DEVICES": ""}, "warning", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_machine_without_usable_gpus_says_why(driver, environ, state, remedy):
    (found,) = machine.check_gpus(driver, environ)
    assert (found.state, found.remedy) == (state, remedy)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sleep 30", "gave no answer"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "NVIDIA-SMI has failed"),
        (r"printf '\377 is no text\n'; exit 9", " is no text"),
        ("echo no xml", "nvidia-smi cannot be run"),
    ],
)
def test_nvidia_smi_itself_may_hang_or_fail(tmp_path, monkeypatch, script, why):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "SMI_S", 0.5)
    assert why in machine.read_driver().why


# -- shared memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "free", "needed", "state", "text", "remedy"),
    [
        (8 * GIB, 7 * GIB, GIB, "ok", "7.0 GiB of 8.0 GiB free", ""),
        (64 * MIB, 64 * MIB, 0, "warning", "has 64 MiB: Ray and vLLM need 1.0 GiB", "size=4G"),
        (8 * GIB, GIB // 2, 3 * GIB, "warning", "a version of the weights takes 3.0 GiB", "size=6G"),
    ],
)
def test_shared_memory_needs_room_for_the_weights(tmp_path, use_disk, total, free, needed, state, text, remedy):
    use_disk(total, free)
    (found,) = machine.check_shared_memory(folder=tmp_path, needed_bytes=needed)
    assert found.state == state and text in found.detail and remedy in found.remedy


def leave(folder: Path, name: str, n_bytes: int = 8192) -> Path:
    """Create a file of a process that was killed a while ago."""
    path = folder / name
    path.write_bytes(bytes(n_bytes))
    os.utime(path, (time.time() - 2 * machine.OLD_S,) * 2)
    return path


def test_files_that_dead_processes_left_are_found_and_no_others(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = [leave(tmp_path, "psm_0123abcd", 1 << 20), leave(tmp_path, f"freewheel-weights-{gone.pid}-ab")]
    leave(tmp_path, f"freewheel-weights-{os.getpid()}-cd")
    leave(tmp_path, "somebody_elses")
    (tmp_path / "psm_young").write_bytes(b"1")
    mapped, opened = leave(tmp_path, "psm_mapped"), leave(tmp_path, "psm_opened")
    with mapped.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with opened.open("rb"):
        *_, found = machine.check_shared_memory(folder=tmp_path)
    memory.close()
    assert found.state is State.OK and "2 files, 1 MiB, left by dead processes" in found.detail
    assert found.remedy == f"rm -f {dead[0]} {dead[1]}", "the largest first"
    subprocess.run(found.remedy, shell=True, check=True)
    assert sorted(machine.find_leftovers(tmp_path)) == sorted([str(mapped), str(opened)])


def test_a_command_lists_the_largest_leftovers_only(monkeypatch, tmp_path):
    files = {f"/dev/shm/psm_{n}": n * 16 * MIB for n in range(machine.NAMED + 5)}
    monkeypatch.setattr(machine, "find_leftovers", lambda folder: files)
    *_, found = machine.check_shared_memory(folder=tmp_path)
    assert found.state is State.WARNING and f"the largest {machine.NAMED}" in found.detail
    assert len(found.remedy.split()) == 2 + machine.NAMED and f"psm_{machine.NAMED + 4}" in found.remedy


# -- disks ------------------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_and_nothing_is_left_on_it(tmp_path):
    first, *_ = machine.check_run_folder(str(tmp_path / "runs" / "one"))
    assert first.state is not State.PROBLEM and str(tmp_path) in first.detail
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("free", "needed", "sync_s", "kind", "expected", "text"),
    [
        (100 * GIB, 0, 0.001, "ext4", ["ok"], "100.0 GiB free, 1.0 ms for an fsync"),
        (100 * GIB, 200 * GIB, 0.001, "ext4", ["warning"], "the run's checkpoints take about 200.0 GiB"),
        (MIB, 0, 0.001, "ext4", ["problem"], "1 MiB free"),
        (GIB // 2, 0, 0.001, "ext4", ["warning"], "grow with the run"),
        (100 * GIB, 0, 0.3, "ext4", ["ok", "warning"], "takes 300 ms"),
        (100 * GIB, 0, 0.001, "nfs4", ["ok", "warning"], "a network disk (nfs4)"),
    ],
)
def test_a_disk_needs_room_and_speed_and_must_be_local(
    tmp_path, use_disk, monkeypatch, free, needed, sync_s, kind,
    expected, text,
):  # fmt: skip
    use_disk(200 * GIB, free)
    monkeypatch.setattr(machine, "measure_sync_s", lambda descriptor: sync_s)
    monkeypatch.setattr(machine, "find_file_system", lambda folder: kind)
    found = list(machine.check_run_folder(str(tmp_path), needed_bytes=needed))
    assert [one.state for one in found] == expected and text in found[-1].detail


def test_the_kind_of_a_disk_is_that_of_its_mount():
    mounts = ["overlay / overlay rw 0 0", "srv:/x /data nfs4 rw 0 0", "tmpfs /data/fast tmpfs rw 0 0"]
    folders = ("/data/runs", "/data/fast/runs", "/database")
    assert [machine.find_file_system(Path(folder), mounts) for folder in folders] == ["nfs4", "tmpfs", "overlay"]


def test_a_folder_that_cannot_be_written_is_a_problem():
    (runs,) = machine.check_run_folder("/proc/nothing/here")
    (ray,) = machine.check_ray_folder({"RAY_TMPDIR": "/proc/nothing/here"})
    (tmp,) = machine.check_ray_folder({"TMPDIR": "/proc/nothing/here"})
    for found in (runs, ray, tmp):
        assert found.state is State.PROBLEM and "cannot be written" in found.detail


@pytest.mark.parametrize(("free", "state"), [(4 * GIB, "warning"), (40 * GIB, "ok")])
def test_a_full_disk_stops_ray(use_disk, free, state):
    use_disk(100 * GIB, free)
    assert states(machine.check_ray_folder({})) == {"Ray's folder": state}


def test_a_folder_whose_name_is_too_long_for_rays_sockets_is_a_problem():
    room = machine.SOCKET_BYTES - len("/" + machine.SOCKET.format(process=os.getpid()))
    longest = "/tmp/é" + "x" * (room - len("/tmp/é".encode()))
    (fits,) = machine.check_ray_folder({"RAY_TMPDIR": longest})
    (found,) = machine.check_ray_folder({"RAY_TMPDIR": longest + "x"})
    assert fits.state is not State.PROBLEM
    assert (found.state, found.remedy) == ("problem", "export RAY_TMPDIR=/tmp") and "of 108 bytes" in found.detail


# -- limits -----------------------------------------------------------------------------------------------------------


def test_the_limits_of_this_host_can_be_read():
    here = machine.read_host()
    assert here.files > 0 and here.files_at_most >= here.files and 0 < here.memory_free < 1 << 60
    assert here.processes > here.processes_now >= 0


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "state"),
    [(1024, 1 << 20, 2048, "ok"), (1024, 1024, 0, "warning"), (4096, 4096, 4000, "warning"), (8192, 8192, 4000, "ok")],
)
def test_open_files_must_suffice_for_the_connections_of_a_judge(soft, hard, connections, state):
    files, _ = machine.check_limits(replace(HOST, files=soft, files_at_most=hard), Needs(connections=connections))
    assert files.state == state
    if state == "warning" and connections:
        assert "4,000 simultaneous connections need 4,512" in files.detail


@pytest.mark.parametrize(("processes", "state"), [(900, "ok"), (899, "warning")])
def test_a_run_needs_room_for_its_processes(processes, state):
    host = replace(HOST, processes=processes, processes_now=300)
    assert states(machine.check_limits(host, Needs()))["processes"] == state


@pytest.mark.parametrize(
    ("free", "machine_gib", "needed", "threads", "memory", "cpus"),
    [
        (64, 128, 40, 8, "ok", "ok"),
        (1, 128, 0, 9, "warning", "warning"),
        (64, 128, 130, 8, "problem", "ok"),
        (64, 0, 130, 8, "warning", "ok"),  # the size of the machine is unknown
    ],
)
def test_memory_and_cpus_are_compared_with_what_the_run_needs(free, machine_gib, needed, threads, memory, cpus):
    host, here = replace(HOST, memory_free=free * GIB), replace(MACHINE, memory_bytes=machine_gib * GIB)
    found = machine.check_memory_and_cpus(host, here, Needs(memory_bytes=needed * GIB, threads=threads))
    assert states(found) == {"memory": memory, "CPUs": cpus}


@pytest.mark.parametrize(("limit", "used", "free"), [("max", 0, 8), (str(2 * GIB), GIB, 1), (str(64 * GIB), GIB, 8)])
def test_a_container_has_the_memory_it_was_given(limit, used, free):
    meminfo = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"
    assert machine.memory_free(meminfo, limit, used) == free * GIB
