"""Generate the parts of the docs that come from the code: settings, command line, metrics, the architecture's tables.

    schemas ────────────▶ configuration.md
    the typer app ──────▶ cli.md
    observe/metrics.py ─▶ the table of metrics.md, between its two marks
    scripts/house.py ───▶ the tables of architecture.md, between their marks

`make docs` runs it before it builds the site. A test checks that the pages are up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import typer

from freewheel.cli import app
from freewheel.judge import Endpoint, JudgeConfig, Price, Rubric
from freewheel.judge.testing import JudgeProfile
from freewheel.judge.verdict import Reason
from freewheel.observe.metrics import METRICS
from freewheel.rewards import LengthPenaltyConfig
from freewheel.runtime.config import Alert, TrainConfig
from freewheel.runtime.config_files import PACKAGED, in_words, section_of
from freewheel.trainer.options import LoraConfig

DOCS = Path(__file__).parent

CONFIGURATION = """\
# Configuration

Every setting with its default. Written by `make docs` from the schemas, the only place where a default is defined.

- [A training run](#a-training-run): `freewheel train`, `fw.train`, YAML files
- [The judge and rewards](#the-judge-and-rewards): `Judge`, `freewheel score`, reward managers, `reward.judge` of a run

Every value is checked before anything starts. A wrong one is an error that names the key, the value and the remedy.
On the command line the exit code is then 2:

```text
freewheel: error: trainer.total_step = 5: unknown key; did you mean trainer.total_steps?
freewheel: error: async_training.max_staleness_allowed = 2: it must be at least async_training.staleness_threshold (3)
freewheel.errors.ConfigError: max_attempts = 0: give a whole number of at least 1
```
"""

TRAINING = """
## A training run

The defaults run on this machine, also without a GPU.

```bash
freewheel train                                                  # the defaults
freewheel train trainer.total_steps=100 rollout.n=16             # with settings
freewheel train --config-path my_configs --config-name first     # my_configs/first.yaml, relative to the current folder
freewheel train --config-name cluster --dry-run                  # prints the plan; nothing starts
freewheel train resume=runs/word_problems-fully_async-20260101-120000 trainer.total_steps=200
freewheel eval runs/word_problems-fully_async-20260101-120000    # the same model on held-out prompts
```

`python fully_async_main.py` (in the root of the repository) and `python -m freewheel.fully_async_main` are
`freewheel train` with the same flags.

A YAML file overrides the defaults, and `key=value` overrides the file. The value of an override is YAML: lists `[1,2]`,
mappings `{a: 1}`, `null`, quotes inside the shell's quotes where text begins with a bracket or looks like a number
(`'data.system_prompt="[one] sentence"'`). `~key` restores the default. `${oc.env:NAME}` and `${trainer.total_steps}`
are filled in, a file may list others under `defaults:` (`defaults: [gsm8k]`), and a value `???` must be given.

The settings of a run are in `config.yaml` in its folder. `resume=RUN` continues it there and lists what has changed.
`seed`, `data.*`, `rollout.n`, `trainer.groups_per_step` and the model cannot change: a resumed run neither skips nor
repeats a prompt. An API key in a setting is refused, because it would be written to `config.yaml`: set
`OPENAI_API_KEY`.

### Configurations that ship with freewheel

"""

JUDGE = """
## The judge and rewards

Give a configuration as `JudgeConfig(...)`, as a mapping (`JudgeConfig.from_dict`), or to `freewheel score` as a TOML or
JSON file with `--config`.
"""

COMMAND_LINE = """\
# Command line

Generated from the program by `make docs`; `freewheel COMMAND --help` prints the same text. Settings of a run are
not flags but `key=value`: [configuration](configuration.md#a-training-run).
"""

MARKS = ("<!-- from observe/metrics.py, by docs/generate.py -->\n", "<!-- until here -->\n")
PATH_MARKS = ("<!-- path of a prompt, from scripts/house.py -->\n", "<!-- end of the path -->\n")
ORDER_MARKS = ("<!-- import order, from scripts/house.py -->\n", "<!-- end of the order -->\n")
"""Everything between these marks is generated."""


def field_docs(struct: type) -> dict[str, str]:
    """The docstring under each field, in order."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(struct)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    found: dict[str, str] = {}
    for field, below in zip(body, [*body[1:], None], strict=True):
        named = isinstance(field, ast.AnnAssign | ast.Assign)
        target = (field.target if isinstance(field, ast.AnnAssign) else field.targets[0]) if named else None
        if isinstance(target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            found[target.id] = " ".join(str(text).split())
    return found


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines)


# -- the judge's settings ----------------------------------------------------------------------------------------------


def struct_table(struct: type[msgspec.Struct]) -> str:
    docs = field_docs(struct)
    rows = ((f"`{field.name}`", _default(field), docs[field.name]) for field in msgspec.structs.fields(struct))
    return table(("key", "default", "meaning"), rows)


def dataclass_table(config: type) -> str:
    docs = field_docs(config)

    def rows() -> Iterator[tuple[str, str, str]]:
        for field in dataclasses.fields(config):
            made = field.default_factory is not dataclasses.MISSING
            value = field.default_factory() if made else field.default  # type: ignore[misc]
            yield f"`{field.name}`", f"`{value!r}`", docs[field.name]

    return table(("key", "default", "meaning"), rows())


def reason_table() -> str:
    docs = field_docs(Reason)
    return table(("reason", "meaning"), ((f"`{reason.value}`", docs[reason.name]) for reason in Reason))


def judge_sections() -> Iterator[tuple[str, str, str]]:
    """(title, introduction, table) of each part of the judge's configuration."""
    yield "`JudgeConfig`", inspect.getdoc(JudgeConfig) or "", struct_table(JudgeConfig)
    introduction = "What a reward manager needs to know. See [rewards](rewards.md)."
    yield "`LengthPenaltyConfig`", introduction, dataclass_table(LengthPenaltyConfig)
    yield "`Endpoint`", inspect.getdoc(Endpoint) or "", struct_table(Endpoint)
    yield "`Price`", inspect.getdoc(Price) or "", struct_table(Price)
    yield "`Rubric`", "See [rubrics](judge.md#rubrics).", struct_table(Rubric)
    introduction = "How the test judge behaves. See [the test judge](score.md#a-test-judge)."
    yield "`JudgeProfile`", introduction, struct_table(JudgeProfile)
    yield "`Failed.reason`", "Why a request has no score.", reason_table()


# -- a run's settings --------------------------------------------------------------------------------------------------


def training_sections() -> Iterator[tuple[str, str, str]]:
    """(title, introduction, table) of each part of a run's configuration."""
    sections = {name: section_of(kind) for name, kind in get_type_hints(TrainConfig).items()}
    structs: list[tuple[str, str, Any]] = [("The whole run", "", TrainConfig)]
    structs += [(f"`{name}`", f"{name}.", struct) for name, struct in sections.items() if struct is not None]
    structs.insert(2, ("`model.lora`", "model.lora.", LoraConfig))
    structs.append(("`observe.alerts`, by a metric's name", "observe.alerts.NAME.", Alert))
    for title, path, struct in structs:
        yield title, inspect.getdoc(struct) or "", typed_table(struct, path)


def configuration() -> str:
    def sections(found: Iterator[tuple[str, str, str]]) -> str:
        return "".join(f"\n### {title}\n\n{introduction}\n\n{rows}\n" for title, introduction, rows in found)

    training = f"{TRAINING}{packaged_table()}\n{sections(training_sections())}"
    return f"{CONFIGURATION}{training}{JUDGE}{sections(judge_sections())}"


def typed_table(struct: type[msgspec.Struct], path: str) -> str:
    """Keys by their full names, as in YAML."""
    docs, hints = field_docs(struct), get_type_hints(struct, include_extras=True)

    def rows() -> Iterator[tuple[str, str, str, str]]:
        for field in msgspec.structs.fields(struct):
            kind = hints[field.name]
            if struct is TrainConfig and section_of(kind) is not None:
                continue
            words = "a section" if section_of(kind) else in_words(kind)
            meaning = re.sub(r"\bNone\b", "null", docs[field.name])
            yield f"`{path}{field.name}`", f"`{_yaml(_value(field))}`", words, meaning

    return table(("key", "default", "may be", "meaning"), rows())


def packaged_table() -> str:
    """Each file of the package with the first paragraph of its comment."""

    def rows() -> Iterator[tuple[str, str]]:
        for file in sorted(PACKAGED.glob("*.yaml")):
            comment = [line.removeprefix("#").strip() for line in file.read_text().partition("\n\n")[0].splitlines()]
            yield f"`{file.stem}`", " ".join(comment)

    return table(("`--config-name`", "what it is"), rows())


# -- the command line --------------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Every command of the program by its full name, groups left out, in the order of `--help`."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
            return
        for word, one in inner.items():
            if not one.hidden:
                yield from walk(f"{name} {word}", one)

    return dict(walk("freewheel", typer.main.get_command(app)))


def command_line() -> str:
    found = commands()
    overview = table(
        ("command", "what it does"),
        ((f"[`{name}`](#{_anchor(name)})", _first_sentence(command.help)) for name, command in found.items()),
    )
    return "\n".join([COMMAND_LINE, overview, *(_command_section(name, command) for name, command in found.items())])


def _command_section(name: str, command: Any) -> str:
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    named = [_named(param) for param in arguments]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *named])
    parts = [f"\n## `{name}`\n", f"```text\n{usage}\n```\n", inspect.cleandoc(command.help or ""), ""]
    if arguments:
        rows = ((f"`{name}`", param.help or "") for name, param in zip(named, arguments, strict=True))
        parts += [table(("argument", "meaning"), rows), ""]
    panels = dict.fromkeys(param.rich_help_panel or "Options" for param in options)
    for panel in panels:
        there = (param for param in options if (param.rich_help_panel or "Options") == panel)
        parts += [table((panel.lower(), "meaning"), ((_flag(param), param.help or "") for param in there)), ""]
    if command.epilog:
        parts += [" ".join(line.split()) + "\n" for line in command.epilog.strip().split("\n\n")]
    return "\n".join(parts).rstrip("\n") + "\n"


def _named(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    if argument.nargs != 1 and not name.endswith("..."):
        name += "..."
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _flag(option: Any) -> str:
    """`--quiet`, `-q` or `--port PORT`."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = (option.metavar or option.name.upper()).replace("|", " or ")
    return names if option.is_flag else f"{names} `{value}`"


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()), maxsplit=1)[0]


def _anchor(heading: str) -> str:
    """As both GitHub and the site make it of a heading that has letters, blanks and hyphens only."""
    return heading.lower().replace(" ", "-")


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics_table() -> str:
    rows = ((f"`{one.name}`", one.component, one.unit, one.what) for one in METRICS)
    return table(("name", "component", "unit", "what it is"), rows)


def metrics() -> str:
    """The page with its table from the registry; the rest is written by hand."""
    return _fill("metrics.md", (DOCS / "metrics.md").read_text(encoding="utf-8"), MARKS, metrics_table())


def architecture() -> str:
    """The page with the path of a prompt, the import order and the packages from scripts/house.py."""
    house = _load(DOCS.parent / "scripts" / "house.py")
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    text = _fill("architecture.md", text, PATH_MARKS, house.path_table())
    table = house.package_table(house.read_modules(), rounded=True)
    return _fill("architecture.md", text, ORDER_MARKS, f"```text\n{house.order_text()}\n```\n\n{table}")


def _fill(name: str, text: str, marks: tuple[str, str], content: str) -> str:
    """`text` with `content` between the two marks."""
    begin, end = marks
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"docs/{name} has lost its marks {begin!r} and {end!r}: put them around the table")
    return f"{before}{begin}\n{content}\n\n{end}{after}"


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages() -> dict[Path, str]:
    return {
        DOCS / "configuration.md": configuration(),
        DOCS / "cli.md": command_line(),
        DOCS / "metrics.md": metrics(),
        DOCS / "architecture.md": architecture(),
    }


def _value(field: msgspec.structs.FieldInfo) -> Any:
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT
    return value


def _yaml(value: Any) -> str:
    """As one would write it in a file."""
    if isinstance(value, float | str):
        return str(value)
    return msgspec.json.encode(value).decode().replace(",", ", ")


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = _value(field)
    return "required" if value is msgspec.NODEFAULT else f"`{value!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
