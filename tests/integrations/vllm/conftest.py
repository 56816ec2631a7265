"""One engine for the tests of a module: vLLM takes ten seconds and more to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import PreTrainedModel

from freewheel.rollout.vllm.engine import VllmEngine

from .asking import engine_of, save, tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM raises warnings


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def old() -> PreTrainedModel:
    return tiny(0)


@pytest.fixture(scope="session")
def new() -> PreTrainedModel:
    return tiny(1)


@pytest.fixture(scope="session")
def folder(old: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(old, tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[VllmEngine]:
    made = engine_of(folder)
    yield made
    await made.close()
