"""`freewheel plan` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.plan.planner import best, of_run
from freewheel.plan.scene import Scores
from freewheel.runtime.config_files import to_config, to_yaml

from .test_measured import made_run

SMALL = ["--model", "1.5b", "--accelerators", "4", "--groups-per-step", "32", "--scale-to", "0"]


def plan(*flags):
    return CliRunner().invoke(app, ["plan", *flags])


def configured(folder, **sections):
    """A run's folder with these settings in its config.yaml."""
    values = to_config({}).to_dict()
    values["trainer"]["groups_per_step"] = 8
    values["rollout"]["n"] = 4
    for section, given in sections.items():
        values[section] |= given
    (folder / "config.yaml").write_text(to_yaml(to_config(values)))
    return folder


def is_measured_at(planned, trainers):
    bounds = planned.bounds(planned.groups_per_step)
    return planned.cluster.is_measured(bounds, trainers=trainers, generators=2)


@pytest.fixture
def run(tmp_path):
    return made_run(configured(tmp_path))


def test_a_model_and_a_table_give_the_best_split():
    found = plan(*SMALL, "--price", "3")
    assert found.exit_code == 0, found.output
    assert "1.5b on 4 x h200" in found.output and "Best: " in found.output and "cost/1M" in found.output
    assert "extrapolated" in found.output


def test_json_is_one_object_and_the_same_seed_gives_the_same(tmp_path):
    first, second = plan(*SMALL, "--json", "--seed", "3"), plan(*SMALL, "--json", "--seed", "3")
    assert first.stdout == second.stdout
    found = json.loads(first.stdout)
    assert len(found["splits"]) == 3 and found["best"] in found["splits"] and found["scaling"] == []


def test_a_run_is_planned_from_what_it_measured(run):
    found = plan(str(run), "--scale-to", "0")
    assert found.exit_code == 0, found.output
    assert "measured over 8 steps (1 to train, 2 to generate)" in found.output.replace("\n", " ")
    lines = found.output.splitlines()
    assert any(line.endswith("  measured") for line in lines) and any(line.endswith("extrapolated") for line in lines)
    assert plan(str(run), "--mode", "sync", "--scale-to", "0").exit_code == 0


@pytest.mark.parametrize(
    ("trainer", "split"),
    [
        ({"n_gpus_per_node": 4, "nnodes": 2}, "8 to train, 2 to generate"),
        ({"world_size": 3}, "3 to train, 2 to generate"),
        ({"device": "cpu"}, "1 to train, 2 to generate"),
    ],
)
def test_those_that_trained_are_counted_by_the_rule_that_placed_them(run, trainer, split):
    configured(run, trainer=trainer, rollout={"n_gpus_per_node": 2})
    assert split in of_run(str(run)).about


@pytest.mark.parametrize(
    ("trainer", "rollout", "is_measured"),  # where the run did not say it itself
    [
        ({}, {"replicas": 2}, False),
        ({"device": "cuda"}, {"device": "cuda", "replicas": 2}, False),
        ({}, {"n_gpus_per_node": 2}, True),
        ({"device": "cpu"}, {"device": "cpu", "replicas": 2}, True),
        ({"n_gpus_per_node": 2}, {"n_gpus_per_node": 2}, True),
    ],
)
def test_what_may_have_been_on_one_gpu_is_not_called_measured(run, trainer, rollout, is_measured):
    configured(run, trainer=trainer, rollout=rollout)
    planned = of_run(str(run))
    assert is_measured_at(planned, planned.cluster.trainers) is is_measured
    assert ("share one GPU" in planned.about) is not is_measured


@pytest.mark.parametrize("shared", [True, False])
def test_whether_a_gpu_was_shared_is_what_the_run_recorded_and_not_what_its_settings_allow(tmp_path, shared):
    said = [{"kind": "event", "step": 0, "time": 0.0, "text": "…", "shared_gpu": not shared}]
    said += [{"kind": "event", "step": 0, "time": 0.0, "text": "…", "shared_gpu": shared}]
    rollout = {"replicas": 2} if not shared else {"n_gpus_per_node": 2}
    planned = of_run(str(made_run(configured(tmp_path, rollout=rollout), before=said)))
    assert is_measured_at(planned, planned.cluster.trainers) is not shared
    assert ("training and generation shared one GPU: each is counted" in planned.about) is shared
    assert "did not record" not in planned.about


