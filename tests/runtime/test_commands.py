"""`freewheel train` and `freewheel eval` as users meet them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest
from typer.testing import CliRunner

from freewheel.cli import app
from freewheel.cli import train as commands
from freewheel.data.tasks.word_problems import model_path
from freewheel.errors import ConfigError
from freewheel.observe.run_folder import JOURNAL
from freewheel.queue.journal import Journal
from freewheel.runtime import placement
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import to_config, to_yaml
from freewheel.runtime.evaluation import eval_config, find_target
from freewheel.runtime.run_plan import resolve
from freewheel.runtime.start import make_plan, new_run, resume, split_resume, write_config
from freewheel.trainer.checkpoint import STATE, RunLock, write_state

ROOT = Path(__file__).parent.parent.parent
WAIT_S = 60.0
"""Longer than anything here takes on a busy machine."""


class Runs:
    """Replaces `FullyAsyncMain` and keeps its arguments."""

    given: ClassVar[dict[str, Any]]
    exit_code = 0
    summary = ("done",)

    def __init__(self, **given: Any) -> None:
        type(self).given = given

    def run(self) -> Runs:
        return self


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(placement, "_ask_smi", lambda: "")  # ignore this machine's GPUs
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> type[Runs]:
    class ThisRun(Runs):
        given: ClassVar[dict[str, Any]] = {}

    module = ModuleType("freewheel.runtime.main")
    module.FullyAsyncMain = ThisRun  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "freewheel.runtime.main", module)
    return ThisRun


def freewheel(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def refused(*arguments: object) -> str:
    done = freewheel(*arguments)
    assert done.exit_code == 2 and not done.stdout, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("freewheel: error: ")
    return str(line)


# -- train ------------------------------------------------------------------------------------------------------------


def test_train_starts_a_run_with_config_plan_and_new_folder(runs: type[Runs], elsewhere: Path):
    done = freewheel("train", "trainer.total_steps=3", "rollout.n=4")
    assert done.exit_code == 0, done.output
    config, plan = runs.given["config"], runs.given["plan"]
    assert (config.trainer.total_steps, config.rollout.n, runs.given["resume"]) == (3, 4, False)
    assert plan.config == config and plan.samples_per_step == 128
    assert Path(config.run_dir).parent == Path("runs")
    runs.exit_code = 130
    assert freewheel("train").exit_code == 130


def test_an_invalid_setting_is_one_line_and_starts_nothing(runs: type[Runs], elsewhere: Path):
    assert "trainer.total_step = 3: unknown key; did you mean trainer.total_steps?" in refused(
        "train", "trainer.total_step=3"
    )
    assert "trainer.device = 'cuda'" in refused("train", "trainer.device=cuda") or make_plan(TrainConfig()).machine.gpus
    assert "--config-name = 'nope'" in refused("train", "--config-name", "nope")
    assert not runs.given and not list(elsewhere.iterdir())


CODE = """
NUMBER = 3
class Other: pass
class Made:
    def __init__(self, size): pass
    def __call__(self, response, row): return 0.0
class Model:
    def __init__(self): raise RuntimeError("loaded where nothing is scored")
    def __call__(self, response, row): return 0.0
class Mute:
    pass
def score(response, row): return 0.0
def wants(response, row, temperature): return 0.0
def one(trainer_stats): pass
def two(trainer_stats, rollouter_stats): pass
from freewheel.rollout.rollouter import Rollouter
from freewheel.trainer.trainer import FullyAsyncTrainer
class MyRollouter(Rollouter): pass
class MyTrainer(FullyAsyncTrainer): pass
class NoArguments(FullyAsyncTrainer):
    def __init__(self): pass
"""


@pytest.fixture
def code(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's modules in the working directory, by names that no other test has."""
    name = f"code_{elsewhere.name}"
    (elsewhere / f"{name}.py").write_text(CODE)
    (elsewhere / f"broken_{name}.py").write_text("1 / 0\n")
    return name


