"""Reward functions as people bring them: found by name, known by their signature, called without ever raising.

    "my_package.rewards:score" ─▶ load_reward ─▶ RewardFunction ─ score(calls) ─▶ Verdict, Verdict, …

Three conventions, told apart by the names of the parameters; each may be `async`:

    one response    (response, row)                                                      ours
                    (data_source, solution_str, ground_truth, extra_info)                verl's
    a batch         (data_sources, solution_strs, ground_truths, extra_infos)            verl's
                    (prompts, completions, **columns)                                    TRL's

`RewardStage` decides when and where a function runs; here is what it is given and what its answers mean.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import msgspec

from freewheel.data.group import Finish
from freewheel.data.tasks import Task
from freewheel.errors import ConfigError, shown
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Verdict
from freewheel.rewards.compute_score import compute_score, compute_score_async, monitors
from freewheel.rewards.scoring import as_scored
from freewheel.utils.registry import DETAIL_CHARS, find_object

KEY = "reward.function"
"""The setting that names a function."""

Convention = Literal["single", "verl_batch", "trl"]

TEXTS = ("solution_str", "response")
"""A function of one response takes one of these."""
SINGLE = (*TEXTS, "row", "finish", "data_source", "dataset_name", "ground_truth", "extra_info")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = ("prompts", "completions", "completion_ids")

CONVENTIONS = (
    "(response, row), (data_source, solution_str, ground_truth, extra_info), "
    "(data_sources, solution_strs, ground_truths, extra_infos) or (prompts, completions, **columns)"
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One response to be scored, and what a function may ask about it."""

    text: str
    row: Mapping[str, Any]
    """Of the data, as its `Prompt` has it."""
    finish: Finish = "stop"
    tokens: Sequence[int] = ()
    """Only for functions that ask for `completion_ids`."""

    @property
    def data_source(self) -> str:
        return str(self.row.get("data_source") or "")

    @property
    def ground_truth(self) -> Any:
        model = self.row.get("reward_model")
        return model.get("ground_truth") if isinstance(model, Mapping) else self.row.get("ground_truth")

    @property
    def extra_info(self) -> dict[str, Any]:
        """A copy: what a function writes into it must not get into the data."""
        return dict(self.row.get("extra_info") or {})

    @property
    def question(self) -> str:
        found = self.extra_info.get("question")
        return found if isinstance(found, str) else ""


def failed(kind: str, detail: str = "", trace: str = "", *, infra: bool = False) -> Failed:
    """Return a failure of a reward function. `kind` is what statistics count it by."""
    return Failed(kind, detail=detail[:DETAIL_CHARS], trace=trace, infra=infra)


def from_exception(error: BaseException) -> Failed:
    trace = "".join(traceback.format_exception(error))
    # Connections, time-outs and the exceptions of most HTTP clients are OSErrors.
    return failed(type(error).__name__, str(error), trace, infra=isinstance(error, OSError))


def from_judge(verdict: Failed) -> Failed:
    """Mark a failure as the judge's. It is an infrastructure failure unless the judge rejects this very response."""
    about_response = verdict.reason in (Reason.UNPARSEABLE, Reason.REJECTED)
    return failed(f"judge {verdict.reason}", verdict.detail, infra=not about_response)


def as_verdict(found: Any) -> Verdict:
    """Read what a function returned for one response: a number, a dict with `score`, a `Verdict`, or None.

    None means that the function does not score this response (as in TRL). That is not a failure.
    """
    if isinstance(found, _PLAIN):
        return _scored(found)
    if found is None:
        return Skipped("none: the function gave None")
    if isinstance(found, Skipped):
        return Skipped(f"skipped: {found.reason}" if found.reason else "skipped")
    if isinstance(found, Failed):
        return from_judge(found)
    if isinstance(found, Mapping) and found.get("judge_status") == "failed":
        # compute_score and the reward managers fill in a score for trainers that cannot mask: do not take it.
        return from_judge(Failed(str(found.get("judge_reason", ""))))
    if inspect.isawaitable(found):
        if inspect.iscoroutine(found):
            found.close()
        return failed("result", "the function gave something to await: declare it with `async def`")
    return _scored(found)