def test_what_the_run_did_not_have_is_not_called_measured(run):
    configured(run, rollout={"n_gpus_per_node": 2})
    for scores, is_measured in ((None, True), (Scores(is_judge=True), False)):
        assert is_measured_at(of_run(str(run), scores=scores), 1) is is_measured
    found = json.loads(plan("--model", "0.5b", "--accelerators", "2", "--scale-to", "0", "--json").stdout)
    assert [one["basis"] for one in found["splits"]] == ["extrapolated"]


@pytest.mark.parametrize(
    ("asked", "is_measured"),
    [
        ({}, True),
        ({"mode": "fully_async", "groups_per_step": 8}, True),
        ({"groups_per_step": 1}, False),
        ({"groups_per_step": 500}, False),
        ({"mode": "sync"}, False),
        ({"threshold": 0}, False),
        ({"sync_every_steps": 2}, False),
    ],
)
def test_only_the_runs_own_settings_are_called_measured(run, asked, is_measured):
    configured(run, rollout={"n_gpus_per_node": 2})
    assert is_measured_at(of_run(str(run), **asked), 1) is is_measured


def test_a_short_run_is_planned_with_a_warning(tmp_path):
    assert "and 2 were measured: the figures may be off" in of_run(str(made_run(configured(tmp_path), steps=3))).about
    assert "may be off" not in of_run(str(made_run(configured(tmp_path), steps=20))).about


def test_a_step_that_train_would_refuse_is_refused_by_the_same_check(run):
    found = plan(str(run), "--groups-per-step", "100000")
    assert found.exit_code == 2, found.output
    assert "--groups-per-step = 100000: freewheel train would refuse it: async_training.max_queue_size" in found.output
    configured(run, async_training={"max_queue_size": 100_000})
    assert of_run(str(run), groups_per_step=100_000).bounds(100_000).max_alive == 100_000


def test_on_a_terminal_it_is_said_that_it_simulates(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    app(["plan", *SMALL], standalone_mode=False)
    said = capsys.readouterr()
    assert said.err == "freewheel: simulating mode fully_async, 32 groups x 8 a step, which may take a minute\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    app(["plan", *SMALL], standalone_mode=False)
    assert capsys.readouterr() == (said.out, "")


@pytest.mark.parametrize("tokens", [900, 1000])
def test_responses_are_as_long_as_was_asked_however_near_the_longest(tokens):
    lengths = ("--response-tokens", str(tokens), "--max-new-tokens", "1000")
    found = json.loads(plan(*SMALL, *lengths, "--json").stdout)["best"]["outcome"]
    assert found["tokens"] / found["samples"] == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--n", "8"),
        ("--accelerator", "h100"),
        ("--prompt-tokens", "9"),
        ("--response-tokens", "9"),
        ("--max-new-tokens", "9"),
    ],
)
def test_a_flag_that_a_run_has_no_use_for_is_refused(run, flag, value):
    found = plan(str(run), flag, value)
    assert found.exit_code == 2 and f"{flag} = " in found.output and "a run has its own: leave it out" in found.output


def test_what_is_given_beside_a_run_and_cannot_be_is_said(run):
    for flags, said in (
        (["--model", "7b"], f"--model = '7b': the run {run} is given too"),
        (["--scale-to", "3"], "--scale-to = 3: the 3 that are planned are doubled again and again: give 6 or more"),
        (["--plot", "plan.png"], "--plot = 'plan.png': it is drawn as SVG: give a name that ends with .svg"),
    ):
        found = plan(str(run), *flags)
        assert found.exit_code == 2 and said in found.output, found.output