GOOD = '{"prompt": "1 + 1?", "data_source": "openai/gsm8k", "answer": "2"}\n'
FILES = {
    "good.jsonl": GOOD,
    "bad.jsonl": GOOD + '{"prompt": "cut o',
    "empty.jsonl": "",
    "no_prompt.jsonl": GOOD + '{"text": "1 + 1?", "answer": "2"}\n',
    "no_truth.jsonl": GOOD + '{"prompt": "1 + 1?", "data_source": "openai/gsm8k"}\n',
    "no_model.jsonl": GOOD + '{"prompt": "1 + 1?", "reward_model": "2"}\n',
    "no_source.jsonl": '{"prompt": "1 + 1?", "answer": "2"}\n',
}


@pytest.fixture
def files(elsewhere: Path) -> None:
    for name, text in FILES.items():
        (elsewhere / name).write_text(text)
    (elsewhere / "folder").mkdir()


ROWS = ("data.task=rows", "model.path=org/model", "data.train=good.jsonl")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("reward.function=no_such_{}:score", "there is no module no_such_"),
        ("reward.function={}:missing", "has no missing; it has "),
        ("reward.function={}:NUMBER", "it is of type int; give a function (response, row)"),
        ("reward.function={}:wants", "it needs 'temperature', which no convention has"),
        ("reward.function={}:Made", "freewheel calls it without arguments"),
        ("reward.function={}:Mute", "it is of type Mute; give a function"),
        ("reward.function=broken_{}:score", "failed: ZeroDivisionError"),
        ("reward.function={}:", "give module:name"),
        ("rollout.engine=sglang", "choose native, vllm, or give module:name of your own"),
        ("rollout.engine=no_such_{}:Engine", "there is no module no_such_"),
        ("rollout.engine={}:Other", "it must be a subclass of freewheel.rollout.engine_factories.EngineFactory"),
        ("rollout.rollouter_class=no_such_{}:Mine", "there is no module no_such_"),
        ("trainer.trainer_class=defualt", "choose default, or give module:name"),
        ("rollout.rollouter_class={}:Missing", "has no Missing"),
        ("rollout.rollouter_class={}:Other", "it must be a subclass of Rollouter"),
        ("trainer.trainer_class={}:MyRollouter", "it must be a subclass of FullyAsyncTrainer"),
        ("trainer.trainer_class={}:NoArguments", "which it does not accept"),
        ("trainer.trainer_class=broken_{}:Mine", "failed: ZeroDivisionError"),
        ("algorithm.loss=cispo", "choose ppo_clip, or give module:name"),
        ("algorithm.loss={}:missing", "has no missing"),
        ("algorithm.advantage={}:NUMBER", "it cannot be called"),
        ("observe.custom_monitor=no_such_{}:monitor", "there is no module no_such_"),
        ("observe.custom_monitor={}:missing", "has no missing"),
        ("observe.custom_monitor={}:NUMBER", "it cannot be called: name a function"),
        ("observe.custom_monitor={}:one", "called with (trainer_stats, rollouter_stats), which it does not accept"),
        ("data.task=broken_{}:task", "failed: ZeroDivisionError"),
        ("model.path=/nonexist", "there is no such folder: give a HF folder, a hub id or embedded"),
        ("model.path=./nonexist", "there is no such folder"),
        ("model.path=models/of/mine", "there is no such folder"),
        ("model.path=folder", "it has no config.json of a model"),
        ("model.path=good.jsonl", "that is a file"),
        ("model.tokenizer=/nonexist", "there is no such folder"),
        ("data.train_split=dev", "word_problems has train and test"),
        ("data.eval_split=dev", "word_problems has train and test"),
        *(
            (f"{key}={file}", said)
            for key in ("data.train", "data.eval")
            for file, said in (
                ("nofile.jsonl", "there is no such file as /"),
                ("bad.jsonl", "bad.jsonl, line 2 is not JSON"),
                ("empty.jsonl", "has no rows: give a file with at least one"),
                ("no_prompt.jsonl", "row 1: a row has no prompt, messages or question"),
                ("no_truth.jsonl", "row 1 cannot be scored: ground_truth = None"),
                ("no_model.jsonl", "row 1: reward_model = '2': give an object"),
                ("no_source.jsonl", "row 0 cannot be scored: there is no rule for its data_source ''"),
                ("folder", "is a folder without data"),
            )
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(
    code: str, files: None, runs: type[Runs], elsewhere: Path, setting: str, said: str
):
    setting = setting.format(code)
    key, _, value = setting.partition("=")
    more = ROWS if key in ("data.train", "data.eval") else ()
    text = refused("train", *more, setting)
    assert f"{key} = {value!r}: " in text and said in text
    assert refused("train", "--dry-run", *more, setting) == text
    assert not runs.given and not (elsewhere / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        (["reward.function={}:Model", "rollout.rollouter_class={}:MyRollouter", "trainer.trainer_class={}:MyTrainer",
          "observe.custom_monitor={}:two"], None),
        ([*ROWS, "data.train=no_truth.jsonl", "reward.function={}:score"], 2),
        (["data.task=rows", "model.path=org/model", "data.train=org/rows", "data.eval=org/rows"], None),
    ],
    ids=["code that is only instantiated in a run", "rows without ground truth", "names on the hub"],
)  # fmt: skip
def test_usable_settings_start_a_run(files: None, code: str, runs: type[Runs], settings: list[str], rows: int | None):
    done = freewheel("train", *(setting.format(code) for setting in settings))
    assert done.exit_code == 0, done.output
    assert rows is None or runs.given["plan"].rows == rows


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trainer.groups_per_step=8"], ["8 groups × 8 responses", "lags at most 5 versions", "KV cache", "an epoch"]),
        (["--config-name", "cluster"], ["FullyAsyncTrainer × 8", "FSDP2"]),
        (["--config-name", "cluster", "ray.address=null"], ["trainer.nnodes = 2: several machines need a Ray cluster"]),
    ],
)
def test_a_dry_run_prints_the_plan_and_what_a_run_refuses_and_leaves_nothing(
    runs: type[Runs], elsewhere: Path, arguments: list[str], parts: list[str]
):
    done = freewheel("train", "--dry-run", *arguments)
    assert done.exit_code == 0 and all(part in done.stdout for part in parts), done.output
    assert not runs.given and not list(elsewhere.iterdir())
    if "ray.address=null" in arguments:
        assert "trainer.nnodes = 2" in refused("train", *arguments)


