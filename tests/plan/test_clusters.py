"""Clusters: what a run recorded is read, what it did not record is found by replay, and data sheets give the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.errors import ConfigError
from freewheel.plan.clusters import (
    SHAPES,
    MeasuredCluster,
    RecordedRun,
    TableCluster,
    Workload,
    decode_step,
    find_accelerator,
    find_shape,
    read,
    scene_of,
)
from freewheel.plan.planner import ending
from freewheel.plan.scene import Generation, HandOver, Measured, Scores, Training, WeightTransfer
from freewheel.plan.simulation import simulate
from freewheel.runtime.config_files import to_config

from .scenes import bounds, scene

LENGTHS = (5.0, 10.0, 15.0, 30.0)


def write(path: Path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn": ')
    return path.parent


def step_row(step, elapsed_s, **changes):
    numbers = {"timing/train_s": 9.0, "timing/wait_batch_s": 9.0, "timing/elapsed_s": elapsed_s}
    numbers |= {"rollout/response_length_mean": 99.0, "avg_sample_age": 9.0, "max_sample_age": 9}
    return {"kind": "step", "step": step, "time": 900.0 + step, **numbers, **changes}


def made_run(folder: Path, *, steps=10, traced=True, rewards=None, before=()) -> Path:
    """Write a run's metrics and trace. `before`: rows in front of its own."""
    own = {"timing/wait_batch_s": 1.4, "rollout/response_length_mean": 20.0, "avg_sample_age": 1.0, "max_sample_age": 2}
    rows = [
        step_row(step, 10.0 + 2 * step, **{**own, "timing/train_s": 0.5 + 0.1 * (step % 2)})
        for step in range(1, steps + 1)
    ]
    rollouter = {"generated_tokens": 8000, "engine_busy_s": 16.0, "slots": 32, "total_generated_samples": 400}
    rollouter["rewards"] = {"mean_latency_s": 0.25, **(rewards or {})}
    statistics = {"kind": "statistics", "step": steps, "time": 1020.0}
    rows.append({**statistics, "rollouter": rollouter, "sync": {"mean_sync_s": 0.3}})
    write(folder / "metrics.jsonl", [*before, *rows])
    if traced:
        span = {"ph": "X", "cat": "span", "tid": "main", "ts": 0, "args": {}}
        events = [{**span, "name": "pack", "pid": "trainer", "dur": 2e5}]
        events += [{**span, "name": "load_weights", "pid": f"rollouter-{one}", "dur": 1e5} for one in range(2)]
        for ordinal in range(20):
            for name, since_s, until_s, args in (
                ("response", 0.0, 1.0, {"index": 0, "tokens": 15}),
                ("response", 0.0, 1.5, {"index": 1, "tokens": 25}),
                ("score", 1.0, 1.5, {"index": 0, "status": "scored"}),
                ("store", 1.5, 1.56, {}),
            ):
                same = {"cat": "group", "id": ordinal, "name": name, "pid": "rollouter-0", "tid": "groups"}
                events += [{"ph": "b", **same, "ts": since_s * 1e6, "args": args}]
                events += [{"ph": "e", **same, "ts": until_s * 1e6}]
        write(folder / "trace" / "rollouter-0-17.jsonl", events)
    return folder


def read_run(folder, **options):
    return read(folder, n=4, groups_per_step=8, **options)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_run_is_read_and_what_it_did_not_record_is_noted(tmp_path):
    found = read_run(made_run(tmp_path))
    assert (found.steps, found.step_s, found.replicas, found.slots) == (8, 2.0, 2, 16)
    assert (found.busy_per_token_s, found.decode_s) == (0.002, pytest.approx(0.05))
    assert sorted(set(found.lengths)) == [15.0, 25.0] and set(found.latencies_s) == {0.5}
    assert (found.pack_s, found.load_s, found.sync_s) == (pytest.approx(0.2), pytest.approx(0.1), 0.3)
    assert found.put_s == pytest.approx(0.01), "the rest was waiting for others"
    assert found.notes == ()
    untraced = tmp_path / "untraced"
    untraced.mkdir()
    found = read_run(made_run(untraced, traced=False))
    assert found.lengths == (20.0,) and found.latencies_s == (0.25,)
    assert len(found.notes) == 2 and "not recorded" in found.notes[0]


def test_the_time_in_which_engines_warm_up_does_not_count(tmp_path):
    def busy_per_token_s(tokens):
        warm = {"generated_tokens": tokens, "engine_busy_s": 9.0, "slots": 32}
        before = [{"kind": "statistics", "step": 0, "time": 900.0, "rollouter": warm}]
        return read_run(made_run(tmp_path, before=before)).busy_per_token_s

    assert busy_per_token_s(1000) == (16.0 - 9.0) / (8000 - 1000)
    assert busy_per_token_s(7000) == 16.0 / 8000, "too little would remain"


