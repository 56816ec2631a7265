"""The verl page: every verl key on it exists in verl, and every command on it is a valid verl configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import DictConfig

from ...documents import DOCS, ELLIPSIS, INLINE, blocks, commands, migration_tables

verl = pytest.importorskip("verl")

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

COMMANDS = [
    command.words[command.words.index("verl.trainer.main_ppo") + 1 :]
    for block in blocks("bash", pages=[DOCS / "verl.md"])
    for command in commands(block)
    if "verl.trainer.main_ppo" in command.words
]


def test_the_page_has_two_commands_for_verl():
    assert len(COMMANDS) == 2


@pytest.mark.parametrize("overrides", COMMANDS, ids=lambda words: words[-1])
def test_the_commands_on_the_page_are_valid_verl_configurations(overrides: tuple[str, ...]) -> None:
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        config = compose("ppo_trainer", overrides=[word for word in overrides if word != ELLIPSIS])
    manager = config.reward.reward_manager
    assert manager.module.path == "pkg://freewheel.integrations.verl" or (
        config.reward.custom_reward_function.path == "pkg://freewheel.rewards"
    )


def configurations() -> list[DictConfig]:
    """Return the defaults of verl's trainer and of its fully asynchronous trainer."""
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        plain = compose("ppo_trainer")
    folder = Path(verl.__file__).parent / "experimental/fully_async_policy/config"
    with initialize_config_dir(version_base=None, config_dir=str(folder)):
        fully_async = compose("fully_async_ppo_trainer", overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])
    return [plain, fully_async]


def test_every_verl_key_in_the_migration_tables_exists_in_verl() -> None:
    known = configurations()
    lines = [line for line in migration_tables("verl.md").splitlines() if line.startswith("| `")]
    named = [key for line in lines for key in INLINE.findall(line.split(" | ")[0])]
    assert len(named) > 80
    assert [key for key in named if not any(_has(one, key) for one in known)] == []


def _has(config: DictConfig, key: str) -> bool:
    """Whether the key exists, also if its value is null, which `OmegaConf.select` treats as missing."""
    *path, last = key.split(".")
    node = config
    for name in path:
        if not isinstance(node, DictConfig) or name not in list(node):
            return False
        node = node._get_node(name)
    return isinstance(node, DictConfig) and last in list(node)
