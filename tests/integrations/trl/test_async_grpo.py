"""TRL's AsyncGRPO: the child process that its worker spawns scores groups with `JudgeReward`.

A server on loopback takes the place of vLLM and answers with given texts; all other parts are those of TRL.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="runs in TRL's environment: make env-trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # importing it warns, and a warning is an error here

from accelerate import PartialState
from datasets import Dataset
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from freewheel.errors import ConfigError
from freewheel.integrations.trl import JudgeReward

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore", "error:::freewheel")]

GENERATIONS = 8
CHILD_START_S = 100
"""The child imports torch and TRL, on a machine that does other things too."""
STOP_S = 30
"""TRL itself waits 15 s, and 5 s more after SIGTERM."""
DATA = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": f"#### {2 * n}"} for n in range(500)]
)


@pytest.fixture(autouse=True)
def accelerate() -> None:
    """TRL's loggers need this state, which a trainer would have made."""
    PartialState()


class PlayedVllm(BaseHTTPRequestHandler):
    """Completes each prompt with one of some texts."""

    texts: list[list[int]]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # http.server's name
        self.rfile.read(int(self.headers["Content-Length"]))
        ids = random.choice(self.texts)
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def vllm_url(tokenizer: Any) -> Iterator[str]:
    texts = [f"It is {n}.<|im_end|>" for n in range(40)]
    PlayedVllm.texts = [tokenizer(text)["input_ids"] for text in texts]
    with ThreadingHTTPServer(("127.0.0.1", 0), PlayedVllm) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def children_of(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


def start_worker(monkeypatch: pytest.MonkeyPatch, reward: JudgeReward, tokenizer: Any, url: str) -> AsyncRolloutWorker:
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    worker = AsyncRolloutWorker(
        model_name="policy",
        dataset=DATA,
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=GENERATIONS,
        max_inflight_tasks=16,
        queue_maxsize=64,
        vllm_server_url=url,
        child_ready_timeout=CHILD_START_S,
    )
    worker.start()
    return worker


def stop_worker(worker: AsyncRolloutWorker) -> None:
    """Stop it as the trainer does. Its queues are emptied, because a child with full queues is killed after 15 s."""
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    until = time.monotonic() + STOP_S
    while stopping.is_alive():
        assert time.monotonic() < until, "the worker does not stop"
        for filled in (worker.rollout_buffer, worker.metrics_queue):
            with contextlib.suppress(queue.Empty):
                filled.get(timeout=0.02)


def test_the_spawned_worker_scores_with_its_own_engine(mock, make_reward, tokenizer, vllm_url, monkeypatch, score):
    """The worker's child is daemonic, and may have no children by `multiprocessing`; the engine must start there."""
    server = mock(error_share=0.05, seed=2)
    reward = make_reward(server.url, judge={"max_attempts": 1})
    worker = start_worker(monkeypatch, reward, tokenizer, vllm_url)
    process = worker._process
    try:
        samples = [worker.rollout_buffer.get(timeout=30) for _ in range(25 * GENERATIONS)]
        engines = children_of(process.pid)
        worker.check_health(stale_after_s=30)
    finally:
        stop_worker(worker)
    assert process.exitcode == 0
    failed = [sample for sample in samples if np.isnan(sample.metrics["reward"])]
    assert 0 < len(failed) < len(samples) / 2
    for sample in samples:
        if not np.isnan(sample.metrics["reward"]):
            wanted = score(sample.completion[0]["content"], sample.prompt[0]["content"])
            assert sample.metrics["rewards/judge"] == wanted
    assert server.counts().most_received <= 1 + len(failed)
    assert engines
    until = time.monotonic() + 10
    while alive := [pid for pid in engines if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, f"the worker ended and left {alive} behind"
        time.sleep(0.05)


def test_a_key_that_cannot_be_sent_is_refused_before_the_worker_starts(
    mock, make_reward, tokenizer, vllm_url, monkeypatch
):
    reward = make_reward(mock(api_key="secret-1").url, api_key="secret-1")
    with pytest.raises(ConfigError, match="set OPENAI_API_KEY in the environment") as failure:
        start_worker(monkeypatch, reward, tokenizer, vllm_url)
    assert "secret-1" not in str(failure.value)