def test_a_dry_run_without_a_plan_lists_every_error(runs: type[Runs], elsewhere: Path):
    wrong = ("rollout.n=0", "seed=-1", "model.path=/no/where")
    done = freewheel("train", "--dry-run", *wrong)
    assert done.exit_code == 2 and not done.stdout, done.output
    lines = done.stderr.splitlines()
    assert [line.partition(" = ")[0] for line in lines] == [
        f"freewheel: error: {setting.partition('=')[0]}" for setting in wrong
    ]
    assert lines[0] == refused("train", *wrong), "which a run is refused for"
    assert not runs.given and not list(elsewhere.iterdir())


def test_configuration_files_and_modules_of_the_user_are_found(runs: type[Runs], elsewhere: Path):
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / "first.yaml").write_text("seed: 5\ndata: {task: task_of_mine:task}\n")
    (elsewhere / "task_of_mine.py").write_text(
        "from freewheel.data.tasks.word_problems import WordProblems\ntask = WordProblems(max_new_tokens=33)\n"
    )
    assert freewheel("train", "--config-path", "mine", "--config-name", "first", "rollout.n=2").exit_code == 0
    config, plan = runs.given["config"], runs.given["plan"]
    assert (config.seed, config.rollout.n, plan.max_new_tokens) == (5, 2, 33)


@pytest.mark.parametrize("missing", ["torch", "ray"])
def test_missing_packages_are_named_with_the_command_to_install_them(missing: str, monkeypatch: pytest.MonkeyPatch):
    found = commands.find_spec
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == missing else found(name))
    text = refused("train")
    assert missing in text and "pip install 'freewheel[train]'" in text
    assert freewheel("train", "--dry-run").exit_code == 0, "a plan needs no torch"