def test_only_rows_since_the_last_restart_count(tmp_path):
    counted = {"generated_tokens": 3000, "engine_busy_s": 20.0, "slots": 32}
    before = [step_row(step, 1000.0 + step) for step in range(1, 6)]
    before += [{"kind": "statistics", "step": 5, "time": 905.0, "rollouter": counted}]
    found = read_run(made_run(tmp_path, before=before))
    assert found == read_run(made_run(tmp_path))
    write(tmp_path / "metrics.jsonl", [*before, step_row(6, 1.0), step_row(7, 2.0)])
    with pytest.raises(ConfigError, match="2 steps are recorded there since its last start"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        {"of": "somebody else"},
        {"kind": "step"},
        step_row(3, 1e9, **{"timing/train_s": None}),
        step_row(3, 1e9, **{"timing/train_s": "3"}),
        step_row(3, 1e9, **{"timing/train_s": -1.0}),
        step_row(3, 10**400),
        {"kind": "statistics", "rollouter": None},
        {"kind": "statistics", "time": 1.0, "rollouter": {"generated_tokens": 10**6}},
        {"kind": "pulse", "waits": None},
    ],
)
def test_an_incomplete_row_is_skipped(tmp_path, row):
    expected = read_run(made_run(tmp_path))
    assert read_run(made_run(tmp_path, before=[row])) == expected
    with pytest.raises(ConfigError, match="0 steps are recorded"):
        read_run(write(tmp_path / "metrics.jsonl", [row]))


def test_a_run_without_measured_speed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="2 steps are recorded"):
        read_run(made_run(tmp_path, steps=2))
    with pytest.raises(ConfigError, match="0 steps"):
        read_run(tmp_path / "nothing")
    made_run(tmp_path, steps=0, before=[step_row(step, float(step), **{"timing/train_s": 0}) for step in range(1, 6)])
    with pytest.raises(ConfigError, match="took no time"):
        read_run(tmp_path)


def test_the_decoding_step_is_how_much_later_a_longer_response_ends():
    def ends(began, *lengths, step_s=0.01):
        return [(float(length), began + length * step_s) for length in lengths]

    groups = [ends(float(began), 5, 12, 20) for began in range(30)]
    assert decode_step(groups) == pytest.approx(0.01)
    disturbed = [ends(float(began), 5, 20, step_s=0.03) for began in range(60)]
    assert decode_step([*groups, *disturbed]) == pytest.approx(0.01), "prompts were read during most of them"
    assert decode_step(groups[:5]) is None and decode_step([ends(0.0, 7, 7, 8)] * 50) is None


# -- replay -----------------------------------------------------------------------------------------------------------


def record(one, outcome) -> RecordedRun:
    """Return what a run with this outcome would have recorded."""
    return RecordedRun(
        steps=outcome.steps,
        step_s=outcome.step_s,
        train_s=(outcome.waits["trainer"]["train"] * outcome.step_s,) * outcome.steps,
        step_tokens=(one.bounds.groups_per_step * one.n * one.lengths.mean,) * outcome.steps,
        replicas=one.generation.replicas,
        slots=one.generation.slots,
        busy_per_token_s=outcome.busy_per_token_s,
        lengths=LENGTHS,
        latencies_s=(0.1, 0.2, 0.3),
        pack_s=one.training.pack_s,
        load_s=one.weights.pause_s,
        sync_s=one.weights.transfer_s + one.weights.pause_s,
        put_s=0.01,
    )


def replay(one, recorded):
    return scene_of(recorded, to_config({"rollout": {"n": one.n}}), one.bounds)


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_replay_finds_the_decoding_step_and_predicts_the_other_modes(mode):
    true = scene(
        mode,
        groups=16,
        steps=40,
        lengths=Measured(LENGTHS),
        scores=Scores(latency_s=Measured((0.1, 0.2, 0.3))),
        generation=Generation(slots=16, step_s=0.013, refill=2),
        training=Training(base_s=0.5, pack_s=0.01),
        weights=WeightTransfer(transfer_s=0.02, pause_s=0.01),
        hand_over=HandOver(message_s=0.01, linger_s=0.05, interval_s=0.1),
    )
    found = replay(true, record(true, simulate(true)))
    assert found.generation.step_s == pytest.approx(0.013, rel=0.03)
    for other in ("sync", "one_step_off", "fully_async"):
        bound = bounds(other, groups=16, steps=40)
        expected = simulate(replace(true, bounds=bound), seed=3).step_s
        assert simulate(replace(found, bounds=bound), seed=3).step_s == pytest.approx(expected, rel=0.03), other


