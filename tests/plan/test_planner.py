"""The planner finds the best split, says what was measured, and `freewheel plan` shows it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.errors import ConfigError
from freewheel.plan import report
from freewheel.plan.planner import HUGE_LIVES, Planned, best, between, candidates_of, changed, ending, of_run, splits
from freewheel.plan.scene import Measured, Scores
from freewheel.plan.simulation import simulate_slice, slice_of
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import to_config, to_yaml

from .scenes import bounds
from .test_clusters import made_run, table

SMALL = ["--model", "1.5b", "--accelerators", "4", "--groups-per-step", "32", "--scale-to", "0"]


def planned(cluster, accelerators, *, groups=64, threshold=3, processes=1):
    changes = {"trainer": {"groups_per_step": groups}, "async_training": {"staleness_threshold": threshold}}
    config = changed(TrainConfig(), changes)
    return Planned(
        about="", config=config, cluster=cluster, accelerators=accelerators, groups_per_step=groups, processes=processes
    )


def unending(groups):
    return replace(bounds(groups=groups), total_groups=None)


@pytest.fixture(scope="module")
def rows():
    return planned(table(), 8).splits()


# -- splits -----------------------------------------------------------------------------------------------------------


def test_the_best_split_is_between_those_that_starve_and_those_that_are_held_back(rows):
    assert [row.trainers for row in rows] == [trainers for trainers, _ in sorted(splits(table(), 8))]
    assert all(row.trainers + row.generators == row.accelerators == 8 for row in rows)
    assert rows[0].trainers < best(rows).trainers < rows[-1].trainers
    waits = [row.outcome.trainer_waits for row in rows]
    assert waits[0] < 0.01 < waits[-1] and waits == sorted(waits)
    assert rows[0].verdict.startswith("training-bound") and rows[-1].verdict.startswith("generation-bound")
    for row in rows:
        one = table().scene(ending(unending(64), 12), trainers=row.trainers, generators=row.generators)
        assert 0.6 * one.guess <= row.outcome.groups_per_s <= 1.05 * one.guess, "the closed form is near"


def test_only_splits_near_the_closed_forms_best_are_simulated_if_there_are_many():
    made, bounded = table(), ending(unending(8192), 12)
    found = candidates_of(made, 512, unending(8192), 12)
    guesses = {one: made.scene(bounded, trainers=one[0], generators=one[1]).guess for one in splits(made, 512)}
    assert max(guesses, key=guesses.__getitem__) in found
    assert len(found) <= 12 and all(sum(split) == 512 for split in found)
    assert max(train for train, _ in found) - min(train for train, _ in found) > 100
    assert between([(train, 512 - train) for train in range(1, 512)], [4, 100, 108, 500], 100)[0][0] == 5


def test_several_processes_find_the_same(rows):
    assert planned(table(), 8, processes=2).splits() == rows


def test_scaling_takes_the_best_of_each_number_and_is_at_most_linear(rows):
    found = planned(table(), 8).scaling(32, rows)
    assert [row.accelerators for row in found] == [8, 16, 32]
    rates = [row.samples_per_s / row.accelerators for row in found]
    assert all(later <= earlier * 1.1 for earlier, later in pairwise(rates))


def test_a_slow_judge_bounds_every_split_and_a_busy_one_ends_the_remedy():
    slow = Scores(is_judge=True, latency_s=Measured((1.0,)), rate_per_s=5.0)
    found = planned(table(scores=slow), 4, groups=8).splits()
    assert all(row.samples_per_s <= 5 * 1.3 for row in found)
    assert best(found).verdict.startswith("judge-bound")
    function = planned(table(scores=replace(slow, is_judge=False)), 4, groups=8).splits()
    assert best(function).verdict.startswith("reward-bound")
    free = planned(table("0.5b"), 2).splits()[0]
    assert free.verdict.startswith("generation-bound")
    narrow = Scores(is_judge=True, latency_s=Measured((0.1,)), rate_per_s=1.1 * free.outcome.scores_per_s)
    (row,) = planned(table("0.5b", scores=narrow), 2).splits()
    assert "the judge is" in row.verdict


@pytest.mark.parametrize(
    ("groups", "threshold", "helps"), [(1, 0, False), (4, 3, False), (64, 1, False), (64, 3, True)]
)
def test_the_simulation_gives_what_a_verdict_promises(groups, threshold, helps):
    """With few groups per step, engines have too little work, and more of them do not help."""
    one = planned(table("0.5b"), 4, groups=groups, threshold=threshold)
    row = best(one.splits())
    found = re.search(r"[(](\d+) replicas instead of \d+[)] would lift throughput ([\d.]+)x", row.verdict)
    assert (found is not None) == helps, row.verdict
    if found is not None:
        scene = one.cluster.scene(ending(one.bounds(groups), 40), trainers=row.trainers, generators=int(found[1]))
        assert float(found[2]) <= 1.05 * simulate_slice(scene).samples_per_s / row.samples_per_s


@pytest.mark.parametrize("groups", [1000, 20_000, 100_000])
def test_the_work_is_bounded_for_any_size_of_a_step(groups):
    one = planned(table("1.5b"), 4)
    for generators in (1, 4, 20):
        job = one.job(2, generators, unending(groups))
        lives = slice_of(job.scene)[0].bounds.total_groups
        assert lives == job.lives <= max(HUGE_LIVES, 9 * groups // generators + 9)
    with pytest.raises(ConfigError, match="--groups-per-step = 200000: one step has 1,600,000 responses"):
        one.job(2, 1, unending(200_000))


# -- how it is shown --------------------------------------------------------------------------------------------------


def test_the_table_marks_the_best_split_and_json_has_derived_values(rows):
    lines, winner = report.table(rows, price=2.5).splitlines(), best(rows)
    assert len(lines) == len(rows) + 1 and lines[0].split()[:3] == ["train", "generate", "samples/s"]
    assert [line.startswith("*") for line in lines[1:]] == [row == winner for row in rows]
    assert all(line.endswith("extrapolated") for line in lines[1:])
    assert "extrapolated:" in report.explain(rows) and "measured:" not in report.explain(rows)
    assert report.as_json(winner, 2.5)["cost_per_million"] == pytest.approx(1e6 / winner.samples_per_s * 8 / 3600 * 2.5)
    first, second = report.summary(rows).splitlines()
    assert first.startswith(f"Best: {winner.trainers} to train and {winner.generators} to generate")
    assert second.lower().startswith(winner.verdict.lower())
    plain = report.as_json(winner, 2.0)
    assert plain["outcome"]["lag_counts"] == winner.outcome.lag_counts
    assert plain["cost_per_million"] == 2 * plain["hours_per_million"]


def test_the_picture_is_one_self_contained_file(rows):
    place = msgspec.structs.replace
    measured = [place(row, basis="measured") if at == 2 else row for at, row in enumerate(rows)]
    drawn = report.draw(measured, [rows[0], place(rows[0], accelerators=16)], title="7b & <more>")
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg") and "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    circles = [one for one in root.iter() if one.tag.endswith("circle")]
    assert len(circles) == len(rows) + 2
    assert sum("full" in one.get("class") for one in circles) == 1, "only measured points are filled"
    assert "7b & <more>" in "".join(root.itertext()) and "give the most" in "".join(root.itertext())
    one_panel = ElementTree.fromstring(report.draw(rows, title="x"))
    assert float(one_panel.get("width")) < float(root.get("width"))


# -- a run ------------------------------------------------------------------------------------------------------------


def configure(folder, **sections):
    """Write a config.yaml with these settings."""
    values = to_config({}).to_dict()
    values["trainer"]["groups_per_step"], values["rollout"]["n"] = 8, 4
    for section, given in sections.items():
        values[section] |= given
    (folder / "config.yaml").write_text(to_yaml(to_config(values)))
    return folder


def is_measured(one):
    bounded = one.bounds(one.groups_per_step)
    return one.cluster.is_measured(bounded, trainers=one.cluster.trainers, generators=2)


@pytest.fixture
def run(tmp_path):
    return made_run(configure(tmp_path))


@pytest.mark.parametrize(
    ("trainer", "rollout", "split", "measured"),
    [
        ({"n_gpus_per_node": 4, "nnodes": 2}, {"n_gpus_per_node": 2}, "8 to train, 2 to generate", True),
        ({"world_size": 3}, {"n_gpus_per_node": 2}, "3 to train, 2 to generate", True),
        ({"device": "cpu"}, {"n_gpus_per_node": 2}, "1 to train, 2 to generate", True),
        ({"device": "cpu"}, {"device": "cpu", "replicas": 2}, "1 to train, 2 to generate", True),
        # training and generation may have shared one GPU, and the run did not record whether they did
        ({}, {"replicas": 2}, "1 to train, 2 to generate", False),
        ({"device": "cuda"}, {"device": "cuda", "replicas": 2}, "1 to train, 2 to generate", False),
    ],
)
def test_trainers_are_counted_as_placed_and_a_shared_gpu_is_not_called_measured(run, trainer, rollout, split, measured):
    configure(run, trainer=trainer, rollout=rollout)
    one = of_run(str(run))
    assert split in one.about
    assert is_measured(one) is measured and ("share one GPU" in one.about) is not measured


@pytest.mark.parametrize("shared", [True, False])
def test_a_recorded_shared_gpu_counts_more_than_the_settings(tmp_path, shared):
    event = {"kind": "event", "step": 0, "time": 1.0, "text": "…"}
    recorded = [{**event, "shared_gpu": not shared}, {**event, "shared_gpu": shared}]
    rollout = {"replicas": 2} if not shared else {"n_gpus_per_node": 2}
    one = of_run(str(made_run(configure(tmp_path, rollout=rollout), before=recorded)))
    assert is_measured(one) is not shared
    assert ("training and generation shared one GPU: each counts" in one.about) is shared
    assert "did not record" not in one.about


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        ({}, True),
        ({"mode": "fully_async", "groups_per_step": 8}, True),
        ({"groups_per_step": 1}, False),
        ({"groups_per_step": 500}, False),
        ({"mode": "sync"}, False),
        ({"threshold": 0}, False),
        ({"sync_every_steps": 2}, False),
        ({"scores": Scores(is_judge=True)}, False),
    ],
)
def test_only_the_runs_own_settings_are_called_measured(run, asked, measured):
    configure(run, rollout={"n_gpus_per_node": 2})
    assert is_measured(of_run(str(run), **asked)) is measured


def test_a_short_run_is_planned_with_a_warning(tmp_path):
    short = of_run(str(made_run(configure(tmp_path), steps=3))).about
    assert "only 2 steps were measured: the figures may be off" in short
    assert "may be off" not in of_run(str(made_run(configure(tmp_path), steps=20))).about


def test_a_run_that_its_judge_held_back_is_planned_with_the_measured_rate(tmp_path):
    endpoint = {"url": "u", "model": "m", "limit": 8, "in_flight": 8, "latency_p50_s": 0.2}
    judge = {"queued": 40, "sent": 500, "limit": 8, "in_flight": 8, "endpoints": [endpoint]}
    rewards = {"scored": 396, "failed": {"timeout": 4}, "busy_s": 160.0, "waiting": 0, "judge": judge}
    folder = made_run(configure(tmp_path, reward={"judge": {"enable_openai_reward": True}}), rewards=rewards)
    one = of_run(str(folder))
    scores = one.cluster.run.scores
    assert (scores.is_judge, scores.rate_per_s) == (True, 5.0), "400 in 80 s of each replica"
    assert scores.latency_s.mean == pytest.approx(0.2), "not the half second that includes waiting"
    assert "scoring is limited to the measured 5/s" in one.about
    assert best(one.splits()).verdict.startswith("judge-bound")
    freed = of_run(str(folder), scores=Scores(is_judge=True))
    assert freed.cluster.run.scores.rate_per_s is None and "limited" not in freed.about


# -- the command ------------------------------------------------------------------------------------------------------


def plan(*flags):
    return CliRunner().invoke(app, ["plan", *map(str, flags)])


def test_a_model_and_a_table_give_the_best_split_and_a_seed_repeats_it(monkeypatch, capsys):
    shown = plan(*SMALL, "--price", "3")
    assert shown.exit_code == 0, shown.output
    for words in ("1.5b on 4 x h200", "Best: ", "cost/1M", "extrapolated"):
        assert words in shown.output
    first, second = (plan(*SMALL, "--json", "--seed", "3") for _ in range(2))
    assert first.stdout == second.stdout
    found = json.loads(first.stdout)
    assert len(found["splits"]) == 3 and found["best"] in found["splits"] and found["scaling"] == []
    assert {one["basis"] for one in found["splits"]} == {"extrapolated"}
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    app(["plan", *SMALL], standalone_mode=False)
    said = "freewheel: simulating mode fully_async, 32 groups x 8 per step, this may take a minute\n"
    assert capsys.readouterr().err == said, "on a terminal it reports that it simulates"


def test_a_run_is_planned_from_what_it_measured(run):
    found = plan(run, "--scale-to", 0)
    assert found.exit_code == 0, found.output
    assert "measured over 8 steps (1 to train, 2 to generate)" in found.output.replace("\n", " ")
    lines = found.output.splitlines()
    assert any(line.endswith("  measured") for line in lines) and any(line.endswith("extrapolated") for line in lines)
    assert plan(run, "--mode", "sync", "--scale-to", 0).exit_code == 0
    judged = plan(run, "--judge-rate", 2, "--scale-to", 0, "--json")
    assert all(one["samples_per_s"] < 3 for one in json.loads(judged.stdout)["splits"])


@pytest.mark.parametrize("tokens", [900, 1000])
def test_responses_are_as_long_as_requested(tokens):
    found = json.loads(plan(*SMALL, "--response-tokens", tokens, "--max-new-tokens", 1000, "--json").stdout)
    outcome = found["best"]["outcome"]
    assert outcome["tokens"] / outcome["samples"] == pytest.approx(tokens, rel=0.01)


def test_a_picture_is_drawn(tmp_path):
    drawn = tmp_path / "plan.svg"
    assert plan(*SMALL[:-2], "--scale-to", 8, "--plot", drawn).exit_code == 0
    assert drawn.read_text().startswith("<svg")
    refused = plan(*SMALL, "--plot", tmp_path / "no" / "plan.svg")
    assert refused.exit_code == 2 and "--plot" in refused.output


MODEL = ["--model", "7b", "--accelerators", "8"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "Invalid value for RUN: give a run's folder, or in its place a model"),
        (["--model", "7b"], "Invalid value for --accelerators: give how many"),
        (["--model", "7c"], "--model = '7c': give one of 0.5b"),
        (["--model", "9b", "--accelerators", "8"], "--model = '9b'"),
        (["--model", "72b", "--accelerators", "4"], "this model needs at least"),
        ([*MODEL, "--mode", "fast"], "mode = 'fast'"),
        (["--model", "7b", "--accelerators", "1000000000"], "--accelerators"),
        ([*MODEL, "--groups-per-step", "100000000"], "--groups-per-step"),
        ([*MODEL, "--scale-to", "1000000000"], "--scale-to"),
        ([*MODEL, "--staleness-threshold", "1000000"], "--staleness-threshold"),
        ([*MODEL, "--judge-rate", "nan"], "--judge-rate"),
        ([*MODEL, "--judge-latency", "inf"], "--judge-latency"),
        ([*MODEL, "--price", "nan"], "--price"),
        (["/nowhere"], "RUN = '/nowhere': there is no such folder"),
        (["RUN", "--n", "8"], "--n = 8: it belongs to --model, and a run has its own value: leave it"),
        (["RUN", "--max-new-tokens", "9"], "--max-new-tokens = 9: it belongs to --model"),
        (["RUN", "--model", "7b"], "--model = '7b': the run RUN is also given"),
        (["RUN", "--scale-to", "3"], "--scale-to = 3: the 3 planned ones are doubled repeatedly: give 6 or"),
        (["RUN", "--plot", "plan.png"], "--plot = 'plan.png': it is drawn as SVG: give a name that ends with .svg"),
        (["RUN", "--groups-per-step", "100000"], "100000: freewheel train would refuse it: async_training.max_queue"),
    ],
)
def test_an_impossible_plan_is_refused_in_one_line(run, flags, words):
    found = plan(*[run if flag == "RUN" else flag for flag in flags])
    assert found.exit_code == 2 and words.replace("RUN is", f"{run} is") in found.output.replace("\n", " ")
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("text", "words"), [("trainer:\n  total_st", "config.yaml: trainer = 'total_st'"), ("seed: [1", "config.yaml:1'")]
)
def test_unreadable_settings_are_reported_with_their_file(run, text, words):
    (run / "config.yaml").write_text(text)
    found = plan(run)
    assert found.exit_code == 2 and f"{run}/{words}" in found.output and "lags" not in found.output, found.output


def test_more_groups_than_the_queue_held_are_planned_if_train_would_take_them(run):
    configure(run, async_training={"max_queue_size": 100_000})
    assert of_run(str(run), groups_per_step=100_000).bounds(100_000).max_alive == 100_000
