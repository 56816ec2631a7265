"""The GSM8K example: its data, its reward, its configurations and its picture. The run itself needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from freewheel.judge.verdict import Scored
from freewheel.observe.recorder import Recorder
from freewheel.rollout.reward_functions import Call, load_reward
from freewheel.runtime.config_files import compose

from .programs import Done, run_program

FOLDER = Path(__file__).parent.parent / "examples/gsm8k"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


# -- configurations ---------------------------------------------------------------------------------------------------


def test_the_configurations_evaluate_on_held_out_data_and_differ_only_in_length():
    config = compose(config_path=FOLDER, config_name="config")
    assert config.rollout.engine == "vllm" and config.mode == "fully_async"
    assert config.data.train != config.data.eval is not None
    assert config.reward.function == "reward:score"
    whole, quick = config.to_dict(), compose(config_path=FOLDER, config_name="quick").to_dict()
    differing = {section for section, values in whole.items() if values != quick[section]}
    assert differing == {"trainer", "eval"}
    assert quick["trainer"] | {"total_steps": 0} == whole["trainer"] | {"total_steps": 0}


# -- the reward -------------------------------------------------------------------------------------------------------

GOOD = "He buys 6 * 4 = 24 pens.\nHe has 24 - 3 = 21 left.\n#### 21"


def scored(response: str, finish: Any = "stop") -> dict[str, float]:
    row = {"reward_model": {"ground_truth": "21"}}
    (found,) = load_reward("reward:score").score([Call(text=response, row=row, finish=finish)])
    assert isinstance(found, Scored), found.summary
    return {"score": found.value, **found.parts}


@pytest.mark.parametrize(
    ("response", "finish", "wanted"),
    [
        (GOOD, "stop", {"score": 1.2, "correct": 1, "format": 1, "last_number": 1}),
        (GOOD.replace("#### 21", "#### 20"), "stop", {"correct": 0, "format": 1, "last_number": 0}),
        ("So 24 - 3 = 21 are left.", "stop", {"correct": 0, "format": 0, "last_number": 1}),
        ("#### 21", "stop", {"score": 1, "correct": 1, "format": 0, "last_number": 1}),  # a guess
        (GOOD, "length", {"score": 1, "correct": 1, "format": 0, "last_number": 1}),  # it would have gone on
        (GOOD + "\nOr is it 25?", "stop", {"correct": 1, "format": 0, "last_number": 0}),
        (GOOD + "\n#### 25", "stop", {"correct": 0, "format": 1, "last_number": 0}),
        ("6 * 4 = 24\n####", "stop", {"correct": 0, "format": 0, "last_number": 0}),
        ("", "stop", {"score": 0, "correct": 0, "format": 0, "last_number": 0}),
        ("6 = 6\n#### $21.00 in all", "stop", {"correct": 1, "format": 1, "last_number": 1}),
    ],
)
def test_the_reward_is_high_for_the_answer_and_low_for_its_form(response: str, finish: Any, wanted: dict[str, float]):
    found = scored(response, finish)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["1 + " * 5000, "1" * 20000 + "=", "1+" * 5000 + "1=2", "1," * 9000, "#### " * 4000])
def test_any_response_is_scored(text: str):
    assert scored(text)["correct"] == 0


# -- the data ---------------------------------------------------------------------------------------------------------


def questions(count: int) -> list[dict[str, str]]:
    return [
        {"question": f"What is {n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n:,}"} for n in range(count)
    ]


def test_no_question_is_in_both_splits():
    from prepare import split

    rows = questions(200)
    train, held_out = split(rows + rows[:50], held_out=60, seed=1)  # with duplicates
    asked = {row["question"] for row in train}
    assert len(held_out) == 60
    assert not asked & {row["question"] for row in held_out}
    assert asked | {row["question"] for row in held_out} == {row["question"] for row in rows}


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_the_file():
    from prepare import split

    rows = questions(200)
    _, drawn = split(rows, held_out=20, seed=1)
    assert split(rows[::-1], held_out=20, seed=1)[1] == drawn
    assert split(rows, held_out=20, seed=2)[1] != drawn
    with pytest.raises(SystemExit, match="--held-out 200: the file has 200 questions"):
        split(rows, held_out=200, seed=1)


# -- the picture ------------------------------------------------------------------------------------------------------


def recorded(run: Path, *, evaluations: int = 5, parts: bool = True) -> Path:
    """Record a run with an evaluation every 10 steps, 3 s per step and a start of 90 s."""
    run.mkdir(exist_ok=True)
    now = 1000.0
    recorder = Recorder(run_dir=run, clock=lambda: now)
    recorder.record("event", 0, {"text": "Run directory: here"})
    now += 95.0
    recorder.record("event", 0, {"text": "Started in 90.0 s"})
    for step in range(10 * (evaluations - 1) + 1):
        now += 3.0
        share = step / 40
        values = {"rollout/reward_mean": share}
        if step:
            more = {"reward/correct": share / 20, "reward/format": share} if parts else {}
            recorder.record("step", step, {**values, **more})
        if step % 10 == 0:
            measured = {"correct": (0.003 + share / 20, 0.005), "format": (0.2 + 0.7 * share, 0.02)} if parts else {}
            told = {f"eval/{name}": mean for name, (mean, _) in measured.items()}
            errors = {f"eval/{name}_se": error for name, (_, error) in measured.items()}
            recorder.record("eval", step, {"eval/reward": share, "eval/reward_se": 0.01, **told, **errors})
    recorder.close()
    return run


def plotted(run: Path, *more: object, code: int = 0) -> Done:
    return run_program(sys.executable, FOLDER / "plot.py", run, *more, code=code)


def test_the_picture_and_the_summary_show_correctness_format_and_reward(tmp_path: Path):
    from plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

    correct, form, steps = plotted(recorded(tmp_path / "run"), tmp_path / "images/a.svg").stdout.splitlines()[-3:]
    assert "0.3% ± 0.5 →" in correct and "5.3% ± 0.5" in correct and "+7.1 standard errors" in correct
    assert form.startswith("format") and "+24.7 standard errors" in form
    assert steps.startswith("40 steps; the last row is from minute 3.6")
    picture = ElementTree.parse(tmp_path / "images/a.svg").getroot()
    panels = picture.findall(f"{SVG}g")
    titles = [panel.find(f"{SVG}text").text for panel in panels]  # type: ignore[union-attr]
    assert titles == ["Correct", "In the requested form", "Reward"]
    for panel in panels:
        assert len(panel.findall(f"{SVG}circle")) == 5, "one mark per evaluation"
        assert len(panel.findall(f"{SVG}polygon")) == 1, "one error band"
        assert len(panel.findall(f"{SVG}polyline")) == 2, "held-out and training curves"
    corners = " ".join(shape.get("points", "") for shape in picture.iter()).split()
    places = [tuple(map(float, corner.split(","))) for corner in corners]
    assert len(places) > 100
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in places)
    heights = [float(circle.get("cy", "nan")) for circle in panels[0].findall(f"{SVG}circle")]
    assert heights == sorted(heights, reverse=True), "higher values are drawn higher"


def test_a_run_without_parts_or_with_one_evaluation_is_drawn_and_one_without_is_refused(tmp_path: Path):
    for name, options in (("plain", {"parts": False}), ("short", {"evaluations": 1})):
        done = plotted(recorded(tmp_path / name, **options), tmp_path / f"{name}.svg")
        assert "standard errors" not in done.stdout
        ElementTree.parse(tmp_path / f"{name}.svg")
    assert "it has no evaluation yet" in plotted(tmp_path, code=1).stderr
