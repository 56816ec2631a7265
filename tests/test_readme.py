"""Every command of the README is looked after by a test: here, or in the test that is named beside it.

`RUN_BY` says which are not run as they are typed. A command that is added to the README and not to `RUN_BY` fails, and
so does one that is gone. The same holds for the page that people start with, docs/index.md.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from freewheel.observe.recorder import read_metrics

from .documents import DOCS, ROOT, as_typed, blocks, commands, inline_code

README, START = ROOT / "README.md", DOCS / "index.md"
FREEWHEEL = Path(sys.executable).parent / "freewheel"
PROGRAMS = ("make", "pip", "freewheel", "python", "python3", ".venv/bin/python")
WAIT_S = 250.0
"""Longer than anything here takes on a busy machine."""
PORT = "8099"
"""Of the test judge on the pages; a free one takes its place here."""

pytestmark = [pytest.mark.pages, pytest.mark.timeout(300)]

DEMO = "tests/test_readme.py::test_the_demo_learns_and_its_run_can_be_looked_at_in_every_way_and_goes_on"
RECIPE = "tests/test_readme.py::test_make_runs_what_it_says"
INSTALLED = "tests/test_readme.py::test_the_package_is_what_pip_was_asked_for"
JUDGING = "tests/test_readme.py::test_a_judge_scores_as_the_pages_say"
STARTS = "tests/test_readme.py::test_a_benchmark_starts"
CODE = "tests/runtime/test_commands.py::test_usable_user_code_passes_without_being_instantiated"

HUB = "model.path=Qwen/Qwen2.5-0.5B-Instruct data.task=gsm8k"

RUN_BY = {
    "make demo": [RECIPE, DEMO],
    "make test": [RECIPE],
    "pip install .": [INSTALLED],
    "pip install '.[train]'": [INSTALLED],
    "freewheel train": [DEMO],
    "freewheel train --dry-run": [
        "tests/runtime/test_commands.py::test_a_dry_run_prints_the_plan_and_leaves_nothing",
    ],
    f"freewheel train {HUB} data.train=train.jsonl data.eval=test.jsonl": [
        "tests/test_readme.py::test_a_model_of_the_hub_and_files_are_taken",
    ],
    "freewheel train rollout.engine=vllm model.path=…": [
        "tests/integrations/vllm/test_run.py::test_a_run_with_vllm_goes_on_after_the_death_of_an_engine_core",
    ],
    "freewheel train resume=runs/…": [
        DEMO,
        "tests/runtime/test_whole_run.py::test_ctrl_c_and_sigterm_save_and_the_run_resumes",
    ],
    "freewheel train reward.function=my_rewards:score": [CODE],
    "freewheel inspect runs/…": [DEMO, "tests/runtime/test_inspect.py::test_a_clean_run_is_accounted_for"],
    "freewheel eval runs/…": [DEMO],
    "freewheel plan runs/…": [DEMO, "tests/plan/test_planner.py::test_a_run_is_planned_from_what_it_measured"],
    "freewheel dashboard runs/…": [DEMO, "tests/browser/test_page.py"],
    "freewheel dashboard runs/": [DEMO],
    "freewheel doctor": ["tests/doctor/test_command.py::test_where_all_is_well_nothing_stands_in_the_way"],
    "python fully_async_main.py": ["tests/runtime/test_commands.py::test_the_three_programs_are_one"],
    "freewheel mock-judge --latency 0.5 --knee 60 --reject-above 80 --port 8099": [JUDGING],
    "freewheel score in.jsonl out.jsonl --endpoint http://127.0.0.1:8099/v1 --model my-judge": [JUDGING],
}
"""A command, without what is beside it in a comment → the tests that run it. Not run as they are typed:

    make …             `make -n` says what it would run (RECIPE); a test that is named beside that runs it
    pip install …      what is installed here is held against pyproject.toml
    train HUB, cluster, fully_async_main.py
                       a dry run: models and machines are elsewhere, and the programs are one
    reward.function=…  with functions of the test's, and without the run
    rollout.engine=vllm, verl
                       in environments of their own, with the tests' settings
    serve, doctor      with a judge and a machine of the tests'
"""

ELSEWHERE = ("echo", "cat", "export", "cd")
"""The shell's own; `test_a_judge_scores_as_the_pages_say` runs those that matter."""


def said_in(page: Path) -> Iterator[str]:
    """Every command of a page: of its blocks, and in passing."""
    for block in blocks("bash", "console", pages=[page]):
        for command in commands(block):
            words = list(command.words)
            if words[0] not in ELSEWHERE:
                words = words[: words.index("…") + 1] if "verl.trainer.main_ppo" in words else words
                yield as_typed(words)
    for code in inline_code(page):
        words = code.split()
        if words[0] in PROGRAMS and len(words) > 1:
            yield code


@pytest.mark.parametrize("page", [README, START], ids=lambda page: page.name)
def test_every_command_is_run_by_a_test(page: Path):
    benchmarks = {command for command in said_in(page) if "benchmarks/" in command}
    assert {command for command in said_in(page) if command not in RUN_BY} == benchmarks


def test_no_command_is_listed_that_nobody_is_told():
    told = {command for page in (README, START) for command in said_in(page)}
    assert [command for command in RUN_BY if command not in told] == []


@pytest.mark.parametrize("where", sorted({one for tests in RUN_BY.values() for one in tests}))
def test_a_test_that_is_named_is_there(where: str):
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert name in functions if name else any(one.startswith("test_") for one in functions)


