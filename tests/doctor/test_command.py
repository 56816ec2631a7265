"""`freewheel doctor` and the dry run as users meet them."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.doctor import machine, software
from freewheel.doctor import run as doctor_run
from freewheel.doctor import run as settings
from freewheel.judge.testing import JudgeProfile, MockJudge
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import Journal
from freewheel.runtime import cluster, placement
from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Gpu, Machine
from freewheel.runtime.plan import Plan, render, resolve
from freewheel.runtime.start import write_config
from freewheel.trainer.checkpoint import STATE, RunLock, write_state
from freewheel.utils.findings import GIB, ChildAnswer, Finding, State

WAIT_S = 120.0
"""Longer than anything here takes on a busy machine."""
WELL = machine.Host(files=1 << 20, files_at_most=1 << 20, processes=1 << 62, processes_now=0, memory_free=64 * GIB)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On a machine with room for a run and without GPUs, whatever that of these tests has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(placement, "_ask_smi", lambda: "")
    monkeypatch.setattr(machine, "read_driver", lambda: machine.GpuDriver())
    monkeypatch.setattr(machine, "read_host", lambda: WELL)
    monkeypatch.setattr(machine, "find_leftovers", lambda folder: [])
    monkeypatch.setattr(machine, "judge_shared_memory", lambda *facts: software.ok("shared memory", "enough"))
    monkeypatch.setattr(
        software, "run_in_child", lambda code, limit_s: ChildAnswer(values={"version": "2.13", "cuda": None})
    )
    return tmp_path


@pytest.fixture
def dead() -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def freewheel(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def found(*arguments: object) -> tuple[dict[str, dict[str, str]], int]:
    """By what was looked at; of several the last."""
    done = freewheel("doctor", "--json", *arguments)
    report = json.loads(done.stdout)
    assert report["ok"] is (done.exit_code == 0) is (report["problems"] == 0)
    assert report["warnings"] == sum(one["state"] == "warning" for one in report["findings"])
    return {one["what"]: one for one in report["findings"]}, done.exit_code


def test_where_all_is_well_nothing_stands_in_the_way(elsewhere: Path) -> None:
    by_name, code = found()
    assert code == 0
    assert {"Python", "freewheel", "torch", "GPU", "vLLM", "Ray", "shared memory", "run directory"} <= set(by_name)
    assert {"open files", "processes", "memory", "CPUs", "threads", "clock", "configuration"} <= set(by_name)
    assert by_name["configuration"]["state"] == "ok" and "fully_async, 40 steps" in by_name["configuration"]["detail"]
    assert not list(elsewhere.iterdir()), "it leaves nothing"


def test_elsewhere_than_on_a_terminal_it_is_lines() -> None:
    done = freewheel("doctor")
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and lines[0].startswith("ok       Python")
    assert lines[-1] in ("Nothing stands in the way of a run.", "1 warning: a run may work.")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("total", "code", "says"), [(64, 0, "a run may work."), (1, 1, "a run would fail.")])
def test_too_little_memory_free_may_do_and_too_little_of_it_does_not(
    monkeypatch: pytest.MonkeyPatch, total: int, code: int, says: str
) -> None:
    monkeypatch.setattr(placement, "_memory_bytes", lambda: total * GIB)
    monkeypatch.setattr(machine, "read_host", lambda: replace(WELL, memory_free=GIB // 2))
    done = freewheel("doctor")
    assert done.exit_code == code and done.stdout.splitlines()[-1].endswith(says), done.stdout


def test_a_gpu_that_cannot_be_looked_at_is_a_problem_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> machine.GpuDriver:
        raise RuntimeError("odd")

    monkeypatch.setattr(machine, "read_driver", breaks)
    done = freewheel("doctor", "--json")
    (told,) = [one for one in json.loads(done.stdout)["findings"] if "odd" in one["detail"]]
    assert (done.exit_code, told["what"], told["state"]) == (1, "GPU", "problem")


def test_from_its_source_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    named = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name == "freewheel":
            raise importlib.metadata.PackageNotFoundError(name)
        return named(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)
    done = freewheel("doctor", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert done.exit_code == 0 and not any("PackageNotFoundError" in one["detail"] for one in findings)
    (told,) = [one for one in findings if "not installed:" in one["detail"] and one["what"] == "freewheel"]
    assert (told["state"], told["remedy"]) == ("warning", "pip install -e '.[train]'")


def test_a_setting_that_cannot_work_is_a_problem_by_its_name() -> None:
    by_name, code = found("trainer.total_step=3")
    assert code == 1 and by_name["configuration"]["state"] == "problem"
    assert "did you mean trainer.total_steps?" in by_name["configuration"]["detail"]
    by_name, code = found("trainer.device=cuda")
    assert code == 1 and "trainer.device = 'cuda': no GPU is visible here" in by_name["configuration"]["detail"]
    by_name, code = found("model.path=/no/such/folder")
    assert code == 1 and "there is no such folder" in by_name["configuration"]["detail"]


def told(*arguments: object) -> list[str]:
    """What is said of the configuration, a line each, by the key that it begins with."""
    done = freewheel("doctor", "--json", *arguments)
    return [one["detail"] for one in json.loads(done.stdout)["findings"] if one["what"] == "configuration"]


def keys(*arguments: object) -> list[str]:
    return [line.partition(" = ")[0] for line in told(*arguments)]


def test_everything_against_a_run_is_told_and_not_the_first_alone(elsewhere: Path) -> None:
    assert keys("trainer.device=cuda", "rollout.device=cuda") == ["trainer.device", "rollout.device"]
    wrong = ("trainer.total_step=3", "rollout.n=0", "rollout.device=cuda", "seed=-1", "model.path=/no/where")
    assert sorted(keys(*wrong, "reward.function=no:where")) == [
        "model.path",
        "reward.function",
        "rollout.device",
        "rollout.n",
        "seed",
        "trainer.total_step",
    ]
    assert keys("a,b", "{", "rollout.n=0") == ["override", "override", "rollout.n"]
    many = ("seed=3", "trainer.groups_per_step=5000", "model.path=/no/where")
    assert keys(*many) == ["async_training.max_queue_size", "model.path"], "what another key contradicts"
    (elsewhere / "mine.yaml").write_text("seed: -1\ntrainer: {total_steps: 0, of: them}\nrollout: {n: many}\n")
    file = ("--config-path", elsewhere, "--config-name", "mine")
    assert sorted(keys(*file, "eval.prompts=-1")) == [
        "eval.prompts",
        "rollout.n",
        "seed",
        "trainer.of",
        "trainer.total_steps",
    ]
    both = [*file, "rollout.n=0", "rollout.n=0", "eval.prompts=-1", "~trainer.of"]
    assert sorted(keys(*both)) == ["eval.prompts", "rollout.n", "seed", "trainer.total_steps"], "wrong in both places"
    (elsewhere / "mine.yaml").write_text("seed: [\n")
    assert keys(*file, "eval.prompts=-1") == ["config"]


def test_what_only_follows_from_another_setting_is_not_told() -> None:
    assert keys("model.path=", "data.task=gsm8k") == ["model.path"], "the embedded model is not what was meant"


def test_a_run_that_goes_on_is_never_left_out() -> None:
    """What remained would be told of a new run, which nobody meant."""
    assert keys("resume=/no/run", "rollout.urls=[http://x]", "seed=-1") == ["resume"]
    write_config(to_config({"run_dir": "runs/one"}))
    assert keys("resume=runs/one", "seed=9", "rollout.n=3") == ["seed", "rollout.n"]
    assert keys("resume=runs/one", "rollout.urls=[http://x]", "--config-name", "sync") == ["--config-name"]


def test_no_command_line_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, read = list[tuple[str, ...]](), settings.read_config

    def counting(overrides: list[str], *file: str | None) -> Any:
        asked.append(tuple(overrides))
        return read(overrides, *file)

    monkeypatch.setattr(settings, "read_config", counting)
    config, refused = settings.read_every_error(["rollout.n=0", "seed=-1", "mode=sync"], None, None)
    assert config is not None and [error.key for error in refused] == ["rollout.n", "seed"]
    assert asked == [("rollout.n=0", "seed=-1", "mode=sync"), ("seed=-1", "mode=sync"), ("mode=sync",)]


def test_a_cluster_that_is_gone_is_named(dead: str) -> None:
    by_name, code = found(f"ray.address={dead}")
    assert code == 1 and by_name["Ray"]["state"] == "problem" and dead in by_name["Ray"]["detail"]
    assert by_name["Ray"]["remedy"] == cluster.START_COMMAND


def test_a_vllm_that_is_wanted_and_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from freewheel.rollout.vllm import api

    monkeypatch.setattr(api, "installed", lambda: None)
    by_name, code = found("rollout.engine=vllm")
    assert code == 1 and "vLLM is not installed: pip install" in by_name["configuration"]["detail"]
    assert "vLLM" not in by_name, "said once"


# -- judges -----------------------------------------------------------------------------------------------------------


def test_a_judge_on_the_command_line_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-right-right-right")
    with MockJudge(JudgeProfile(api_key="sk-right-right-right", model="j")).in_thread() as server:
        asked = ("--judge", server.base_url, "--api-key-env", "MY_KEY")
        by_name, code = found(*asked, "--judge-model", "j")
        assert code == 0 and by_name["judge"]["state"] == "ok"
        by_name, code = found(*asked)
        assert code == 1 and "there is no such model" in by_name["judge"]["detail"]
        assert by_name["judge"]["remedy"] == "--judge-model j"


def test_the_judge_of_the_configuration_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with MockJudge(JudgeProfile()).in_thread() as server:
        setting = f"reward.judge={{api_endpoint: '{server.base_url}', model_name: j}}"
        by_name, _ = found(setting)
        assert by_name["judge"]["state"] == "warning" and server.counts().received == 0, "without a key it is off"
        monkeypatch.setenv("OPENAI_API_KEY", "sk-some-some-some")
        by_name, _ = found(setting)
        assert by_name["judge"]["state"] == "ok" and server.counts().received == 1


def test_a_judge_that_cannot_be_named_is_a_usage_error() -> None:
    done = freewheel("doctor", "--judge", "nowhere")
    assert done.exit_code == 2 and "--judge = 'nowhere'" in done.stderr
    done = freewheel("doctor", "--judge-model", "j")
    assert done.exit_code == 2 and "--judge-model = 'j': it says how to ask a judge that --judge names" in done.stderr
    done = freewheel("doctor", "--judge", "http://127.0.0.1:9/v1", "--api-key-env", "NOT_SET_ANYWHERE")
    assert done.exit_code == 2 and "that variable is not set" in done.stderr


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


def test_without_torch_and_ray_it_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BARE, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    by_name = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    training = by_name["training"]
    assert training["state"] == "problem" and training["remedy"] == "pip install 'freewheel[train]'"
    assert "torch is missing" in training["detail"] and "ray is missing" in training["detail"]
    assert "torch" not in by_name and by_name["configuration"]["state"] == "ok"


def test_without_torch_and_ray_a_judge_can_be_asked(tmp_path: Path) -> None:
    with MockJudge(JudgeProfile()).in_thread() as server:
        command = [sys.executable, "-c", BARE, "doctor", "--json", "--judge", server.base_url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    by_name = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0 and by_name["judge"]["state"] == "ok", done.stdout + done.stderr
    assert by_name["training"]["state"] == "warning"


# -- a run's needs ----------------------------------------------------------------------------------------------------


def plan_of(*, gpus: int = 0, **sections: Any) -> Plan:
    from freewheel.runtime.model_size import ModelSize

    card = Gpu(name="H200", memory_bytes=140 * GIB)
    machine = Machine(cpus=8, memory_bytes=64 * GIB, gpus=(card,) * gpus)
    model = ModelSize(parameters=1 << 30, layers=24, hidden=2048, vocabulary=1 << 17, kv_width=256)
    return resolve(to_config(sections), machine, model=model)


def test_what_a_run_asks_of_its_machine_follows_from_its_plan() -> None:
    plan = plan_of(rollout={"replicas": 2, "threads": 2})
    needs = doctor_run.run_needs(plan)
    assert (needs.actors, needs.threads, needs.connections) == (5, 5, 0)
    assert needs.memory_bytes == sum(plan.memory_trainer.values()) + 2 * sum(plan.memory_replica.values())
    assert doctor_run.weights_bytes(plan) == 4 * GIB
    kept = plan.config.trainer.keep_last + 1
    assert doctor_run.checkpoint_bytes(plan) == kept * (4 + 8 + 4) * GIB + 2 * 4 * GIB
    on_gpu = plan_of(gpus=1)
    assert doctor_run.run_needs(on_gpu).memory_bytes == 0 and doctor_run.weights_bytes(on_gpu) == 0, "within the GPU"
    together = sum(on_gpu.memory_trainer.values()) + sum(on_gpu.memory_replica.values())
    assert doctor_run.gpu_bytes(on_gpu) == together and doctor_run.gpu_bytes(plan) == 0
    apart = plan_of(gpus=2, rollout={"engine": "vllm"})
    assert doctor_run.gpu_bytes(apart) == int(0.9 * 140 * GIB), "vLLM takes its share whole"
    assert doctor_run.run_needs(None) == machine.Needs() and doctor_run.checkpoint_bytes(None) == 0
    joined = plan_of(gpus=1, ray={"address": "10.0.0.5:6379"}, trainer={"device": "cpu"})
    assert doctor_run.gpu_bytes(joined) == 0, "its actors are where the cluster has room"
    assert (doctor_run.run_needs(joined).actors, doctor_run.run_needs(joined).memory_bytes) == (0, 0)


def test_a_judges_connections_are_bounded_by_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"api_endpoint": "http://127.0.0.1:1/v1", "model_name": "j"}
    assert doctor_run.judge_connections(plan_of(reward={"judge": judge})) == 0, "without a key it is off"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-some-some-some")
    assert doctor_run.judge_connections(plan_of(reward={"judge": judge})) == 2048
    assert doctor_run.judge_connections(plan_of(reward={"judge": judge, "concurrency": 64})) == 64
    bounded = {**judge, "max_concurrent_requests": 10}
    assert doctor_run.judge_connections(plan_of(reward={"judge": bounded})) == 10


# -- the dry run ------------------------------------------------------------------------------------------------------


def dry_run(*settings: str) -> str:
    done = freewheel("train", "--dry-run", *settings)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_a_dry_run_lists_what_the_machine_has_against_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Against this run here" not in dry_run()
    monkeypatch.setattr(
        machine, "read_host", lambda: machine.Host(**{**WELL.__dict__, "files": 256, "files_at_most": 256})
    )
    text = dry_run("reward.judge={api_endpoint: 'http://127.0.0.1:1/v1'}")
    against = text.partition("Against this run here")[2]
    assert "judge: no API key for http://127.0.0.1:1/v1" in against and "→ export OPENAI_API_KEY=YOUR_KEY" in against
    assert "open files: a process may have 256" in against


def test_a_dry_run_names_who_else_is_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = machine.GpuCard(index="0", name="H200", total_bytes=140 * GIB, used_bytes=130 * GIB)
    monkeypatch.setattr(machine, "read_driver", lambda: machine.GpuDriver(gpus=(card,)))
    (found,) = [one for one in doctor_run.find_concerns(plan_of(gpus=1)) if one.what == "GPU 0"]
    assert "10.0 GiB of 140.0 GiB free, and the run wants about" in found.detail
    assert not any(one.what == "GPU 0" for one in doctor_run.find_concerns(plan_of())), (
        "one on the CPU has no use for it"
    )


def test_a_dry_run_lists_a_vllm_that_is_missing_and_a_run_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from freewheel.rollout.vllm import api

    monkeypatch.setattr(api, "installed", lambda: None)
    against = dry_run("rollout.engine=vllm").partition("Against this run here")[2]
    assert "rollout.engine = 'vllm': vLLM is not installed" in against
    done = freewheel("train", "rollout.engine=vllm")
    assert done.exit_code == 2 and "vLLM is not installed" in done.stderr


def test_a_dry_run_lists_a_cluster_that_is_gone_and_a_run_refuses(dead: str, elsewhere: Path) -> None:
    against = dry_run(f"ray.address={dead}").partition("Against this run here")[2]
    assert f"ray.address = '{dead}': nobody takes a connection there" in against
    done = freewheel("train", f"ray.address={dead}")
    assert done.exit_code == 2 and f"ray.address = '{dead}'" in done.stderr
    assert not list(elsewhere.iterdir())


def test_a_dry_run_and_the_doctor_list_ports_that_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = (f"observe.dashboard_port={port}", f"observe.prometheus_port={port}")
        against = dry_run(*settings).partition("Against this run here")[2]
        by_name, code = found(*settings)
        assert found(settings[0], "observe.dashboard=false")[1] == 0
        assert "port" in found(settings[0], "optimizer.lr=-1")[0], "beside what is refused"
    by_twice, _ = found(*settings)
    assert by_twice["port"]["remedy"] == "observe.dashboard_port=0", "free, and given twice"
    said = f"port: observe.dashboard_port = {port}: it cannot be listened on (Address already in use)"
    assert f"{said}: the run would have no page → observe.dashboard_port=0" in against
    assert f"port: observe.prometheus_port = {port}: it cannot be listened on" in against
    assert code == 1 and by_name["port"]["remedy"] == "observe.dashboard_port=0", "the last of the two"


def test_a_dry_run_says_what_is_against_a_run_that_goes_on(elsewhere: Path) -> None:
    write_config(to_config({"run_dir": "runs/one"}))
    with RunLock("runs/one"):
        against = dry_run("resume=runs/one").partition("Against this run here")[2]
    assert "run directory: runs/one is in use by process" in against
    assert "runs/one has no checkpoint: the run begins anew, with what its journal has" in against
    saved = elsewhere / "runs/one/checkpoints/step_000020"
    saved.mkdir(parents=True)
    write_state(saved, STATE, {"step": 20, "version": 20})
    assert "Against this run here" not in dry_run("resume=runs/one")


def test_a_checkpoint_that_is_damaged_is_not_called_none_and_one_that_stepped_aside_is_one(elsewhere: Path) -> None:
    write_config(to_config({"run_dir": "runs/one"}))
    Journal(elsewhere / "runs/one" / JOURNAL).close()
    aside = elsewhere / "runs/one/checkpoints/step_000020.replaced"
    aside.mkdir(parents=True)
    assert "runs/one has no checkpoint that can be loaded: the run begins anew" in dry_run("resume=runs/one")
    write_state(aside, STATE, {"step": 20, "version": 20})
    assert "Against this run here" not in dry_run("resume=runs/one")


def test_findings_keep_their_order_by_weight() -> None:
    findings = [
        Finding(what="first", state=State.WARNING, detail="little"),
        Finding(what="second", state=State.PROBLEM, detail="much", remedy="mend it"),
    ]
    text = render(resolve(to_config({}), Machine(cpus=2, memory_bytes=GIB)), findings).plain
    assert text.index("second: much → mend it") < text.index("first: little")
    assert text.count("Against this run here") == 1
