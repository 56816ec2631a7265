"""`freewheel serve` as a process: how it starts, what many processes get from it, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from freewheel.gateway.limits import TOKEN_ENV
from freewheel.judge.testing import RunningJudge

from .conftest import MODEL, WAIT_S, Program, chat

Mock = Callable[..., RunningJudge]
Begin = Callable[..., Program]

CHAT = "/v1/chat/completions"
TOKEN = "the-gateways-own-token"

CLIENT = """
import asyncio, json, sys, aiohttp
url, count, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
async def ask(session, n):
    body = {"model": model, "messages": [{"role": "user", "content": f"question {n}"}], "temperature": 0}
    async with session.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return (await reply.json())["choices"][0]["message"]["content"]
async def main():
    async with aiohttp.ClientSession() as session:
        print(json.dumps(await asyncio.gather(*(ask(session, n) for n in range(count)))))
asyncio.run(main())
"""


def post(url: str, body: Any, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def asking(url: str, count: int) -> list[Future[tuple[int, Any]]]:
    """Requests in threads of their own, which nobody has to wait for."""
    futures: list[Future[tuple[int, Any]]] = []
    for number in range(count):
        future: Future[tuple[int, Any]] = Future()

        def run(future: Future[tuple[int, Any]] = future, number: int = number) -> None:
            try:
                future.set_result(post(url + CHAT, chat(f"question {number}")))
            except OSError as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        futures.append(future)
    return futures


# -- start ------------------------------------------------------------------------------------------------------------


def test_other_machines_are_refused_at_the_start_without_a_token(program: Begin):
    code, said = program("http://127.0.0.1:9/v1", "--host", "0.0.0.0").end()
    assert code == 2
    assert said.startswith("freewheel: error: --host = '0.0.0.0': ") and f"set {TOKEN_ENV}" in said


def test_a_token_variable_that_is_named_must_be_set(program: Begin):
    code, said = program("http://127.0.0.1:9/v1", "--token-env", "NO_SUCH_VARIABLE").end()
    assert code == 2 and "NO_SUCH_VARIABLE" in said


def test_a_port_that_is_taken_is_said_so(program: Begin):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = program("http://127.0.0.1:9/v1", "--port", taken.getsockname()[1]).end()
    assert code == 2
    assert "it cannot listen there" in said and "Traceback" not in said


def test_a_setting_that_cannot_work_ends_it_without_a_traceback(program: Begin):
    for flags in (["--max-connections", 0], ["--concurrency", "many"], ["--rubric", "nope"]):
        code, said = program("http://127.0.0.1:9/v1", *flags).end()
        assert code == 2 and "Traceback" not in said


def test_a_gateway_is_not_its_own_judge(program: Begin):
    code, said = program("http://localhost:8911/v1", "--port", 8911).end()
    assert code == 2 and "this gateway itself" in said


def test_it_takes_its_judge_from_a_config_file(mock: Mock, program: Begin, tmp_path: Path):
    judge = mock()
    file = tmp_path / "judge.toml"
    file.write_text('reasks = 0\nrubric = "yes_no"\n')
    gateway = program(judge.url, "--config", file).wait_ready()
    assert post(gateway.url + "/score", {"response": "a"})[1]["verdicts"][0]["reason"] == "unparseable"


def test_the_token_is_asked_for_and_shows_nowhere(mock: Mock, program: Begin):
    gateway = program(mock().url, env={TOKEN_ENV: TOKEN}).wait_ready()
    assert post(gateway.url + CHAT, chat("hi"))[0] == 401
    assert post(gateway.url + CHAT, chat("hi"), Authorization="Bearer wrong")[0] == 401
    assert post(gateway.url + CHAT, chat("hi"), Authorization=f"Bearer {TOKEN}")[0] == 200
    assert TOKEN not in json.dumps(gateway.ready)
    gateway.tell()
    code, said = gateway.end()
    assert code == 0 and TOKEN not in said


# -- many processes ---------------------------------------------------------------------------------------------------


def test_eight_processes_that_ask_the_same_pay_once(mock: Mock, program: Begin):
    judge = mock(latency_s=0.2)
    gateway = program(judge.url).wait_ready()
    command = [sys.executable, "-c", CLIENT, gateway.url + CHAT, "30", MODEL]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: subprocess.run(command, capture_output=True, timeout=WAIT_S), range(8)))
    assert [one.stderr for one in done] == [b""] * 8
    assert len({one.stdout for one in done}) == 1
    assert judge.counts().received == 30


def test_a_second_gateway_finds_what_the_first_had_paid_for(mock: Mock, program: Begin):
    judge = mock()
    for _ in range(2):
        gateway = program(judge.url).wait_ready()
        assert post(gateway.url + CHAT, chat("hi"))[0] == 200
        gateway.tell()
        assert gateway.end()[0] == 0
    assert judge.counts().received == 1


# -- end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_end_well_after_a_signal_and_new_ones_are_sent_away(mock: Mock, program: Begin, number: int):
    judge = mock(latency_s=2.0)
    gateway = program(judge.url).wait_ready()
    replies = asking(gateway.url, 10)
    until(lambda: judge.counts().in_flight == 10)
    gateway.tell(number)
    until(lambda: get(gateway.url + "/healthz")[0] == 503)
    assert get(gateway.url + "/healthz")[1]["status"] == "draining"
    status, told = post(gateway.url + CHAT, chat("too late"))
    assert (status, told["error"]["code"]) == (503, "draining")
    assert [reply.result(WAIT_S)[0] for reply in replies] == [200] * 10
    code, said = gateway.end()
    assert code == 0
    assert "shutting down" in said and "10 calls" in said
    assert judge.counts().answered == 10


def test_what_outlasts_the_drain_ends_as_a_503(mock: Mock, program: Begin):
    judge = mock(latency_s=60.0)
    gateway = program(judge.url, "--drain-s", 0.5).wait_ready()
    replies = asking(gateway.url, 3)
    until(lambda: judge.counts().in_flight == 3)
    gateway.tell()
    for reply in replies:
        status, told = reply.result(WAIT_S)
        assert (status, told["error"]["code"]) == (503, "draining")
    assert gateway.end()[0] == 0
    until(lambda: judge.counts().in_flight == 0)


def test_a_second_signal_ends_the_drain_at_once(mock: Mock, program: Begin):
    judge = mock(latency_s=60.0)
    gateway = program(judge.url, "--drain-s", 50).wait_ready()
    replies = asking(gateway.url, 3)
    until(lambda: judge.counts().in_flight == 3)
    gateway.tell()
    until(lambda: get(gateway.url + "/healthz")[0] == 503)
    began = time.monotonic()
    gateway.tell()
    assert gateway.end()[0] == 0
    assert time.monotonic() - began < 10
    assert {reply.result(WAIT_S)[0] for reply in replies} == {503}


def test_an_idle_gateway_ends_at_once(mock: Mock, program: Begin):
    gateway = program(mock().url).wait_ready()
    connection = socket.create_connection(("127.0.0.1", gateway.ready["port"]))
    began = time.monotonic()
    gateway.tell()
    assert gateway.end()[0] == 0
    assert time.monotonic() - began < 10
    connection.close()