def test_a_replay_finds_the_cost_of_a_prompt():
    made = Generation(slots=32, step_s=0.006, prefill_s=0.004, refill=4)
    true = scene("sync", groups=32, steps=40, lengths=Measured(LENGTHS), generation=made)
    recorded = replace(record(true, simulate(true)), decode_s=0.006, latencies_s=(0.0,))
    assert replay(true, recorded).generation.prefill_s == pytest.approx(0.004, rel=0.1)
    found = replay(true, replace(recorded, decode_s=0.02)).generation  # more than the engines were busy
    assert found.prefill_s == 0 and found.step_s < 0.02


def test_a_run_is_measured_only_at_its_own_split_and_settings():
    run = scene(generation=Generation(replicas=2, slots=16, step_s=0.01), training=Training(per_token_s=0.001))
    cluster = MeasuredCluster(run=replace(run, weights=WeightTransfer(transfer_s=0.1)), trainers=2)
    asked = [(run.bounds, 2, 2), (replace(run.bounds, total_groups=None), 2, 2), (run.bounds, 4, 2), (run.bounds, 2, 4)]
    asked += [(bounds("sync"), 2, 2), (bounds(groups=1), 2, 2), (bounds(threshold=1), 2, 2), (bounds(every=2), 2, 2)]
    found = [cluster.is_measured(of, trainers=trainers, generators=generators) for of, trainers, generators in asked]
    assert found == [True, True] + [False] * 6
    assert cluster.scene(run.bounds, trainers=2, generators=2) == cluster.run
    larger = cluster.scene(run.bounds, trainers=4, generators=6)
    assert larger.training.per_token_s == pytest.approx(0.0005 / 0.97)
    assert larger.generation.replicas == 6 and larger.weights.transfer_s == pytest.approx(0.3)
    few = replace(run.bounds, groups_per_step=1, total_groups=12)
    alike = {cluster.scene(few, trainers=trainers, generators=2).training.per_token_s for trainers in (4, 64)}
    assert len(alike) == 1, "a step of four sequences employs four trainers"


# -- a table ----------------------------------------------------------------------------------------------------------


def table(model="7b", name="h200", **work):
    workload = Workload(groups_per_step=64, **work)
    return TableCluster(accelerator=find_accelerator(name), shape=find_shape(model), workload=workload)


EIGHT = ending(bounds(groups=8), 12)


@pytest.mark.parametrize("name", SHAPES)
def test_a_larger_model_needs_more_and_gives_less(name):
    big = table(name)
    assert big.least_trainers * big.accelerator.memory_bytes >= 18 * big.shape.parameters
    assert big.per_replica * big.accelerator.memory_bytes > big.shape.weight_bytes
    one, small = (
        made.scene(EIGHT, trainers=big.least_trainers, generators=big.per_replica) for made in (big, table("0.5b"))
    )
    assert one.capacities["training"] <= small.capacities["training"]
    assert one.capacities["generation"] <= small.capacities["generation"] * 1.01


def test_the_table_gives_what_was_measured_on_an_h200():
    """docs/benchmarks.md: 55,439 tokens/s of a 1.5B step, and 20,700 tokens/s of a 0.5B engine with 256 sequences."""
    made = table("1.5b", prompt_tokens=128, response_tokens=1024, max_new_tokens=1024)
    per_s = 1 / made.scene(EIGHT, trainers=1, generators=1).training.per_token_s
    assert per_s == pytest.approx(55_439, rel=0.1)
    made = table("0.5b", prompt_tokens=128, response_tokens=512, max_new_tokens=512)
    one = made.scene(EIGHT, trainers=1, generators=1)
    assert one.generation.tokens_per_s == pytest.approx(20_700, rel=0.1)
    assert not made.is_measured(EIGHT, trainers=1, generators=1)
    few = ending(bounds(groups=1), 12)
    steps = [table().scene(few, trainers=count, generators=1).training.per_token_s for count in (4, 8, 64)]
    assert steps[0] > steps[1] == steps[2], "more trainers than sequences have nothing to do"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: table("7b", "l40s", max_new_tokens=10_000_000), "--max-new-tokens = 10000000: a replica .1 x l40s. h"),
        (lambda: table(response_tokens=5000), "--response-tokens = 5000: a response has 4,096 at most"),
        (lambda: find_accelerator("tpu"), "--accelerator = 'tpu': give one of h200"),
        (lambda: find_shape("8b"), "--model = '8b': give one of 0.5b, .* take the nearest size"),
    ],
)
def test_impossible_workloads_and_unknown_names_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
