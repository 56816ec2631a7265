"""`freewheel doctor` and the dry run as users meet them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.doctor import machine, software
from freewheel.doctor import run as doctor_run
from freewheel.judge.testing import JudgeProfile, MockJudge
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import Journal
from freewheel.rollout.vllm import api
from freewheel.runtime import cluster, placement
from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Gpu, Machine
from freewheel.runtime.run_plan import RunPlan, render, resolve
from freewheel.runtime.start import write_config
from freewheel.trainer.checkpoint import STATE, RunLock, write_state
from freewheel.utils.findings import GIB, Finding, State
from freewheel.utils.processes import ChildAnswer

WAIT_S = 120.0
"""Longer than anything here takes on a busy machine."""
WELL = machine.Host(files=1 << 20, files_at_most=1 << 20, processes=1 << 62, processes_now=0, memory_free=64 * GIB)
AGAINST = "Against this run here"
KEY = "sk-right-right-right"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with room for a run and without GPUs, whatever the machine of these tests has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(placement, "_ask_smi", lambda: "")
    monkeypatch.setattr(placement, "_memory_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(machine, "read_driver", machine.GpuDriver)
    monkeypatch.setattr(machine, "read_host", lambda: WELL)
    monkeypatch.setattr(machine, "find_leftovers", lambda folder: {})
    monkeypatch.setattr(machine, "measure_sync_s", lambda descriptor: 0.001)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=100 * GIB, free=60 * GIB))
    answer = ChildAnswer(values={"version": "2.13", "cuda": None})
    monkeypatch.setattr(software, "run_in_child", lambda code, limit_s: answer)
    monkeypatch.setattr(api, "find_release", lambda: None)
    return tmp_path


@pytest.fixture
def dead() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def freewheel(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def list_findings(*arguments: object) -> tuple[list[dict[str, str]], int]:
    done = freewheel("doctor", "--json", *arguments)
    report = json.loads(done.stdout)
    assert report["ok"] is (done.exit_code == 0) is (report["problems"] == 0)
    assert report["warnings"] == sum(one["state"] == "warning" for one in report["findings"])
    return report["findings"], done.exit_code


def examine(*arguments: object) -> tuple[dict[str, dict[str, str]], int]:
    """Return the findings by name, the last one if a name is there twice."""
    findings, code = list_findings(*arguments)
    return {one["what"]: one for one in findings}, code


def dry_run(*settings: str) -> str:
    """Return what a dry run lists against the run."""
    done = freewheel("train", "--dry-run", *settings)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split()).partition(AGAINST)[2]


def test_on_a_good_machine_every_check_is_ok_and_nothing_is_left(elsewhere):
    by_name, code = examine()
    assert code == 0 and {one["state"] for one in by_name.values()} == {"ok"}, by_name
    assert {"Python", "freewheel", "torch", "GPU", "vLLM", "Ray", "shared memory", "run directory"} <= set(by_name)
    assert {"open files", "processes", "memory", "CPUs", "configuration"} <= set(by_name)
    assert "fully_async, 40 steps" in by_name["configuration"]["detail"]
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("total", "free", "code", "summary"),
    [
        (64, 64, 0, "No problem found."),
        (64, 0, 0, "1 warning: a run may work."),
        (1, 0, 1, "1 problem, 0 warnings: a run would fail."),
    ],
)
def test_the_lines_end_with_what_the_findings_mean(monkeypatch, total, free, code, summary):
    monkeypatch.setattr(placement, "_memory_bytes", lambda: total * GIB)
    monkeypatch.setattr(machine, "read_host", lambda: replace(WELL, memory_free=free * GIB))
    done = freewheel("doctor", "model.path=embedded")
    lines = done.stdout.splitlines()
    assert done.exit_code == code and lines[-1] == summary, done.stdout
    assert lines[0].startswith("ok       Python") and "\x1b" not in done.stdout


def test_a_gpu_that_cannot_be_asked_is_reported_once(monkeypatch):
    def breaks() -> machine.GpuDriver:
        raise RuntimeError("odd")

    monkeypatch.setattr(machine, "read_driver", breaks)
    findings, code = list_findings()
    assert code == 1 and [one["state"] for one in findings if one["what"] == "GPU"] == ["problem"]


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("trainer.total_step=3", "did you mean trainer.total_steps?"),
        ("trainer.device=cuda", "trainer.device = 'cuda': no GPU is visible here"),
        ("model.path=/no/such/folder", "there is no such folder"),
        ("rollout.engine=vllm", "vLLM is not installed: pip install"),
    ],
)
def test_a_setting_that_cannot_work_is_a_problem_of_the_configuration(setting, text):
    by_name, code = examine(setting)
    assert code == 1 and by_name["configuration"]["state"] == "problem" and text in by_name["configuration"]["detail"]
    assert ("vLLM" in by_name) == (setting != "rollout.engine=vllm"), "reported once"


def find_keys(*arguments: object) -> list[str]:
    """Return the keys of the refused settings."""
    findings, _ = list_findings(*arguments)
    return [one["detail"].partition(" = ")[0] for one in findings if one["what"] == "configuration"]


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["trainer.device=cuda", "rollout.device=cuda"], ["rollout.device", "trainer.device"]),
        (
            ["trainer.total_step=3", "rollout.n=0", "rollout.device=cuda", "seed=-1", "reward.function=no:where"],
            ["reward.function", "rollout.device", "rollout.n", "seed", "trainer.total_step"],
        ),
        (["a,b", "{", "rollout.n=0"], ["override", "override", "rollout.n"]),
        (["model.path=", "data.task=gsm8k"], ["model.path"]),  # not the embedded model, which was not meant
        (["FILE", "eval.prompts=-1"], ["eval.prompts", "rollout.n", "seed", "trainer.of", "trainer.total_steps"]),
        (
            ["FILE", "rollout.n=0", "rollout.n=0", "eval.prompts=-1", "~trainer.of"],
            ["eval.prompts", "rollout.n", "seed", "trainer.total_steps"],
        ),
        (["resume=/no/run", "rollout.urls=[http://x]", "seed=-1"], ["resume"]),
        (["resume=runs/one", "seed=9", "rollout.n=3"], ["rollout.n", "seed"]),
        (["resume=runs/one", "rollout.urls=[http://x]", "--config-name", "sync"], ["--config-name"]),
    ],
)
def test_every_refused_setting_is_reported_once(elsewhere, arguments, keys):
    (elsewhere / "mine.yaml").write_text("seed: -1\ntrainer: {total_steps: 0, of: them}\nrollout: {n: many}\n")
    write_config(to_config({"run_dir": "runs/one"}))
    if arguments[0] == "FILE":
        arguments = ["--config-path", str(elsewhere), "--config-name", "mine", *arguments[1:]]
    assert sorted(find_keys(*arguments)) == keys


def test_a_file_that_is_not_yaml_is_reported_alone(elsewhere):
    (elsewhere / "mine.yaml").write_text("seed: [\n")
    assert find_keys("--config-path", elsewhere, "--config-name", "mine", "eval.prompts=-1") == ["config"]


def test_a_cluster_that_is_gone_is_named(elsewhere, dead):
    setting, text = f"ray.address={dead}", f"ray.address = '{dead}': nothing accepts connections there"
    assert text in dry_run(setting)
    done = freewheel("train", setting)
    assert done.exit_code == 2 and text in done.stderr and not list(elsewhere.iterdir())
    by_name, code = examine(setting)
    assert code == 1 and by_name["Ray"]["state"] == "problem" and dead in by_name["Ray"]["detail"]
    assert by_name["Ray"]["remedy"] == cluster.START_COMMAND


# -- judges -----------------------------------------------------------------------------------------------------------


def test_a_judge_on_the_command_line_is_asked(monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    with MockJudge(JudgeProfile(api_key=KEY, model="j")).in_thread() as server:
        asked = ("--judge", server.base_url, "--api-key-env", "MY_KEY")
        by_name, code = examine(*asked, "--judge-model", "j")
        assert code == 0 and by_name["judge"]["state"] == "ok"
        by_name, code = examine(*asked)
        assert code == 1 and "there is no such model" in by_name["judge"]["detail"]
        assert by_name["judge"]["remedy"] == "--judge-model j"


def test_the_judge_of_the_configuration_is_asked(monkeypatch):
    with MockJudge(JudgeProfile()).in_thread() as server:
        setting = f"reward.judge={{api_endpoint: '{server.base_url}', model_name: j}}"
        by_name, _ = examine(setting)
        assert by_name["judge"]["state"] == "warning" and server.counts().received == 0, "without a key it is off"
        monkeypatch.setenv("OPENAI_API_KEY", "sk-some-some-some")
        by_name, _ = examine(setting)
        assert by_name["judge"]["state"] == "ok" and server.counts().received == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--judge", "nowhere"], "--judge = 'nowhere'"),
        (["--judge-model", "j"], "--judge-model = 'j': it is only used with --judge"),
        (["--judge", "http://127.0.0.1:9/v1", "--api-key-env", "NOT_SET_ANYWHERE"], "that variable is not set"),
    ],
)
def test_a_judge_that_cannot_be_named_is_a_usage_error(flags, text):
    done = freewheel("doctor", *flags)
    assert done.exit_code == 2 and text in done.stderr


# -- without the rest -------------------------------------------------------------------------------------------------

BARE = """
import importlib.metadata as metadata, sys
HIDDEN = ("torch", "ray", "transformers", "safetensors", "tensordict", "peft", "pyarrow")
found = metadata.version
def version(name):
    if name.partition("-")[0].lower() in HIDDEN:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
