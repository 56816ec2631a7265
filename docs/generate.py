"""Writes the pages that come from the code: `docs/configuration.md`. A test checks that they are up to date.

make docs
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from freewheel.judge import Endpoint, JudgeConfig, Price, Rubric
from freewheel.judge.testing import JudgeProfile
from freewheel.judge.verdict import Reason
from freewheel.rewards import LengthPenaltyConfig

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


def pages() -> dict[Path, str]:
    return {DOCS / "configuration.md": configuration()}


def _default(field: msgspec.structs.FieldInfo) -> str:
    value: Any = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT
    if value is msgspec.NODEFAULT:
        return "required"
    return f"`{_cell(repr(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
