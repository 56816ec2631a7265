"""The TRL page: every TRL setting in its migration tables exists in TRL."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ...documents import INLINE, migration_tables

trl = pytest.importorskip("trl")

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]


def find_names(section: str) -> list[str]:
    """Return TRL's names in the table under a heading."""
    text = migration_tables("trl.md")
    (part,) = re.findall(rf"^### {re.escape(section)}\n(.*?)(?=^### |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [key for line in lines for key in INLINE.findall(line.split(" | ")[0])]


def fields(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_names_of_grpo_config_are_its_own() -> None:
    names = [*find_names("`GRPOConfig`"), *find_names("What comes from `TrainingArguments`")]
    assert len(names) > 50
    assert [name for name in names if name not in fields(trl.GRPOConfig)] == []


def test_names_of_async_grpo_config_are_its_own() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    names = find_names("`AsyncGRPOConfig`")
    assert len(names) > 8
    assert [name for name in names if name not in fields(AsyncGRPOConfig)] == []
