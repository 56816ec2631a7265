"""Small whole runs under Ray: they record all metrics, survive deaths and clean up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from freewheel.observe.lines import files_of
from freewheel.observe.recorder import read_metrics
from freewheel.observe.run_folder import JOURNAL, TRACE
from freewheel.observe.samples import read_samples
from freewheel.queue.audit import audit
from freewheel.queue.journal import Journal
from freewheel.runtime import main as main_module
from freewheel.runtime.account import RunResult
from freewheel.runtime.main import FullyAsyncMain
from freewheel.trainer.checkpoint import CheckpointStore, RunLock

from ..ray_runs import WAIT_S, count_steps, processes, running, wait_until
from .pipeline import journal_of, plan_of, small_config
from .standins import View
from .traces import Trace, check_lives

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(400)]  # a busy machine is ten times slower

TELLING = "user_code:TellingTrainer"
RAY_GOES_S = 30.0
"""Longest time for Ray's own processes to end after its shutdown."""

SPEC = {
    "trainer": ["global_steps", "processed_samples", "current_param_version", "param_sync_count"],
    "rollouter": ["total_generated_samples", "dropped_stale_samples", "generation_errors", "param_sync_requests"],
    "queue": ["queue_size", "total_produced", "total_consumed", "dropped_samples"],
    "sync": ["sync_failures", "last_sync_s", "mean_sync_s"],
}
FRESHNESS = ["avg_sample_age", "max_sample_age", "stale_samples_ratio"]


def main_of(run_dir: Path, *, view: Any = None, **sections: Any) -> FullyAsyncMain:
    config = small_config(run_dir=str(run_dir), **sections)
    return FullyAsyncMain(config=config, plan=plan_of(config), view=view)


def trained_ordinals(run_dir: Path) -> list[int]:
    return [ordinal for row in read_metrics(run_dir, "step") for ordinal in row["ordinals"]]


# -- a whole run ------------------------------------------------------------------------------------------------------


