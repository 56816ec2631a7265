"""The house rules of the code: imports point one way, and docs/architecture.md shows the real path of a prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .documents import ROOT, load_script
from .programs import run_program

house = load_script(ROOT / "scripts" / "house.py")


def test_no_package_imports_against_the_order():
    assert house.find_violations(house.read_modules()) == []


def test_there_are_no_cycles_between_packages():
    assert house.find_cycles(house.count_packages(house.read_modules())) == []


def test_an_import_against_the_order_is_found_even_inside_a_function(tmp_path: Path):
    source = tmp_path / "freewheel"
    for name, text in {
        "judge/engine.py": "def load():\n    from freewheel.trainer import losses\n    return losses\n",
        "trainer/losses.py": "from freewheel.judge import engine\n",
        "attic/old.py": "",
    }.items():
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text(text)
    modules = house.read_modules(source)
    violations = "\n".join(house.find_violations(modules))
    assert "freewheel.judge.engine imports freewheel.trainer" in violations and "attic" in violations
    assert house.find_cycles(house.count_packages(modules)) == [("judge", "trainer")]


def test_every_step_of_a_prompts_path_is_in_the_code():
    assert len(house.PATH_OF_A_PROMPT) >= 10
    assert house.check_path() == []


HEAVY = ("torch", "ray", "transformers")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("freewheel", (*HEAVY, "numpy")),
        ("freewheel.judge, freewheel.rewards, freewheel.gateway", HEAVY),
        ("freewheel.plan.report, freewheel.doctor.run, freewheel.dashboard.web.server", HEAVY),
        ("freewheel.cli, freewheel.fully_async_main", (*HEAVY, "aiohttp", "sqlite3", "hydra", "omegaconf")),
    ],
)
def test_the_light_parts_import_nothing_heavy(modules: str, unwanted: tuple[str, ...]):
    code = f"import sys, {modules}; dir(sys.modules['freewheel']); print(sorted({set(unwanted)} & sys.modules.keys()))"
    assert run_program(sys.executable, "-c", code).stdout == "[]\n"
