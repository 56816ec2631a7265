"""The light half imports without torch, and the heavy half says what to install."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import freewheel.data
from freewheel.data.tasks import TASKS

WITHOUT = """
import sys
for name in {hidden}:
    sys.modules[name] = None
"""


def run(code: str, *hidden: str) -> str:
    program = WITHOUT.format(hidden=list(hidden)) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_the_light_half_imports_without_torch():
    """Reward workers import tasks: torch would take half a gigabyte in each."""
    modules = ["prompts", "sources", "group", *(f"tasks.{name}" for name in TASKS)]
    names = ", ".join(f"freewheel.data.{module}" for module in modules)
    code = f"import freewheel.rewards.batch, {names}; print('torch' in sys.modules)"
    assert run(code) == "False\n"
    hidden = ("torch", "tensordict", "safetensors")
    assert run("from freewheel.data import RewardBatch, DataError; print(RewardBatch.__name__)", *hidden)


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    code = """
        import freewheel.data
        try:
            freewheel.data.DataProto
        except ImportError as error:
            print(error)
    """
    said = run(code, "torch")
    assert "torch" in said and "pip install 'freewheel[train]'" in said
    with pytest.raises(AttributeError, match="Nothing"):
        _ = freewheel.data.Nothing
