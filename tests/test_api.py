"""The Python API: every block of docs/api.md runs, and the arguments of `train` become the settings of the run."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

import freewheel as fw
from freewheel import api
from freewheel.data.tasks.word_problems import model_path
from freewheel.inspect.run import find_run, inspect
from freewheel.observe.run_folder import CONFIG, METRICS
from freewheel.runtime import placement
from freewheel.runtime.account import RunResult
from freewheel.runtime.config_files import to_config
from freewheel.runtime.start import RunRequest, load_run, make_plan, write_config
from freewheel.trainer.checkpoint import RunLock
from freewheel.utils.registry import find_object, kept_in_memory

from .documents import DOCS, blocks
from .ray_runs import count_steps, wait_until

ROOT = Path(__file__).parent.parent
WAIT_S = 200.0
ROWS = [{"prompt": f"Tom has {a} apples, buys 3 and finds 2. How many apples is that?", "answer": a} for a in range(9)]
SMALL = {
    "trainer": {"total_steps": 2, "groups_per_step": 4},
    "rollout": {"n": 4, "max_new_tokens": 20, "device": "cpu"},
    "trainer.device": "cpu",
}


def importable_reward(response: str, row: dict[str, Any]) -> float:
    return float(len(response))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(placement, "_ask_smi", lambda: "")  # ignore this machine's GPUs
    return tmp_path


class Drive:
    """Replaces the coordinator: records each request and returns the outcome that the test chose."""

    def __init__(self) -> None:
        self.requests: list[RunRequest] = []
        self.found: dict[str, Any] = {}
        self.outcome: Any = "finished"
        self.error: BaseException | None = None
        self.refusal: BaseException | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def make(self, request: RunRequest, shown: Any) -> Any:
        make_plan(request.config).check()
        return SimpleNamespace(run=lambda: self.run(request), request_stop=self.may_end.set)

    def run(self, request: RunRequest) -> RunResult:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        write_config(request.config)
        for key in (request.config.reward.function, request.config.trainer.trainer_class):
            if key is not None:
                self.found[key] = find_object("key", key)
        assert self.may_end.wait(WAIT_S)
        folder = Path(request.config.run_dir or "")
        return RunResult(outcome=self.outcome, run_dir=folder, steps=0, error=self.error)

    @property
    def config(self) -> fw.TrainConfig:
        return self.requests[-1].config


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    stand_in = Drive()
    monkeypatch.setattr(api, "_make_main", stand_in.make)
    return stand_in


# -- the package ------------------------------------------------------------------------------------------------------


def test_every_public_name_exists_and_has_its_place_on_the_reference_page():
    page = (DOCS / "api.md").read_text()
    for name in fw.__all__:
        assert getattr(fw, name).__name__ == name
        assert re.search(rf"\b{name}\b", page), name
    assert len(fw.__all__) <= 16
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        _ = fw.tran


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_the_blocks_of_the_reference_page_run_one_after_the_other(cluster: None, capsys: pytest.CaptureFixture[str]):
    """They train, stop, resume, evaluate and judge in one process, with functions of `__main__`."""
    names: dict[str, Any] = {"__name__": "__main__"}
    page = [block for block in blocks("python") if block.page.name == "api.md"]
    assert len(page) >= 7
    for block in page:
        exec(compile(block.code, block.where, "exec"), names)
    report = inspect(find_run(str(names["run"].run_dir)))  # it was stopped and resumed
    assert not report.violations and report.steps == names["run"].steps
    assert "in_memory:score" in (names["run"].run_dir / CONFIG).read_text()
    assert "step 2/2" in capsys.readouterr().out


@pytest.mark.timeout(400)
def test_a_script_that_gets_sigterm_saves_ends_ray_and_is_resumed_with_its_function_given_again(
    cluster: None, tmp_path: Path
):
    """Its process group gets it, as from `timeout` and service managers. The chaos suite has Ctrl-C."""
    (tmp_path / "script.py").write_text(
        "import freewheel as fw\n"
        f"rows = {ROWS!r}\n"
        f"config = {SMALL!r} | {{'trainer.total_steps': 1000}}\n"
        "run = fw.train(data=rows, reward=lambda response, row: len(response) % 3, config=config, run_dir='run')\n"
        "print('END', run.status, run.steps, run.model_path.name)\n"
    )
    command = [sys.executable, "script.py"]
    script = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    family = [psutil.Process(script.pid)]
    try:
        wait_until(lambda: count_steps(tmp_path / "run") >= 1 or script.poll() is not None)
        family += family[0].children(recursive=True)
        os.killpg(script.pid, signal.SIGTERM)
        out, _ = script.communicate(timeout=WAIT_S)
        gone, alive = psutil.wait_procs(family, timeout=30)
        assert len(gone) >= 5 and alive == [], "the script, Ray's own processes and the actors"
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    (said,) = [line for line in out.splitlines() if line.startswith("END")]
    steps = count_steps(tmp_path / "run")
    assert said == f"END stopped {steps} step_{steps:06d}", "Ray was not among the processes that got the signal"
    assert f"freewheel train resume={tmp_path / 'run'}" in out
    again = {"trainer.total_steps": steps + 1}
    assert fw.Run("run").resume(again, reward=lambda response, row: 1.0, show="off").status == "finished"
    assert not inspect(find_run(str(tmp_path / "run"))).violations


@pytest.mark.timeout(300)
async def test_evaluation_takes_a_model_object_inside_an_event_loop_and_sees_the_row_as_it_was_given():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    seen: list[dict[str, Any]] = []

    async def score(response: str, row: dict[str, Any]) -> dict[str, float]:
        seen.append(row)
        return {"score": 2.0 if row["answer"] == 0 else 1.0, "length": len(response)}

    threads = torch.get_num_threads()
    short = {"rollout.max_new_tokens": 8}
    one = fw.evaluate(model, ROWS[:4], score, tokenizer=tokenizer, config=short)
    assert (torch.get_num_threads() == threads and "OMP_NUM_THREADS" not in os.environ) or threads == 1
    assert one.mean == 1.25 and one.scores == [[2.0], [1.0], [1.0], [1.0]] and one.failed == 0
    assert one.stderr == pytest.approx(0.25)
    assert one.parts["length"] == sum(len(text) for (text,) in one.responses) / 4
    assert sorted(row["prompt"] for row in seen) == sorted(row["prompt"] for row in ROWS[:4])
    for embedded in ("embedded", None):
        assert fw.evaluate(embedded, ROWS[:4], score, config=short).responses == one.responses


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "nowhere"}, "model = 'nowhere': there is no such folder"),
        ({"model": "empty"}, "model = 'empty': it has neither"),
        ({"model": "hub/id"}, "task = None: a model without a run has no task"),
        ({"prompts": 0}, "prompts = 0: nothing would be evaluated"),
        ({"model": "run"}, "data = None: the run names no held-out prompts"),
        ({"task": "rows", "data": "run/rows.jsonl"}, "data.task = 'rows': its prompts are too long for this model"),
    ],
    ids=["no folder", "no model", "no task", "no prompts", "no held-out rows", "long prompts"],
)
def test_an_evaluation_that_is_refused_names_arguments_and_keys(elsewhere: Path, given: dict[str, Any], said: str):
    (elsewhere / "empty").mkdir()
    data = {"task": "rows", "train": "run/rows.jsonl"}
    write_config(to_config({"run_dir": "run", "data": data, "rollout": {"max_new_tokens": 20}}))
    shutil.copytree(model_path(), elsewhere / "run/final")
    row = {"prompt": "6 + 9 = " * 30, "data_source": "openai/gsm8k", "answer": "2"}
    (elsewhere / "run/rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(fw.ConfigError) as refused:
        fw.evaluate(**given)
    assert str(refused.value).startswith(said)


# -- what train is given ----------------------------------------------------------------------------------------------


def test_rows_become_private_files_and_a_lambda_stays_in_memory(drive: Drive, elsewhere: Path):
    reward = lambda response, row: 1.0  # noqa: E731
    run = fw.train(data=iter(ROWS), eval_data=ROWS[:2], reward=reward, config=SMALL, run_dir="mine", show="off")
    config, folder = drive.config, elsewhere / "mine"
    assert (config.data.task, config.reward.function) == ("rows", "in_memory:lambda")
    assert drive.found["in_memory:lambda"] is reward
    assert [json.loads(line) for line in Path(config.data.train or "").read_text().splitlines()] == ROWS
    assert Path(config.data.eval or "") == folder / "data/eval.jsonl"
    for path in (folder, folder / "data"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "data/train.jsonl").stat().st_mode) == 0o600
    assert "lambda response" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert run.status == "finished" and run.run_dir == folder
    with pytest.raises(fw.ConfigError, match="in_memory"):
        find_object("reward.function", "in_memory:lambda")  # the table is empty again after the run


@pytest.mark.parametrize(
    "config",
    [
        {"trainer.total_steps": 7},
        {"trainer": {"total_steps": 7}},
        fw.TrainConfig(seed=0),
        "seven.yaml",
        Path("seven.yaml"),
    ],
    ids=["flat", "nested", "TrainConfig", "file", "path"],
)
def test_a_config_is_settings_a_file_or_an_object(drive: Drive, elsewhere: Path, config: Any):
    (elsewhere / "seven.yaml").write_text(yaml.safe_dump({"trainer": {"total_steps": 7}}))
    fw.train(config=config, show="off")
    assert drive.config.trainer.total_steps == (40 if isinstance(config, fw.TrainConfig) else 7)
    assert drive.config.data.task == "word_problems" and drive.config.model.path == "embedded"


@pytest.mark.parametrize("form", ["flat", "nested", "TrainConfig", "file"])
@pytest.mark.parametrize(("task", "used"), [("word_problems", "rows"), ("my_tasks:Mine", "my_tasks:Mine")])
def test_given_rows_are_read_by_the_configured_task_unless_it_makes_its_own(
    drive: Drive, elsewhere: Path, form: str, task: str, used: str
):
    (elsewhere / "my_tasks.py").write_text("from freewheel.data.tasks.rows import Rows as Mine\n")
    sys.path.append(str(elsewhere))
    nested = {"data": {"task": task}, "rollout": {"max_new_tokens": 20}}
    (elsewhere / "task.yaml").write_text(yaml.safe_dump(nested))
    flat = {"data.task": task, "rollout.max_new_tokens": 20}
    try:
        config = {"flat": flat, "nested": nested, "TrainConfig": to_config(nested), "file": "task.yaml"}[form]
        fw.train(data=ROWS, reward=importable_reward, config=config, run_dir="run", show="off")
    finally:
        sys.modules.pop("my_tasks", None)
    assert (drive.config.data.task, drive.config.rollout.max_new_tokens) == (used, 20)


def test_objects_in_settings_are_named_where_a_fresh_process_can_import_them(drive: Drive, elsewhere: Path):
    (elsewhere / "rewards_in_a_file.py").write_text("def score(response, row):\n    return 1.0\n")
    sys.path.append(str(elsewhere))
    module = importlib.import_module("rewards_in_a_file")
    from freewheel.trainer.trainer import FullyAsyncTrainer

    class Mine(FullyAsyncTrainer):
        pass

    try:
        fw.train(reward=module.score, config={"trainer": {"trainer_class": Mine}}, show="off")
    finally:
        del sys.modules["rewards_in_a_file"]
    assert drive.config.reward.function == "rewards_in_a_file:score"
    assert drive.config.trainer.trainer_class == "in_memory:Mine" and drive.found["in_memory:Mine"] is Mine


def test_two_objects_of_one_name_are_kept_apart():
    objects: dict[str, Any] = {}
    names = [api._name_object("reward", one, objects) for one in (lambda response: 1, lambda response: 2)]
    assert names == ["in_memory:lambda", "in_memory:lambda_2"] and len(objects) == 2
    with kept_in_memory(objects):  # of a run in the background
        assert api._name_object("reward", lambda response: 3, {}) == "in_memory:lambda_3"
        assert api._name_object("reward", objects["lambda"], {}) == "in_memory:lambda"


def test_a_function_of_the_main_program_is_sent_by_value(monkeypatch: pytest.MonkeyPatch, elsewhere: Path):
    """Other processes have another `__main__`, also when the program is a folder with `__main__.py`."""
    (elsewhere / "__main__.py").touch()
    sys.path.append(str(elsewhere))
    monkeypatch.setattr(sys.modules["__main__"], "importable_reward", importable_reward, raising=False)
    monkeypatch.setattr(importable_reward, "__module__", "__main__")
    assert api._name_object("reward", importable_reward, {}) == "in_memory:importable_reward"


def test_a_function_of_a_module_that_no_other_process_can_import_is_sent_by_value():
    module = ModuleType("not_on_any_path")
    exec("FACTOR = 3\ndef score(response, row):\n    return FACTOR * len(response)\n", module.__dict__)
    sys.modules["not_on_any_path"] = module
    try:
        objects: dict[str, Any] = {}
        assert api._name_object("reward", module.score, objects) == "in_memory:score"
        from ray import cloudpickle

        data = cloudpickle.dumps(objects["score"])
    finally:
        del sys.modules["not_on_any_path"]
    assert cloudpickle.loads(data)("ab", {}) == 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": [{"text": "?"}], "reward": importable_reward}, "row 0: a row has no prompt"),
        ({"data": ["what?"], "reward": importable_reward}, "data.train, row 0 = 'what?': give a mapping"),
        ({"data": [{"prompt": "?", "image": object()}]}, "data.train, row 0 cannot be written as JSON"),
        ({"data": {"train": ROWS}}, "Of several splits give one"),
        ({"data": ROWS}, "there is no rule for its data_source ''"),
        ({"data": []}, "has no rows"),
        ({"data": ROWS, "reward": lambda x: x}, "fit no convention"),
        ({"reward": (lambda lock: lambda response, row: lock)(threading.Lock())}, "cannot be sent to the processes"),
        ({"model": object(), "tokenizer": "x"}, "model.path = <object"),
        ({"model": object()}, "tokenizer = None: a model object has no tokenizer"),
        ({"config": {"trainer.total_step": 1}}, "did you mean trainer.total_steps?"),
        ({"config": "no.yaml"}, "there is no such file: give one, settings, or cluster, default"),
        ({"show": "loud"}, "choose auto, plain or off"),
    ],
)
def test_a_start_that_is_refused_says_why_and_leaves_nothing_behind(
    drive: Drive, elsewhere: Path, given: dict[str, Any], said: str
):
    with pytest.raises((fw.ConfigError, fw.DataError)) as refused:
        fw.train(**given, run_dir="deep/run") if "config" not in given else fw.train(**given)
    assert said in str(refused.value)
    assert not drive.requests and not list(elsewhere.iterdir())


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_raises_with_the_run_and_its_last_error(drive: Drive):
    drive.outcome, drive.error = "failed", MemoryError("out of memory")
    with pytest.raises(fw.RunFailed, match="after step 0: MemoryError: out of memory") as failed:
        fw.train(run_dir="run", show="off")
    assert failed.value.run.status == "failed" and failed.value.run.error is drive.error


def test_a_refusal_in_the_background_is_raised_by_wait_and_takes_its_files_along(drive: Drive, elsewhere: Path):
    drive.refusal = fw.ConfigError("ray.address", "x", "no cluster answers there")
    run = fw.train(data=ROWS, reward=importable_reward, config=SMALL, run_dir="run", background=True)
    with pytest.raises(fw.ConfigError, match="no cluster answers"):
        run.wait(WAIT_S)
    assert not (elsewhere / "run").exists()


def test_one_run_at_a_time_and_stop_ends_it(drive: Drive):
    drive.may_end.clear()
    drive.outcome = "stopped"
    run = fw.train(run_dir="run", background=True)
    assert run.status == "running" and run.wait(0.01) is run
    with pytest.raises(fw.FreewheelError, match="already trains"):
        fw.train(run_dir="other", show="off")
    assert run.stop(WAIT_S).status == "stopped"
    fw.train(run_dir="other", show="off")


def test_a_folder_that_does_not_exist_is_no_run(elsewhere: Path):
    with pytest.raises(fw.ConfigError, match=r"run_dir = '.*typo': there is no such folder"):
        fw.Run(elsewhere / "typo")


def test_a_run_of_another_process_is_not_waited_for_or_stopped_in_silence(elsewhere: Path):
    run = fw.Run(elsewhere)
    assert run.wait() is run.stop() is run
    with RunLock(elsewhere):
        assert run.status == "running"
        for ask in (run.wait, run.stop):
            with pytest.raises(fw.FreewheelError, match=rf"process {os.getpid()} on .*SIGTERM"):
                ask()


def test_a_resumed_run_remembers_its_function_and_another_process_must_give_it_again(drive: Drive, elsewhere: Path):
    reward = lambda response, row: 1.0  # noqa: E731
    run = fw.train(data=ROWS, reward=reward, config=SMALL, run_dir="run", show="off")
    run.resume({"trainer.total_steps": 5}, show="off")
    assert drive.requests[-1].resume and drive.config.trainer.total_steps == 5
    assert drive.found["in_memory:lambda"] is reward
    with pytest.raises(fw.ConfigError, match=r"in no file.*resume\(reward=the_function\).*reward.function=module:name"):
        fw.Run("run").resume(show="off")
    fw.Run("run").resume(reward=importable_reward, show="off")
    assert any("reward.function: in_memory:lambda → " in line for line in drive.requests[-1].changed)


def test_the_files_of_a_run_move_with_its_folder(drive: Drive, elsewhere: Path):
    fw.train(data=ROWS, reward=importable_reward, config=SMALL, run_dir="before", show="off")
    moved = (elsewhere / "before").rename(elsewhere / "after")
    assert load_run(moved).data.train == str(moved / "data/train.jsonl")
    fw.Run(moved).resume(show="off")
    assert (drive.requests[-1].changed, drive.config.run_dir) == ([], str(moved))


def test_metrics_have_one_row_per_step_with_its_evaluation(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"kind": "eval", "step": 0, "eval/reward": 0.5},
        {"kind": "step", "step": 1, "loss": 2.0},
        {"kind": "statistics", "step": 1, "queue": {}},
        {"kind": "eval", "step": 1, "eval/reward": 0.75},
    ]
    (elsewhere / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = fw.Run(elsewhere)
    assert run.metrics == [{"step": 0, "eval/reward": 0.5}, {"step": 1, "loss": 2.0, "eval/reward": 0.75}]
    assert (run.steps, run.status, run.dashboard_url, run.error) == (1, "stopped", None, None)

    class DataFrame(list[Any]):
        def set_index(self, name: str) -> Any:
            return name, list(self)

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    assert run.to_pandas() == ("step", run.metrics)


def test_steps_reads_only_what_was_appended_since_and_a_new_file_from_its_start(elsewhere: Path):
    def rows(*steps: int) -> str:
        return "".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in steps)

    path, run = elsewhere / METRICS, fw.Run(elsewhere)
    assert run.steps == 0
    path.write_text(rows(*range(1, 10_000)) + '{"kind": "pulse", "step": 20000}\n{"kind": "eval", "step": "x"}\n7\n')
    assert run.steps == 9_999
    before = psutil.Process().io_counters().read_chars
    with path.open("a") as file:
        file.write(rows(10_000) + '{"kind": "step", "st')
    assert f"at step {run.steps}>" in repr(run) and run.steps == 10_000
    assert psutil.Process().io_counters().read_chars - before < path.stat().st_size / 2
    path.unlink()
    path.write_text(rows(3))
    assert run.steps == 3


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
async def test_the_quickstart_notebook_learns_and_its_saved_outputs_belong_to_its_cells(cluster: None):
    """Its cells run inside an event loop, as in Jupyter."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module([*body, last], []), "quickstart.ipynb", "exec"), names)
        shows = isinstance(last, ast.Expr | ast.For) or "fw.train" in "".join(cell["source"])
        assert shows == bool(cell["outputs"]), cell["source"]
    right = [row["eval/right"] for row in names["run"].metrics if "eval/right" in row]
    assert right[-1] > right[0] and (names["run"].run_dir / "final/model.safetensors").exists()


def test_the_quickstart_script_asks_what_the_notebook_asks(drive: Drive, monkeypatch: pytest.MonkeyPatch):
    scores = SimpleNamespace(mean=0.5)
    monkeypatch.setattr(fw.Run, "evaluate", lambda run, rows: scores)
    monkeypatch.setattr(fw.Run, "model_path", Path("final"))
    names = runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    assert names["score"]("2+2=4#6", {"answer": 6}) == 1 and drive.config.trainer.total_steps == 20
