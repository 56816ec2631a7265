"""`freewheel doctor`: check this machine for a run. A table on a terminal, lines elsewhere, or JSON.

Exit code 1 where a run would fail. The command imports only what a configuration names, and torch where there is a GPU,
to see whether torch can use it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.cli.flags import ConfigNameFlag, ConfigPathFlag, KeyVariableFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from freewheel.doctor.machine import GpuDriver
    from freewheel.doctor.run import Run
    from freewheel.judge.config import JudgeConfig
    from freewheel.utils.findings import Check, Finding

EPILOG = """
Exit codes: 0 nothing stands in the way of a run; 1 something does; 2 a flag cannot work.
"""
_JUDGE = "Judge"
READ_S = 240.0
"""Time to read a configuration: a child process may check vLLM."""
JUDGE_S = 40.0
"""Time for an endpoint. Its calls have their own limits, but resolving its name has none."""
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the run that is meant, as `freewheel train` takes "
                       "them; resume=RUN too. Without any: the default run.", show_default=False),
    ] = None,
    config_path: ConfigPathFlag = None,
    config_name: ConfigNameFlag = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="A judge that is not in the configuration, by its base URL: it is asked one short question. "
                     "Give it again for further ones.", metavar="URL", rich_help_panel=_JUDGE),
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(help="The model's name there ($OPENAI_MODEL, else deepseek-v3).", rich_help_panel=_JUDGE),
    ] = None,
    api_key_env: KeyVariableFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as one JSON object.")] = False,
) -> None:  # fmt: skip
    """Look for what would stand in a run's way on this machine, and say which command mends it.

    A judge that the configuration names is asked one short question, which costs what one judgement costs.
    """
    from freewheel.cli.console import ExitCode, plain_errors, print_json
    from freewheel.runtime.start import find_local_modules

    with plain_errors():
        find_local_modules()
        asked = _named(judge or [], judge_model, api_key_env)
        with _told(quiet=as_json) as begun:
            findings = _findings(overrides or [], config_path, config_name, asked, begun)
        print_json(_as_json(findings)) if as_json else _print(findings)
        if _count(findings, "problem"):
            raise typer.Exit(ExitCode.INCOMPLETE)


def _named(urls: list[str], model: str | None, key_variable: str | None) -> list[JudgeConfig]:
    from freewheel.doctor.judge import at_url
    from freewheel.errors import ConfigError
    from freewheel.rewards.compute_score import MODEL
    from freewheel.rewards.config import DEFAULT_MODEL

    for flag, given in (("--judge-model", model), ("--api-key-env", key_variable)):
        if given is not None and not urls:
            raise ConfigError(flag, given, "it says how to ask a judge that --judge names: give that too")
    if key_variable is not None and not os.environ.get(key_variable):
        raise ConfigError("--api-key-env", key_variable, "that variable is not set in the environment")
    name = model or os.environ.get(MODEL) or DEFAULT_MODEL
    return [at_url(url, name, key_variable) for url in urls]


def _findings(
    overrides: list[str],
    config_path: str | None,
    config_name: str | None,
    judges: list[JudgeConfig],
    begun: Callable[[str], None],
) -> list[Finding]:
    from freewheel.doctor import run as doctor_run
    from freewheel.utils.findings import Check, run_checks

    only_judge = bool(judges) and not (overrides or config_path or config_name)
    driver = _driver(begun)
    found = run_checks(_of_software(driver, trains=not only_judge), begun=begun)
    read: list[Run] = []

    def look() -> list[Finding]:
        with redirect_stdout(sys.stderr):  # whatever a module of the user's prints
            read.append(doctor_run.read_run(overrides, config_path, config_name))
        return read[-1].findings

    of_run = run_checks([Check(what=doctor_run.WHAT, look=look, limit_s=READ_S)], begun=begun)
    run = read[-1] if read else doctor_run.Run()
    found += run_checks(_of_machine(driver, run), begun=begun)
    found += of_run
    return found + run_checks(_of_judges(run, judges), begun=begun)


def _driver(begun: Callable[[str], None]) -> GpuDriver:
    """Return what nvidia-smi reports, or why it could not be asked."""
    from freewheel.doctor import machine
    from freewheel.doctor import run as doctor_run
    from freewheel.utils.findings import Check, run_checks

    told: list[GpuDriver] = []

    def look() -> list[Finding]:
        told.append(machine.read_driver())
        return []

    failed = run_checks([Check(what="GPU", look=look, limit_s=doctor_run.GPU_S)], begun=begun)
    return machine.GpuDriver(why=failed[0].detail) if failed else told[0]


def _of_software(driver: GpuDriver, *, trains: bool) -> Iterator[Check]:
    from freewheel.doctor import software
    from freewheel.utils.findings import Check

    yield Check(what="Python", look=lambda: [software.python_release()])
    yield Check(what="packages", look=lambda: software.packages(trains=trains))
    yield Check(what="torch", look=lambda: software.torch(driver), limit_s=software.TORCH_S + 10)


def _of_machine(driver: GpuDriver, run: Run) -> Iterator[Check]:
    from freewheel.doctor import machine, software
    from freewheel.doctor import run as doctor_run
    from freewheel.rollout.engines import find_engine
    from freewheel.runtime.placement import Machine
    from freewheel.utils.findings import Check

    config, plan = run.config, run.plan
    wants_vllm = config is not None and "vllm" in find_engine(config.rollout.engine).packages(config.rollout)
    address = None if config is None else config.ray.address
    here = plan.machine if plan is not None else Machine.of_host()
    weights, checkpoints = doctor_run.weights_bytes(plan), doctor_run.checkpoint_bytes(plan)
    yield Check(what="GPU", look=lambda: machine.check_gpus(driver, needed_bytes=doctor_run.gpu_bytes(plan)))
    yield Check(what="vLLM", look=lambda: software.vllm(wanted=wants_vllm))
    yield Check(what="Ray", look=lambda: software.ray(address, os.environ), limit_s=20.0)
    yield Check(what="shared memory", look=lambda: machine.check_shared_memory(needed_bytes=weights))
    yield Check(
        what="run directory",
        look=lambda: machine.check_run_folder(doctor_run.run_folder(config), needed_bytes=checkpoints),
    )
    yield Check(what="run directory", look=lambda: doctor_run.check_existing_run(config))
    yield Check(what="port", look=lambda: doctor_run.check_ports(config))
    if address is None:  # a cluster's is said where it is started
        yield Check(what="Ray's folder", look=machine.check_ray_folder)
    yield Check(what="limits", look=lambda: machine.check_limits(machine.read_host(), here, doctor_run.run_needs(plan)))
    yield Check(what="threads", look=lambda: [machine.check_threads(os.environ)])
    yield Check(what="clock", look=lambda: [machine.check_clock()])


def _of_judges(run: Run, judges: list[JudgeConfig]) -> Iterator[Check]:
    from freewheel.doctor import judge as judging
    from freewheel.doctor import run as doctor_run
    from freewheel.utils.findings import Check

    named, said = doctor_run.named_judge(run.config)
    if said:
        yield Check(what=judging.WHAT, look=lambda: said)
    wanted = [(config, "--judge-model") for config in judges]
    if named is not None:
        wanted.insert(0, (named, "reward.judge.model_name"))
    for config, model_key in wanted:
        for endpoint in config.endpoints:
            asked = partial(judging.ask, config, endpoint, model_key=model_key)
            yield Check(what=f"{judging.WHAT} {endpoint.url}", look=asked, limit_s=JUDGE_S)


# -- told -------------------------------------------------------------------------------------------------------------


@contextmanager
def _told(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show the current check on a terminal, on a line that disappears at the end."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what: None
        return
    with console.status("looking") as status:
        yield lambda what: status.update(f"looking at {what}")


def _print(findings: list[Finding]) -> None:
    from rich.console import Console

    from freewheel.cli.console import print_text, writing_stdout

    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        print_text("\n".join([*_lines(findings), _summary(findings)]))
        return
    with writing_stdout():
        _show(console, findings)


def _show(console: Console, findings: list[Finding]) -> None:
    from rich.text import Text

    console.print(_table(findings))
    worst = next((state for state in ("problem", "warning") if _count(findings, state)), "ok")
    console.print(Text(_summary(findings), style=STYLES[worst]))


def _table(findings: list[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for one in findings:
        said = Text(one.detail)
        if one.remedy:
            said.append(f"\n{one.remedy}", style="bold cyan")
        table.add_row(Text(one.state, style=STYLES[one.state]), Text(one.what), said)
    return table


def _lines(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each finding, and one for its remedy."""
    state, what = (max(map(len, words)) for words in (STYLES, [one.what for one in findings]))
    for one in findings:
        yield f"{one.state:<{state}}  {one.what:<{what}}  {one.detail}"
        if one.remedy:
            yield f"{'':<{state}}  {'':<{what}}  {one.remedy}"


def _summary(findings: list[Finding]) -> str:
    from freewheel.utils.findings import count_of

    problems, warnings = (_count(findings, state) for state in ("problem", "warning"))
    if problems:
        return f"{count_of(problems, 'problem')}, {count_of(warnings, 'warning')}: a run would fail."
    if warnings:
        return f"{count_of(warnings, 'warning')}: a run may work."
    return "Nothing stands in the way of a run."


def _as_json(findings: list[Finding]) -> dict[str, Any]:
    import freewheel

    return {
        "freewheel": freewheel.__version__,
        "ok": not _count(findings, "problem"),
        "problems": _count(findings, "problem"),
        "warnings": _count(findings, "warning"),
        "findings": [
            {"what": one.what, "state": str(one.state), "detail": one.detail, "remedy": one.remedy} for one in findings
        ],
    }


def _count(findings: list[Finding], state: str) -> int:
    return sum(one.state == state for one in findings)
