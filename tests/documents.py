"""The parts of the docs pages for tests: links, anchors, code blocks, and the commands in them.

page ─▶ blocks (```language) ─▶ shell lines ─▶ Command: its words, and the folder that it runs in
  └──▶ prose, without the blocks ─▶ links, inline code
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/*/README.md")])

FENCE = re.compile(r"^```([\w-]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
ASSIGNMENT = re.compile(r"^[A-Z_]+=")
SUBSTITUTION = re.compile(r"^\w+=\$\((.*)\)$")
PLAIN = re.compile(r"[\w./:=,@%+…-]+")
OPERATORS = ("&&", "||", ";", "|", "&")
BUILD_S = 250.0
"""Longer than the site takes on a busy machine."""
ELLIPSIS = "…"
"""On a page it marks an omission, or a part of a value that the reader replaces."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    folder: Path
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {as_typed(self.words)}"


def as_typed(words: Iterable[str]) -> str:
    """Join words with quotes only where the shell needs them."""
    return " ".join(word if PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def blocks(*languages: str, pages: list[Path] | None = None) -> list[Block]:
    """Return all code blocks, or those in one of these languages."""
    found = []
    for page in PAGES if pages is None else pages:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            block = Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
            if not languages or block.language in languages:
                found.append(block)
    return found


def prose(page: Path) -> str:
    """Return the text without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    return INLINE.findall(prose(page))


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip()
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


def migration_tables(page: str) -> str:
    """Return the part of a page that maps the keys of another trainer to ours."""
    return (DOCS / page).read_text(encoding="utf-8").partition("Move from ")[2]


def anchors(page: Path) -> list[str]:
    return [slug(heading) for heading in HEADING.findall(prose(page))]


def build_site(folder: Path) -> str:
    """Build the site as `make docs` does, and return the output."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # a notice of the theme's about its successor
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def load_script(path: Path) -> ModuleType:
    """Import a script that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(block: Block) -> list[Command]:
    """Return each simple command of a shell block, without variables before it and without redirections."""
    folder, found = ROOT, []
    for number, line in _logical_lines(block):
        for words in _simple_commands(line):
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            found.append(Command(tuple(words), folder, f"{block.page.relative_to(ROOT)}:{number}"))
    return found


def _logical_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Yield lines as the shell sees them: continued ones joined, and of a `console` block only those after a prompt."""
    lines = block.code.splitlines()
    at = 0
    while at < len(lines):
        number, line = block.line + 1 + at, lines[at]
        while line.endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line[:-1] + " " + lines[at].strip()
        at += 1
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, SUBSTITUTION.sub(r"\1", line)


def _simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if redirected:
            redirected = False
        elif word in (">", ">>", "<", "2>"):
            redirected = True
        elif word not in OPERATORS:
            words.append(word)
        else:
            while words and ASSIGNMENT.match(words[0]):
                words.pop(0)
            if words:
                yield words
            words = []
