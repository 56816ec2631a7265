"""One Ray for all of verl's tests: it takes seconds to start, and two cores carry one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from transformers import PreTrainedTokenizerFast

from .stage import make_tokenizer


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gives the folder that only this Ray's processes have in their environment."""
    folder = tmp_path_factory.mktemp("ray-workers")
    variables = {
        "OPENAI_API_KEY": "EMPTY",  # as a user's shell has it when Ray starts
        "OMP_NUM_THREADS": "1",
        "FREEWHEEL_CACHE_DIR": str(folder),
    }
    ray.init(
        num_cpus=8,  # verl's actors want one each, and mostly wait
        include_dashboard=False,
        log_to_driver=True,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": variables},
    )
    yield folder
    ray.shutdown()


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_path)
