"""The `freewheel` command in real processes, with a real mock judge on loopback."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import freewheel
from freewheel.cli import app
from freewheel.cli.console import REPEAT_S, log_to, plain_errors
from freewheel.cli.flags import judge_from_flags
from freewheel.cli.servers import mock_judge, profile_from_flags
from freewheel.errors import ConfigError
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge
from freewheel.rollout.evaluation import EvalResult

WAIT_S = 60.0
"""Longer than anything here takes on a busy machine."""
NO_ROOM = b"freewheel: error: stdout cannot be written: No space left on device\n"
KEY = "sk-not-to-be-seen-1234567890"
NOBODY = ["--endpoint", "http://127.0.0.1:1", "--model", "m"]
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")

Program = subprocess.Popen[bytes]
Done = subprocess.CompletedProcess[bytes]
COMMAND = [sys.executable, "-m", "freewheel"]


def run(*arguments: object, command: list[str] = COMMAND, **options: Any) -> Done:
    options = {"input": b"", "capture_output": True, "timeout": WAIT_S, **options}
    return subprocess.run([*command, *map(str, arguments)], check=False, **options)


def run_to_full(*arguments: object, **options: Any) -> tuple[int, bytes]:
    """The exit code and the errors where stdout has no room."""
    with Path("/dev/full").open("wb") as full:
        done = run(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE, **options)
    return done.returncode, done.stderr


class Scoring:
    """A judge, a file of rows, and the output of `freewheel score`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.judge: RunningJudge
        self._stack = stack
        self.start_judge()
        self.write(5)

    def start_judge(self, **profile: Any) -> None:
        self.judge = self._stack.enter_context(MockJudge(JudgeProfile(**profile)).in_thread())

    def write(self, count: int, **fields: Any) -> None:
        rows = [{"id": n, "prompt": "Say a number.", "response": f"answer {n}", **fields} for n in range(count)]
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def flags(self, *more: object) -> list[object]:
        return ["--endpoint", self.judge.base_url, "--model", "m", *more]

    def run(self, *more: object, code: int = 0, **options: Any) -> Done:
        done = run("score", self.source, self.target, *self.flags(*more), **options)
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
        return done

    def summary(self, *more: object, code: int = 0, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(*more, "--json", code=code, **options).stdout)
        assert found["exit_code"] == code
        return found

    def begin(self, *more: object, source: object = None, target: object = None, **options: Any) -> Program:
        return self.begin_program("score", source or self.source, target or self.target, *self.flags(*more), **options)

    def begin_program(self, *words: object, **options: Any) -> Program:
        """Start the program, and end it at the end of the test."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        program = self._stack.enter_context(subprocess.Popen([*COMMAND, *map(str, words)], **options))
        self._stack.callback(program.kill)
        return program

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_bytes().splitlines()]

    def assert_complete(self, count: int) -> None:
        assert [row["verdict"]["line"] for row in self.rows()] == list(range(1, count + 1))
        assert [row["id"] for row in self.rows()] == list(range(count))
        assert {row["verdict"]["status"] for row in self.rows()} == {"scored"}


@pytest.fixture
def scoring(tmp_path: Path) -> Iterator[Scoring]:
    with ExitStack() as stack:
        yield Scoring(tmp_path, stack)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


# -- the program -------------------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_package_also_where_only_installed_modules_are_found() -> None:
    assert run("--version").stdout.decode().strip() == f"freewheel {freewheel.__version__}"
    assert run("--version", command=[sys.executable, "-P", "-m", "freewheel"]).returncode == 0


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["score", "--help"], ["--version"], ["cache", "stats", "--json"]])
def test_a_stdout_without_room_is_one_line_and_an_exit_code(arguments: list[str], unbuffered: str) -> None:
    assert run_to_full(*arguments, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}) == (3, NO_ROOM)


@needs_full
def test_reports_and_replies_that_find_no_room_are_not_lost_in_silence(scoring: Scoring) -> None:
    code, errors = run_to_full("score", scoring.source, scoring.target, *scoring.flags("--json"))
    assert code == 3 and errors.endswith(NO_ROOM) and b"Traceback" not in errors
    scoring.assert_complete(5)
    assert run_to_full("cache", "export", "-") == (3, NO_ROOM)
    done = run("score", scoring.source, "/dev/full", *scoring.flags())
    assert done.returncode == 3 and b"No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "m"], ["endpoint", "--endpoint"]),
        (["--endpoint", "http://127.0.0.1:1/v1"], ["model", "--model"]),
        ([*NOBODY, "--rubric", "nope"], ["rubric", "nope", "integer"]),
        ([*NOBODY, "--max-cost", "1"], ["max_cost", "prices"]),
        ([*NOBODY, "--temperature", "hot"], ["--temperature", "hot", "none"]),
        ([*NOBODY, "--sampling", "seed"], ["--sampling", "KEY=VALUE"]),
        ([*NOBODY, "--price-in", "1"], ["--price-out"]),
        ([*NOBODY, "--api-key-env", "NO_SUCH"], ["NO_SUCH", "not set"]),
        ([*NOBODY, "--config", "no.toml"], ["config", "no.toml"]),
        ([*NOBODY, "--prompt-field", "response"], ["response_field"]),
        ([*NOBODY, "--retry-failed"], ["retry_failed", "earlier run"]),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_remedy(
    scoring: Scoring, flags: list[str], words: list[str]
) -> None:
    done = run("score", scoring.source, scoring.target, *flags)
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert all(word in done.stderr.decode() for word in words), done.stderr
    assert not scoring.target.exists()


# -- score: the ordinary run -------------------------------------------------------------------------------------------


def test_a_file_is_scored_in_order_and_its_fields_are_passed_through(scoring: Scoring) -> None:
    scoring.write(300, meta={"a": [1, None]})
    summary = scoring.summary("--price-in", 1, "--price-out", 2)
    scoring.assert_complete(300)
    assert scoring.rows()[7]["meta"] == {"a": [1, None]}
    assert [summary[name] for name in ("scored", "failed", "skipped", "malformed")] == [300, 0, 0, 0]
    assert summary["calls"]["sent"] == 300 and summary["calls"]["cost"] > 0


def test_flags_override_the_settings_of_a_file(scoring: Scoring, tmp_path: Path) -> None:
    scoring.start_judge(model="m", keep_requests=1)
    config = tmp_path / "judge.toml"
    config.write_text('model = "wrong"\nmax_tokens = 8\n')
    scoring.run("--config", config, "--temperature", "none", "--sampling", "reasoning_effort=low")
    sent = scoring.judge.requests()[0].json()
    assert (sent["max_tokens"], sent["reasoning_effort"], "temperature" in sent) == (8, "low", False)
    config.write_text('endpont = "typo"\n')
    assert b"endpont" in scoring.run("--config", config, code=2).stderr


@pytest.mark.parametrize(
    ("in_file", "flag", "made"),
    [("", None, 0.0), ("", "none", None), ("", "0.5", 0.5), ('"none"', None, None), ('"none"', "0.5", 0.5)],
)
def test_the_temperature_can_be_left_out_and_more_fields_of_the_request_be_given(
    tmp_path: Path, in_file: str, flag: str | None, made: float | None
) -> None:
    config = tmp_path / "judge.toml"
    line = f"temperature = {in_file}\n" if in_file else ""
    config.write_text(f'endpoint = "http://127.0.0.1:1"\nmodel = "m"\n{line}[sampling]\nseed = 1\ntop_k = 3\n')
    fields = ["seed=2", "reasoning_effort=low", 'stop=["a", "b=c"]', 'user="7"']
    settings = judge_from_flags(config=config, temperature=flag, sampling=fields)
    expected = {"seed": 2, "top_k": 3, "reasoning_effort": "low", "stop": ["a", "b=c"], "user": "7"}
    assert (settings.temperature, settings.sampling) == (made, expected)


def test_fields_can_have_other_names_and_two_verdicts_share_a_row(scoring: Scoring) -> None:
    scoring.source.write_text('{"answer": "a", "verdict": "mine"}\n')
    scoring.run("--response-field", "answer", code=1)
    assert "--verdict-field" in scoring.rows()[0]["verdict"]["detail"]
    scoring.run("--response-field", "answer", "--verdict-field", "second", "--overwrite")
    (row,) = scoring.rows()
    assert row["verdict"] == "mine" and row["second"]["status"] == "scored"


def test_malformed_lines_are_reported_by_number_and_do_not_stop_the_run(scoring: Scoring) -> None:
    lines = [
        b'\xef\xbb\xbf{"response": "after a byte order mark"}\r\n',
        b"\r\n",
        b"not json\n",
        b"[1, 2]\n",
        b'{"prompt": "no response"}\n',
        b'{"response": 5}\n',
        b'{"response": "\xff"}\n',
        b'{"response": "x", "n": NaN}\n',
        b"   \n",
        b'{"response": "lone \\ud800", "other": "\\udfff"}\n',
        b'{"response": "nul \\u0000"}\n',
        b'{"response": null, "skip": "too short"}\n',
        b'{"response": "' + b"y" * 1_000_000 + b'", "n": 12345678901234567890123, "f": 1.50}\r\n',
        b'{"response": "no newline"}',
    ]
    scoring.source.write_bytes(b"".join(lines))
    summary = scoring.summary(code=1)
    assert [summary[name] for name in ("scored", "skipped", "malformed", "blank")] == [5, 1, 6, 2]
    rows, written = scoring.rows(), scoring.target.read_bytes().splitlines()
    assert [row["verdict"]["line"] for row in rows] == [1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14]
    assert {row["verdict"]["reason"] for row in rows[1:7]} == {"malformed"}
    assert rows[7]["response"] == "lone \ud800"
    assert written[-2].partition(b',"verdict"')[0] == lines[-2].strip()[:-1]
    assert b"line" not in scoring.run(code=1).stderr and scoring.rows() == rows, "already in the output"


def test_only_the_first_malformed_lines_are_named(scoring: Scoring) -> None:
    scoring.source.write_bytes(b"nonsense\n" * 500)
    errors = scoring.run(code=1).stderr
    assert b"line 20 is malformed: not JSON" in errors and errors.count(b"is malformed") == 20
    assert b"500 malformed (20 shown)" in errors


def test_rows_come_from_a_pipe_and_go_to_one(scoring: Scoring) -> None:
    scoring.write(200)
    done = run("score", "-", "-", *scoring.flags(), input=scoring.source.read_bytes())
    assert done.returncode == 0 and b"200 scored, 0 failed, 0 skipped" in done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == list(range(200))
    empty = run("score", "-", "-", *scoring.flags())
    assert (empty.returncode, empty.stdout) == (0, b"")
    assert run("score", "-", "-", *scoring.flags("--json")).returncode == 2, "both cannot have stdout"


@pytest.mark.parametrize(("end", "code"), [("close", 0), ("interrupt", 130)])
def test_a_row_from_a_pipe_is_answered_at_once_and_the_wait_for_the_next_can_end(
    scoring: Scoring, end: str, code: int
) -> None:
    program = scoring.begin(source="-", target="-", stdin=subprocess.PIPE)
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(b'{"response": "first"}\n')
    program.stdin.flush()
    assert json.loads(program.stdout.readline())["verdict"]["status"] == "scored"
    program.stdin.close() if end == "close" else program.send_signal(signal.SIGINT)
    assert program.wait(WAIT_S) == code


def test_a_reader_that_goes_away_ends_it_without_an_error(scoring: Scoring) -> None:
    scoring.write(3000)
    program = scoring.begin("--quiet", target="-")
    assert program.stdout is not None and program.stderr is not None and program.stdout.readline()
    program.stdout.close()
    assert program.wait(WAIT_S) == 141
    errors = program.stderr.read()  # a busy machine may cause warnings
    assert b"error" not in errors and b"Traceback" not in errors


def test_failed_rows_give_exit_code_1_and_can_be_retried(scoring: Scoring, tmp_path: Path) -> None:
    scoring.start_judge(scores={"answer 3": "no idea", "answer 5": "nothing"})
    scoring.write(10)
    scoring.run(code=1)
    errors = scoring.run(code=1).stderr
    assert b"failed: line 4: " in errors and b"--retry-failed scores" in errors
    before = scoring.rows()
    assert [row["id"] for row in before if row["verdict"]["status"] == "failed"] == [3, 5]
    assert before[3]["verdict"]["score"] is None and before[3]["verdict"]["reason"] == "unparseable"
    scoring.judge.reset(JudgeProfile())
    assert scoring.summary("--retry-failed")["scored"] == 10 and scoring.judge.counts().received == 2
    scoring.assert_complete(10)
    assert [row for row in scoring.rows() if row["id"] not in (3, 5)] == [r for r in before if r["id"] not in (3, 5)]
    assert not list(tmp_path.glob("*.retry"))


PEAK = """
import pathlib, re, sys
from freewheel.cli import app
try: app(sys.argv[1:])
finally: print(re.search("VmHWM:(.*) kB", pathlib.Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""
"""Not ru_maxrss, which is inherited from the process that started it."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(scoring: Scoring) -> None:
    peaks = []
    for count in (12_000, 60_000):
        scoring.source.write_text((json.dumps({"response": "the same", "pad": "x" * 1500}) + "\n") * count)
        words = ["score", scoring.source, scoring.target, *scoring.flags("--overwrite")]
        done = run(*words, command=[sys.executable, "-c", PEAK])
        assert len(scoring.target.read_bytes().splitlines()) == count
        peaks.append(int(done.stderr.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 25, peaks  # the file alone grew by 72 MB


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_a_parser_in_the_current_directory_is_found(scoring: Scoring, tmp_path: Path, placement: str) -> None:
    (tmp_path / "my_scoring.py").write_text("print('hello')\ndef read(reply): return float(reply) / 2\n")
    (tmp_path / "mine.toml").write_text('base = "integer"\nlow = 0\nparser = "my_scoring:read"\n')
    command = [sys.executable, "-P", "-m", "freewheel"]  # as the installed command runs
    flags = scoring.flags("--rubric", "mine.toml", "--placement", placement)
    done = run("score", scoring.source, "-", *flags, command=command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line)["verdict"] for line in done.stdout.splitlines()]
    assert [verdict["score"] for verdict in verdicts] == [float(verdict["raw"]) / 2 for verdict in verdicts]


def test_settings_that_would_break_the_engine_are_refused_before_it_starts(scoring: Scoring, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "integer"\nparser = "no_such_module:read"\n')
    errors = scoring.run("--rubric", tmp_path / "mine.toml", code=2).stderr
    assert b"no_such_module:read" in errors and b"PYTHONPATH" in errors
    errors = scoring.run(code=2, env={**os.environ, "OPENAI_API_KEY": f"{KEY}\n{KEY}"}).stderr
    assert b"OPENAI_API_KEY" in errors and b"no HTTP header can carry" in errors and KEY.encode() not in errors
    assert not scoring.target.exists() and scoring.judge.counts().received == 0


# -- score: an early end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_run_that_was_stopped_or_killed_continues_without_paying_twice(
    scoring: Scoring, number: signal.Signals, code: int
) -> None:
    scoring.start_judge(latency_s=0.05)
    scoring.write(400)
    program = scoring.begin("--concurrency", "fixed:8")
    wait_until(lambda: scoring.target.exists() and scoring.target.stat().st_size > 0)
    program.send_signal(number)
    _, errors = program.communicate(timeout=WAIT_S)
    assert program.returncode == code and b"Traceback" not in errors
    assert (b"run the same command again" in errors) == (number != signal.SIGKILL)
    assert 0 < scoring.summary()["before"] < 400
    scoring.assert_complete(400)
    counts = scoring.judge.counts()
    assert counts.most_received <= 2 and counts.received - 400 <= 8, "those in flight at the end, and no other"


def test_an_output_of_another_input_or_rubric_is_refused(scoring: Scoring) -> None:
    scoring.run()
    before = scoring.target.read_bytes()
    for flags in (["--rubric", "number"], ["--model", "other"], ["--temperature", "1"]):
        assert b"--overwrite" in scoring.run(*flags, code=2).stderr
    for text, reason in (('{"response": "changed"}\n' * 5, b"another input"), ("{}\n", b"the input ends before")):
        scoring.source.write_text(text)
        assert reason in scoring.run(code=2).stderr
    assert scoring.target.read_bytes() == before
    scoring.target.write_text("my diary\n")
    assert b"not a row of" in scoring.run(code=2).stderr and scoring.target.read_text() == "my diary\n"
    scoring.write(1)
    scoring.run("--overwrite")
    scoring.assert_complete(1)


def test_the_input_is_never_taken_for_the_output(scoring: Scoring, tmp_path: Path) -> None:
    before = scoring.source.read_bytes()
    (tmp_path / "link").symlink_to(scoring.source)
    for target in (scoring.source, tmp_path / "link"):
        scoring.target = target
        assert b"the input file itself" in scoring.run("--overwrite", code=2).stderr
    assert scoring.source.read_bytes() == before


def test_a_wrong_key_stops_the_run_and_is_shown_nowhere(scoring: Scoring, tmp_path: Path) -> None:
    scoring.start_judge(api_key="another")
    done = scoring.run("--json", code=3, env={**os.environ, "OPENAI_API_KEY": KEY})
    assert b"OPENAI_API_KEY" in done.stderr and b"run the same command again" in done.stderr
    assert json.loads(done.stdout)["stopped"]["reason"] == "auth" and scoring.target.read_bytes() == b""
    everything = done.stdout + done.stderr + b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert KEY.encode() not in everything
    scoring.run(env={**os.environ, "OPENAI_API_KEY": "another"})
    scoring.assert_complete(5)


@pytest.mark.parametrize(
    ("profile", "reason", "text"),
    [
        ({"model": "other"}, "not_found", b"correct --model or --endpoint"),
        ({"insufficient_quota": True}, "quota", b"the account has no credit left"),
        ({"unparseable_share": 1.0}, "unparseable", b"none was scored"),
    ],
)
def test_a_judge_that_gives_no_score_is_not_paid_for_the_whole_file(
    scoring: Scoring, profile: dict[str, Any], reason: str, text: bytes
) -> None:
    scoring.start_judge(**profile)
    scoring.write(3000)
    done = scoring.run("--concurrency", "fixed:8", "--json", code=3)
    assert json.loads(done.stdout)["stopped"]["reason"] == reason and text in done.stderr
    assert scoring.judge.counts().received < 3000


@pytest.mark.parametrize("count", [1, 200])
def test_an_unreachable_judge_stops_the_run_and_no_row_counts_as_failed(
    scoring: Scoring, tmp_path: Path, count: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    scoring.write(count)
    config = tmp_path / "judge.json"
    config.write_text(json.dumps({"endpoint": url, "model": "m", "request_deadline_s": 1.0}))
    done = run("score", scoring.source, scoring.target, "--config", config, "--json")
    assert done.returncode == 3 and scoring.target.read_bytes() == b"", done.stderr
    assert json.loads(done.stdout)["stopped"]["next_line"] == 1
    assert b"does not answer" in done.stderr and f"{url}/chat/completions".encode() in done.stderr


def test_a_file_that_cannot_grow_keeps_whole_rows_and_is_continued(scoring: Scoring) -> None:
    scoring.write(400)
    words = ["score", scoring.source, scoring.target, *scoring.flags("--no-cache")]
    done = run(*words, command=["sh", "-c", 'ulimit -f 40; exec "$@"', "sh", *COMMAND])
    assert done.returncode == 3 and b"File too large" in done.stderr
    assert scoring.target.read_bytes().endswith(b"\n") and 0 < len(scoring.rows()) < 400
    scoring.run("--no-cache")
    scoring.assert_complete(400)


# -- cache and mock-judge ----------------------------------------------------------------------------------------------


def cache(*words: object) -> Any:
    return json.loads(run("cache", *words, "--json").stdout)


def test_the_cache_is_shown_exported_and_cleared(scoring: Scoring, tmp_path: Path) -> None:
    assert cache("stats")["entries"] == 0 and not (tmp_path / "cache").exists()
    scoring.run()
    shown = cache("stats")
    assert shown["entries"] == 5 and not {"expired", "max_bytes", "ttl_s"} & shown.keys(), "bounds are a judge's"
    assert b"replies   5" in run("cache", "stats").stdout
    assert cache("export", tmp_path / "dump")["exported"] == len((tmp_path / "dump").read_bytes().splitlines()) == 5
    assert len(run("cache", "export", "-").stdout.splitlines()) == 5
    assert run("cache", "clear").returncode == run("cache", "clear", "--older-than", "soon", "--yes").returncode == 2
    assert cache("clear", "--older-than", "7d", "--yes")["removed"] == 0
    assert cache("clear", "--yes")["removed"] == 5


def test_an_export_is_private_and_replaces_a_file_only_on_request_and_no_link(scoring: Scoring, tmp_path: Path) -> None:
    scoring.run()
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to("real")
    assert run("cache", "export", link).returncode == 0
    assert len(real.read_bytes().splitlines()) == 5 and real.stat().st_mode & 0o777 == 0o600
    real.write_text("mine\n")
    done = run("cache", "export", link)
    assert done.returncode == 2 and b"--overwrite" in done.stderr and real.read_text() == "mine\n"
    assert run("cache", "export", link, "--overwrite").returncode == 0
    assert link.is_symlink() and len(real.read_bytes().splitlines()) == 5
    assert not list(tmp_path.glob("*.part"))


def test_an_export_is_written_into_a_fifo(scoring: Scoring, tmp_path: Path) -> None:
    scoring.run()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = scoring.begin_program("cache", "export", fifo)
    assert len(fifo.read_bytes().splitlines()) == 5
    assert program.wait(WAIT_S) == 0 and fifo.is_fifo()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_mock_judge_serves_until_a_signal(scoring: Scoring, number: signal.Signals) -> None:
    env = {**os.environ, "MOCK_KEY": KEY}
    flags = ("--port", "0", "--json", "--latency", "0.01", "--model", "m", "--api-key-env", "MOCK_KEY")
    program = scoring.begin_program("mock-judge", *flags, env=env)
    assert program.stdout is not None and program.stderr is not None
    endpoint = json.loads(program.stdout.readline())["endpoint"]
    words = ("score", scoring.source, scoring.target, "--endpoint", endpoint, "--model", "m")
    assert run(*words).returncode == 3
    assert run(*words, "--api-key-env", "MOCK_KEY", env=env).returncode == 0
    program.send_signal(number)
    assert program.wait(WAIT_S) == 0 and program.stderr.read() == b""


def test_each_flag_of_the_mock_judge_is_a_field_of_its_profile() -> None:
    own = {"profile", "host", "port", "as_json", "api_key_env"}
    assert set(inspect.signature(mock_judge).parameters) - own <= set(JudgeProfile.__struct_fields__)


def test_a_flag_with_the_value_0_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[JudgeProfile] = []
    monkeypatch.setattr("freewheel.judge.testing.serve", lambda profile, *rest: made.append(profile))
    mock_judge(**dict.fromkeys(inspect.signature(mock_judge).parameters) | {"reject_above": 0, "as_json": False})
    assert made == [profile_from_flags(reject_above=0)] != [JudgeProfile()]


def test_the_mock_judge_refuses_settings_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('{"latencie": 1}')
    for flags in (["--error-share", "2"], ["--reply-style", "odd"], ["--profile", tmp_path / "profile.json"]):
        done = run("mock-judge", *flags, "--port", 0)
        assert done.returncode == 2 and b"Traceback" not in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("mock-judge", "--port", port)
    assert done.returncode == 2 and f"--port = {port}: it cannot listen there".encode() in done.stderr


def test_a_file_that_may_not_be_read_is_one_line_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, plain_errors():
        tmp_path.read_text()  # a folder where a file should be
    text = capsys.readouterr().err
    assert ended.value.exit_code == 2 and str(tmp_path) in text and text.count("\n") == 1
    with pytest.raises(typer.Exit) as ended, plain_errors():
        raise ConfigError("key", 1, "cannot work")
    assert ended.value.exit_code == 2 and capsys.readouterr().err == "freewheel: error: key = 1: cannot work\n"


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_an_evaluation_with_failed_responses_says_so_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, failed: int, code: int
) -> None:
    scores = np.array([[1.0], [math.nan if failed else 0.5]])
    result = EvalResult(scores=scores, truncated=scores > 2, lengths=np.ones((2, 1), np.int64), versions=(0,))
    monkeypatch.setattr("freewheel.runtime.evaluation.run_evaluation", lambda config: asyncio.sleep(0, result))
    done = CliRunner().invoke(app, ["eval", "embedded", "--json"])
    assert done.exit_code == code and json.loads(done.stdout)["failed"] == failed
    assert ("warning: left out 1 response without a score" in done.stderr) == bool(failed)


def test_a_repeated_log_line_is_written_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now_s = 100.0
    monkeypatch.setattr("freewheel.cli.console.time.monotonic", lambda: now_s)
    log = logging.getLogger("freewheel.judge")
    with log_to(lines.append):
        log.warning("a key is refused")
        log.warning("a key is refused")
        log.info("not shown")
        log.warning("another")
        now_s += REPEAT_S
        log.warning("a key is refused")
    assert lines == ["WARNING: a key is refused", "WARNING: another", "WARNING: a key is refused"]
