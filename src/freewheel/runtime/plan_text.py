"""A `Plan` as people read it: what `--dry-run` prints, and what a run says at its start."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from freewheel.runtime.plan import Actor, Plan
from freewheel.utils.findings import Finding, State

LABEL = 24
"""Columns of what stands at the left; the longest name of an actor fits."""
WIDTH = 110

WAYS = {"object_store": "through host memory", "ipc": "within the GPU", "nccl": "from GPU to GPU"}

Rows = list[tuple[str, str]]


def render(plan: Plan, concerns: Sequence[Finding] = ()) -> Text:
    text, shown = Text(), ""
    for title, style, rows in _sections(plan, concerns):
        if not rows:
            continue
        if title != shown:
            text.append(f"{title}\n", style="bold")
            shown = title
        for label, said in rows:
            indent = " " * (2 + (LABEL if label else 0))
            lines = textwrap.wrap(said, WIDTH - len(indent)) or [""]
            text.append(f"  {label:<{LABEL}}" if label else "  ", style="dim")
            text.append(f"\n{indent}".join(lines) + "\n", style=style)
    text.rstrip()
    return text


PROBLEMS = "Against this run here"
COLOURS = {State.PROBLEM: "red", State.WARNING: "yellow"}


def _sections(plan: Plan, concerns: Sequence[Finding]) -> Iterator[tuple[str, str, Rows]]:
    """Title, colour and rows. One title may have rows of two colours."""
    yield "Run", "", _run(plan)
    yield "Actors", "", [("FullyAsyncMain", "this process"), *((_name(one), _actor(one)) for one in plan.actors)]
    yield "Batch", "", _batch(plan)
    yield "Staleness", "", _staleness(plan)
    yield "Memory (estimate)", "", _memory(plan)
    yield "Notes", "", [("", note) for note in plan.notes]
    yield PROBLEMS, "red", [("", str(problem)) for problem in plan.problems]
    for state, style in COLOURS.items():
        yield PROBLEMS, style, [("", _concern(one)) for one in concerns if one.state is state]


def _concern(finding: Finding) -> str:
    return f"{finding.what}: {finding.detail}" + (f" → {finding.remedy}" if finding.remedy else "")


def _run(plan: Plan) -> Rows:
    c, m = plan.config, plan.machine
    gpus = ", ".join(f"{gpu.name} ({_size(gpu.memory_bytes)})" for gpu in m.gpus) or "no GPU"
    cluster = f"Ray cluster at {c.ray.address}; here: " if c.ray.address else ""
    return [
        ("mode", f"{c.mode}, {_n(plan.total_steps, 'step')}, seed {c.seed}"),
        ("model", f"{c.model.path}, {plan.dtype}{', LoRA' if c.model.lora else ''}"),
        ("data", f"{c.data.task}{f' from {c.data.train}' if c.data.train else ''}"),
        ("machine", f"{cluster}{_n(m.cpus, 'CPU')}, {_size(m.memory_bytes)} memory, {gpus}"),
        ("run directory", c.run_dir or "a new folder under runs/"),
    ]


def _name(actor: Actor) -> str:
    return actor.name if actor.count == 1 else f"{actor.name} × {actor.count}"


def _actor(actor: Actor) -> str:
    where = (
        actor.device
        if not actor.gpus
        else f"cuda, {actor.gpus:g} GPU{'s' * (actor.gpus > 1)}{' each' * (actor.count > 1)}"
    )
    return f"{where}{', ' * bool(actor.detail)}{actor.detail}"


def _batch(plan: Plan) -> Rows:
    c, groups = plan.config, plan.config.trainer.groups_per_step
    most = plan.samples_per_step * plan.tokens_per_sample
    rows = [
        ("a step", f"{groups:,} groups × {c.rollout.n} responses = {plan.samples_per_step:,} samples"),
        (
            "",
            f"at most {plan.samples_per_step:,} × ({plan.max_prompt_tokens:,} prompt + {plan.max_new_tokens:,} new) "
            f"= {most:,} tokens, in micro-batches of {c.trainer.micro_batch_tokens:,}",
        ),
        ("the run", f"{_n(plan.total_steps, 'step')}, {plan.total_prompts:,} prompts in all"),
    ]
    if plan.rows is not None:
        steps, used = plan.rows / groups, plan.total_prompts / plan.rows
        rows.append(
            ("an epoch", f"{plan.rows:,} prompts = {steps:,.1f} steps; the run goes over them {used:.2f} times")
        )
        if plan.total_steps < c.trainer.total_steps:
            told = f"data.epochs = {c.data.epochs} ends it before trainer.total_steps = {c.trainer.total_steps}"
            rows.append(("", told))
    updates = c.algorithm.updates_per_batch * c.algorithm.mini_batches
    rows.append(("updates", f"{_n(updates, 'optimizer step')} a training step"))
    return [(label if label else " ", said) for label, said in rows]


def _staleness(plan: Plan) -> Rows:
    b = plan.bounds
    every = "each step" if b.steps_per_version == 1 else f"every {b.steps_per_version} steps"
    how = "once nothing is in progress" if b.drain else "between two tokens of what is in flight"
    rows = [
        (
            "bound",
            f"a sample lags at most {_n(b.max_lag, 'version')} when it is trained on "
            f"(threshold {b.threshold} + ⌈(window {b.window} − 1) / {b.groups_per_version} groups a version⌉)",
        ),
        ("generation", f"held back at {b.capacity:,} groups alive; the queue never has more"),
        ("checked again", f"what lags more than {_n(b.max_lag_allowed, 'version')} is never trained on"),
        ("new weights", f"after {every}, {how}"),
    ]
    if plan.sync_bytes is not None:
        how = WAYS[plan.transport]
        rows.append(("weight sync", f"{_size(plan.sync_bytes)} to {_n(plan.replicas, 'replica')}, each version, {how}"))
    return rows


def _memory(plan: Plan) -> Rows:
    if not plan.memory_trainer:
        return [("", "not known: the model's files are not here, or do not say its size")]
    return [("trainer", _parts(plan.memory_trainer)), ("a rollouter", _parts(plan.memory_replica))]


def _parts(parts: dict[str, int]) -> str:
    return f"{_size(sum(parts.values()))}: " + ", ".join(f"{name} {_size(size)}" for name, size in parts.items())


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _n(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