_PLAIN = (Scored, float, int)
"""Nearly all results have one of these types. They are checked first: the other checks take longer than most rules."""


def _scored(found: Any) -> Verdict:
    try:
        scored = as_scored(found)
    except ConfigError as error:
        return failed("result", str(error.renamed(KEY)))
    parts = _numbers(scored.parts)
    if isinstance(found, Mapping) and "format" in found:
        parts["format"] = scored.format  # it gates the judge, and is worth a curve as well
    return Scored(scored.value, parts=parts, format=scored.format)


def _numbers(parts: Mapping[str, Any]) -> dict[str, float]:
    """What can be reported beside a reward; a function's dict may hold anything."""
    found: dict[str, float] = {}
    for name, value in parts.items():
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(value, str):
                found[name] = float(value)
    return found


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's function with what its signature says. Pickled where the function itself can be."""

    name: str
    function: Callable[..., Any]
    convention: Convention
    is_async: bool
    names: tuple[str, ...]
    """Arguments that it takes by keyword."""
    positional: tuple[str, ...] = ()
    """Those before a `/`."""
    takes_columns: bool = False
    """TRL's `**kwargs`: every column of the data."""
    conversational: bool = False
    """TRL's `completions: list[list[dict]]`: messages instead of texts."""

    @property
    def is_batch(self) -> bool:
        return self.convention != "single"

    @property
    def wants_tokens(self) -> bool:
        return self.convention == "trl" and (self.takes_columns or "completion_ids" in self.names)

    def score(self, calls: Sequence[Call]) -> list[Verdict]:
        """A verdict for each call; a function that raises makes failures. For one response at a time, give one."""
        try:
            return self._read(self._invoke(calls), len(calls))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's function may raise anything
            return [from_exception(error)] * len(calls)

    async def score_async(self, calls: Sequence[Call]) -> list[Verdict]:
        """The same for an async function."""
        try:
            return self._read(await self._invoke(calls), len(calls))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's function may raise anything
            return [from_exception(error)] * len(calls)

    def _read(self, found: Any, count: int) -> list[Verdict]:
        if not self.is_batch:
            return [as_verdict(found)]
        if found is None or isinstance(found, str | Mapping) or not hasattr(found, "__len__"):
            return [failed("result", f"a batch function must give a list, and gave {shown(found)}")] * count
        if len(found) != count:
            return [failed("result", f"the function gave {len(found)} results for {count} responses")] * count
        return [as_verdict(one) for one in found]

    def _invoke(self, calls: Sequence[Call]) -> Any:
        if self.convention == "single":
            (call,) = calls
            given = {name: _SINGLE[name](call) for name in (*self.positional, *self.names)}
        elif self.convention == "verl_batch":
            given = {name: _column(calls, name) for name in (*self.positional, *self.names)}
        else:
            given = self._trl(calls)
        before_slash = [given.pop(name) for name in self.positional]
        return self.function(*before_slash, **given)

    def _trl(self, calls: Sequence[Call]) -> dict[str, Any]:
        columns = _columns(calls)
        wanted = {*TRL, *columns} if self.takes_columns else set()
        given: dict[str, Any] = {}
        for name in (*self.positional, *self.names, *sorted(wanted - {*self.positional, *self.names})):
            if name == "prompts":
                given[name] = [self._said("user", call.question) for call in calls]
            elif name == "completions":
                given[name] = [self._said("assistant", call.text) for call in calls]
            elif name == "completion_ids":
                given[name] = [list(call.tokens) for call in calls]
            elif name in columns:
                given[name] = columns[name]
            # A name that no column has keeps its default; without one, the call fails and says which it misses.
        return given

    def _said(self, role: str, text: str) -> str | list[dict[str, str]]:
        return [{"role": role, "content": text}] if self.conversational else text


