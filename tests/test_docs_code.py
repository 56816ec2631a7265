"""Every code block of the docs is valid: Python compiles and imports existing names, data parses, settings compose, and
commands exist with their flags."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml

from freewheel.cli import app
from freewheel.judge.rubric import Rubric
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import compose
from freewheel.runtime.start import split_resume

from .documents import ELLIPSIS, PAGES, ROOT, Block, Command, blocks, commands, inline_code
from .programs import run_program

LANGUAGES = {"bash", "console", "json", "python", "sql", "text", "toml", "yaml"}

FOREIGN = {"cat", "curl", "echo", "export", "grep", "head", "ray", "scontrol", "sleep", "srun", "ssh", "vllm", "wait"}
"""Programs of others: only their names are checked."""
WRAPPERS = {"srun"}
"""Programs that start another program."""
YOURS = {"my_configs", "conf"}
"""Folders of the reader: commands that name one are checked without it."""


def ids(block: Block) -> str:
    return block.where


def test_every_block_names_its_language():
    assert [block.where for block in blocks() if block.language not in LANGUAGES] == []


# -- Python ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=ids)
def test_a_python_block_compiles(block: Block):
    compile(block.code, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def freewheel_imports() -> Iterator[tuple[str, str]]:
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.code)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if any(name.partition(".")[0] == "freewheel" for name in [*names, module]):
                yield block.where, ast.unparse(node)


TRY_EACH = """
import json, sys
failed = {}
for where, line in json.load(sys.stdin):
    try:
        exec(line, {})
    except Exception as error:
        failed[where] = f"{line}: {type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def test_python_blocks_import_existing_names_of_freewheel():
    lines = [*freewheel_imports()]
    assert len(lines) > 20
    done = run_program(sys.executable, "-c", TRY_EACH, input=json.dumps(lines))
    assert json.loads(done.stdout.splitlines()[-1]) == {}


CHECKING = [
    block
    for block in blocks("python")
    if re.search(r"^assert ", block.code, re.MULTILINE) and block.page.name != "api.md"  # tests/test_api.py runs those
]


@pytest.mark.parametrize("block", CHECKING, ids=ids)
def test_a_python_block_with_assertions_runs(block: Block, tmp_path: Path):
    run_program(sys.executable, "-c", block.code, cwd=tmp_path)


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("json"), ids=ids)
def test_a_json_block_is_json_or_json_lines(block: Block):
    try:
        json.loads(block.code)
    except json.JSONDecodeError:
        assert [json.loads(line) for line in block.code.splitlines()]


@pytest.mark.parametrize("block", blocks("toml"), ids=ids)
def test_a_toml_block_is_a_rubric(block: Block):
    fields = {field.name for field in msgspec.structs.fields(Rubric)} | {"base"}
    assert set(tomllib.loads(block.code)) <= fields


@pytest.mark.parametrize("block", blocks("sql"), ids=ids)
def test_an_sql_block_queries_a_trace(block: Block):
    """Perfetto runs these; its tables are SQLite tables with extra functions."""
    with closing(sqlite3.connect(":memory:")) as trace:
        trace.execute("create table slice (name, ts, dur, arg_set_id)")
        trace.create_function("extract_arg", 2, lambda *_: 0)
        trace.execute(block.code)


@pytest.mark.parametrize("block", blocks("yaml"), ids=ids)
def test_a_yaml_block_composes_as_a_run(block: Block, tmp_path: Path):
    values = yaml.safe_load(block.code)
    if "apiVersion" in values:  # a Kubernetes resource that starts freewheel
        assert_freewheel(Command(tuple(values["spec"]["entrypoint"].split()), ROOT, block.where))
        return
    (tmp_path / "page.yaml").write_text(block.code)
    config = compose(config_path=tmp_path, config_name="page")
    assert config != TrainConfig(), "the block sets nothing"


# -- commands ----------------------------------------------------------------------------------------------------------

SHELL = [command for block in blocks("bash", "console") for command in commands(block)]


@pytest.mark.parametrize("command", SHELL, ids=str)
def test_a_command_line_works_as_printed(command: Command):
    program = command.words[0].rpartition("/")[2]
    if "freewheel" in command.words or program == "freewheel":
        assert_freewheel(command)
    elif program in ("python", "python3"):
        assert_python(command)
    elif program == "make":
        targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(command.words[1:]) <= set(targets)
    elif program == "pip":
        assert_pip(command)
    else:
        assert program in FOREIGN, f"{command}: unknown program"


def assert_freewheel(command: Command) -> None:
    """The program has these flags and arguments, and the settings compose."""
    words = [*command.words]
    while words[0].rpartition("/")[2] != "freewheel":
        assert command.words[0] in WRAPPERS, command
        words.pop(0)
    context = parsed(words[1:], command)
    overrides = context.params.get("overrides")
    if context.info_name == "train" or overrides:
        folder, name = context.params.get("config_path"), context.params.get("config_name")
        if folder in YOURS:
            folder = name = None
        _, settings = split_resume(overrides or [])
        compose(settings, config_path=command.folder / folder if folder else None, config_name=name)


def parsed(words: list[str], command: Command) -> Any:
    """Return the context in which the program would run, or raise the error that the user would see."""
    node, given = typer.main.get_command(app), [word.replace(ELLIPSIS, "x") for word in words if word != ELLIPSIS]
    name = "freewheel"
    while hasattr(node, "commands"):
        assert given and given[0] in node.commands, f"{command}: {name} has {', '.join(node.commands)}"
        name = given.pop(0)
        node = node.commands[name]
    return node.make_context(name, given)


def assert_python(command: Command) -> None:
    """An existing script with flags that it has, or a module of another environment."""
    _, *rest = command.words
    if rest[0] == "-m":
        assert rest[1] in ("pytest", "verl.trainer.main_ppo", "vllm.entrypoints.openai.api_server"), command
        return
    script = command.folder / rest[0]
    assert script.exists(), command
    assert [flag for flag in rest[1:] if flag.startswith("--") and flag not in known_flags(script)] == [], command


@cache
def known_flags(script: Path) -> set[str]:
    sources = [script, *(path for path in [script.parent / "common.py"] if path.exists())]
    return {flag for path in sources for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())}


def assert_pip(command: Command) -> None:
    """The requested extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words[2:]:
        found = re.fullmatch(r"(?:freewheel|\.)\[([\w,]+)\]", word)
        if found:
            assert set(found[1].split(",")) <= set(extras), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_named_in_the_text_exist(page: Path):
    for code in inline_code(page):
        words = code.replace(" [", " ").replace("]", " ").split()
        if len(words) < 2 or words[0] not in ("freewheel", ".venv/bin/freewheel") or words[1].isupper():
            continue
        node: Any = typer.main.get_command(app)
        for word in words[1:]:
            if not hasattr(node, "commands"):
                break
            choices = word.split("|")  # `freewheel cache stats|clear|export`
            assert all(choice in node.commands for choice in choices), f"{page.name}: {code}"
            node = node.commands[choices[0]]
        flags = {name for param in node.params for name in param.opts} | {"--help"}
        named = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [flag for flag in named if flag not in flags] == [], f"{page.name}: {code}"