class Run:
    """One run with all user code, checked in several ways."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.view = View()
        self.monitored = folder / "monitored"
        os.environ["FREEWHEEL_TEST_MONITORED"] = str(self.monitored)
        self.result: RunResult = main_of(
            folder,
            view=self.view,
            trainer={"trainer_class": TELLING, "total_steps": 6, "save_every_steps": 2},
            rollout={"rollouter_class": "user_code:MarkingRollouter", "replicas": 2},
            reward={"function": "user_code:slow_score"},
            eval={"prompts": 8, "every_steps": 3, "at_start": True},
            observe={"custom_monitor": "user_code:monitor", "statistics_every_s": 0.5},
        ).run()
        del os.environ["FREEWHEEL_TEST_MONITORED"]


def check_steps_metrics_and_evaluations(run: Run) -> None:
    assert run.result.error is None
    assert (run.result.outcome, run.result.exit_code, run.result.steps) == ("finished", 0, 6)
    assert [row["step"] for row in read_metrics(run.folder, "step")] == [1, 2, 3, 4, 5, 6]
    assert sorted(trained_ordinals(run.folder)) == list(range(24))
    for row in read_metrics(run.folder, "step"):
        assert {*SPEC["trainer"], *FRESHNESS} <= row.keys()
        assert row["max_sample_age"] <= 5
    assert [row["shared_gpu"] for row in read_metrics(run.folder, "event") if "shared_gpu" in row] == [False]
    last = read_metrics(run.folder, "statistics")[-1]
    for component, names in SPEC.items():
        assert set(names) <= last[component].keys(), component
    assert last["trainer"]["global_steps"] == 6
    assert last["trainer"]["processed_samples"] == 24 * 4
    assert last["queue"]["total_consumed"] == 24
    assert last["rollouter"]["total_generated_samples"] == 24 * 4  # of both replicas
    assert last["sync"]["sync_failures"] == 0
    rows = read_metrics(run.folder, "eval")
    assert {0, 6} <= {row["step"] for row in rows}
    assert all(row["eval/prompts"] == 8 for row in rows)
    assert any("Held-out reward" in line for line in run.result.summary)
    told = [json.loads(line) for line in run.monitored.read_text().splitlines()]
    assert (told[-1], last["rollouter"]["marks"]) == ([6, 2], 2), "the user's monitor and rollouters"


def check_log_view_and_summary(run: Run) -> None:
    text = (run.folder / "fully_async_training.log").read_text()
    (*_, statistics) = [line for line in text.splitlines() if "Component Statistics |" in line]
    assert all(f"{component}:" in statistics for component in SPEC)
    assert "Parameter sync: version 6 on 2 of 2 engines" in text
    assert " ERROR " not in text
    assert {"[main]", "[trainer]", "[sync]"} <= {word for line in text.splitlines() for word in line.split()[3:4]}
    assert run.view.snapshots
    last = run.view.snapshots[-1]
    assert (last.step, last.total_steps, last.published_version) == (6, 6, 6)
    assert last.waits.keys() >= {"trainer", "rollouter-0", "rollouter-1"}
    assert "Finished at step 6 of 6" in run.view.end
    assert any(str(run.folder) in text for text in run.view.said)


def check_export_and_checkpoints(run: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    store = CheckpointStore(run.folder, keep_last=2)
    paths = sorted(store.folder.iterdir())
    assert [path.name for path in paths] == ["step_000004", "step_000006"]
    final = AutoModelForCausalLM.from_pretrained(run.folder / "final").state_dict()
    AutoTokenizer.from_pretrained(run.folder / "final")
    for path in paths:
        assert store.load(path).step == int(path.name[-6:])
    last = AutoModelForCausalLM.from_pretrained(paths[-1]).state_dict()
    assert all(bool((last[name] == tensor).all()) for name, tensor in final.items())
    assert (run.folder / "best" / "model.safetensors").is_file()


def check_traces_and_records_for_programs(run: Run) -> None:
    trace = Trace.of(run.folder)
    assert set(trace.components.values()) == {"main", "trainer", "sync", "rollouter-0", "rollouter-1"}
    check_lives(trace, range(24), n=4)
    told = {phase.ordinal: phase.args["step"] for phase in trace.phases if phase.name == "train"}
    rows = read_metrics(run.folder, "step")
    assert told == {ordinal: row["step"] for row in rows for ordinal in row["ordinals"]}
    assert {"train", "wait_batch", "pack", "save"} == trace.spans("trainer")
    assert {"sync", "load"} == trace.spans("sync")
    assert {"generate", "load_weights"} <= trace.spans("rollouter-0") & trace.spans("rollouter-1")
    assert {"groups", "tokens_per_s"} <= {event["name"] for event in trace.events if event["ph"] == "C"}
    pulses = read_metrics(run.folder, "pulse")
    assert pulses and pulses[-1]["waits"].keys() >= {"trainer", "rollouter-0", "rollouter-1"}
    assert pulses[-1]["published_version"] <= pulses[-1]["version"] <= 6
    syncs = read_metrics(run.folder, "sync")
    versions = [row["version"] for row in syncs]
    assert versions == sorted(set(versions)) and versions[-1] == 6, "a slow engine may skip a version, not repeat one"
    for row in syncs:
        assert (row["failed"], row["bytes"] > 0, row["engines"].keys()) == (False, True, {"rollouter-0", "rollouter-1"})
        assert all(one["attempts"] == 1 and one["took_s"] <= row["took_s"] for one in row["engines"].values())
    for row in read_metrics(run.folder, "step"):
        assert sum(row["sample_age_counts"]) == 4
    assert {sample["replica"] for sample in read_samples(run.folder)} == {"rollouter-0", "rollouter-1"}
    records = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert {"main", "trainer", "sync"} <= {record["role"] for record in records}
    assert [record["version"] for record in records if record["role"] == "sync" and "version" in record] == versions
    assert [record["step"] for record in records if record["message"].startswith("Saved")] == [2, 4, 6]


def check_nothing_is_left_behind(run: Run) -> None:
    started = processes(run.folder)
    assert len(started) == 5
    wait_until(lambda: not any(map(is_alive, started)), RAY_GOES_S)
    with RunLock(run.folder):
        pass
    assert not list(run.folder.rglob(".tmp-*"))


def test_a_whole_run_trains_records_and_cleans_up(tmp_path: Path) -> None:
    """One test of one run: separate tests would repeat the run in each worker."""
    run = Run(tmp_path)
    check_steps_metrics_and_evaluations(run)
    check_log_view_and_summary(run)
    check_export_and_checkpoints(run)
    check_traces_and_records_for_programs(run)
    check_nothing_is_left_behind(run)


# -- what goes wrong --------------------------------------------------------------------------------------------------


STEPS = 18
"""Steps of a run with failures: enough for all of them to happen before its end."""
PROMPTS = list(range(4 * STEPS))
SILENT_S = 8.0
ROUNDS = (
    (
        ("queue", signal.SIGKILL, "queue"),
        ("rollouter-0", signal.SIGKILL, "rollouter-0"),
        ("rank-1", signal.SIGKILL, "rank-1"),
    ),
    (("trainer", signal.SIGKILL, "rank-1"), ("rollouter-0", signal.SIGSTOP, "rollouter-0")),
    (("rank-1", signal.SIGSTOP, "rank-1"),),
)
"""Signals that are sent together: component, signal, and the component that is then started again. The trainer dies
with its rank, and starts it."""


def strike(main: FullyAsyncMain) -> RunResult:
    """Run to the end, with a round of signals to the newest processes every three steps."""
    folder = main.run_dir
    with running(main, wait_s=2 * WAIT_S) as found:
        for strokes in ROUNDS:
            step = count_steps(folder) + 3
            before = {restarted: len(processes(folder, restarted)) for _, _, restarted in strokes}
            wait_until(lambda: count_steps(folder) >= step or bool(found))  # noqa: B023
            assert not found, "the run was over before it was struck"
            for name, number, _ in strokes:
                os.kill(processes(folder, name)[-1], number)
            wait_until(
                lambda: bool(found) or all(len(processes(folder, name)) > count for name, count in before.items())  # noqa: B023
            )
    return found[0]


def test_dead_and_hanging_components_are_replaced_and_every_prompt_is_trained_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One test of one run, because a start takes longest. Training has two processes. There is one rollouter, and no
    sync is retried, so the run waits for the replacement. Rewards are slow, so that the run lasts long enough."""
    monkeypatch.setattr(main_module, "LOOK_EVERY_S", 0.05)  # to see early steps in time
    monkeypatch.setattr(main_module, "ANSWER_S", 0.5)
    result = strike(
        main_of(
            tmp_path,
            trainer={
                "trainer_class": TELLING, "total_steps": STEPS, "max_errors": 1, "save_every_steps": 3, "world_size": 2,
            },
            reward={"function": "user_code:slow_score"},
            async_training={"max_sync_retries": 0, "staleness_threshold": 1},
            recovery={"silent_s": SILENT_S},
        )
    )  # fmt: skip
    assert (result.error, result.outcome, result.steps) == (None, "finished", STEPS)
    check_that_every_prompt_was_trained_once(tmp_path)
    check_that_each_that_died_was_replaced_and_nobody_else(tmp_path)
    check_that_the_newest_checkpoint_lies_in_shards(tmp_path, 2)
    check_that_the_trace_is_whole(tmp_path)
    told = [row["step"] for row in read_metrics(tmp_path, "step")]
    assert told == sorted(set(told)), "none is told twice"