@pytest.mark.parametrize(
    ("text", "said"),
    [("trainer:\n  total_st", "config.yaml: trainer = 'total_st'"), ("seed: [1", "config.yaml:1'")],
)
def test_settings_that_cannot_be_read_are_told_by_their_file(run, text, said):
    (run / "config.yaml").write_text(text)
    found = plan(str(run))
    assert found.exit_code == 2 and f"{run}/{said}" in found.output and "lags" not in found.output, found.output


def test_a_run_whose_judge_held_it_back_is_planned_with_that_rate(tmp_path):
    judge = {
        "queued": 40,
        "sent": 500,
        "endpoints": [{"url": "u", "model": "m", "limit": 8, "in_flight": 8, "latency_p50_s": 0.2}],
    }
    rewards = {"scored": 396, "failed": {"timeout": 4}, "busy_s": 160.0, "waiting": 0, "judge": judge}
    folder = made_run(configured(tmp_path, reward={"judge": {"enable_openai_reward": True}}), rewards=rewards)
    planned = of_run(str(folder))
    scores = planned.cluster.run.scores
    assert (scores.is_judge, scores.rate_per_s) == (True, 5.0), "400 in 80 s of each replica"
    assert scores.latency_s.mean == pytest.approx(0.2), "and not the half second that waiting was a part of"
    assert "scoring is bounded by the 5/s that were measured" in planned.about
    assert best(planned.splits()).verdict.startswith("judge-bound")
    freed = of_run(str(folder), scores=Scores(is_judge=True))
    assert freed.cluster.run.scores.rate_per_s is None and "bounded" not in freed.about


def test_a_judge_can_be_tried_on_a_run(run):
    found = plan(str(run), "--judge-rate", "2", "--scale-to", "0", "--json")
    assert found.exit_code == 0, found.output
    assert all(one["samples_per_s"] < 3 for one in json.loads(found.stdout)["splits"])


def test_a_picture_is_drawn(tmp_path):
    drawn = tmp_path / "plan.svg"
    assert plan(*SMALL[:-2], "--scale-to", "8", "--plot", str(drawn)).exit_code == 0
    assert drawn.read_text().startswith("<svg")
    refused = plan(*SMALL, "--plot", str(tmp_path / "no" / "plan.svg"))
    assert refused.exit_code == 2 and "--plot" in refused.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "Invalid value for RUN: give a run's folder, or in its place a model"),
        (["--model", "7b"], "Invalid value for --accelerators: give how many"),
        (["--model", "7c"], "--model = '7c': did you mean 7b?"),
        (["--model", "9b", "--accelerators", "8"], "--model = '9b'"),
        (["--model", "72b", "--accelerators", "4"], "it takes"),
        (["--model", "7b", "--accelerators", "8", "--mode", "fast"], "mode"),
        (["--model", "7b", "--accelerators", "1000000000"], "--accelerators"),
        (["--model", "7b", "--accelerators", "8", "--groups-per-step", "100000000"], "--groups-per-step"),
        (["--model", "7b", "--accelerators", "8", "--scale-to", "1000000000"], "--scale-to"),
        (["--model", "7b", "--accelerators", "8", "--staleness-threshold", "1000000"], "--staleness-threshold"),
        (["--model", "7b", "--accelerators", "8", "--judge-rate", "nan"], "--judge-rate"),
        (["--model", "7b", "--accelerators", "8", "--judge-latency", "inf"], "--judge-latency"),
        (["--model", "7b", "--accelerators", "8", "--price", "nan"], "--price"),
        (["/nowhere"], "RUN = '/nowhere': there is no such folder"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(flags, said):
    found = plan(*flags)
    assert found.exit_code == 2 and said in found.output.replace("\n", " "), found.output
    assert "Traceback" not in found.output


def test_neither_torch_nor_ray_is_imported():
    code = (
        "import sys\n"
        "import freewheel.plan.planner, freewheel.plan.report, freewheel.plan.report, freewheel.runtime.bottleneck\n"
        "sys.exit(' '.join(name for name in ('torch', 'ray', 'transformers') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
