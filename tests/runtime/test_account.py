"""The account of a run uses whatever its components answer, also if one has died or none answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freewheel.judge.stats import EndpointStats, JudgeStats
from freewheel.observe.recorder import Recorder, read_metrics
from freewheel.rollout.reward_functions import failed
from freewheel.rollout.reward_stage import JUDGE_TOTALS, RewardCounts
from freewheel.runtime.account import RunAccount, sum_replicas
from freewheel.trainer.backend import MetricsRow

from .pipeline import small_config
from .standins import View

P = 4


class Scene:
    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.folder = folder
        self.view = View()
        self.recorder = Recorder(run_dir=folder)
        config = small_config(trainer={"total_steps": 10}, observe={"statistics_every_s": 10.0})
        self.account = RunAccount(
            config=config, run_dir=folder, recorder=self.recorder, view=self.view, clock=lambda: self.now
        )
        self.account.begin(0)
        self.account.started()

    def look(self, *rows: MetricsRow, last: bool = False, **stats: Any) -> bool:
        named = {name.replace("_", "-"): found for name, found in stats.items()}
        return self.account.look(named, rows, self.now, last=last)


def replica(*, elapsed: float = 1.0, generate: float = 0.5, **numbers: Any) -> dict[str, Any]:
    spans = {"elapsed": elapsed, "generate": generate * elapsed, "wait_room": (1 - generate) * elapsed}
    return {"total_generated_samples": 0, "generated_tokens": 0, "version": 0, **numbers, "spans": spans}


def step_row(step: int, **values: float) -> MetricsRow:
    return MetricsRow("step", step, {"rollout/reward_mean": step / 10, "max_sample_age": 1.0, **values})


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.recorder.close()


def test_a_note_is_recorded_and_not_shown(scene: Scene) -> None:
    scene.look(step_row(1))
    scene.account.note("trainer is process 77", role="trainer", process=77, node="here")
    (row,) = [row for row in read_metrics(scene.folder, "event") if "role" in row]
    assert (row["text"], row["step"], row["role"], row["process"]) == ("trainer is process 77", 1, "trainer", 77)
    assert "trainer is process 77" not in scene.view.said


def test_a_paused_run_shows_the_reason_and_no_remaining_time(scene: Scene) -> None:
    scene.look(step_row(1), rollouter_0=replica(), trainer={"spans": {"elapsed": 1.0, "wait_batch": 0.1}})
    scene.now += 5.0
    scene.look(step_row(2), queue={"paused": "no space left on /runs"})
    shown = scene.view.snapshots[-1]
    assert shown.verdict == "paused until there is room: no space left on /runs" and shown.eta_s is None
    scene.look()  # nobody answers: that is no end of it
    assert scene.view.snapshots[-1].verdict == shown.verdict
    assert scene.view.said[-1] == "The run is paused and continues when there is room: no space left on /runs"
    scene.look(queue={"paused": ""})
    assert scene.view.said[-1] == "There is room again: the run continues"
    assert "paused" not in scene.view.snapshots[-1].verdict and scene.view.snapshots[-1].eta_s


def test_an_unreachable_judge_is_named_once_and_gives_no_advice_on_limits(scene: Scene) -> None:
    def with_judge(*breakers: str) -> dict[str, Any]:
        endpoints = [{"url": f"http://{at}/v1", "breaker": one} for at, one in enumerate(breakers)]
        return replica(rewards={"judge": {"endpoints": endpoints}})

    scene.look(rollouter_0=with_judge("open", "closed"))
    assert not any("does not answer" in text for text in scene.view.said)
    for _ in range(3):
        scene.look(rollouter_0=with_judge("open", "probing"))
    (told,) = [text for text in scene.view.said if "does not answer" in text]
    assert "http://0/v1" in told and "http://1/v1" in told
    assert scene.account.verdict.lift is None and scene.view.snapshots[-1].verdict in told
    scene.look(rollouter_0=with_judge("closed", "closed"))
    assert scene.view.said[-1] == "The judge answers again"


def test_statistics_are_due_by_the_clock_and_at_the_last_look(scene: Scene) -> None:
    assert not scene.look(queue={"queue_size": 3})
    scene.now += 10
    assert scene.look(queue={"queue_size": 4})
    scene.now += 1
    assert not scene.look(queue={"queue_size": 5})
    assert scene.look(queue={"queue_size": 6}, last=True)
    assert [row["queue"]["queue_size"] for row in read_metrics(scene.folder, "statistics")] == [4, 6]


def test_a_judge_is_up_if_one_replica_reaches_it() -> None:
    """Its endpoints are those of all replicas together."""
    down = {"url": "http://a", "model": "m", "breaker": "open", "halted": "", "faults": {"broken": 3}, "sent": 5}
    up = {**down, "breaker": "closed", "faults": {"broken": 1, "timeout": 2}, "latency_p50_s": 0.5}
    other = {**down, "url": "http://b", "sent": 1}
    of = [{"judge": {"endpoints": [one, other]}} for one in (down, up)]
    first, second = sum_replicas(of)["judge"]["endpoints"]
    assert first == {**up, "sent": 10, "faults": {"broken": 4, "timeout": 2}}
    assert second == {**other, "sent": 2, "faults": {"broken": 6}}, "none reaches it"
    begun: dict[str, Any] = {"judge": {"endpoints": []}}
    assert sum_replicas([begun, of[0]]) == sum_replicas([of[0], begun]) == of[0], "one that has asked nobody yet"


def test_statistics_of_replicas_are_summed_and_the_work_of_a_replaced_one_stays_counted(scene: Scene) -> None:
    def scoring(scored: int, judge: dict[str, Any], **failed: int) -> dict[str, Any]:
        return {"scored": scored, "failed": failed, "in_flight": 2, "mean_latency_s": scored / 10, "judge": judge}

    def asking(cost: float, **faults: int) -> dict[str, Any]:
        found = JudgeStats(endpoints=[EndpointStats(url="http://a", model="m", faults=faults, cost=cost, limit=8)])
        return {**found.to_dict(), **{name: getattr(found, name) for name in JUDGE_TOTALS}}

    def one(elapsed: float, samples: int, rewards: dict[str, Any], **states: Any) -> dict[str, Any]:
        return replica(elapsed=elapsed, total_generated_samples=samples, rewards=rewards, **states)

    first = one(50, 90, scoring(5, asking(2.0, broken=7), raised=1), version=3, running=8, engine_busy_s=1.5)
    second = one(50, 1, scoring(7, asking(1.0, timeout=2), raised=2, timeout=4), version=2, engine_busy_s=0.5)
    scene.look(rollouter_0=first, rollouter_1=second)
    both = scene.account.statistics["rollouter"]
    assert (both["version"], both["engine_busy_s"]) == (2, 2.0), "of versions the oldest, of numbers the sum"
    scene.look(rollouter_1=second)  # the first does not answer
    scene.look(rollouter_0={}, rollouter_1=second)  # it is starting
    assert scene.account.statistics["rollouter"] == {**both, "dropped_stale_samples": 0}
    scene.look(rollouter_0=one(1, 2, scoring(1, asking(0.5)), running=3), rollouter_1=second)
    for more in (0, 2):
        scene.look(rollouter_0=one(2, 2 + more, scoring(1 + more, asking(0.5, broken=more)), running=3))
        found = scene.account.statistics["rollouter"]
        assert (found["total_generated_samples"], found["running"]) == (93 + more, 3), "what it was doing is over"
        rewards, judge = found["rewards"], found["rewards"]["judge"]
        assert (rewards["scored"], rewards["in_flight"]) == (13 + more, 4)
        assert rewards["failed"] == {"raised": 3, "timeout": 4} and rewards["mean_latency_s"] == 0.7
        assert judge["faults"] == {"broken": 7 + more, "timeout": 2}
        assert (judge["cost"], judge["limit"], len(judge["endpoints"])) == (3.5, 16, 1)


def test_rows_are_recorded_and_shown_once_also_where_steps_are_replayed(scene: Scene) -> None:
    scene.look(step_row(1), step_row(2), MetricsRow("eval", 2, {"eval/reward": 0.4}), trainer={"global_steps": 2})
    shown = scene.view.snapshots[-1]
    assert (shown.step, shown.reward, shown.freshness) == (2, 0.2, {"max_sample_age": 1.0})
    assert (shown.reward_curve, shown.eval_curve) == ([(1, 0.1), (2, 0.2)], [(2, 0.4)])
    scene.look(
        step_row(2), step_row(3), MetricsRow("eval", 1, {"eval/reward": 0.3})
    )  # an evaluation takes longer than steps
    assert [row["step"] for row in read_metrics(scene.folder, "step")] == [1, 2, 3]
    assert [step for step, _ in scene.view.snapshots[-1].reward_curve] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(scene.folder, "eval")] == [2, 1] and scene.account.step == 3


def test_rates_and_shares_are_of_the_time_between_two_looks(scene: Scene) -> None:
    first = replica(elapsed=10, generate=1.0, generated_tokens=100)
    scene.look(step_row(1), rollouter_0=first, rollouter_1=replica(generated_tokens=50))
    assert scene.view.snapshots[-1].eta_s is None
    scene.now += 6
    second = replica(elapsed=20, generate=0.5, generated_tokens=500)
    scene.look(step_row(2), step_row(3), step_row(4), rollouter_0=second, rollouter_1=replica(generated_tokens=250))
    shown = scene.view.snapshots[-1]
    assert (shown.tokens_per_s, shown.samples_per_s) == (100.0, pytest.approx(0.5 * P * 4))
    assert shown.eta_s == pytest.approx(12.0), "six steps at half a step a second"
    assert shown.waits["rollouter-0"]["generate"] == pytest.approx(0.0)
    assert scene.account.waits["rollouter-0"]["generate"] == pytest.approx(0.5)


def test_a_component_that_does_not_answer_keeps_its_last_known_values(scene: Scene) -> None:
    scene.look()
    assert scene.view.snapshots[-1].step == 0 and scene.account.hopeless == ""
    scene.look(step_row(3), queue={"version": 3, "queue_size": 5}, sync={"published_version": 2})
    scene.look(trainer={"dropped_stale_samples": 6}, rollouter_0=replica())
    shown = scene.account.snapshot(scene.now)
    assert (shown.version, shown.published_version, shown.queue["queue_size"]) == (3, 2, 5)
    assert scene.account.statistics["rollouter"]["dropped_stale_samples"] == 6, "the trainer finds them"


def test_a_change_of_a_judges_clock_does_not_count_as_progress(scene: Scene) -> None:
    for lag in range(3):
        judge = {"loop_lag_s": float(lag), "scored": 0}
        scene.look(queue={"step": 1}, rollouter_0=replica(rewards={"scored": 0, "judge": judge}))
        scene.now += 10.0
    assert scene.account.progress.stalled(scene.now, patience_s=15.0) is not None


@pytest.mark.parametrize(
    ("mark", "before", "after"),
    [
        ("a step", {"queue": {"step": 1}}, {"queue": {"step": 2}}),
        ("a group", {"queue": {"total_produced": 1}}, {"queue": {"total_produced": 2}}),
        ("a token", {"rollouter_0": replica(generated_tokens=1)}, {"rollouter_0": replica(generated_tokens=2)}),
        ("a score", {"rollouter_0": replica(rewards={"scored": 1})}, {"rollouter_0": replica(rewards={"scored": 2})}),
        ("training", {}, {"trainer": {"training": True}}),
        ("saving", {}, {"trainer": {"saving": True}}),
        ("evaluating", {}, {"trainer": {"evaluating": True}}),
        ("a pause", {"queue": {"step": 1}}, {"queue": {"step": 1, "paused": "0 MB free on /data"}}),
    ],
)
def test_every_kind_of_work_counts_as_progress(
    scene: Scene, mark: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    scene.look(**before)
    scene.now += 50
    scene.look(**before)
    assert scene.account.progress.stalled_s(scene.now) == 50, mark
    scene.look(**after)
    assert scene.account.progress.stalled_s(scene.now) == 0, mark


End = Callable[..., str]


@pytest.fixture
def end(scene: Scene) -> End:
    def finish(outcome: str, error: BaseException | None = None) -> str:
        lines = scene.account.finish(outcome, error)
        assert scene.view.end == "\n".join(lines)
        return scene.view.end

    return finish


def test_the_summary_says_how_a_run_went(scene: Scene, end: End) -> None:
    scene.now += 30
    scene.look(
        MetricsRow("eval", 0, {"eval/reward": 0.125}),
        step_row(10),
        MetricsRow("eval", 10, {"eval/reward": 0.9}),
        trainer={"spans": {"elapsed": 30.0, "wait_batch": 3.0, "train": 27.0}},
        rollouter_0=replica(elapsed=30.0, generate=0.95, engine_busy_s=27.0),
    )
    said = end("finished")
    assert "Finished at step 10 of 10 after 30.0 s of training (0.0 s to start)" in said
    assert "Held-out reward 0.125 at step 0, 0.900 at step 10" in said
    assert "Training waited 10.0% of the time, generation 5.0% (engines idle 10.0%)" in said
    assert str(scene.folder) in said
    assert "resume=" not in said


def test_the_summary_counts_what_was_not_trained_on(scene: Scene, end: End) -> None:
    rewards = {"failed": {"raised": 1400}}
    scene.look(queue={"abandoned": {"reward": 6, "prompt": 1}}, rollouter_0=replica(rewards=rewards), last=True)
    expected = "7 prompts were abandoned (reward 6, prompt 1) and 1,400 responses got no score (raised 1,400): see "
    assert f"{expected}{scene.folder / 'fully_async_training.log'}" in end("finished")


def resumed(elapsed: float, step: int, **shares: float) -> dict[str, Any]:
    spans = {"elapsed": elapsed, **{name: share * elapsed for name, share in shares.items()}}
    return {"global_steps": step, "recorded_until": 28, "spans": spans}


def test_replayed_steps_are_not_part_of_the_final_verdict(scene: Scene, end: End) -> None:
    scene.look(trainer=resumed(90.0, 27, train=1.0), rollouter_0=replica(elapsed=90.0, generate=0.05))
    assert "Training waited" not in end("stopped"), "only replayed steps so far"
    scene.look(trainer=resumed(94.0, 29, train=1.0), rollouter_0=replica(elapsed=94.0, generate=0.05))
    trainer, rollouter = (
        resumed(104.0, 33, train=99 / 104, wait_batch=5 / 104),
        replica(elapsed=104.0, generate=14.7 / 104),
    )
    scene.look(trainer=trainer, rollouter_0=rollouter, last=True)
    assert "Training waited 50.0% of the time, generation 0.0% (engines idle" in (said := end("finished"))
    assert "; generation-bound: 50%" in said


def test_a_summary_without_any_scores_says_why_and_gives_no_advice(scene: Scene, end: End) -> None:
    counts = RewardCounts("my_reward.py")
    for text in ("no key 'answer' in the row" + "!" * 500, "another"):
        counts.settle(failed("KeyError", text, "Traceback (most recent call last):\n  ..."), 0.1)
    scene.look(
        MetricsRow("eval", 0, {"eval/reward": 0.5}),
        MetricsRow("eval", 5, {"eval/reward": math.nan}),
        trainer={"spans": {"elapsed": 30.0, "wait_batch": 29.0, "train": 1.0}},
        rollouter_0=replica(elapsed=30.0, generate=1.0, rewards=counts.snapshot()),
        last=True,
    )
    said = end("finished")
    assert "; rewards failed: 2 of 2 responses got no score (KeyError 2); " in said and "-bound" not in said
    assert "2 responses got no score (KeyError 2): first KeyError: no key 'answer' in the row!!" in said
    assert "Traceback" not in said and max(map(len, said.splitlines())) < 400
    assert "nan" not in said and scene.view.snapshots[-1].eval_curve == [(0, 0.5)]


def test_the_final_verdict_covers_the_whole_run_and_is_recorded(scene: Scene, end: End) -> None:
    waited, trained = {"elapsed": 900.0, "wait_batch": 700.0}, {"elapsed": 1000.0, "wait_batch": 701.0, "train": 99.0}
    scene.look(trainer={"spans": waited}, rollouter_0=replica(elapsed=900.0, generate=1.0))
    scene.now += 100
    rollouter = replica(elapsed=1000.0, generate=0.95)
    scene.look(trainer={"spans": trained}, rollouter_0=rollouter)
    lately = scene.view.snapshots[-1].verdict
    scene.look(trainer={"spans": trained}, rollouter_0=rollouter, last=True)
    *before, closing = read_metrics(scene.folder, "pulse")
    assert lately.startswith("training-bound") and closing["verdict"].startswith("generation-bound: 70%")
    assert closing["last"] and not any("last" in row for row in before)
    assert read_metrics(scene.folder, "statistics")[-1]["run"] == {"verdict": closing["verdict"]}
    assert f"; {closing['verdict']}\n" in end("finished")


def test_the_summary_of_a_stopped_run_names_the_checkpoint_and_the_resume_command(scene: Scene, end: End) -> None:
    scene.look(step_row(3), trainer={"saved_step": 3})
    said = end("stopped")
    assert "Stopped at step 3 of 10" in said
    assert f"The checkpoint of step 3 is there; continue with: freewheel train resume={scene.folder}" in said
    scene.account._saved_step = 0
    said = end("failed", RuntimeError("the GPU fell off"))
    assert "RuntimeError: the GPU fell off" in said
    assert f"No checkpoint yet; continue with: freewheel train resume={scene.folder}" in said
    scene.account._started = None
    assert "resume=" not in end("failed", OSError("no such model")), "there is nothing to resume"
    assert "resume=" in end("stopped")
    (scene.folder / "journal.sqlite").touch()
    assert "resume=" in end("failed", OSError("it died while it was started"))


def test_a_pulse_is_recorded_at_most_once_a_second(scene: Scene) -> None:
    for _ in range(30):
        scene.look(queue={"queue_size": 3, "in_progress": 2, "version": 5}, sync={"published_version": 4})
        scene.now += 0.1
    pulses = read_metrics(scene.folder, "pulse")
    assert 3 <= len(pulses) <= 4
    assert {(row["queue_size"], row["in_progress"], row["version"]) for row in pulses} == {(3, 2, 5)}
    assert all(row["published_version"] == 4 for row in pulses)
    scene.account.record_syncs([{"version": 3, "took_s": 0.5}])
    assert [(row["version"], row["took_s"]) for row in read_metrics(scene.folder, "sync")] == [(3, 0.5)]