def check_that_every_prompt_was_trained_once(folder: Path) -> None:
    steps = journal_of(folder)
    assert list(steps) == list(range(1, STEPS + 1))
    assert sorted(ordinal for ordinals in steps.values() for ordinal in ordinals) == PROMPTS
    with contextlib.closing(Journal(folder / JOURNAL, readonly=True)) as journal:
        found = audit(journal, max_lag=5)
    assert (found.violations, found.lost, found.repeated, found.stale_trained) == ([], 0, 0, 0)


def check_that_each_that_died_was_replaced_and_nobody_else(folder: Path) -> None:
    events = [row["text"] for row in read_metrics(folder, "event")]
    for name, deaths in {"queue": 1, "sync": 0, "rollouter-0": 2, "trainer": 3}.items():
        assert len([text for text in events if f"{name} died and is restarted" in text]) == deaths, name
        assert len(processes(folder, name)) == deaths + 1, name
    silent = [text for text in events if f"rollouter-0 is killed: it was silent for {SILENT_S:g} s" in text]
    assert len(silent) == 1, "the one that was stopped, and not the one that was killed"
    log = (folder / "fully_async_training.log").read_text()
    assert "rollouter-0 died; " in log and "in 2 processes (FSDP2)" in log
    assert log.count("The trainer restarts from ") == 3
    ends = "The training processes cannot continue, so the trainer ends: rank-1"
    assert f"{ends} died" in log and f"{ends} was silent for {SILENT_S:g} s" in log, "who died is named"
    wait_until(lambda: not any(map(is_alive, processes(folder))), RAY_GOES_S)


def check_that_the_trace_is_whole(folder: Path) -> None:
    """The trace is whole whatever its writer was writing when it died."""
    trace = Trace.of(folder)
    newest = processes(folder, "rollouter-0")[-1]
    assert newest in {file.process for file in files_of(folder / TRACE, "rollouter-0")}
    for name in ("generate", "train"):
        told = {phase.ordinal for phase in trace.phases if phase.name == name}
        assert set(PROMPTS[-4:]) <= told <= set(PROMPTS), name


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check_that_the_newest_checkpoint_lies_in_shards(folder: Path, world: int) -> None:
    store = CheckpointStore(folder, keep_last=2)
    latest = store.latest()
    assert latest == folder / "checkpoints" / f"step_{STEPS:06d}"
    files = store.load(latest).tensor_files()
    assert [file.name for file in files] == [f"shard_{n:05d}_of_{world:05d}.safetensors" for n in range(1, world + 1)]
    assert (latest / "model.safetensors").is_file()
    modes = {oct(path.stat().st_mode & 0o777) for path in latest.rglob("*")}
    assert modes == {"0o600", "0o700"}, "others may not look into it"
