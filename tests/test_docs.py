"""The docs say what the code does: generated pages are current, links lead somewhere, code blocks are Python."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_generated_pages_are_up_to_date():
    for path, text in generator().pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run `make docs`"


def test_every_setting_is_described():
    for line in (ROOT / "docs/configuration.md").read_text().splitlines():
        if line.startswith("| `"):
            assert line.rstrip("| ").count("|") >= 2, f"no meaning is given: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(linked), (
                f"{page.name} links to {target}; {linked.name} has {sorted(anchors(linked))}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile_and_import_what_exists(page: Path):
    for language, code in BLOCK.findall(page.read_text()):
        if language != "python":
            continue
        tree = ast.parse(code)
        imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        ours = [line for line in imports if "freewheel" in line]
        if ours:
            done = subprocess.run([sys.executable, "-c", "\n".join(ours)], capture_output=True, text=True)
            assert done.returncode == 0, f"{page.name}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_files_that_pages_name_exist(page: Path):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for name in re.findall(r"\b((?:benchmarks|examples|docs)/[\w/]+\.(?:py|md|toml|sh))\b", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}, which does not exist"
