"""What the page about moving from TRL says of TRL's settings is so."""

from __future__ import annotations

import dataclasses
import re

import pytest

from ...documents import DOCS, INLINE

trl = pytest.importorskip("trl")

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]


def named(section: str) -> list[str]:
    """TRL's names in the table under a heading."""
    text = (DOCS / "from-trl.md").read_text()
    (part,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [key for line in lines for key in INLINE.findall(line.split(" | ")[0])]


def fields(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def test_names_of_grpo_config_are_its_own() -> None:
    names = [*named("`GRPOConfig`"), *named("What comes from `TrainingArguments`")]
    assert len(names) > 50
    assert [name for name in names if name not in fields(trl.GRPOConfig)] == []


def test_names_of_async_grpo_config_are_its_own() -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    names = named("`AsyncGRPOConfig`")
    assert len(names) > 8
    assert [name for name in names if name not in fields(AsyncGRPOConfig)] == []
