"""The `freewheel` command as users meet it: real processes, a real judge on loopback, and what they do to it."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

import freewheel
from freewheel.cli.console import plain_errors
from freewheel.cli.flags import judge_from_flags
from freewheel.cli.servers import mock_judge
from freewheel.errors import ConfigError
from freewheel.judge.testing import JudgeProfile, MockJudge, RunningJudge

WAIT_S = 60.0
"""Longer than anything here takes on a busy machine."""
NO_ROOM = b"freewheel: error: stdout cannot be written: No space left on device\n"
KEY = "sk-not-to-be-seen-1234567890"
SLOW = {"latency_s": 0.05}

Program = subprocess.Popen[bytes]


@pytest.fixture
def mock() -> Iterator[Callable[..., RunningJudge]]:
    with contextlib.ExitStack() as stack:
        yield lambda **profile: stack.enter_context(MockJudge(JudgeProfile(**profile)).in_thread())


@pytest.fixture
def begin() -> Iterator[Callable[..., Program]]:
    """Starts the program and ends what is left of it."""
    begun: list[Program] = []

    def begin_one(*arguments: object, **options: Any) -> Program:
        command = [sys.executable, "-m", "freewheel", *map(str, arguments)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        begun.append(subprocess.Popen(command, **options))
        return begun[-1]

    yield begin_one
    for program in begun:
        if program.poll() is None:
            program.kill()
        program.communicate()


def run(*arguments: object, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "freewheel", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=WAIT_S, check=False, **options)


def run_to_full(*arguments: object, **options: Any) -> tuple[int, bytes]:
    """The exit code and the words where stdout has no room."""
    command = [sys.executable, "-m", "freewheel", *map(str, arguments)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=WAIT_S, check=False, **options)
    return done.returncode, done.stderr


def installed(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """As the installed command runs: the current directory is not among the places where modules are looked for."""
    command = [sys.executable, "-P", "-m", "freewheel", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False, **options)


def write_rows(path: Path, count: int, **fields: Any) -> Path:
    rows = [{"id": n, "prompt": "Say a number.", "response": f"answer {n}", **fields} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def judge_flags(judge: RunningJudge, *more: object) -> list[object]:
    return ["--endpoint", judge.base_url, "--model", "m", *more]


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def assert_complete(target: Path, count: int) -> None:
    rows = read_rows(target)
    assert [row["verdict"]["line"] for row in rows] == list(range(1, count + 1))
    assert [row["id"] for row in rows] == list(range(count))
    assert {row["verdict"]["status"] for row in rows} == {"scored"}


# -- the program -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [[], ["score"], ["cache"], ["cache", "stats"], ["cache", "clear"], ["cache", "export"], ["mock-judge"]]
)
def test_each_command_explains_itself(arguments: list[str]) -> None:
    done = run(*arguments, "--help")
    assert done.returncode == 0
    assert b"Usage: freewheel" in done.stdout


def test_the_help_of_score_names_its_exit_codes() -> None:
    text = " ".join(run("score", "--help").stdout.decode().split())
    assert "Exit codes: 0 every row was scored or skipped; 1 some rows failed" in text


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout.decode().strip() == f"freewheel {freewheel.__version__}"


def test_help_loads_neither_the_http_client_nor_the_engine() -> None:
    code = "import sys, freewheel.cli; print([m for m in ('aiohttp', 'torch', 'ray', 'sqlite3') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=WAIT_S, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_the_package_runs_as_the_command() -> None:
    assert installed("--version").stdout == run("--version").stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", [["--help"], ["score", "--help"], ["--version"], ["cache", "stats"], ["cache", "stats", "--json"]]
)
def test_a_stdout_without_room_is_said_in_one_line(arguments: list[str], unbuffered: str) -> None:
    assert run_to_full(*arguments, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}) == (3, NO_ROOM)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_reports_and_replies_that_find_no_room_on_stdout_are_not_lost_in_silence(tmp_path: Path, mock: Any) -> None:
    target = tmp_path / "out"
    code, errors = run_to_full("score", write_rows(tmp_path / "in", 5), target, *judge_flags(mock()), "--json")
    assert code == 3 and errors.endswith(NO_ROOM) and b"Traceback" not in errors
    assert_complete(target, 5)
    assert run_to_full("cache", "export", "-") == (3, NO_ROOM)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "m"], ["endpoint", "--endpoint"]),
        (["--endpoint", "http://127.0.0.1:1/v1"], ["model", "--model"]),
        (["--endpoint", "ftp://x", "--model", "m"], ["endpoint", "ftp://x", "http"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--rubric", "nope"], ["rubric", "nope", "integer"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--concurrency", "0"], ["concurrency", "auto"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--max-cost", "1"], ["max_cost", "prices"]),
        (
            ["--endpoint", "http://127.0.0.1:1", "--model", "m", "--temperature", "hot"],
            ["--temperature", "hot", "none"],
        ),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--temperature", "-1"], ["temperature", "at least 0"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--sampling", "seed"], ["--sampling", "KEY=VALUE"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--sampling", "n=2"], ["sampling.n", "leave n out"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--price-in", "1"], ["--price-out"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--api-key-env", "NO_SUCH"], ["NO_SUCH", "not set"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--config", "no.toml"], ["config", "no.toml"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--prompt-field", "response"], ["response_field"]),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m", "--retry-failed"], ["retry_failed", "earlier run"]),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_remedy(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    done = run("score", write_rows(tmp_path / "in", 1), tmp_path / "out", *flags)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert all(word in done.stderr.decode() for word in words), done.stderr
    assert not (tmp_path / "out").exists()


# -- score: the ordinary run -------------------------------------------------------------------------------------------


def test_a_file_is_scored_in_order_and_its_fields_are_passed_through(tmp_path: Path, mock: Any) -> None:
    judge, target = mock(), tmp_path / "out.jsonl"
    source = write_rows(tmp_path / "in.jsonl", 300, meta={"a": [1, None]})
    prices = ("--price-in", 1, "--price-out", 2)
    done = run("score", source, target, *judge_flags(judge, *prices), "--json")
    assert done.returncode == 0, done.stderr
    assert_complete(target, 300)
    assert read_rows(target)[7]["meta"] == {"a": [1, None]}
    summary = json.loads(done.stdout)
    assert (summary["scored"], summary["failed"], summary["skipped"], summary["malformed"]) == (300, 0, 0, 0)
    assert summary["calls"]["sent"] == 300 and summary["calls"]["cost"] > 0
    assert b"300 scored, 0 failed, 0 skipped" in done.stderr


def test_settings_come_from_a_file_and_flags_come_before_it(tmp_path: Path, mock: Any) -> None:
    judge, target = mock(model="right"), tmp_path / "out"
    config = tmp_path / "judge.toml"
    config.write_text(f'endpoint = "{judge.base_url}"\nmodel = "wrong"\nmax_tokens = 8\n')
    assert run("score", write_rows(tmp_path / "in", 3), target, "--config", config, "--model", "right").returncode == 0
    config.write_text('endpont = "typo"\n')
    done = run("score", tmp_path / "in", target, "--config", config, "--model", "m", "--endpoint", "http://127.0.0.1:1")
    assert done.returncode == 2 and b"endpont" in done.stderr


def test_a_reasoning_model_can_be_asked_without_a_temperature(tmp_path: Path) -> None:
    config = tmp_path / "judge.toml"
    config.write_text('endpoint = "http://127.0.0.1:1"\nmodel = "m"\ntemperature = "none"\n[sampling]\nseed = 1\n')
    pairs = ["max_completion_tokens=64", "reasoning_effort=low", 'stop=["a", "b=c"]', "seed=2", 'user="7"']
    made = judge_from_flags(config=config, sampling=pairs)
    assert made.temperature is None
    assert made.sampling == {
        "max_completion_tokens": 64,
        "reasoning_effort": "low",
        "stop": ["a", "b=c"],
        "seed": 2,
        "user": "7",
    }
    assert judge_from_flags(config=config, temperature="0.5").temperature == 0.5
    config.write_text('endpoint = "http://127.0.0.1:1"\nmodel = "m"\n')
    assert judge_from_flags(config=config, temperature="none").temperature is None
    assert judge_from_flags(config=config).temperature == 0.0
    config.write_text('endpoint = "http://127.0.0.1:1"\nmodel = "m"\ntemperature = "hot"\n')
    with pytest.raises(ConfigError, match="temperature = 'hot'"):
        judge_from_flags(config=config)


def test_what_sampling_flags_name_is_in_the_request(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            reply = json.dumps({"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = [
            "--temperature",
            "none",
            "--sampling",
            "max_completion_tokens=64",
            "--sampling",
            "reasoning_effort=low",
        ]
        at = f"http://127.0.0.1:{server.server_address[1]}/v1"
        done = run("score", write_rows(tmp_path / "in", 1), tmp_path / "out", "--endpoint", at, "--model", "m", *flags)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    (body,) = bodies
    assert "temperature" not in body
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (64, "low")


def test_fields_can_have_other_names_and_two_verdicts_stand_side_by_side(tmp_path: Path, mock: Any) -> None:
    judge = mock()
    (tmp_path / "in").write_text('{"answer": "a", "verdict": "mine"}\n')
    flags = judge_flags(judge, "--response-field", "answer")
    assert run("score", tmp_path / "in", tmp_path / "out", *flags).returncode == 1
    assert "--verdict-field" in read_rows(tmp_path / "out")[0]["verdict"]["detail"]
    assert run("score", tmp_path / "in", tmp_path / "two", *flags, "--verdict-field", "second").returncode == 0
    (row,) = read_rows(tmp_path / "two")
    assert row["verdict"] == "mine" and row["second"]["status"] == "scored"


def test_malformed_lines_are_reported_by_number_and_do_not_stop_it(tmp_path: Path, mock: Any) -> None:
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
    judge, source, target = mock(), tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"".join(lines))
    done = run("score", source, target, *judge_flags(judge), "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert (summary["scored"], summary["skipped"], summary["malformed"], summary["blank"]) == (5, 1, 6, 2)
    for number in range(3, 9):
        assert f"line {number} is malformed".encode() in done.stderr
    rows = read_rows(target)
    assert [row["verdict"]["line"] for row in rows] == [1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14]
    assert {row["verdict"]["reason"] for row in rows[1:7]} == {"malformed"}
    assert rows[7]["response"] == "lone \ud800"
    assert target.read_bytes().splitlines()[-2].partition(b',"verdict"')[0] == lines[-2].strip()[:-1]
    again = run("score", source, target, *judge_flags(judge))
    assert again.returncode == 1 and len(read_rows(target)) == len(rows)


def test_only_the_first_malformed_lines_are_named(tmp_path: Path, mock: Any) -> None:
    (tmp_path / "in").write_bytes(b"nonsense\n" * 500)
    done = run("score", tmp_path / "in", tmp_path / "out", *judge_flags(mock()))
    assert done.returncode == 1
    assert done.stderr.count(b"is malformed") == 20
    assert b"500 malformed (20 shown)" in done.stderr


def test_an_empty_input_gives_an_empty_output(tmp_path: Path, mock: Any) -> None:
    (tmp_path / "in").touch()
    done = run("score", tmp_path / "in", tmp_path / "out", *judge_flags(mock()), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["scored"] == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_rows_come_from_a_pipe_and_go_to_one(tmp_path: Path, mock: Any) -> None:
    source = write_rows(tmp_path / "in", 200)
    done = run("score", "-", "-", *judge_flags(mock()), stdin=source.read_bytes())
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == list(range(200))


def test_a_row_from_a_pipe_is_answered_before_the_pipe_ends(mock: Any, begin: Any) -> None:
    program = begin("score", "-", "-", *judge_flags(mock()), stdin=subprocess.PIPE)
    program.stdin.write(b'{"response": "first"}\n')
    program.stdin.flush()
    assert json.loads(program.stdout.readline())["verdict"]["status"] == "scored"
    program.stdin.close()
    program.stdin = None
    assert program.wait(WAIT_S) == 0


def test_a_reader_that_goes_away_ends_it_in_silence(tmp_path: Path, mock: Any, begin: Any) -> None:
    program = begin("score", write_rows(tmp_path / "in", 3000), "-", *judge_flags(mock()), "--quiet")
    assert program.stdout.readline()
    program.stdout.close()
    program.stdout = None
    assert program.wait(WAIT_S) == 141
    assert program.stderr.read() == b""


def test_json_and_rows_cannot_both_have_stdout(tmp_path: Path, mock: Any) -> None:
    assert run("score", write_rows(tmp_path / "in", 1), "-", *judge_flags(mock()), "--json").returncode == 2


def test_failed_rows_give_exit_code_1_and_can_be_retried(tmp_path: Path, mock: Any) -> None:
    judge = mock(scores={"answer 3": "no idea", "answer 5": "nothing"})
    source, target = write_rows(tmp_path / "in", 10), tmp_path / "out"
    assert run("score", source, target, *judge_flags(judge)).returncode == 1
    again = run("score", source, target, *judge_flags(judge))
    assert again.returncode == 1 and b"failed: line 4: " in again.stderr and b"--retry-failed scores" in again.stderr
    before = read_rows(target)
    assert [row["id"] for row in before if row["verdict"]["status"] == "failed"] == [3, 5]
    assert before[3]["verdict"]["score"] is None and before[3]["verdict"]["reason"] == "unparseable"
    judge.reset(JudgeProfile())
    done = run("score", source, target, *judge_flags(judge), "--retry-failed", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scored"] == 10
    assert judge.counts().received == 2
    assert_complete(target, 10)
    assert [row for row in read_rows(target) if row["id"] not in (3, 5)] == [r for r in before if r["id"] not in (3, 5)]
    assert not list(tmp_path.glob("*.retry"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path, mock: Any) -> None:
    judge = mock()
    row = json.dumps({"response": "the same", "pad": "x" * 1500}) + "\n"
    # Not ru_maxrss: that is inherited from the process that started it.
    program = (
        "import pathlib, re, sys\nfrom freewheel.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(re.search('VmHWM: *\\t*(.*) kB', pathlib.Path('/proc/self/status').read_text())[1].strip(),"
        " file=sys.stderr)"
    )
    peaks = []
    for count in (12_000, 60_000):
        (tmp_path / "in").write_text(row * count)
        command = [sys.executable, "-c", program, "score", tmp_path / "in", tmp_path / "out", *judge_flags(judge)]
        done = subprocess.run([*map(str, command), "--overwrite"], capture_output=True, timeout=WAIT_S, check=True)
        assert len((tmp_path / "out").read_bytes().splitlines()) == count
        peaks.append(int(done.stderr.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 25, peaks  # the file alone grew by 72 MB


@pytest.mark.parametrize("placement", ["process", "thread"])
def test_a_parser_in_the_current_directory_is_found(tmp_path: Path, mock: Any, placement: str) -> None:
    (tmp_path / "my_scoring.py").write_text("print('hello')\ndef read(reply): return float(reply) / 2\n")
    (tmp_path / "mine.toml").write_text('base = "integer"\nlow = 0\nparser = "my_scoring:read"\n')
    write_rows(tmp_path / "in", 3)
    flags = judge_flags(mock(), "--rubric", "mine.toml", "--placement", placement)
    done = installed("score", "in", "-", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line)["verdict"] for line in done.stdout.splitlines()]
    assert [verdict["score"] for verdict in verdicts] == [float(verdict["raw"]) / 2 for verdict in verdicts]


def test_what_would_break_the_engine_is_refused_before_it_starts(tmp_path: Path, mock: Any) -> None:
    judge, source, target = mock(), write_rows(tmp_path / "in", 3), tmp_path / "out"
    (tmp_path / "mine.toml").write_text('base = "integer"\nparser = "no_such_module:read"\n')
    done = run("score", source, target, *judge_flags(judge, "--rubric", tmp_path / "mine.toml"))
    assert done.returncode == 2
    assert b"no_such_module:read" in done.stderr and b"PYTHONPATH" in done.stderr
    env = {**os.environ, "OPENAI_API_KEY": f"{KEY}\n{KEY}"}
    done = run("score", source, target, *judge_flags(judge), env=env)
    assert done.returncode == 2
    assert b"OPENAI_API_KEY" in done.stderr and b"no HTTP header can carry" in done.stderr
    assert KEY.encode() not in done.stderr
    assert not target.exists() and judge.counts().received == 0


# -- score: what ends a run early --------------------------------------------------------------------------------------


def test_a_killed_run_continues_without_paying_twice(tmp_path: Path, mock: Any, begin: Any) -> None:
    judge, source, target, concurrency = mock(**SLOW), write_rows(tmp_path / "in", 400), tmp_path / "out", 8
    flags = judge_flags(judge, "--concurrency", f"fixed:{concurrency}")
    program = begin("score", source, target, *flags)
    wait_until(lambda: target.exists() and target.stat().st_size > 0)
    program.kill()
    program.wait()
    done = run("score", source, target, *flags, "--json")
    assert done.returncode == 0, done.stderr
    assert_complete(target, 400)
    assert 0 < json.loads(done.stdout)["before"] < 400
    counts = judge.counts()
    assert counts.most_received <= 2
    assert counts.received - 400 <= concurrency  # those in flight at the kill, and no other


def test_half_a_row_at_the_end_is_cut_off_and_written_again(tmp_path: Path, mock: Any) -> None:
    judge, source, target = mock(), write_rows(tmp_path / "in", 20), tmp_path / "out"
    assert run("score", source, target, *judge_flags(judge)).returncode == 0
    whole = target.read_bytes()
    target.write_bytes(whole[: len(whole) // 2])
    assert run("score", source, target, *judge_flags(judge)).returncode == 0
    assert_complete(target, 20)
    assert judge.counts().received == 20


def test_the_death_of_the_engines_process_costs_no_row(tmp_path: Path, mock: Any, begin: Any) -> None:
    judge, source, target = mock(**SLOW), write_rows(tmp_path / "in", 300), tmp_path / "out"
    program = begin("score", source, target, *judge_flags(judge, "--concurrency", "fixed:8"), "--json")
    wait_until(lambda: judge.counts().answered > 40)
    psutil.Process(program.pid).children()[0].kill()
    output, errors = program.communicate(timeout=WAIT_S)
    assert program.returncode == 0, errors
    assert_complete(target, 300)
    assert json.loads(output)["calls"]["restarts"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_to_continue(
    tmp_path: Path, mock: Any, begin: Any, number: signal.Signals, code: int
) -> None:
    judge, source, target = mock(**SLOW), write_rows(tmp_path / "in", 400), tmp_path / "out"
    flags = judge_flags(judge, "--concurrency", "fixed:16")
    program = begin("score", source, target, *flags)
    wait_until(lambda: target.exists() and target.stat().st_size > 0)
    program.send_signal(number)
    _, errors = program.communicate(timeout=WAIT_S)
    assert program.returncode == code, errors
    assert b"run the same command again" in errors and b"Traceback" not in errors
    written = read_rows(target)
    assert [row["id"] for row in written] == list(range(len(written)))
    assert run("score", source, target, *flags).returncode == 0
    assert_complete(target, 400)


def test_a_run_that_waits_for_a_silent_pipe_can_be_interrupted(mock: Any, begin: Any) -> None:
    program = begin("score", "-", "-", *judge_flags(mock()), stdin=subprocess.PIPE)
    program.stdin.write(b'{"response": "one"}\n')
    program.stdin.flush()
    assert program.stdout.readline()
    program.send_signal(signal.SIGINT)
    assert program.wait(WAIT_S) == 130


def test_two_runs_cannot_write_to_one_output(tmp_path: Path, mock: Any, begin: Any) -> None:
    judge, source, target = mock(**SLOW), write_rows(tmp_path / "in", 400), tmp_path / "out"
    begin("score", source, target, *judge_flags(judge, "--concurrency", "fixed:4"))
    wait_until(lambda: judge.counts().received > 0)
    done = run("score", source, target, *judge_flags(judge))
    assert done.returncode == 2
    assert b"another run is writing to it" in done.stderr


def test_an_output_of_another_input_or_rubric_is_refused(tmp_path: Path, mock: Any) -> None:
    judge, source, target = mock(), write_rows(tmp_path / "in", 5), tmp_path / "out"
    assert run("score", source, target, *judge_flags(judge)).returncode == 0
    before = target.read_bytes()
    for flags in (["--rubric", "number"], ["--model", "other"], ["--temperature", "1"]):
        done = run("score", source, target, *judge_flags(judge), *flags)
        assert done.returncode == 2 and b"--overwrite" in done.stderr
    source.write_text('{"response": "changed"}\n' * 5)
    assert run("score", source, target, *judge_flags(judge)).returncode == 2
    source.write_text('{"response": "answer 0"}\n')
    assert b"the input ends before" in run("score", source, target, *judge_flags(judge)).stderr
    target.write_text("my diary\n")
    assert b"no row of" in run("score", source, target, *judge_flags(judge)).stderr
    assert target.read_text() == "my diary\n"
    target.write_bytes(before)
    assert run("score", source, target, *judge_flags(judge), "--overwrite").returncode == 0
    assert len(read_rows(target)) == 1


def test_the_input_is_never_taken_for_the_output(tmp_path: Path, mock: Any) -> None:
    source = write_rows(tmp_path / "in", 5)
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link"):
        done = run("score", source, target, *judge_flags(mock()), "--overwrite")
        assert done.returncode == 2 and b"the input file itself" in done.stderr
    assert len(source.read_bytes().splitlines()) == 5


def test_a_wrong_key_stops_it_and_is_shown_nowhere(tmp_path: Path, mock: Any) -> None:
    judge, target = mock(api_key="another"), tmp_path / "out"
    env = {**os.environ, "OPENAI_API_KEY": KEY}
    done = run("score", write_rows(tmp_path / "in", 50), target, *judge_flags(judge), "--json", env=env)
    assert done.returncode == 3
    assert b"OPENAI_API_KEY" in done.stderr and b"run the same command again" in done.stderr
    assert target.read_bytes() == b""
    assert json.loads(done.stdout)["stopped"]["reason"] == "auth"
    everything = done.stdout + done.stderr + b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert KEY.encode() not in everything
    done = run("score", tmp_path / "in", target, *judge_flags(judge), env={**os.environ, "OPENAI_API_KEY": "another"})
    assert done.returncode == 0
    assert_complete(target, 50)


def test_an_unknown_model_stops_it(tmp_path: Path, mock: Any) -> None:
    done = run("score", write_rows(tmp_path / "in", 50), tmp_path / "out", *judge_flags(mock(model="other")))
    assert done.returncode == 3
    assert b"--model" in done.stderr and b"does not exist" in done.stderr


def test_no_credit_stops_it(tmp_path: Path, mock: Any) -> None:
    judge = mock(insufficient_quota=True)
    done = run("score", write_rows(tmp_path / "in", 50), tmp_path / "out", *judge_flags(judge), "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["stopped"]["reason"] == "quota"


def test_the_cost_ceiling_stops_it_and_a_further_run_continues(tmp_path: Path, mock: Any) -> None:
    judge, source, target = mock(**SLOW), write_rows(tmp_path / "in", 100), tmp_path / "out"
    prices = ("--price-in", 10, "--price-out", 10, "--concurrency", "fixed:4")
    done = run("score", source, target, *judge_flags(judge, *prices), "--max-cost", 0.1, "--json")
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert summary["stopped"]["reason"] == "budget"
    assert summary["calls"]["cost"] <= 0.1
    assert run("score", source, target, *judge_flags(judge, *prices)).returncode == 0
    assert_complete(target, 100)
    assert judge.counts().received == 100


@pytest.mark.parametrize("count", [1, 200])
def test_an_unreachable_judge_stops_it_and_no_row_is_called_failed(tmp_path: Path, count: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    config, target = tmp_path / "judge.json", tmp_path / "out"
    config.write_text(json.dumps({"endpoint": url, "model": "m", "request_deadline_s": 1.0}))
    done = run("score", write_rows(tmp_path / "in", count), target, "--config", config, "--json")
    assert done.returncode == 3, done.stderr
    assert target.read_bytes() == b""
    assert json.loads(done.stdout)["stopped"]["next_line"] == 1
    assert b"does not answer" in done.stderr and f"{url}/chat/completions".encode() in done.stderr


def test_a_judge_that_never_gives_a_score_is_not_paid_for_the_whole_file(tmp_path: Path, mock: Any) -> None:
    judge = mock(unparseable_share=1.0)
    flags = judge_flags(judge, "--concurrency", "fixed:8")
    done = run("score", write_rows(tmp_path / "in", 3000), tmp_path / "out", *flags)
    assert done.returncode == 3
    assert b"none was scored" in done.stderr
    assert judge.counts().received < 3000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_without_room_ends_it_with_a_message(tmp_path: Path, mock: Any) -> None:
    done = run("score", write_rows(tmp_path / "in", 5), "/dev/full", *judge_flags(mock()))
    assert done.returncode == 3
    assert b"No space left on device" in done.stderr and b"Traceback" not in done.stderr


def test_a_file_that_cannot_grow_keeps_whole_rows_and_is_continued(tmp_path: Path, mock: Any) -> None:
    judge, source, target = mock(), write_rows(tmp_path / "in", 400), tmp_path / "out"
    command = [sys.executable, "-m", "freewheel", "score", source, target, *judge_flags(judge), "--no-cache"]
    limited = ["sh", "-c", 'ulimit -f 40; exec "$@"', "sh", *map(str, command)]
    done = subprocess.run(limited, capture_output=True, timeout=WAIT_S, check=False)
    assert done.returncode == 3, done.stderr
    assert b"File too large" in done.stderr
    assert target.read_bytes().endswith(b"\n") and 0 < len(read_rows(target)) < 400
    assert run("score", source, target, *judge_flags(judge), "--no-cache").returncode == 0
    assert_complete(target, 400)


# -- cache and mock-judge ----------------------------------------------------------------------------------------------


def test_the_cache_is_shown_exported_and_cleared(tmp_path: Path, mock: Any) -> None:
    assert json.loads(run("cache", "stats", "--json").stdout)["entries"] == 0
    assert not (tmp_path / "cache").exists()
    assert run("score", write_rows(tmp_path / "in", 30), tmp_path / "out", *judge_flags(mock())).returncode == 0
    assert json.loads(run("cache", "stats", "--json").stdout)["entries"] == 30
    assert b"replies   30" in run("cache", "stats").stdout
    of_a_judge = {"expired", "max_bytes", "ttl_s"}
    assert not of_a_judge & json.loads(run("cache", "stats", "--json").stdout).keys(), "the file does not know them"
    done = run("cache", "export", tmp_path / "dump", "--json")
    assert json.loads(done.stdout)["exported"] == 30
    assert len(read_rows(tmp_path / "dump")) == 30
    assert len(run("cache", "export", "-").stdout.splitlines()) == 30
    assert run("cache", "clear").returncode == 2
    assert json.loads(run("cache", "clear", "--older-than", "7d", "--yes", "--json").stdout)["removed"] == 0
    assert run("cache", "clear", "--older-than", "soon", "--yes").returncode == 2
    assert json.loads(run("cache", "clear", "--yes", "--json").stdout)["removed"] == 30


@pytest.fixture
def replies(tmp_path: Path, mock: Any) -> int:
    """Puts replies into the cache. Their number."""
    assert run("score", write_rows(tmp_path / "in", 30), "-", *judge_flags(mock())).returncode == 0
    return 30


def test_an_export_is_for_its_user_alone_and_replaces_a_file_only_when_told(tmp_path: Path, replies: int) -> None:
    (tmp_path / "exported").mkdir()
    dump = tmp_path / "exported" / "dump"
    assert run("cache", "export", dump).returncode == 0
    assert len(read_rows(dump)) == replies and dump.stat().st_mode & 0o777 == 0o600
    dump.write_text("mine\n")
    done = run("cache", "export", dump)
    assert done.returncode == 2 and b"--overwrite" in done.stderr
    assert dump.read_text() == "mine\n"
    assert run("cache", "export", dump, "--overwrite").returncode == 0
    assert len(read_rows(dump)) == replies
    assert [path.name for path in dump.parent.iterdir()] == ["dump"]


def test_an_export_through_a_link_leaves_the_link(tmp_path: Path, replies: int) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to("real")
    assert run("cache", "export", link).returncode == 0
    assert run("cache", "export", link).returncode == 2
    assert run("cache", "export", link, "--overwrite").returncode == 0
    assert link.is_symlink() and len(read_rows(real)) == replies


def test_an_export_is_written_into_a_fifo(tmp_path: Path, replies: int, begin: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = begin("cache", "export", fifo)
    assert len(fifo.read_bytes().splitlines()) == replies
    assert program.wait(WAIT_S) == 0
    assert fifo.is_fifo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_an_export_leaves_a_device_a_device(tmp_path: Path, replies: int) -> None:
    devices = {"null": os.makedev(1, 3), "full": os.makedev(1, 7)}
    for name, number in devices.items():
        try:
            os.mknod(tmp_path / name, 0o666 | stat.S_IFCHR, number)
            (tmp_path / name).open("wb").close()
        except PermissionError:
            pytest.skip("no devices may be made or opened here")
    assert run("cache", "export", tmp_path / "null", "--overwrite").returncode == 0
    done = run("cache", "export", tmp_path / "full")
    assert done.returncode == 2 and b"No space left on device" in done.stderr
    assert all((tmp_path / name).is_char_device() for name in devices)
    assert not list(tmp_path.glob("*.part"))


def test_the_mock_judge_serves_until_it_is_told_to_stop(tmp_path: Path, begin: Any) -> None:
    env = {**os.environ, "MOCK_KEY": KEY}
    flags = ("--port", 0, "--json", "--latency", 0.01, "--model", "m", "--api-key-env", "MOCK_KEY")
    program = begin("mock-judge", *flags, env=env)
    endpoint = json.loads(program.stdout.readline())["endpoint"]
    source, target = write_rows(tmp_path / "in", 10), tmp_path / "out"
    flags = ("--endpoint", endpoint, "--model", "m")
    assert run("score", source, target, *flags).returncode == 3
    assert run("score", source, target, *flags, "--api-key-env", "MOCK_KEY", env=env).returncode == 0
    program.send_signal(signal.SIGTERM)
    assert program.wait(WAIT_S) == 0
    assert program.stderr.read() == b""


def test_each_flag_of_the_mock_judge_is_a_field_of_its_profile() -> None:
    own = {"profile", "host", "port", "as_json", "api_key_env"}
    assert set(inspect.signature(mock_judge).parameters) - own <= set(JudgeProfile.__struct_fields__)


def test_the_mock_judge_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text('{"latencie": 1}')
    for flags in (["--error-share", "2"], ["--reply-style", "odd"], ["--profile", tmp_path / "profile.json"]):
        done = run("mock-judge", *flags, "--port", 0)
        assert done.returncode == 2 and b"Traceback" not in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("mock-judge", "--port", port)
    assert done.returncode == 2 and b"cannot listen" in done.stderr
    assert f"127.0.0.1:{port}".encode() in done.stderr


def test_what_may_not_be_read_is_one_line_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as ended, plain_errors():
        tmp_path.read_text()  # a folder where a file should be
    told = capsys.readouterr().err
    assert ended.value.exit_code == 2 and str(tmp_path) in told and told.count("\n") == 1
