"""What the pages say of verl is so: its keys are spelt as verl has them, and what it is told is a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from ...documents import DOCS, ELLIPSIS, INLINE, blocks, commands

verl = pytest.importorskip("verl")

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

TOLD = [
    command.words[command.words.index("verl.trainer.main_ppo") + 1 :]
    for block in blocks("bash", pages=[DOCS / "verl.md"])
    for command in commands(block)
    if "verl.trainer.main_ppo" in command.words
]


def test_there_is_something_to_look_at():
    assert len(TOLD) == 2


@pytest.mark.parametrize("overrides", TOLD, ids=lambda words: words[-1])
def test_what_the_pages_tell_verl_is_a_configuration_of_verl(overrides: tuple[str, ...]) -> None:
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        config = compose("ppo_trainer", overrides=[word for word in overrides if word != ELLIPSIS])
    manager = config.reward.reward_manager
    assert manager.module.path == "pkg://freewheel.integrations.verl" or (
        config.reward.custom_reward_function.path == "pkg://freewheel.rewards"
    )


def configurations() -> list[DictConfig]:
    """The trainer's, and that of the fully asynchronous one, which lies beside it."""
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        plain = compose("ppo_trainer")
    folder = Path(verl.__file__).parent / "experimental/fully_async_policy/config"
    with initialize_config_dir(version_base=None, config_dir=str(folder)):
        fully_async = compose("fully_async_ppo_trainer", overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])
    return [plain, fully_async]


def test_keys_on_the_page_about_moving_are_verls_own() -> None:
    known = configurations()
    lines = [line for line in (DOCS / "from-verl.md").read_text().splitlines() if line.startswith("| `")]
    named = [key for line in lines for key in INLINE.findall(line.split(" | ")[0])]
    assert len(named) > 80
    missing = object()
    unknown = [
        key for key in named if all(OmegaConf.select(one, key, default=missing) is missing for one in known)
    ]  # a key whose value is null is there
    assert [key for key in unknown if not any(_has(one, key) for one in known)] == []


def _has(config: DictConfig, key: str) -> bool:
    """`select` takes a null for nothing."""
    *path, last = key.split(".")
    node = config
    for name in path:
        if not isinstance(node, DictConfig) or name not in list(node):
            return False
        node = node._get_node(name)
    return isinstance(node, DictConfig) and last in list(node)
