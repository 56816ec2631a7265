"""Measures the code base: size of each package, the import order, cycles, and the path of one prompt.

    python scripts/house.py            print the report
    python scripts/house.py --check    exit 1 if a package imports against the order, or a cycle exists

`docs/generate.py` puts the same tables into docs/architecture.md. Reads the sources; imports nothing of freewheel.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "freewheel"

ORDER = (
    ("errors",),
    ("utils",),
    ("observe",),
    ("judge",),
    ("rewards", "gateway"),
    ("data", "integrations"),
    ("queue", "sync"),
    ("trainer",),
    ("rollout",),
    ("runtime",),
    ("inspect",),
    ("plan",),
    ("doctor",),
    ("dashboard",),
    ("api",),
    ("cli",),
)
"""A package imports only from the lines above its own."""

ENTRY_POINTS = ("__init__", "__main__", "fully_async_main")
"""Modules of the package itself, which may import everything."""

PATH_OF_A_PROMPT = (
    ("queue/message_queue.py", "MessageQueue.admit", "issues a `Ticket` while the staleness bound leaves room"),
    ("queue/staleness.py", "StalenessPolicy.admit", "gives the ticket its sequence number and holds a slot for it"),
    ("rollout/rollouter.py", "Rollouter", "requests tickets and brings each to exactly one end"),
    ("data/prompts.py", "PromptStream.prompt", "maps the ticket's ordinal to a row, rendered as a `Prompt`"),
    ("rollout/generation.py", "generate_and_score", "collects the responses and starts scoring each as it ends"),
    ("rollout/engine.py", "GenerationRequest", "asks an engine for n samples of the prompt"),
    ("data/group.py", "Response", "holds one response: tokens, log-probabilities and versions; later its reward"),
    ("rollout/reward_stage.py", "RewardStage", "scores each response, with the judge if there is one"),
    ("judge/verdict.py", "Scored", "is the result of scoring, a `Verdict`; the others are `Failed` and `Skipped`"),
    ("data/group.py", "PromptGroup", "joins the prompt and its scored responses"),
    ("data/group.py", "EncodedGroup", "holds the group's bytes, encoded once"),
    ("rollout/rollouter.py", "Outbox", "sends finished groups in one message until the queue has stored them"),
    ("queue/message_queue.py", "MessageQueue.put", "keeps the bytes and returns once the journal has them"),
    ("queue/journal.py", "Stored", "is the group's row in the journal: the same bytes"),
    ("queue/client.py", "Taken", "brings a batch of exactly P groups to the trainer, still as bytes"),
    ("trainer/trainer.py", "FullyAsyncTrainer", "decodes the batch, replaces stale groups and trains on the rest"),
    ("trainer/advantages.py", "estimate", "turns the rewards of each group into advantages"),
    ("trainer/batching.py", "MicroBatch", "holds responses of several groups as tensors"),
    ("trainer/losses.py", "LossInputs", "gives the loss the tokens of a micro-batch"),
    ("trainer/torch_backend.py", "TorchBackend.step", "computes the gradient and updates the weights"),
)
"""File, type or function, and what happens there: from the data to a weight update."""

_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Package:
    """The counts of one package."""

    files: int = 0
    code_lines: int = 0
    public_names: int = 0
    imports: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Module:
    name: str
    package: str
    code_lines: int
    public_names: tuple[str, ...]
    imported: frozenset[str]
    """Modules of freewheel that it imports, at any level of nesting, `if TYPE_CHECKING` included."""


def read_modules(source: Path = SOURCE) -> dict[str, Module]:
    paths = {_module_name(path, source): path for path in sorted(source.rglob("*.py"))}
    return {name: _read(name, path, paths.keys() | {"freewheel"}) for name, path in paths.items()}


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(name: str, path: Path, known: set[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    parts = name.split(".")
    return Module(
        name=name,
        package=parts[1] if len(parts) > 1 else "__init__",
        code_lines=_count_code_lines(text, tree),
        public_names=tuple(_public_names(tree)),
        imported=frozenset(_imported(tree, known)),
    )


def _count_code_lines(text: str, tree: ast.Module) -> int:
    """Lines with code: blank lines, comments and docstrings (those below fields too) do not count."""
    strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def _public_names(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


def _imported(tree: ast.Module, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name in known}


def count_packages(modules: dict[str, Module]) -> dict[str, Package]:
    packages: dict[str, Package] = defaultdict(Package)
    for module in modules.values():
        package = packages[module.package]
        package.files += 1
        package.code_lines += module.code_lines
        package.public_names += len(module.public_names)
        package.imports |= {modules[name].package for name in module.imported} - {module.package, "__init__"}
    return dict(packages)


def find_violations(modules: dict[str, Module]) -> list[str]:
    """Imports that point against `ORDER`, and packages that `ORDER` does not know."""
    rank = {package: place for place, line in enumerate(ORDER) for package in line}
    found: list[str] = []
    for module in modules.values():
        if module.package in ENTRY_POINTS:
            continue
        if module.package not in rank:
            found.append(f"{module.name}: the package {module.package} has no place in ORDER (scripts/house.py)")
            continue
        for name in sorted(module.imported):
            other = modules[name].package
            if other not in (module.package, *ENTRY_POINTS) and rank.get(other, -1) >= rank[module.package]:
                found.append(f"{module.name} imports {name}: {other} does not come before {module.package}")
    return found


def find_cycles(packages: dict[str, Package]) -> list[tuple[str, ...]]:
    """Cycles among packages, each once."""
    found: set[tuple[str, ...]] = set()

    def follow(path: list[str]) -> None:
        for other in sorted(packages[path[-1]].imports & packages.keys()):
            if other == path[0]:
                start = path.index(min(path))
                found.add((*path[start:], *path[:start]))
            elif other not in path and other > path[0]:
                follow([*path, other])

    for package in sorted(packages):
        if package not in ENTRY_POINTS:
            follow([package])
    return sorted(found)


def count_importers(modules: dict[str, Module]) -> dict[str, int]:
    importers: dict[str, int] = dict.fromkeys(modules, 0)
    for module in modules.values():
        for name in module.imported:
            importers[name] = importers.get(name, 0) + 1
    return importers


def check_path(source: Path = SOURCE) -> list[str]:
    """Return the steps of `PATH_OF_A_PROMPT` that are not in the code."""
    missing: list[str] = []
    for file, name, _ in PATH_OF_A_PROMPT:
        path = source / file
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ():
            if isinstance(node, ast.ClassDef):
                found |= {node.name}
                found |= {
                    f"{node.name}.{one.name}"
                    for one in node.body
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                }
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
        if name not in found:
            missing.append(f"{file}: {name}")
    return missing


def package_table(modules: dict[str, Module], *, rounded: bool = False) -> str:
    """`rounded`: counts as the docs show them, so that a small change to the code does not change the page."""
    packages = count_packages(modules)
    places = [package for line in ORDER for package in line if package in packages]

    def show(counts: Iterable[int], step: int) -> str:
        total = sum(counts)
        return f"{step * round(total / step) if rounded and total >= step else total:,}"

    def row(title: str, counted: list[Package], last: str) -> str:
        code = show((one.code_lines for one in counted), 100)
        names = show((one.public_names for one in counted), 10)
        return f"| {title} | {sum(one.files for one in counted)} | {code} | {names} | {last} |"

    rows = ["| package | files | code lines | public names | imported by |", "|---|---:|---:|---:|---|"]
    for name in places:
        importers = sorted(other for other in packages if name in packages[other].imports)
        rows.append(row(f"`{name}`", [packages[name]], ", ".join(importers) or "–"))
    return "\n".join([*rows, row("all", [*packages.values()], "")])


def order_text() -> str:
    return " < ".join(", ".join(line) for line in ORDER)


def path_table() -> str:
    rows = ["| | file | type or function | what happens |", "|---:|---|---|---|"]
    rows += [f"| {n} | `{file}` | `{name}` | {what} |" for n, (file, name, what) in enumerate(PATH_OF_A_PROMPT, 1)]
    files = len({file for file, _, _ in PATH_OF_A_PROMPT})
    types = len({name.split(".")[0] for _, name, _ in PATH_OF_A_PROMPT if name[0].isupper()})
    return "\n".join([*rows, "", f"{files} files, {types} types."])


def main() -> int:
    modules = read_modules()
    problems = [
        *find_violations(modules),
        *(" -> ".join((*one, one[0])) for one in find_cycles(count_packages(modules))),
    ]
    problems += [f"not in the code: {step}" for step in check_path()]
    if "--check" not in sys.argv:
        print(package_table(modules))
        print(f"\nimport order: {order_text()}\n")
        print(path_table())
        importers = count_importers(modules)
        lonely = sorted(name for name, count in importers.items() if count == 1 and modules[name].code_lines < 60)
        print(f"\nmodules under 60 code lines with one importer: {len(lonely)}: {', '.join(lonely) or 'none'}")
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
