"""The example runs as it stands, and its model learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore", "error:::freewheel")]

EXAMPLE = Path(__file__).parents[3] / "examples/trl/grpo_judge.py"


def test_the_example_trains_a_tiny_model_that_pleases_the_judge_more_and_more(tmp_path: Path):
    environment = {**os.environ, "FREEWHEEL_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "20"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    header, *lines = [line.split() for line in done.stdout.splitlines()[-5:]]
    assert header == ["step", "reward", "rule_score", "judge_score", "judge_failed", "judge_cached"]
    first, last = (dict(zip(header, map(float, line), strict=True)) for line in (lines[0], lines[-1]))
    assert last["step"] == 20
    assert last["judge_score"] > first["judge_score"] + 1
    assert last["reward"] > first["reward"] + 0.1
    assert last["judge_failed"] == 0


def test_with_a_model_and_an_endpoint_it_trains_on_gsm8k(example, tokenizer, mock, monkeypatch, tmp_path, capsys):
    """GSM8K itself is not on this machine: rows of its shape stand in for it."""
    server = mock()
    rows = [{"question": f"What is {n} + 1?", "answer": f"One more is {n + 1}.\n#### {n + 1}"} for n in range(8)]
    tokenizer.save_pretrained(tmp_path / "model")
    example.tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(example, "load_dataset", lambda *names, split: Dataset.from_list(rows))
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    given = {"--model": tmp_path / "model", "--endpoint": server.base_url, "--steps": 2, "--max-tokens": 8}
    monkeypatch.setattr(sys, "argv", ["grpo_judge.py", *(str(word) for pair in given.items() for word in pair)])
    example.main()
    assert float(capsys.readouterr().out.splitlines()[-1].split()[3]) > 0
    assert server.counts().containing("End with a line") and server.counts().containing("One more is")
