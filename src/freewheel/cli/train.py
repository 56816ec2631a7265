"""`freewheel train`, `eval` and `doctor`: train a policy, measure it, and check this machine for a run.

`python fully_async_main.py` and `python -m freewheel.fully_async_main` are the same program as `freewheel train`.
Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from freewheel.cli.console import ExitCode, fail, plain_errors, print_json, print_rich, report, say
from freewheel.cli.flags import CONFIG_FLAGS, JSON_FLAG, JUDGE_PANEL, KEY_FLAG, argument, flag, read_variable, takes
from freewheel.errors import ConfigError
from freewheel.utils.findings import count_of

if TYPE_CHECKING:
    from freewheel.judge.config import JudgeConfig
    from freewheel.rollout.evaluation import Estimate, EvalResult
    from freewheel.runtime.config import TrainConfig
    from freewheel.utils.findings import Finding

TRAINS = ("torch", "transformers", "safetensors", "ray")
EVALUATES = ("torch", "transformers", "safetensors")

TRAIN_EPILOG = """
Exit codes: 0 the run finished; 1 it failed; 2 a flag, a file or a setting cannot work; 130 stopped by Ctrl-C or SIGTERM
and saved; `resume=RUN` continues it.
"""
DOCTOR_EPILOG = """
Exit codes: 0 no problem found; 1 a run would fail; 2 a flag cannot work.
"""
_SHOW = "Output"
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}
"""The colour of each state of a finding."""


@takes(
    argument("overrides", list[str], "[KEY=VALUE]...", "Settings, such as trainer.total_steps=100. Values are YAML: "
             "lists [1,2], mappings {a: 1}, null; ~KEY restores the default. resume=RUN continues the run in that "
             "folder, with its settings and those given here."),
    *CONFIG_FLAGS,
    flag("dry_run", bool, "Print the plan (actors, batches, staleness bound, memory) and what would prevent the run "
         "on this machine. Nothing starts.", panel=_SHOW),
    flag("plain", bool, "Print lines instead of the live view of a terminal.", panel=_SHOW),
    flag("resume_flag", str, "", "--resume", hidden=True),
)  # fmt: skip
def train(
    overrides: list[str] | None,
    config_path: str | None,
    config_name: str | None,
    dry_run: bool,
    plain: bool,
    resume_flag: str | None,
) -> None:
    """Train a policy with reinforcement learning; generation and training run side by side.

    Without settings the built-in model learns word problems on this machine, with or without a GPU.
    """
    with plain_errors():
        if not dry_run:
            _require(TRAINS)
        if resume_flag is not None:
            raise ConfigError("--resume", resume_flag, f"it is a setting, not a flag: write resume={resume_flag}")
        from freewheel.runtime.start import find_local_modules

        find_local_modules()
        if dry_run:
            _print_plan(overrides or [], config_path, config_name)
            return
        from freewheel.api import drive
        from freewheel.dashboard.terminal import view
        from freewheel.runtime.start import read_config

        given = read_config(overrides or [], config_path, config_name)
        raise typer.Exit(drive(given, view(plain=plain)).exit_code)


@takes(
    argument("target", str, "RUN_OR_MODEL", "A run's folder, one of its checkpoints, a HF folder, a hub id, or "
             "'embedded'."),
    flag("task", str, "The task to evaluate on (default: the run's): word_problems, gsm8k, rows, or module:name."),
    flag("data", str, "Held-out prompts (default: the run's, or the task's)."),
    flag("prompts", int, "Number of prompts (128)."),
    flag("samples", int, "Responses per prompt (1)."),
    flag("temperature", float, "Sampling temperature (0: greedy)."),
    flag("engine", str, "The engine: native, vllm or module:name (default: the run's, else native)."),
    JSON_FLAG,
)  # fmt: skip
def evaluate(target: str, as_json: bool, **given: Any) -> None:
    """Measure a model on held-out prompts, in this process and without Ray."""
    import asyncio

    with plain_errors():
        _require(EVALUATES)
        from freewheel.rollout.engine_factories import find_engine
        from freewheel.runtime.evaluation import eval_config, find_target, run_evaluation
        from freewheel.runtime.start import find_local_modules

        find_local_modules()

        with _name_flags_in_errors({"target": target, **given}):
            config = eval_config(find_target(target), **given)
            factory = find_engine(config.rollout.engine)
            factory.require(config.rollout)
            if note := factory.start_note(config.rollout):
                say(note)
            result = asyncio.run(run_evaluation(config))
        report(as_json, _result_object(target, config, result), _format_result(target, config, result))
        if result.failed:
            say(f"warning: left out {count_of(result.failed, 'response')} without a score")
            raise typer.Exit(ExitCode.INCOMPLETE)


def _print_plan(overrides: list[str], config_path: str | None, config_name: str | None) -> None:
    """Print the plan. Without a plan, print every setting that is refused."""
    from freewheel.doctor.run import find_concerns, read_run
    from freewheel.runtime.run_plan import render

    run = read_run(overrides, config_path, config_name)
    if run.plan is None:
        raise fail(*(finding.detail for finding in run.findings))
    print_rich(render(run.plan, find_concerns(run.plan)))


def _result_object(target: str, config: TrainConfig, result: EvalResult) -> dict[str, Any]:
    prompts, samples = result.scores.shape
    # msgspec writes NaN, which JSON does not have, as null.
    return {
        "model": target,
        "task": config.data.task,
        "mean_reward": result.mean,
        "standard_error": result.reward.error,
        "parts": {name: {"mean": part.mean, "standard_error": part.error} for name, part in result.parts.items()},
        "best_of_samples": result.best,
        "prompts": prompts,
        "samples": samples,
        "temperature": config.eval.temperature,
        "failed": result.failed,
        "truncated_share": result.truncated_share,
        "mean_tokens": result.mean_tokens,
        "per_prompt": result.per_prompt.tolist(),
    }


def _format_result(target: str, config: TrainConfig, result: EvalResult) -> str:
    prompts, samples = result.scores.shape
    how = "greedy" if config.eval.temperature == 0 else f"temperature {config.eval.temperature:g}"
    several = f", best of {samples}: {result.best:.3f}" if samples > 1 else ""
    parts = "".join(f", {name} {_format_estimate(part)}" for name, part in result.parts.items())
    return (
        f"{target} on {config.data.task}: mean reward {_format_estimate(result.reward)}{parts}{several} "
        f"({prompts} prompts × {samples}, {how}; {result.truncated_share:.1%} cut off, {result.mean_tokens:.1f} tokens)"
    )


def _format_estimate(found: Estimate) -> str:
    """Format as `0.412 ± 0.022`. A single prompt has no error."""
    return f"{found.mean:.3f}" if found.error != found.error else f"{found.mean:.3f} ± {found.error:.3f}"


FLAGS = {
    "model": ("target", "RUN_OR_MODEL"),
    "task": ("task", "--task"),
    "data": ("data", "--data"),
    "prompts": ("prompts", "--prompts"),
    "model.path": ("target", "RUN_OR_MODEL"),
    "data.task": ("task", "--task"),
    "data.train": ("data", "--data"),
    "data.eval": ("data", "--data"),
    "eval.prompts": ("prompts", "--prompts"),
    "eval.samples": ("samples", "--samples"),
    "eval.temperature": ("temperature", "--temperature"),
    "rollout.engine": ("engine", "--engine"),
}
"""Argument of `freewheel.evaluate` or key → the parameter and the flag of `eval` that set it."""


@contextlib.contextmanager
def _name_flags_in_errors(given: Mapping[str, Any]) -> Iterator[None]:
    """Name the flag instead of an argument, also of a missing one, and instead of a key if its value came from it."""
    try:
        yield
    except ConfigError as error:
        parameter, flag = FLAGS.get(error.key, ("", ""))
        if not parameter or ("." in error.key and given.get(parameter) is None):
            raise
        raise error.renamed(flag) from error


def _require(packages: tuple[str, ...]) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise fail(f"training needs {', '.join(missing)}: pip install 'freewheel[train]'")


# -- freewheel doctor -------------------------------------------------------------------------------------------------


@takes(
    argument("overrides", list[str], "[KEY=VALUE]...", "Settings of the run, as `freewheel train` takes them; "
             "resume=RUN too. Without any: the default run."),
    *CONFIG_FLAGS,
    flag("judge", list[str], "A judge that is not in the configuration, by its base URL: it is asked one short "
         "question. Repeat it for several.", metavar="URL", panel=JUDGE_PANEL),
    flag("judge_model", str, "The model's name there ($OPENAI_MODEL, else deepseek-v3).", panel=JUDGE_PANEL),
    KEY_FLAG,
    flag("as_json", bool, "The findings as one JSON object.", "--json"),
)  # fmt: skip
def doctor(
    overrides: list[str] | None,
    config_path: str | None,
    config_name: str | None,
    judge: list[str] | None,
    judge_model: str | None,
    api_key_env: str | None,
    as_json: bool,
) -> None:
    """Check what would prevent a run on this machine, and print the command that fixes it.

    A judge that the configuration names is asked one short question, which costs as much as one judgement.
    """
    from freewheel.doctor.run import list_checks
    from freewheel.runtime.start import find_local_modules
    from freewheel.utils.findings import State, run_checks

    with plain_errors():
        find_local_modules()
        judges = _read_judges(judge or [], judge_model, api_key_env)
        with _show_current(quiet=as_json) as begun:
            findings = run_checks(list_checks(overrides or [], config_path, config_name, judges), begun=begun)
        counts = Counter(str(finding.state) for finding in findings)
        print_json(_findings_object(findings, counts)) if as_json else _print_findings(findings, counts)
        if counts[State.PROBLEM]:
            raise typer.Exit(ExitCode.INCOMPLETE)


def _read_judges(urls: list[str], model: str | None, key_variable: str | None) -> list[JudgeConfig]:
    from freewheel.doctor.judge import at_url
    from freewheel.rewards.compute_score import MODEL
    from freewheel.rewards.config import DEFAULT_MODEL

    for name, given in (("--judge-model", model), ("--api-key-env", key_variable)):
        if given is not None and not urls:
            raise ConfigError(name, given, "it is only used with --judge: give that too")
    if key_variable is not None:
        read_variable("--api-key-env", key_variable)
    model = model or os.environ.get(MODEL) or DEFAULT_MODEL
    return [at_url(url, model, key_variable) for url in urls]


@contextlib.contextmanager
def _show_current(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current check on a terminal, on a line that disappears at the end."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what: None
        return
    with console.status("looking") as status:
        yield lambda what: status.update(f"looking at {what}")


def _print_findings(findings: list[Finding], counts: Counter[str]) -> None:
    """Print a line for each finding, one for its remedy, and the summary."""
    from rich.text import Text

    width = max(len(one.what) for one in findings)
    lines: list[Text] = []
    for one in findings:
        lines.append(Text.assemble((f"{one.state:<9}", _COLOURS[one.state]), f"{one.what:<{width}}  {one.detail}"))
        if one.remedy:
            lines.append(Text.assemble(" " * (9 + width + 2), (one.remedy, "bold cyan")))
    problems, warnings = counts["problem"], counts["warning"]
    summary, style = "No problem found.", _COLOURS["ok"]
    if problems:
        summary = f"{count_of(problems, 'problem')}, {count_of(warnings, 'warning')}: a run would fail."
        style = _COLOURS["problem"]
    elif warnings:
        summary, style = f"{count_of(warnings, 'warning')}: a run may work.", _COLOURS["warning"]
    print_rich(*lines, Text(summary, style=style))


def _findings_object(findings: list[Finding], counts: Counter[str]) -> dict[str, Any]:
    import freewheel

    return {
        "freewheel": freewheel.__version__,
        "ok": not counts["problem"],
        "problems": counts["problem"],
        "warnings": counts["warning"],
        "findings": findings,
    }
