"""A run directory becomes a scene: what is recorded is read, and what is not is found by replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from freewheel.errors import ConfigError
from freewheel.plan.clusters import MeasuredCluster, RecordedRun, RunSettings, beside, decode_step, read, scene_of
from freewheel.plan.scene import Beside, Generation, HandOver, Measured, Scores, Training, Weights
from freewheel.plan.simulation import simulate
from freewheel.rollout.engines import NativeFactory

from .scenes import bounds, scene


def write(path: Path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn": ')


def pair(name, ordinal, since_s, until_s, pid="rollouter-0", **args):
    same = {"cat": "group", "id": ordinal, "name": name, "pid": pid, "tid": "groups"}
    return [
        {"ph": "b", **same, "ts": since_s * 1e6, "args": args},
        {"ph": "e", **same, "ts": until_s * 1e6},
    ]


def made_run(folder: Path, *, steps=10, traced=True, rewards=None, before=()) -> Path:
    """`before`: rows that stand before its own."""
    rows = [
        {
            "kind": "step",
            "step": step,
            "time": 1000.0 + 2 * step,
            "timing/train_s": 0.5 + 0.1 * (step % 2),
            "timing/wait_batch_s": 1.4,
            "timing/elapsed_s": 10.0 + 2 * step,
            "rollout/response_length_mean": 20.0,
            "avg_sample_age": 1.0,
            "max_sample_age": 2,
        }
        for step in range(1, steps + 1)
    ]
    rollouter = {
        "generated_tokens": 8000,
        "engine_busy_s": 16.0,
        "slots": 32,
        "total_generated_samples": 400,
        "rewards": {"mean_latency_s": 0.25, **(rewards or {})},
    }
    rows.append(
        {"kind": "statistics", "step": steps, "time": 1020.0, "rollouter": rollouter, "sync": {"mean_sync_s": 0.3}}
    )
    write(folder / "metrics.jsonl", [*before, *rows])
    if traced:
        events = [
            {"ph": "X", "name": "pack", "cat": "span", "pid": "trainer", "tid": "main", "ts": 0, "dur": 2e5, "args": {}}
        ]
        for pid in ("rollouter-0", "rollouter-1"):
            loading = {"ph": "X", "name": "load_weights", "cat": "span", "pid": pid, "tid": "main", "ts": 0, "dur": 1e5}
            events.append({**loading, "args": {}})
        for ordinal in range(20):
            events += pair("response", ordinal, 0.0, 1.0, index=0, tokens=15)
            events += pair("response", ordinal, 0.0, 1.5, index=1, tokens=25)
            events += pair("score", ordinal, 1.0, 1.5, index=0, status="scored")
            events += pair("store", ordinal, 1.5, 1.56)
        write(folder / "trace" / "rollouter-0-17.jsonl", events)
    return folder


def test_what_is_recorded_is_read(tmp_path):
    found = read(made_run(tmp_path), n=4, groups_per_step=8)
    assert (found.steps, found.step_s, found.replicas, found.slots) == (8, 2.0, 2, 16)
    assert found.busy_per_token_s == 0.002
    assert sorted(set(found.lengths)) == [15.0, 25.0] and set(found.latencies_s) == {0.5}
    assert (found.pack_s, found.load_s, found.sync_s) == (pytest.approx(0.2), pytest.approx(0.1), 0.3)
    assert found.put_s == pytest.approx(0.01), "the rest was waiting for others"
    assert found.trainer_waits == pytest.approx(0.7)
    assert found.notes == ()


def test_what_is_not_recorded_is_said(tmp_path):
    found = read(made_run(tmp_path, traced=False), n=4, groups_per_step=8)
    assert found.lengths == (20.0,) and found.latencies_s == (0.25,)
    assert len(found.notes) == 2 and "not recorded" in found.notes[0]


def test_a_run_that_has_hardly_begun_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="2 steps are recorded"):
        read(made_run(tmp_path, steps=2), n=4, groups_per_step=8)
    with pytest.raises(ConfigError, match="0 steps"):
        read(tmp_path / "nothing", n=4, groups_per_step=8)


def step_row(step, elapsed_s, **changes):
    return {
        "kind": "step",
        "step": step,
        "time": 900.0 + step,
        "timing/train_s": 9.0,
        "timing/wait_batch_s": 9.0,
        "timing/elapsed_s": elapsed_s,
        "rollout/response_length_mean": 99.0,
        "avg_sample_age": 9.0,
        "max_sample_age": 9,
        **changes,
    }


def test_what_came_before_a_clock_began_anew_is_not_looked_at(tmp_path):
    counted = {"generated_tokens": 3000, "engine_busy_s": 20.0, "slots": 32}
    before = [step_row(step, 1000.0 + step) for step in range(1, 6)]
    before += [{"kind": "statistics", "step": 5, "time": 905.0, "rollouter": counted}]
    found = read(made_run(tmp_path, before=before), n=4, groups_per_step=8)
    assert found == read(made_run(tmp_path), n=4, groups_per_step=8)
    (tmp_path / "resumed").mkdir()
    write(tmp_path / "resumed" / "metrics.jsonl", [*before, step_row(6, 1.0), step_row(7, 2.0)])
    with pytest.raises(ConfigError, match="2 steps are recorded there since it last began"):
        read(tmp_path / "resumed", n=4, groups_per_step=8)
    with pytest.raises(ConfigError, match=r"window = \(0, 5\)"):
        read(made_run(tmp_path, before=before), n=4, groups_per_step=8, window=(0, 5))


@pytest.mark.parametrize(
    "row",
    [
        {"of": "somebody else"},
        {"kind": "step"},
        step_row(3, 1e9, **{"timing/train_s": None}),
        step_row(3, 1e9, avg_sample_age="3"),
        step_row(3, 1e9, **{"timing/train_s": -1.0}),
        step_row(3, 10**400),
        {"kind": "statistics", "rollouter": None},
        {"kind": "statistics", "time": 1.0, "rollouter": {"generated_tokens": 10**6}},
        {"kind": "pulse", "waits": None},
    ],
)
def test_a_row_that_is_not_whole_is_passed_over(tmp_path, row):
    expected = read(made_run(tmp_path), n=4, groups_per_step=8)
    assert read(made_run(tmp_path, before=[row]), n=4, groups_per_step=8) == expected
    with pytest.raises(ConfigError, match="0 steps are recorded"):
        write(tmp_path / "metrics.jsonl", [row])
        read(tmp_path, n=4, groups_per_step=8)


def test_steps_that_took_no_time_are_refused(tmp_path):
    made_run(tmp_path, steps=0, before=[step_row(step, float(step), **{"timing/train_s": 0}) for step in range(1, 6)])
    with pytest.raises(ConfigError, match="took no time"):
        read(tmp_path, n=4, groups_per_step=8)


def recorded_of(one, outcome) -> RecordedRun:
    """What a run with this outcome would have written down."""
    tokens = one.bounds.groups_per_step * one.n * one.lengths.mean
    return RecordedRun(
        steps=outcome.steps,
        step_s=outcome.step_s,
        train_s=(outcome.waits["trainer"]["train"] * outcome.step_s,) * outcome.steps,
        step_tokens=(tokens,) * outcome.steps,
        trainer_waits=outcome.trainer_waits,
        lag_mean=outcome.lag_mean,
        lag_max=outcome.lag_max,
        replicas=one.generation.replicas,
        slots=one.generation.slots,
        busy_per_token_s=outcome.busy_per_token_s,
        lengths=(5.0, 10.0, 15.0, 30.0),
        latencies_s=(0.1, 0.2, 0.3),
        pack_s=one.training.pack_s,
        load_s=one.weights.pause_s,
        sync_s=one.weights.transfer_s + one.weights.pause_s,
        put_s=0.01,
    )


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_replay_finds_the_step_that_the_run_had_and_predicts_the_other_modes(mode):
    true = scene(
        mode,
        groups=16,
        steps=40,
        lengths=Measured((5.0, 10.0, 15.0, 30.0)),
        scores=Scores(latency_s=Measured((0.1, 0.2, 0.3))),
        generation=Generation(slots=16, step_s=0.013, refill=2),
        training=Training(base_s=0.5, pack_s=0.01),
        weights=Weights(transfer_s=0.02, pause_s=0.01),
        hand_over=HandOver(message_s=0.01, linger_s=0.05, interval_s=0.1),
    )
    settings = RunSettings(bounds=true.bounds, n=4, refill_slots=NativeFactory().refill_slots, interval_s=0.1)
    found = scene_of(recorded_of(true, simulate(true)), settings)
    assert found.generation.step_s == pytest.approx(0.013, rel=0.03)
    for other in ("sync", "one_step_off", "fully_async"):
        bound = bounds(other, groups=16, steps=40)
        expected = simulate(replace(true, bounds=bound), seed=3).step_s
        assert simulate(replace(found, bounds=bound), seed=3).step_s == pytest.approx(expected, rel=0.03), other


def test_what_the_sides_cost_each_other_is_what_they_took_longer():
    alone = scene(steps=30, training=Training(per_token_s=0.4 / 320))
    shared = replace(alone, beside=Beside(generation=1.3, training=1.2))
    found = beside(alone, recorded_of(shared, simulate(shared)), alone.bounds)
    assert found.generation == pytest.approx(1.3, rel=0.1) and found.training == pytest.approx(1.2, rel=0.1)
    assert beside(alone, recorded_of(alone, simulate(alone)), alone.bounds) == Beside(
        generation=pytest.approx(1.0, abs=0.02), training=pytest.approx(1.0, abs=0.02)
    )


def test_the_time_of_a_step_is_by_how_much_later_a_longer_response_ends():
    def ends(began, *lengths, step_s=0.01):
        return [(float(length), began + length * step_s) for length in lengths]

    groups = [ends(float(began), 5, 12, 20) for began in range(30)]
    assert decode_step(groups) == pytest.approx(0.01)
    disturbed = [ends(float(began), 5, 20, step_s=0.03) for began in range(60)]
    assert decode_step([*groups, *disturbed]) == pytest.approx(0.01), "prompts were read beside most of them"
    assert decode_step(groups[:5]) is None and decode_step([ends(0.0, 7, 7, 8)] * 50) is None


def test_what_a_prompt_costs_is_what_decoding_leaves_of_the_engines_time():
    true = scene(
        "sync",
        groups=32,
        steps=40,
        lengths=Measured((5.0, 10.0, 15.0, 30.0)),
        generation=Generation(slots=32, step_s=0.006, prefill_s=0.004, refill=4),
    )
    recorded = replace(recorded_of(true, simulate(true)), decode_s=0.006, latencies_s=(0.0,))
    found = scene_of(
        recorded, RunSettings(bounds=true.bounds, n=4, refill_slots=NativeFactory().refill_slots, interval_s=0.1)
    )
    assert found.generation.prefill_s == pytest.approx(0.004, rel=0.1)
    slower = replace(recorded, decode_s=0.02)  # more than there was
    found = scene_of(
        slower, RunSettings(bounds=true.bounds, n=4, refill_slots=NativeFactory().refill_slots, interval_s=0.1)
    )
    assert found.generation.prefill_s == 0 and found.generation.step_s < 0.02


def test_a_measured_run_is_measured_at_its_own_split_and_with_its_own_settings_alone():
    run = scene(generation=Generation(replicas=2, slots=16, step_s=0.01), training=Training(per_token_s=0.001))
    cluster = MeasuredCluster(run=replace(run, weights=Weights(transfer_s=0.1)), trainers=2)
    asked = [(run.bounds, 2, 2), (replace(run.bounds, total_groups=None), 2, 2), (run.bounds, 4, 2), (run.bounds, 2, 4)]
    asked += [(bounds("sync"), 2, 2), (bounds(groups=1), 2, 2), (bounds(threshold=1), 2, 2), (bounds(every=2), 2, 2)]
    found = [cluster.is_measured(of, trainers=trainers, generators=generators) for of, trainers, generators in asked]
    assert found == [True, True] + [False] * 6
    same = cluster.scene(run.bounds, trainers=2, generators=2)
    assert same == replace(cluster.run, window=None)
    larger = cluster.scene(run.bounds, trainers=4, generators=6)
    assert larger.training.per_token_s == pytest.approx(0.0005 / 0.97)
    assert larger.generation.replicas == 6 and larger.weights.transfer_s == pytest.approx(0.3)
    few = replace(run.bounds, groups_per_step=1, total_groups=12)
    alike = [cluster.scene(few, trainers=trainers, generators=2).training.per_token_s for trainers in (4, 64)]
    assert alike[0] == alike[1], "a step of four sequences keeps four at work"
    with pytest.raises(ConfigError, match="split"):
        cluster.scene(run.bounds, trainers=0, generators=2)
