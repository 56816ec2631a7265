"""The commands of README.md and docs/index.md run as printed: a whole training run, and the judge."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from freewheel.observe.recorder import read_metrics

from .documents import DOCS, ROOT, as_typed, blocks, commands
from .programs import WAIT_S, Done, run_program

README, START = ROOT / "README.md", DOCS / "index.md"
FREEWHEEL = Path(sys.executable).parent / "freewheel"
PORT = "8099"
"""The test judge's port on the pages; a free one replaces it here."""

pytestmark = [pytest.mark.pages, pytest.mark.timeout(300)]


def find_command(page: Path, part: str) -> list[str]:
    """Return the words of the one command in a shell block of a page that contains `part`."""
    typed = [command.words for block in blocks("bash", "console", pages=[page]) for command in commands(block)]
    (words,) = (words for words in typed if part in as_typed(words))
    return list(words)


# -- training ----------------------------------------------------------------------------------------------------------


def freewheel(folder: Path, *arguments: str) -> Done:
    return run_program(FREEWHEEL, *arguments, cwd=folder)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Run a command that serves until SIGTERM; yields the first line that it prints."""
    with subprocess.Popen([FREEWHEEL, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline()
        finally:
            program.send_signal(signal.SIGTERM)
            code = program.wait(WAIT_S)
    assert code == 0


@pytest.mark.timeout(600)  # two whole runs, one after the other
def test_the_demo_learns_and_every_command_works_on_its_run(tmp_path: Path):
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


def test_a_synchronous_run_trains_on_fresh_samples_only(tmp_path: Path):
    freewheel(tmp_path, "train", "mode=sync", "trainer.total_steps=3")
    (run,) = (tmp_path / "runs").iterdir()
    assert [row["max_sample_age"] for row in read_metrics(run, "step")] == [0, 0, 0]


def test_the_command_with_a_hub_model_and_files_is_accepted(tmp_path: Path):
    row = '{"question": "What is 2 and 2?", "answer": "#### 4"}\n'
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(row * 40)
    done = freewheel(tmp_path, *find_command(README, "data.train=train.jsonl")[1:], "--dry-run")
    assert "Qwen/Qwen2.5-0.5B-Instruct" in done.stdout


# -- the judge ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


@pytest.mark.parametrize("page", [README, START], ids=lambda page: page.name)
def test_a_judge_scores_as_the_pages_say(page: Path, tmp_path: Path):
    port = free_port()
    start = [word.replace(PORT, str(port)) for word in find_command(page, "mock-judge")]
    (scoring,) = (block.code for block in blocks("bash", pages=[page]) if "freewheel score" in block.code)
    judging = [block.code for block in blocks("python", pages=[page]) if f"127.0.0.1:{PORT}" in block.code]
    with serving(tmp_path, *start[1:]) as listens:
        assert f"127.0.0.1:{port}" in listens
        environment = {**os.environ, "PATH": f"{FREEWHEEL.parent}:{os.environ['PATH']}"}
        for code in judging:
            printed = run_program(sys.executable, "-c", code.replace(PORT, str(port)), cwd=tmp_path)
            assert 1 <= float(printed.stdout) <= 10
        run_program("bash", "-euc", scoring.replace(PORT, str(port)), cwd=tmp_path, env=environment)
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


def test_the_judge_demo_compares_six_ways():
    code = SIX_WAYS.format(folder=str(ROOT / "examples"))
    done = run_program(sys.executable, "-c", code)
    assert len(re.findall(r"\d+x\b|\d+\.\d+x", done.stdout)) >= 4, done.stdout


# -- benchmarks --------------------------------------------------------------------------------------------------------

BENCHMARKS = sorted(set(re.findall(r"benchmarks/\w+\.py", README.read_text() + (DOCS / "benchmarks.md").read_text())))


@pytest.mark.parametrize("script", BENCHMARKS)
def test_a_benchmark_starts(script: str):
    """Its imports and flags work. Benchmarks are run by hand."""
    assert "--json" in run_program(sys.executable, ROOT / script, "--help").stdout
