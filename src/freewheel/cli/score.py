"""`freewheel score`: flags in, a `ScoringJob` run, words and an exit code out."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli.judge_flags import (
    PANEL,
    CacheDirFlag,
    ConcurrencyFlag,
    ConfigFlag,
    EndpointFlag,
    KeyVariableFlag,
    MaxCostFlag,
    MaxTokensFlag,
    ModelFlag,
    NoCacheFlag,
    PriceInFlag,
    PriceOutFlag,
    RubricFlag,
    SamplingFlag,
    TemperatureFlag,
)

if TYPE_CHECKING:
    from freewheel.judge.row_files import Tally
    from freewheel.judge.scoring import ScoringJob, Stopped, Summary

EPILOG = """
Exit codes: 0 every row was scored or skipped; 1 some rows failed or were malformed; 2 a flag, a file or a setting
cannot work; 3 stopped early (key, quota, budget, an outage, a full disk) and can be continued; 130 and 143 stopped by
Ctrl-C or SIGTERM, and can be continued; 141 the reader of stdout has gone.

A run that ended early continues with the same command. What was answered is cached, and is not paid for again.
"""

MALFORMED_SHOWN = 20
"""Malformed lines that are named one by one; a file of another format would fill the screen."""
TO_CONTINUE = "run the same command again to continue"

_ROWS, _RUN, _SHOW = "Rows", "Run", "Output"


def score(
    source: Annotated[str, typer.Argument(metavar="IN.jsonl", help="The rows, one JSON object a line; - is stdin.")],
    target: Annotated[
        str, typer.Argument(metavar="OUT.jsonl", help="Where the rows go, each with its verdict; - is stdout.")
    ],
    endpoint: EndpointFlag = None,
    model: ModelFlag = None,
    rubric: RubricFlag = None,
    api_key_env: KeyVariableFlag = None,
    concurrency: ConcurrencyFlag = None,
    temperature: TemperatureFlag = None,
    max_tokens: MaxTokensFlag = None,
    sampling: SamplingFlag = None,
    price_in: PriceInFlag = None,
    price_out: PriceOutFlag = None,
    max_cost: MaxCostFlag = None,
    placement: Annotated[
        str | None, typer.Option(help="Where the engine runs: process or thread.", rich_help_panel=PANEL)
    ] = None,
    config: ConfigFlag = None,
    response_field: Annotated[
        str | None, typer.Option(help="Field with the text to score (response).", rich_help_panel=_ROWS)
    ] = None,
    prompt_field: Annotated[
        str | None, typer.Option(help="Field with the question (prompt).", rich_help_panel=_ROWS)
    ] = None,
    reference_field: Annotated[
        str | None, typer.Option(help="Field with a reference answer (reference).", rich_help_panel=_ROWS)
    ] = None,
    skip_field: Annotated[
        str | None, typer.Option(help="Field with a reason not to score the row (skip).", rich_help_panel=_ROWS)
    ] = None,
    verdict_field: Annotated[
        str | None, typer.Option(help="Field under which the verdict is added (verdict).", rich_help_panel=_ROWS)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew instead of continuing OUT.jsonl.", rich_help_panel=_RUN)
    ] = False,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Score the rows that failed again, and keep the others.",
                     rich_help_panel=_RUN),
    ] = False,
    cache_dir: CacheDirFlag = None,
    no_cache: NoCacheFlag = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The summary as JSON on stdout.", rich_help_panel=_SHOW)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_SHOW)] = False,
) -> None:  # fmt: skip
    """Score a file of responses with an LLM judge, and continue where a killed run was.

    Each row needs a "response"; "prompt", "reference" and "skip" are read where they are there, and every other field
    is passed through. The output has the rows in the order of the input, each with a "verdict".
    """
    from freewheel.cli.console import ExitCode, log_to, mute_stdout, plain_errors, print_json, say
    from freewheel.cli.judge_flags import check_start, judge_config, parse_sampling, parse_temperature
    from freewheel.cli.progress import make_reporter
    from freewheel.errors import ConfigError
    from freewheel.judge.row_files import Fields
    from freewheel.judge.scoring import open_job

    names = {
        "response": response_field, "prompt": prompt_field, "reference": reference_field, "skip": skip_field,
        "verdict": verdict_field,
    }  # fmt: skip
    malformed: list[int] = []

    def report_malformed(line: int, detail: str) -> None:
        malformed.append(line) if len(malformed) < MALFORMED_SHOWN else None
        if line in malformed:
            reporter.say(f"line {line} is malformed: {detail}")

    with plain_errors(), contextlib.ExitStack() as stack:
        if as_json and target == "-":
            raise ConfigError("--json", True, "stdout takes the rows already; write them to a file")
        flags = {
            "endpoint": endpoint or None, "model": model, "rubric": rubric, "api_key_env": api_key_env,
            "concurrency": concurrency, "temperature": parse_temperature(temperature), "max_tokens": max_tokens,
            "sampling": parse_sampling(sampling), "max_cost": max_cost, "placement": placement,
            "cache_dir": cache_dir, "cache": False if no_cache else None,
        }  # fmt: skip
        settings = judge_config(config, flags, price_in=price_in, price_out=price_out)
        check_start(settings)
        fields = Fields(**{key: name for key, name in names.items() if name is not None})
        reporter = stack.enter_context(make_reporter(quiet=quiet, rows_on_stdout=target == "-"))
        stack.enter_context(log_to(reporter.say))
        job = stack.enter_context(
            open_job(
                source, target, settings, fields=fields, overwrite=overwrite, retry_failed=retry_failed,
                on_progress=reporter.show, on_malformed=report_malformed,
            )
        )  # fmt: skip
        signals = stack.enter_context(stop_on_signals(job))
        try:
            summary = job.run()
        except OSError as error:
            reporter.say(f"error: {source} cannot be read: {error.strerror}; {TO_CONTINUE}")
            raise typer.Exit(ExitCode.STOPPED) from None
    stopped = summary.stopped
    if stopped is not None and stopped.reason == "pipe":
        mute_stdout()
        raise typer.Exit(ExitCode.BROKEN_PIPE)
    say(describe(summary, shown=len(malformed)))
    if stopped is not None:
        say(explain_stop(stopped, target=target, retry_failed=retry_failed, api_key_env=settings.api_key_env))
    elif summary.tally.failed:
        say(explain_failed(summary.tally, target=target))
    code: int = ExitCode.OK
    if signals and stopped is not None:
        code = 128 + signals[0]
    elif stopped is not None:
        code = ExitCode.STOPPED
    elif summary.tally.failed or summary.tally.malformed:
        code = ExitCode.INCOMPLETE
    if as_json:
        print_json(as_plain(summary, exit_code=code))
    raise typer.Exit(code)


@contextlib.contextmanager
def stop_on_signals(job: ScoringJob) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM stop the job in order; a second one ends the program at once. Yields the signals that came."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        job.stop("interrupted")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(summary: Summary, *, shown: int) -> str:
    """The summary in words: first how the rows ended, then what it took."""
    tally, calls = summary.tally, summary.calls
    parts = [f"{tally.scored:,} scored", f"{tally.failed:,} failed", f"{tally.skipped:,} skipped"]
    if tally.malformed:
        parts.append(f"{tally.malformed:,} malformed" + (f" ({shown} shown)" if tally.malformed > shown > 0 else ""))
    text = ", ".join(parts)
    if summary.before:
        text += f" ({summary.before:,} of them by an earlier run)"
    if tally.reasons:
        text += "; failed by " + ", ".join(f"{reason} {count:,}" for reason, count in sorted(tally.reasons.items()))
    text += f"; {calls.sent:,} calls, {tally.cached:,} from cache, {calls.throttled:,} 429s"
    if calls.cost:
        text += f", cost {calls.cost:.4f}"
    rate = (tally.rows - summary.before) / summary.elapsed_s if summary.elapsed_s else 0.0
    return f"{text}; {summary.elapsed_s:.1f} s, {rate:,.0f} rows/s"


def explain_failed(tally: Tally, *, target: str) -> str:
    """What went wrong first, and how to score those rows again: the same command keeps them as they are."""
    from freewheel.judge.row_files import is_stream

    text = f"the first that failed: {tally.first_failure}"
    return text if is_stream(target) else f"{text}. Rows that failed are kept: --retry-failed scores them again"


def explain_stop(stopped: Stopped, *, target: str, retry_failed: bool, api_key_env: str | None) -> str:
    """Why it stopped, what to do about it, and how to go on."""
    from freewheel.judge.row_files import is_stream

    key = api_key_env or "the key"
    remedies = {
        "interrupted": "stopped",
        "output": f"stopped: {target} cannot be written: {stopped.detail}; make room",
        "auth": f"stopped: the judge refuses us: {stopped.detail}; correct {key}, or name another variable",
        "not_found": f"stopped: the judge knows no such model or path: {stopped.detail}; correct --model or --endpoint",
        "quota": f"stopped: the account has no credit left: {stopped.detail}",
        "budget": f"stopped: {stopped.detail}; --max-cost counts one run, and each further run may spend it again",
        "engine": f"stopped: the judge's engine broke: {stopped.detail}",
    }
    outage = f"stopped: the judge does not answer ({stopped.reason}): {stopped.detail}"
    if stopped.reason in ("unparseable", "rejected"):
        outage = f"stopped, as nothing can be scored this way ({stopped.reason}): {stopped.detail}"
    text = remedies.get(stopped.reason, outage)
    if is_stream(target):
        return f"{text}. The first line without a row is {stopped.next_line}"
    if retry_failed:
        return f"{text}. {target} is as it was; {TO_CONTINUE}"
    return f"{text}. The next line is {stopped.next_line}; {TO_CONTINUE}"


def as_plain(summary: Summary, *, exit_code: int) -> dict[str, object]:
    """The summary as one flat JSON object."""
    import msgspec

    tally, calls = msgspec.to_builtins(summary.tally), msgspec.to_builtins(summary.calls)
    for momentary in ("in_flight", "limit"):
        del calls[momentary]
    stopped = msgspec.to_builtins(summary.stopped)
    rest = {"before": summary.before, "blank": summary.blank, "elapsed_s": round(summary.elapsed_s, 3)}
    return {**tally, **rest, "calls": calls, "stopped": stopped, "exit_code": exit_code}