def load_reward(spec: str | Callable[..., Any] | None, task: Task | None = None) -> RewardFunction:
    """The function that `spec` names or is; None is the task's own `score`."""
    if spec is None:
        if task is None:
            raise ConfigError(KEY, None, "there is no task to take it from: give module:name")
        return read_signature(task.score, f"the task {task.name}'s score")
    if not isinstance(spec, str):
        return read_signature(spec, getattr(spec, "__qualname__", None) or type(spec).__qualname__)
    function = find_object(KEY, spec)
    if inspect.isclass(function):
        try:
            function = function()
        except TypeError as error:
            raise ConfigError(KEY, spec, f"it is a class, and is made without arguments: {error}") from error
    return _signature_of(function, spec)


def check_reward(spec: str) -> None:
    """Raises what `load_reward` would, and makes no object of a class: that may load a model."""
    function = find_object(KEY, spec)
    if not inspect.isclass(function):
        load_reward(spec)
        return
    try:
        inspect.signature(function).bind()
        unmade = function.__new__(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(KEY, spec, f"it is a class, and is made without arguments: {error}") from error
    _signature_of(unmade, spec)


def _signature_of(function: Any, spec: str) -> RewardFunction:
    if not callable(function):
        raise ConfigError(KEY, spec, f"it is a {type(function).__name__}; give a function {CONVENTIONS}")
    return read_signature(function, spec)


def read_signature(function: Callable[..., Any], name: str) -> RewardFunction:
    """Which convention a function follows. One that fits none is refused, by the parameter that does not fit."""
    if function is compute_score and monitors():
        function = compute_score_async  # the same, and its wait for the judge holds no thread
    if function in (compute_score, compute_score_async):
        is_async = function is compute_score_async
        return RewardFunction(name=name, function=function, convention="single", is_async=is_async, names=VERL)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(KEY, name, f"its signature cannot be read ({error}): wrap it in a function") from error
    any_keyword = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    plain = {key: one for key, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    convention, vocabulary = _convention(plain, name)
    for key, one in plain.items():
        if convention != "trl" and key not in vocabulary and one.default is one.empty:
            remedy = f"it needs {key!r}, which nobody gives it. A reward function takes {CONVENTIONS}"
            raise ConfigError(KEY, name, remedy)
    before_slash = [key for key, one in plain.items() if one.kind is one.POSITIONAL_ONLY]
    names = [key for key in plain if key not in before_slash and (convention == "trl" or key in vocabulary)]
    if any_keyword and convention != "trl":
        family = VERL if "solution_str" in plain else () if "response" in plain else vocabulary
        names += [key for key in family if key not in plain]
    return RewardFunction(
        name=name,
        function=function,
        convention=convention,
        is_async=_is_async(function),
        names=tuple(names),
        positional=tuple(key for key in before_slash if convention == "trl" or key in vocabulary),
        takes_columns=any_keyword and convention == "trl",
        conversational=convention == "trl" and "dict" in str(plain["completions"].annotation),
    )


def _convention(plain: Mapping[str, inspect.Parameter], name: str) -> tuple[Convention, tuple[str, ...]]:
    if "solution_strs" in plain:
        return "verl_batch", VERL_BATCH
    if "completions" in plain:
        return "trl", TRL
    if any(text in plain for text in TEXTS):
        return "single", SINGLE
    remedy = f"its parameters ({', '.join(plain) or 'none by name'}) fit no convention: take {CONVENTIONS}"
    raise ConfigError(KEY, name, remedy)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


_SINGLE: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(TEXTS, attrgetter("text")),
    "row": lambda call: dict(call.row),
    "dataset_name": attrgetter("data_source"),
    **{name: attrgetter(name) for name in ("finish", "data_source", "ground_truth", "extra_info")},
}
"""What an argument of a function of one response is."""


def _column(calls: Sequence[Call], name: str) -> list[Any]:
    return [_SINGLE[name.removesuffix("s")](call) for call in calls]


def _columns(calls: Sequence[Call]) -> dict[str, list[Any]]:
    """The data by column, as TRL's datasets have it: what is inside `extra_info` and the ground truth lie open."""
    rows = [{**call.extra_info, "ground_truth": call.ground_truth, **call.row} for call in calls]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names if name not in TRL}
