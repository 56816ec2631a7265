"""The light half imports without torch, and the heavy half says what to install."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import freewheel.data

WITHOUT = """
import sys
for name in {hidden}:
    sys.modules[name] = None
"""


def run(code: str, *hidden: str) -> str:
    program = WITHOUT.format(hidden=list(hidden)) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_the_protocol_needs_neither_torch_nor_tensordict():
    hidden = ("torch", "tensordict", "safetensors")
    assert (
        run("from freewheel.data import RewardBatch, DataError; print(RewardBatch.__name__)", *hidden)
        == "RewardBatch\n"
    )


def test_importing_the_package_does_not_load_torch():
    code = "import freewheel.data, freewheel.rewards.batch; print({'torch', 'tensordict'} & {*sys.modules})"
    assert run(code) == "set()\n"


@pytest.mark.parametrize("hidden", ["torch", "tensordict"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(hidden: str):
    code = """
        import freewheel.data
        try:
            freewheel.data.DataProto
        except ImportError as error:
            print(error)
    """
    said = run(code, hidden)
    assert hidden in said and "pip install 'freewheel[train]'" in said


def test_names_are_listed_and_unknown_ones_are_not_found():
    assert set(freewheel.data.__all__) <= set(dir(freewheel.data))
    with pytest.raises(AttributeError, match="Nothing"):
        _ = freewheel.data.Nothing