sys.modules.update(dict.fromkeys(HIDDEN))
from freewheel.cli import main
main()
"""


def examine_bare(folder: Path, *flags: str) -> tuple[dict[str, dict[str, str]], int]:
    command = [sys.executable, "-c", BARE, "doctor", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=folder)
    return {one["what"]: one for one in json.loads(done.stdout)["findings"]}, done.returncode


def test_without_torch_and_ray_it_names_what_to_install_and_can_ask_a_judge(tmp_path):
    by_name, code = examine_bare(tmp_path)
    training = by_name["training"]
    assert (code, training["state"], training["remedy"]) == (1, "problem", "pip install 'freewheel[train]'")
    assert "torch is missing" in training["detail"] and "ray is missing" in training["detail"]
    assert "torch" not in by_name and by_name["configuration"]["state"] == "ok"
    with MockJudge(JudgeProfile()).in_thread() as server:
        by_name, code = examine_bare(tmp_path, "--judge", server.base_url)
    assert (code, by_name["judge"]["state"], by_name["training"]["state"]) == (0, "ok", "warning")


# -- a run's needs ----------------------------------------------------------------------------------------------------


def plan_of(*, gpus: int = 0, **sections: Any) -> RunPlan:
    from freewheel.runtime.model_size import ModelSize

    card = Gpu(name="H200", memory_bytes=140 * GIB)
    machine = Machine(cpus=8, memory_bytes=64 * GIB, gpus=(card,) * gpus)
    model = ModelSize(parameters=1 << 30, layers=24, hidden=2048, vocabulary=1 << 17, kv_width=256)
    return resolve(to_config(sections), machine, model=model)


def test_the_needs_of_a_run_follow_from_its_plan():
    plan = plan_of(rollout={"replicas": 2, "threads": 2})
    memory = sum(plan.memory_trainer.values()) + 2 * sum(plan.memory_replica.values())
    checkpoints = (plan.config.trainer.keep_last + 1) * (4 + 8 + 4) * GIB + 2 * 4 * GIB
    assert doctor_run.run_needs(plan) == machine.Needs(
        actors=5, threads=5, memory_bytes=memory, weights_bytes=4 * GIB, checkpoint_bytes=checkpoints
    )
    assert doctor_run.run_needs(None) == machine.Needs()
    shared = plan_of(gpus=1)
    together = sum(shared.memory_trainer.values()) + sum(shared.memory_replica.values())
    needs = doctor_run.run_needs(shared)
    assert (needs.memory_bytes, needs.weights_bytes, needs.gpu_bytes) == (0, 0, together), "within the GPU"
    apart = doctor_run.run_needs(plan_of(gpus=2, rollout={"engine": "vllm"}))
    assert apart.gpu_bytes == int(0.9 * 140 * GIB), "vLLM takes its whole share"
    joined = doctor_run.run_needs(plan_of(gpus=1, ray={"address": "10.0.0.5:6379"}, trainer={"device": "cpu"}))
    assert (joined.actors, joined.memory_bytes, joined.threads, joined.gpu_bytes) == (0, 0, 0, 0), "in the cluster"


def test_a_judges_connections_are_bounded_by_what_was_given(monkeypatch):
    judge = {"api_endpoint": "http://127.0.0.1:1/v1", "model_name": "j"}
    assert doctor_run.judge_connections(plan_of(reward={"judge": judge})) == 0, "without a key it is off"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-some-some-some")
    assert doctor_run.judge_connections(plan_of(reward={"judge": judge})) == 2048
    assert doctor_run.judge_connections(plan_of(reward={"judge": judge, "concurrency": 64})) == 64
    bounded = {**judge, "max_concurrent_requests": 10}
    assert doctor_run.judge_connections(plan_of(reward={"judge": bounded})) == 10


# -- the dry run ------------------------------------------------------------------------------------------------------


def test_a_dry_run_lists_what_the_machine_lacks_for_the_run(monkeypatch):
    assert dry_run() == ""
    monkeypatch.setattr(machine, "read_host", lambda: replace(WELL, files=256, files_at_most=256))
    against = dry_run("reward.judge={api_endpoint: 'http://127.0.0.1:1/v1'}")
    assert "judge: no API key for http://127.0.0.1:1/v1" in against and "→ export OPENAI_API_KEY=YOUR_KEY" in against
    assert "open files: a process may have 256" in against


def test_a_dry_run_names_who_else_uses_the_gpu(monkeypatch):
    card = machine.GpuCard(index=0, name="H200", total_bytes=140 * GIB, used_bytes=130 * GIB)
    monkeypatch.setattr(machine, "read_driver", lambda: machine.GpuDriver(gpus=(card,)))
    (found,) = doctor_run.find_concerns(plan_of(gpus=1))
    assert "10.0 GiB of 140.0 GiB free, and the run needs about" in found.detail
    assert not doctor_run.find_concerns(plan_of()), "a run on the CPU has no use for it"


def test_ports_that_are_taken_are_reported(dead):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = (f"observe.dashboard_port={port}", f"observe.prometheus_port={port}")
        against = dry_run(*settings)
        by_name, code = examine(*settings)
        assert examine(settings[0], "observe.dashboard=false")[1] == 0
        assert "port" in examine(settings[0], "optimizer.lr=-1")[0], "also where a setting is refused"
    assert code == 1 and by_name["port"]["remedy"] == "observe.dashboard_port=0", "the last of the two"
    text = f"port: observe.dashboard_port = {port}: the run cannot listen on it (Address already in use)"
    assert f"{text}: the run would have no page → observe.dashboard_port=0" in against
    assert f"port: observe.prometheus_port = {port}: the run cannot listen on it" in against
    by_name, code = examine(*settings)
    assert code == 0 and by_name["port"]["remedy"] == "observe.dashboard_port=0", "free, and given twice"


def test_a_dry_run_checks_the_folder_of_a_resumed_run(elsewhere):
    write_config(to_config({"run_dir": "runs/one"}))
    with RunLock("runs/one"):
        against = dry_run("resume=runs/one")
    assert "run directory: runs/one is in use by process" in against
    assert "runs/one has no checkpoint: the run starts over" in against
    Journal(elsewhere / "runs/one" / JOURNAL).close()
    aside = elsewhere / "runs/one/checkpoints/step_000020.replaced"
    aside.mkdir(parents=True)
    assert "runs/one has no checkpoint that can be loaded: the run starts over" in dry_run("resume=runs/one")
    write_state(aside, STATE, {"step": 20, "version": 20})
    assert dry_run("resume=runs/one") == ""


def test_findings_are_listed_by_weight():
    findings = [
        Finding(what="first", state=State.WARNING, detail="little"),
        Finding(what="second", state=State.PROBLEM, detail="much", remedy="mend it"),
    ]
    text = render(resolve(to_config({}), Machine(cpus=2, memory_bytes=GIB)), findings).plain
    assert text.index("second: much → mend it") < text.index("first: little")
    assert text.count(AGAINST) == 1
