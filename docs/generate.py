"""Writes the pages that come from the code: the two pages about configuration. A test checks that they are up to date.

make docs
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from freewheel.judge import Endpoint, JudgeConfig, Price, Rubric
from freewheel.judge.testing import JudgeProfile
from freewheel.judge.verdict import Reason
from freewheel.rewards import LengthPenaltyConfig
from freewheel.runtime.compose import PACKAGED
from freewheel.runtime.config import Alert, TrainConfig
from freewheel.runtime.typed import in_words, section_of
from freewheel.trainer.options import LoraConfig

DOCS = Path(__file__).parent

CONFIGURATION = """\
# Configuration

Generated from the schema by `make docs`; the schema is the only place where a default stands.

Every value is checked when the config is made. A wrong one is an error that names the key, the value and the remedy:

```text
freewheel.judge.errors.ConfigError: max_attempts = 0: give a whole number of at least 1
```

A config can be given as `JudgeConfig(...)`, as a mapping (`JudgeConfig.from_dict`), or to `freewheel score` as a TOML
or JSON file with `--config`.
"""

TRAINING = """\
# Configuration of training

Generated from the schema by `make docs`; the schema is the only place where a default stands. The defaults run on the
machine at hand, CPU included. The judge's own settings are on [another page](configuration.md).

```bash
freewheel train                                                  # the defaults
freewheel train trainer.total_steps=100 rollout.n=16             # with settings
freewheel train --config-path my_configs --config-name first     # my_configs/first.yaml, relative to where you are
freewheel train --config-name cluster --dry-run                  # what would run where; nothing starts
freewheel train resume=runs/word_problems-fully_async-20260101-120000 trainer.total_steps=200
freewheel eval runs/word_problems-fully_async-20260101-120000    # the same model on held-out prompts
```

`python fully_async_main.py` (at the root of the repository) and `python -m freewheel.fully_async_main` are
`freewheel train` with the same flags.

A YAML file goes over the defaults, and `key=value` goes over the file. Overrides have Hydra's grammar: lists `[1,2]`,
mappings `{a: 1}`, `null`, quotes inside the shell's quotes where text has commas or brackets
(`'data.system_prompt="Be brief, please."'`), and `~key` to go back to the default. `${oc.env:NAME}` and
`${trainer.total_steps}` are filled in, a file may list others under `defaults:`, and a value `???` must be given. Hydra
merges and does nothing else: no working directory, log or output folder of its own.

Everything is checked before anything starts: each key, and each pair of keys that must agree. A wrong one ends the
program with exit code 2 and names the key, the value and the remedy:

```text
freewheel: error: trainer.total_step = 5: unknown key; did you mean trainer.total_steps?
freewheel: error: async_training.max_staleness_allowed = 2: it must be at least async_training.staleness_threshold (3)
```

What a run used is in `config.yaml` in its folder. `resume=RUN` continues it there and lists what is changed; `seed`,
`data.*`, `rollout.n`, `trainer.groups_per_step` and the model stay as they were, for a resumed run neither skips nor
repeats a prompt. An API key in a setting is refused, as it would be written there: give it as `OPENAI_API_KEY`.
"""


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


def struct_table(struct: type[msgspec.Struct]) -> str:
    docs = field_docs(struct)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        lines.append(f"| `{field.name}` | {_default(field)} | {_cell(docs[field.name])} |")
    return "\n".join(lines)


def dataclass_table(config: type) -> str:
    docs = field_docs(config)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        made = field.default_factory is not dataclasses.MISSING
        value = field.default_factory() if made else field.default  # type: ignore[misc]
        lines.append(f"| `{field.name}` | `{_cell(repr(value))}` | {_cell(docs[field.name])} |")
    return "\n".join(lines)


def reason_table() -> str:
    lines = ["| reason | meaning |", "|---|---|"]
    docs = field_docs(Reason)
    lines += [f"| `{reason.value}` | {_cell(docs[reason.name])} |" for reason in Reason]
    return "\n".join(lines)


def configuration() -> str:
    sections: list[tuple[str, str, str]] = [
        ("`JudgeConfig`", inspect.getdoc(JudgeConfig) or "", struct_table(JudgeConfig)),
        (
            "`LengthPenaltyConfig`",
            "What a reward manager needs to know. See [rewards](rewards.md).",
            dataclass_table(LengthPenaltyConfig),
        ),
        ("`Endpoint`", inspect.getdoc(Endpoint) or "", struct_table(Endpoint)),
        ("`Price`", inspect.getdoc(Price) or "", struct_table(Price)),
        ("`Rubric`", "See [rubrics](rubrics.md).", struct_table(Rubric)),
        (
            "`JudgeProfile`",
            "How the test judge behaves. See [the test judge](mock-judge.md).",
            struct_table(JudgeProfile),
        ),
        ("`Failed.reason`", "Why a request has no score.", reason_table()),
    ]
    return CONFIGURATION + "".join(f"\n## {title}\n\n{intro}\n\n{table}\n" for title, intro, table in sections)


def training_configuration() -> str:
    sections = [("The whole run", "", TrainConfig), *_training_sections()]
    sections.insert(2, ("`model.lora`", "model.lora.", LoraConfig))
    sections.append(("`observe.alerts`, by a metric's name", "observe.alerts.NAME.", Alert))
    parts = [TRAINING, "\n## Files that come with freewheel\n\n", packaged_table(), "\n"]
    for title, path, struct in sections:
        parts.append(f"\n## {title}\n\n{inspect.getdoc(struct) or ''}\n\n{typed_table(struct, path)}\n")
    return "".join(parts)


def _training_sections() -> list[tuple[str, str, Any]]:
    hints = get_type_hints(TrainConfig)
    named = [(name, section_of(kind)) for name, kind in hints.items()]
    return [(f"`{name}`", f"{name}.", struct) for name, struct in named if struct is not None]


def typed_table(struct: type[msgspec.Struct], path: str) -> str:
    """Keys by their full names, as they stand in YAML."""
    docs, hints = field_docs(struct), get_type_hints(struct)
    lines = ["| key | default | may be | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        if struct is TrainConfig and section_of(kind) is not None:
            continue
        words = "a section" if section_of(kind) else in_words(kind)
        meaning = re.sub(r"\bNone\b", "null", docs[field.name])
        cells = [f"`{path}{field.name}`", f"`{_yaml(_value(field))}`", words, meaning]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def packaged_table() -> str:
    """Each file of the package with the first paragraph of its comment."""
    lines = ["| `--config-name` | what it is |", "|---|---|"]
    for file in sorted(PACKAGED.glob("*.yaml")):
        comment = [line.removeprefix("#").strip() for line in file.read_text().partition("\n\n")[0].splitlines()]
        lines.append(f"| `{file.stem}` | {_cell(' '.join(comment))} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    return {
        DOCS / "configuration.md": configuration(),
        DOCS / "training-configuration.md": training_configuration(),
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
    if value is msgspec.NODEFAULT:
        return "required"
    return f"`{_cell(repr(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
