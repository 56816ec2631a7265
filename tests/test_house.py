"""The house rules of the code: imports point one way, and docs/architecture.md shows the real path of a prompt."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from .documents import ROOT


def load_house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = load_house()


def write_package(folder: Path, sources: dict[str, str]) -> Path:
    source = folder / "freewheel"
    for name, text in {"__init__.py": "", **sources}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return source


def test_no_package_imports_against_the_order():
    assert house.find_violations(house.read_modules()) == []


def test_there_are_no_cycles_between_packages():
    assert house.find_cycles(house.count_packages(house.read_modules())) == []


def test_an_import_against_the_order_is_found_even_inside_a_function(tmp_path: Path):
    source = write_package(
        tmp_path,
        {
            "judge/__init__.py": "",
            "judge/engine.py": "def load():\n    from freewheel.trainer.losses import grpo\n    return grpo\n",
            "trainer/__init__.py": "",
            "trainer/losses.py": "from freewheel.judge import engine\n\n\ndef grpo(): ...\n",
        },
    )
    modules = house.read_modules(source)
    (violation,) = house.find_violations(modules)
    assert violation.startswith("freewheel.judge.engine imports freewheel.trainer.losses")
    assert house.find_cycles(house.count_packages(modules)) == [("judge", "trainer")]


def test_a_package_without_a_place_in_the_order_is_found(tmp_path: Path):
    modules = house.read_modules(write_package(tmp_path, {"attic/__init__.py": "", "attic/old.py": ""}))
    assert any("attic" in violation for violation in house.find_violations(modules))


def test_docstrings_and_comments_are_not_code(tmp_path: Path):
    text = '''
    """A module."""

    # a comment
    LIMIT = 3
    """What it bounds."""


    def _double(value):
        """Return twice `value`."""
        return (
            value * 2
        )
    '''
    modules = house.read_modules(write_package(tmp_path, {"utils.py": text}))
    assert modules["freewheel.utils"].code_lines == 5
    assert modules["freewheel.utils"].public_names == ("LIMIT",)


def test_every_step_of_a_prompts_path_is_in_the_code():
    assert len(house.PATH_OF_A_PROMPT) >= 10
    assert house.check_path() == []


def test_judge_and_rewards_import_without_torch_ray_and_transformers():
    code = (
        "import sys, freewheel, freewheel.judge, freewheel.rewards, freewheel.gateway\n"
        "print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
