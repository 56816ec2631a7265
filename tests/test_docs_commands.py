"""The program explains itself: every command that there is, found in the program and not in a list."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from freewheel.cli import app

from .documents import DOCS

WAIT_S = 60.0


def walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk((*words, name), inner)


EVERY = [*walk((), typer.main.get_command(app))]


def test_the_commands_that_users_know_are_among_them():
    known = "train eval inspect score serve mock-judge cache doctor plan trace dashboard"
    assert set(known.split()) <= {words[0] for words in EVERY if words}
    assert ("cache", "stats") in EVERY


@pytest.mark.parametrize("words", EVERY, ids=lambda words: " ".join(("freewheel", *words)))
def test_every_command_explains_itself(words: tuple[str, ...]):
    done = subprocess.run(
        [sys.executable, "-m", "freewheel", *words, "--help"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert f"Usage: {' '.join(('freewheel', *words))}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("words", EVERY[1:], ids=lambda words: " ".join(("freewheel", *words)))
def test_every_command_and_flag_has_words_of_its_own(words: tuple[str, ...]):
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    assert (command.help or "").strip()
    for param in command.params:
        assert getattr(param, "hidden", False) or param.help, f"{' '.join(words)}: {param.name} has no help"


@pytest.mark.parametrize(
    "words", [words for words in EVERY if words and words != ("cache",)], ids=lambda words: " ".join(words)
)
def test_every_command_is_in_the_reference(words: tuple[str, ...]):
    assert f"\n## `freewheel {' '.join(words)}`\n" in (DOCS / "cli.md").read_text()