# -- make --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "recipe"),
    [
        ("demo", "bin/freewheel train"),
        ("test", "bin/python -m pytest"),
        ("test-pages", "-m pages"),
        ("demo-judge", "bin/python examples/judge_demo.py"),
        ("test-integrations", "bin/python -m pytest tests/integrations -m verl"),
        ("chaos", "bin/python scripts/chaos.py"),
        ("docs", "bin/mkdocs build"),
    ],
)
def test_make_runs_what_it_says(target: str, recipe: str):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert recipe in done.stdout


def test_the_package_is_what_pip_was_asked_for():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = importlib.metadata.metadata("freewheel")
    assert set(installed.get_all("Provides-Extra") or []) >= {"train", "math"}
    plain = [one for one in importlib.metadata.requires("freewheel") or [] if "extra ==" not in one]
    named = {re.split(r"[^\w.-]", one)[0] for one in plain}
    assert named == {re.split(r"[^\w.-]", one)[0] for one in told["dependencies"]}
    assert not named & {"torch", "ray", "transformers"}, "the light half"
    scripts = {one.name: one.value for one in importlib.metadata.entry_points(group="console_scripts")}
    assert scripts["freewheel"] == told["scripts"]["freewheel"]


# -- training ----------------------------------------------------------------------------------------------------------


def freewheel(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [FREEWHEEL, *arguments], cwd=folder, capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """A command that serves until it is told to stop; gives its first line."""
    with subprocess.Popen([FREEWHEEL, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline()
        finally:
            program.send_signal(signal.SIGTERM)
            code = program.wait(WAIT_S)
    assert code == 0


@pytest.mark.timeout(600)  # two whole runs, one after the other
def test_the_demo_learns_and_its_run_can_be_looked_at_in_every_way_and_goes_on(tmp_path: Path):
    freewheel(tmp_path, "train")
    (run,) = (tmp_path / "runs").iterdir()
    held_out = [row["eval/reward"] for row in read_metrics(run, "eval")]
    assert held_out[0] < 0.25 and held_out[-1] > 0.9
    assert len(read_metrics(run, "step")) == 40

    assert "Every prompt is accounted for." in freewheel(tmp_path, "inspect", str(run)).stdout
    assert "mean reward" in freewheel(tmp_path, "eval", str(run)).stdout
    assert "samples" in freewheel(tmp_path, "plan", str(run)).stdout
    with serving(tmp_path, "dashboard", "runs/") as said:
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+", said)
        with build_opener(HTTPCookieProcessor()).open(address, timeout=WAIT_S) as page:
            assert page.status == 200 and b"freewheel" in page.read()

    freewheel(tmp_path, "train", f"resume={run}", "trainer.total_steps=42")
    assert len(read_metrics(run, "step")) == 42
    assert "Every prompt is accounted for." in freewheel(tmp_path, "inspect", str(run)).stdout


def test_a_synchronous_run_trains_on_nothing_old(tmp_path: Path):
    freewheel(tmp_path, "train", "mode=sync", "trainer.total_steps=3")
    (run,) = (tmp_path / "runs").iterdir()
    assert [row["max_sample_age"] for row in read_metrics(run, "step")] == [0, 0, 0]


def test_a_model_of_the_hub_and_files_are_taken(tmp_path: Path):
    row = '{"question": "What is 2 and 2?", "answer": "#### 4"}\n'
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(row * 40)
    (command,) = (one for one in said_in(README) if "data.train=train.jsonl" in one)
    done = freewheel(tmp_path, *shlex.split(command)[1:], "--dry-run")
    assert "Qwen/Qwen2.5-0.5B-Instruct" in done.stdout


# -- the judge ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


@pytest.mark.parametrize("page", [README, START], ids=lambda page: page.name)
def test_a_judge_scores_as_the_pages_say(page: Path, tmp_path: Path):
    port = free_port()
    (start,) = (one for one in said_in(page) if one.startswith("freewheel mock-judge"))
    (scoring,) = (block.code for block in blocks("bash", pages=[page]) if "freewheel score" in block.code)
    judging = [block.code for block in blocks("python", pages=[page]) if f"127.0.0.1:{PORT}" in block.code]
    with serving(tmp_path, *shlex.split(start.replace(PORT, str(port)))[1:]) as listens:
        assert f"127.0.0.1:{port}" in listens
        environment = {**os.environ, "PATH": f"{FREEWHEEL.parent}:{os.environ['PATH']}"}
        for code in judging:
            printed = subprocess.run(
                [sys.executable, "-c", code.replace(PORT, str(port))],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            assert printed.returncode == 0, printed.stderr
            assert 1 <= float(printed.stdout) <= 10
        done = subprocess.run(
            ["bash", "-euc", scoring.replace(PORT, str(port))],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["verdict"]["status"] == "scored" and 1 <= row["verdict"]["score"] <= 10
    assert bool(judging) == (page is README)


SIX_WAYS = """
import sys
sys.path.insert(0, {folder!r})
import judge_demo
judge_demo.SAMPLES = 64
judge_demo.main()
"""


def test_the_demo_of_the_judge_shows_six_ways():
    code = SIX_WAYS.format(folder=str(ROOT / "examples"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d+x\b|\d+\.\d+x", done.stdout)) >= 4, done.stdout


# -- benchmarks --------------------------------------------------------------------------------------------------------

BENCHMARKS = sorted(set(re.findall(r"benchmarks/\w+\.py", README.read_text() + (DOCS / "benchmarks.md").read_text())))


@pytest.mark.parametrize("script", BENCHMARKS)
def test_a_benchmark_starts(script: str):
    """That its imports and its flags are right; what it measures is measured by hand."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
