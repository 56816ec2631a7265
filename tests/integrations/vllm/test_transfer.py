"""Weights reach real vLLM in parts through a file, and by a broadcast.

The model has fused projections, biases and a tied head. On a CPU vLLM packs the weights that it loads."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from freewheel.rollout.engine import EngineError
from freewheel.rollout.vllm import transfer
from freewheel.rollout.vllm.engine import VllmEngine
from freewheel.runtime.building import load_engine
from freewheel.sync.broadcast import WeightServer
from freewheel.sync.device import DevicePacker
from freewheel.sync.weights import AnyWeights, Packer, pack

from ...rollout.helpers import ask, request_of
from .asking import LONGEST_PROMPT, SHAPE, assert_computed_by, config_of, plan_of, save

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PART_BYTES = 40_000
"""Several parts, and none is a whole layer."""


def qwen(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


class Way:
    """An engine and the transport of its weights."""

    def __init__(self, engine: VllmEngine, packer: Packer) -> None:
        self.engine = engine
        self._packer = packer
        self._held: AnyWeights | None = None
        """The trainer's part."""

    async def take(self, model: PreTrainedModel) -> bool:
        """Send weights. Return whether the engine then holds them."""
        held = self._packer({name: parameter.detach() for name, parameter in model.named_parameters()})
        self._held = held
        sent: AnyWeights = pickle.loads(pickle.dumps(held))
        found = await self.engine.update_weights(self.engine.version + 1, sent, verify=True)
        return found == held.checksum

    async def agrees(self, model: PreTrainedModel) -> None:
        request = request_of(self.engine.version, n=2)
        for one in await ask(self.engine, request):
            assert_computed_by(model, request, one)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["object_store", "nccl"])
async def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Way]:
    segments = set(Path("/dev/shm").glob("psm_*"))
    folder = save(qwen(0), tmp_path_factory.mktemp("qwen"))
    config = config_of(folder)
    plan = dataclasses.replace(plan_of(config), transport=request.param)
    loaded = load_engine(config=config, plan=plan, model_path=str(folder), longest_tokens=LONGEST_PROMPT, version=0)
    server = WeightServer(host="127.0.0.1")
    assert isinstance(loaded.engine, VllmEngine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BUCKET_BYTES", PART_BYTES)
        by_broadcast = DevicePacker(bucket_bytes=PART_BYTES, travels_as=server.offer)
        yield Way(loaded.engine, by_broadcast if request.param == "nccl" else pack)
    await loaded.engine.close()
    server.close()
    assert set(Path("/dev/shm").glob("psm_*")) <= segments, "vLLM's processes left shared memory behind"


async def test_every_version_arrives_in_parts_and_the_engine_computes_with_it(way: Way) -> None:
    for seed in (1, 2, 3):
        model = qwen(seed)
        assert await way.take(model)
        await way.agrees(model)
    assert not list(Path("/dev/shm").glob("freewheel-weights-*"))


@contextmanager
def spoiled(engine: VllmEngine) -> Iterator[None]:
    """Damage the last message about a version."""
    update = engine._llm.update

    async def spoils(info: dict[str, Any]) -> None:
        broken = {"key": -1} if "key" in info else {"starts": [1 << 40 for _ in info["starts"]]}
        await update(info | broken if info.get("part", 0) + 1 == info.get("parts", 1) else info)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._llm, "update", spoils)
        yield


async def test_after_a_damaged_version_the_next_one_arrives_whole(way: Way) -> None:
    with spoiled(way.engine), pytest.raises(EngineError, match="did not take version"):
        await way.take(qwen(4))
    model = qwen(5)
    async with asyncio.timeout(60):
        assert await way.take(model)
    await way.agrees(model)