def test_the_three_programs_are_one(elsewhere: Path):
    ways = (
        [sys.executable, "-m", "freewheel", "train"],
        [sys.executable, "-m", "freewheel.fully_async_main"],
        [sys.executable, str(ROOT / "fully_async_main.py")],
    )
    more = ["--dry-run", "--config-name", "sync", "trainer.total_steps=5", "run_dir=here"]
    begun = [subprocess.Popen([*way, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for way in ways]
    first, *others = [(*program.communicate(timeout=WAIT_S), program.returncode) for program in begun]
    assert first[2] == 0 and b"sync, 5 steps" in first[0], first
    assert others == [first, first]
    assert not list(elsewhere.iterdir())


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(elsewhere: Path) -> Path:
    config = msgspec.structs.replace(TrainConfig(), run_dir="runs/one", seed=4)
    write_config(config)
    return Path("runs/one")


def test_a_resumed_run_keeps_its_folder_and_settings(runs: type[Runs], run_dir: Path):
    assert freewheel("train", f"resume={run_dir}", "trainer.total_steps=80").exit_code == 0
    config = runs.given["config"]
    assert runs.given["resume"] is True
    assert (config.run_dir, config.seed, config.trainer.total_steps) == ("runs/one", 4, 80)
    assert runs.given["changed"] == ["trainer.total_steps: 40 → 80"]


def test_resume_is_given_once_among_the_overrides():
    assert split_resume(["mode=sync", "resume=runs/a", "seed=1"]) == ("runs/a", ["mode=sync", "seed=1"])
    assert split_resume(["+resume='runs/a b'"]) == ("runs/a b", [])
    assert split_resume(["trainer.resume=x"]) == (None, ["trainer.resume=x"])
    assert "resume = 'a, b': name one run's folder" in refused("train", "resume=a", "resume=b")
    assert "name one run's folder" in refused("train", "resume=")
    assert "--resume = 'runs/a': it is a setting, not a flag: write resume=runs/a" in refused(
        "train", "--resume", "runs/a"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.temperature=0.7", "rollout.temperature: 1.0 → 0.7 (groups that are stored were made with the old"),
        ("reward.function=mine:score", "reward.function: null → mine:score (groups that are stored keep the rewards"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low: 0.2 → 0.1 (also for steps since the last checkpoint"),
        ("optimizer.lr=1e-5", "optimizer.lr: auto → 1e-05 (also for steps since the last checkpoint"),
        ("async_training.sync_every_steps=2", "async_training.sync_every_steps: 1 → 2 (steps that were trained keep"),
        ("data.eval_split=validation", "data.eval_split: test → validation (scores from now on are of other prompts)"),
        ("observe.tensorboard=true", "observe.tensorboard: false → true"),
        ("rollout.replicas=2", "rollout.replicas: auto → 2"),
        ("rollout.n_gpus_per_node=0", "rollout.n_gpus_per_node: auto → 0"),
        ("mode=sync", "mode: fully_async → sync"),
    ],
)
def test_changed_settings_of_a_resumed_run_are_reported_with_their_consequence(run_dir: Path, override: str, said: str):
    (line,) = resume(str(run_dir), [override]).changed
    assert line.startswith(said)
    assert resume(str(run_dir), ["seed=4", "rollout.n=8"]).changed == [], "the same values"


def test_a_running_run_cannot_be_resumed(run_dir: Path):
    before = (run_dir / "config.yaml").read_text()
    with RunLock(run_dir):
        assert "is in use by process" in refused("train", f"resume={run_dir}", "trainer.total_steps=80")
    assert (run_dir / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("data.shuffle=false", "data.shuffle"),
        ("data.limit=5", "data.limit"),
        ("rollout.n=4", "rollout.n"),
        ("trainer.groups_per_step=16", "trainer.groups_per_step"),
        ("model.path=other", "model.path"),
        ("model.lora.rank=4", "model.lora"),
        ("algorithm.name=ppo", "algorithm.name"),
        ("run_dir=other", "run_dir"),
        ("journal.enabled=false", "journal.enabled"),
    ],
)
def test_a_resume_refuses_changes_that_contradict_its_history(run_dir: Path, override: str, key: str):
    with pytest.raises(ConfigError, match="a resumed run keeps") as caught:
        resume(str(run_dir), [override])
    assert caught.value.key == key


def test_a_finished_run_resumes_only_with_more_steps(run_dir: Path):
    saved = run_dir / "checkpoints" / "step_000040"
    saved.mkdir(parents=True)
    write_state(saved, STATE, {})
    resume(str(run_dir), ["trainer.total_steps=40"])  # killed before its final weights were written
    (run_dir / "final").mkdir()
    for steps in (3, 40):
        with pytest.raises(ConfigError, match="the run is at step 40 already: give more to continue") as caught:
            resume(str(run_dir), [f"trainer.total_steps={steps}"])
        assert caught.value.key == "trainer.total_steps"
    assert resume(str(run_dir), ["trainer.total_steps=41"]).changed


def test_a_run_resumes_despite_damaged_checkpoints_if_the_journal_has_every_step(run_dir: Path):
    resume(str(run_dir), [])  # before its first checkpoint
    (run_dir / "checkpoints" / "step_000020").mkdir(parents=True)
    for dry in ([], ["--dry-run"]):
        said = refused("train", *dry, f"resume={run_dir}")
        assert f"resume = '{run_dir}': there is no checkpoint in it that can be loaded" in said
    Journal(run_dir / JOURNAL).close()
    resume(str(run_dir), [])


def test_a_replaced_checkpoint_counts_as_a_checkpoint(run_dir: Path):
    """A kill while one was replaced left it."""
    aside = run_dir / "checkpoints" / "step_000020.replaced"
    aside.mkdir(parents=True)
    assert "there is no checkpoint in it that can be loaded" in refused("train", f"resume={run_dir}"), "damaged, alone"
    write_state(aside, STATE, {})
    resume(str(run_dir), [])
    aside.with_suffix("").mkdir()
    resume(str(run_dir), [])  # next to a damaged one
    with pytest.raises(ConfigError, match="the run is at step 20 already"):
        resume(str(run_dir), ["trainer.total_steps=3"])


def test_a_folder_without_a_run_is_not_resumed(run_dir: Path):
    assert "resume = 'nowhere': there is no such folder" in refused("train", "resume=nowhere")
    assert "there is no config.yaml in it" in refused("train", "resume=runs")
    assert "--config-name = 'sync'" in refused("train", f"resume={run_dir}", "--config-name", "sync")


def test_a_new_run_does_not_use_another_runs_folder(run_dir: Path, elsewhere: Path):
    text = refused("train", "run_dir=runs/one")
    assert "run_dir = 'runs/one'" in text and "resume=runs/one" in text
    (elsewhere / "file").write_text("")
    assert "that is a file" in refused("train", "run_dir=file")
    first = new_run(TrainConfig(), now_s=0)
    write_config(first)
    assert new_run(TrainConfig(), now_s=0).run_dir not in (None, first.run_dir), "two in the same second"


# -- eval -------------------------------------------------------------------------------------------------------------


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_eval_uses_a_runs_final_weights_or_its_last_checkpoint(run_dir: Path):
    with pytest.raises(ConfigError, match="no weights yet"):
        find_target(str(run_dir))
    model_in(run_dir / "best")
    assert find_target(str(run_dir)).path.endswith("best")
    older, newer = (model_in(run_dir / "checkpoints" / f"step_{step:06d}") for step in (9, 10))
    assert find_target(str(run_dir)).path == str(newer)
    final = model_in(run_dir / "final")
    found = find_target(str(run_dir))
    assert found.path == str(final) and found.run is not None and found.run.seed == 4
    named = find_target(str(older))
    assert named.path == str(older) and named.run is not None, "a checkpoint knows the run that it is from"


def test_eval_refuses_a_folder_without_a_model(elsewhere: Path):
    assert "RUN_OR_MODEL = 'nowhere': there is no such folder" in refused("eval", "nowhere")
    (elsewhere / "empty").mkdir()
    assert "neither config.json" in refused("eval", "empty")
    model_in(elsewhere / "model")
    assert "--task = None" in refused("eval", "model")
    assert "RUN_OR_MODEL = 'model'" in refused("eval", "model", "--task", "word_problems"), "config.json says nothing"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompts", "0"], "--prompts = 0: nothing would be evaluated: give 1 or more"),
        (["--prompts", "-1"], "--prompts = -1"),
        (["--samples", "0"], "--samples = 0"),
        (["--samples", "4"], "--samples = 4"),
        (["--temperature", "-1"], "--temperature = -1"),
        (["--data", "a.jsonl"], "--data = 'a.jsonl': word_problems makes its own rows"),
        (["--task", "rows", "--data", "a.jsonl"], "--data = 'a.jsonl': there is no such file as /"),
        (["--task", "nobodys:task"], "--task = 'nobodys:task': there is no module nobodys"),
        (["--engine", "turbo"], "--engine = 'turbo': choose native, vllm, or give module:name of your own"),
        (["--engine", "vllm"], "--engine = 'vllm': vLLM is not installed"),
    ],
)
def test_an_invalid_flag_is_refused_by_its_name(flags: list[str], said: str):
    assert said in refused("eval", "embedded", *flags)


def test_prompts_too_long_for_a_model_are_a_plain_error(elsewhere: Path):
    words = " ".join(["6 + 9 ="] * 400)
    row = {"prompt": words, "data_source": "openai/gsm8k", "answer": "2"}
    (elsewhere / "long.jsonl").write_text(json.dumps(row) + "\n")
    config = json.loads((model_path() / "config.json").read_text())
    shutil.copytree(model_path(), elsewhere / "model")
    (elsewhere / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    (elsewhere / "short.jsonl").write_text(json.dumps(row | {"prompt": " ".join(["6 + 9 ="] * 15)}) + "\n")
    text = refused("eval", "model", "--task", "rows", "--data", "short.jsonl")
    assert "--task = 'rows': its prompts are too long for this model (a prompt has " in text and "64 for both" in text
    done = freewheel("eval", "model", "--task", "rows", "--data", "long.jsonl")
    assert done.exit_code == 2 and "--data = 'long.jsonl': none of 1 prompts is left" in done.stderr


def test_another_engine_starts_with_its_own_defaults_alone_on_its_gpu(run_dir: Path):
    rollout = {"engine": "vllm", "vllm": {"enforce_eager": True}, "gpu_memory_share": 0.2, "n": 4, "replicas": 4}
    run = to_config({"rollout": rollout})
    (run_dir / "config.yaml").write_text(to_yaml(run))
    model_in(run_dir / "final")
    target = find_target(str(run_dir))
    assert eval_config(target).rollout.vllm == {"enforce_eager": True}
    native = eval_config(target, engine="native").rollout
    assert (native.engine, native.vllm, native.gpu_memory_share, native.n) == ("native", {}, "auto", 4)
    assert eval_config(find_target("embedded"), engine="vllm").rollout.engine == "vllm"
    gpu = placement.Machine(cpus=2, memory_bytes=8 << 30, gpus=(placement.Gpu(name="one", memory_bytes=16 << 30),))
    assert [resolve(config, gpu).engines_on_a_gpu for config in (run, eval_config(target))] == [4, 1]


def test_truncated_weights_are_named_with_their_file(elsewhere: Path, runs: type[Runs]):
    shutil.copytree(model_path(), elsewhere / "model")
    with (elsewhere / "model" / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    said = "= 'model': model.safetensors in it is cut short or damaged"
    text = refused("eval", "model", "--task", "word_problems")
    assert f"RUN_OR_MODEL {said}" in text and "copy or fetch it again" in text
    assert f"model.path {said}" in refused("train", "model.path=model")
    assert not runs.given


def test_a_run_is_evaluated_on_its_own_task_by_default(run_dir: Path, elsewhere: Path):
    config = msgspec.convert(
        {"model": {"path": "x", "lora": {}}, "data": {"task": "gsm8k", "train": "a.jsonl", "eval": "b.jsonl"}},
        TrainConfig,
    )
    (run_dir / "config.yaml").write_text(to_yaml(config))
    model_in(run_dir / "final")
    target = find_target(str(run_dir))
    own = eval_config(target, prompts=5)
    assert (own.data.task, own.data.eval, own.eval.prompts, own.model.lora) == ("gsm8k", "b.jsonl", 5, None)
    other = eval_config(target, task="rows", data="c.jsonl")
    assert (other.data.task, other.data.eval) == ("rows", "c.jsonl")


def test_the_untrained_embedded_model_scores_low_and_missing_prompts_are_reported(caplog: pytest.LogCaptureFixture):
    done = freewheel("eval", "embedded", "--prompts", "32", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["mean_reward"] <= 0.25 and found["failed"] == 0
    assert found["prompts"] == 32 and len(found["per_prompt"]) == 32
    again = freewheel("eval", "embedded", "--prompts", "32", "--samples", "2", "--temperature", "1")
    assert again.exit_code == 0 and "best of 2" in again.stdout
    assert "There are only" not in caplog.text
    count = json.loads(freewheel("eval", "embedded", "--prompts", "1000000", "--json").stdout)["prompts"]
    assert f"There are only {count} prompts; 1000000 were requested" in caplog.text
