"""Reward functions: how freewheel finds a function, calls it by its own convention, and reads what it returns.

    "my_package.rewards:score" or a callable ─▶ load_reward ─▶ RewardFunction.score(calls) ─▶ [Verdict, …]

The names of the parameters identify the convention. A function of each convention may be `async`:

    one response    (response, row)                                                      freewheel's
                    (data_source, solution_str, ground_truth, extra_info)                verl's
    a batch         (data_sources, solution_strs, ground_truths, extra_infos)            verl's
                    (prompts, completions, **columns)                                    TRL's

`RewardStage` and the evaluation call functions through `reward_workers.FunctionRunner`. A function never raises here:
what it raises becomes a `Failed` verdict.
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

from freewheel.data.group import Finish, Prompt, Response
from freewheel.data.tasks import Task
from freewheel.errors import ConfigError, format_value
from freewheel.judge.verdict import Failed, Reason, Scored, Skipped, Verdict
from freewheel.rewards.compute_score import compute_score, compute_score_async, monitors
from freewheel.rewards.scoring import as_scored
from freewheel.utils.registry import DETAIL_CHARS, find_object

KEY = "reward.function"

_Convention = Literal["single", "verl_batch", "trl"]

_TEXTS = ("solution_str", "response")
"""A function of one response takes one of these."""
_SINGLE = (*_TEXTS, "row", "finish", "data_source", "dataset_name", "ground_truth", "extra_info")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_TRL = ("prompts", "completions", "completion_ids")

_CONVENTIONS = (
    "(response, row), (data_source, solution_str, ground_truth, extra_info), "
    "(data_sources, solution_strs, ground_truths, extra_infos) or (prompts, completions, **columns)"
)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One response to be scored, and everything that a function may ask for."""

    text: str
    row: Mapping[str, Any]
    """The prompt's row of the data."""
    finish: Finish = "stop"
    tokens: Sequence[int] = ()
    """Only filled for functions that take `completion_ids`."""

    @property
    def data_source(self) -> str:
        return str(self.row.get("data_source") or "")

    @property
    def ground_truth(self) -> Any:
        model = self.row.get("reward_model")
        return model.get("ground_truth") if isinstance(model, Mapping) else self.row.get("ground_truth")

    @property
    def extra_info(self) -> dict[str, Any]:
        """A copy, so that a function cannot change the data."""
        return dict(self.row.get("extra_info") or {})

    @property
    def question(self) -> str:
        found = self.extra_info.get("question")
        return found if isinstance(found, str) else ""


# -- what a function returns ------------------------------------------------------------------------------------------


def failed(reason: str, detail: str = "", trace: str = "", *, infra: bool = False) -> Failed:
    """Return the failure of one call. `reason` is the kind of failure that statistics count."""
    return Failed(reason, detail=detail[:DETAIL_CHARS], trace=trace, infra=infra)


def from_exception(error: BaseException) -> Failed:
    trace = "".join(traceback.format_exception(error))
    # Connections, time-outs and the exceptions of most HTTP clients are OSErrors.
    return failed(type(error).__name__, str(error), trace, infra=isinstance(error, OSError))


def from_judge(verdict: Failed) -> Failed:
    """Name the judge in a failure. It is an infrastructure failure unless the judge rejects this very response."""
    about_response = verdict.reason in (Reason.UNPARSEABLE, Reason.REJECTED)
    return failed(f"judge {verdict.reason}", verdict.detail, infra=not about_response)


def as_verdict(found: Any) -> Verdict:
    """Convert the result of a function for one response to a verdict: a number, a dict with `score`, a `Verdict`, or
    None.

    None means that the function does not score this response, as in TRL. That is not a failure.
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
        return failed("result", "the function returned an awaitable: declare it with `async def`")
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
        parts["format"] = scored.format  # it gates the judge, and is also reported
    return Scored(scored.value, parts=parts, format=scored.format)


def _numbers(parts: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts that can be reported. A function's dict may hold anything."""
    found: dict[str, float] = {}
    for name, value in parts.items():
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(value, str):
                found[name] = float(value)
    return found


# -- how a function is called -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function and its calling convention, read from its signature. It can be pickled if the function can."""

    name: str
    function: Callable[..., Any]
    convention: _Convention
    is_async: bool
    names: tuple[str, ...]
    """The arguments that are passed by keyword."""
    takes_columns: bool = False
    """The function has TRL's `**kwargs`, which receive every column of the data."""
    conversational: bool = False
    """The function is annotated `completions: list[list[dict]]` and receives messages, not texts."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> RewardFunction:
        """Read the signature of `function`. Raises a `ConfigError` that names the parameter that fits no convention."""
        name = name or getattr(function, "__qualname__", None) or type(function).__qualname__
        if function is compute_score and monitors():
            function = compute_score_async  # the same scores, and waiting for the judge holds no thread
        if function in (compute_score, compute_score_async):
            is_async = function is compute_score_async
            return cls(name=name, function=function, convention="single", is_async=is_async, names=_VERL)
        if not callable(function):
            raise ConfigError(KEY, name, f"it is of type {type(function).__name__}; give a function {_CONVENTIONS}")
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(KEY, name, f"its signature cannot be read ({error}): wrap it in a function") from error
        any_keyword = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        plain = {key: one for key, one in parameters.items() if one.kind in by_name}
        convention, vocabulary = _convention_of(plain, name)
        is_trl = convention == "trl"
        for key, one in plain.items():
            if not is_trl and key not in vocabulary and one.default is one.empty:
                remedy = f"it needs {key!r}, which no convention has. A reward function takes {_CONVENTIONS}"
                raise ConfigError(KEY, name, remedy)
        names = [key for key in plain if is_trl or key in vocabulary]
        if any_keyword and not is_trl:
            family = _VERL if "solution_str" in plain else () if "response" in plain else vocabulary
            names += [key for key in family if key not in plain]
        return cls(
            name=name,
            function=function,
            convention=convention,
            is_async=_is_async(function),
            names=tuple(names),
            takes_columns=any_keyword and is_trl,
            conversational=is_trl and "dict" in str(plain["completions"].annotation),
        )

    @property
    def is_batch(self) -> bool:
        return self.convention != "single"

    @property
    def wants_tokens(self) -> bool:
        return self.convention == "trl" and (self.takes_columns or "completion_ids" in self.names)

    def call_for(self, prompt: Prompt, text: str, response: Response) -> Call:
        tokens = response.tokens.tolist() if self.wants_tokens else ()
        return Call(text=text, row=prompt.row, finish=response.finish, tokens=tokens)

    def score(self, calls: Sequence[Call]) -> list[Verdict]:
        """Return a verdict for each call. Only a batch function may be given more than one call."""
        try:
            return self._read(self._invoke(calls), len(calls))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's function may raise anything
            return [from_exception(error)] * len(calls)

    async def score_async(self, calls: Sequence[Call]) -> list[Verdict]:
        """Do the same as `score` for an async function."""
        try:
            return self._read(await self._invoke(calls), len(calls))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a user's function may raise anything
            return [from_exception(error)] * len(calls)

    def _read(self, found: Any, count: int) -> list[Verdict]:
        if not self.is_batch:
            return [as_verdict(found)]
        if found is None or isinstance(found, str | Mapping) or not hasattr(found, "__len__"):
            return [
                failed("result", f"a batch function must return a list, and returned {format_value(found)}")
            ] * count
        if len(found) != count:
            return [failed("result", f"the function returned {len(found)} results for {count} responses")] * count
        return [as_verdict(one) for one in found]

    def _invoke(self, calls: Sequence[Call]) -> Any:
        if self.convention == "single":
            (call,) = calls
            return self.function(**{name: _ARGUMENTS[name](call) for name in self.names})
        if self.convention == "verl_batch":
            columns = {name: [_ARGUMENTS[name.removesuffix("s")](call) for call in calls] for name in self.names}
            return self.function(**columns)
        return self.function(**self._trl_arguments(calls))

    def _trl_arguments(self, calls: Sequence[Call]) -> dict[str, Any]:
        # A name that no column has keeps its default. Without a default the call fails and names the argument.
        columns = _columns(calls)
        names = {*_TRL, *columns, *self.names} if self.takes_columns else self.names
        columns["prompts"] = [self._message("user", call.question) for call in calls]
        columns["completions"] = [self._message("assistant", call.text) for call in calls]
        columns["completion_ids"] = [list(call.tokens) for call in calls]
        return {name: columns[name] for name in names if name in columns}

    def _message(self, role: str, text: str) -> str | list[dict[str, str]]:
        return [{"role": role, "content": text}] if self.conversational else text


_ARGUMENTS: dict[str, Callable[[Call], Any]] = {
    **dict.fromkeys(_TEXTS, attrgetter("text")),
    "row": lambda call: dict(call.row),
    "dataset_name": attrgetter("data_source"),
    **{name: attrgetter(name) for name in ("finish", "data_source", "ground_truth", "extra_info")},
}
"""The value of each argument of a function of one response."""


def _columns(calls: Sequence[Call]) -> dict[str, list[Any]]:
    """Return the data by column, as TRL's datasets have it: with the fields of `extra_info` and the ground truth."""
    rows = [{**call.extra_info, "ground_truth": call.ground_truth, **call.row} for call in calls]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names if name not in _TRL}


def _convention_of(plain: Mapping[str, inspect.Parameter], name: str) -> tuple[_Convention, tuple[str, ...]]:
    if "solution_strs" in plain:
        return "verl_batch", _VERL_BATCH
    if "completions" in plain:
        return "trl", _TRL
    if any(text in plain for text in _TEXTS):
        return "single", _SINGLE
    remedy = f"its parameters ({', '.join(plain) or 'none by name'}) fit no convention: take {_CONVENTIONS}"
    raise ConfigError(KEY, name, remedy)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


# -- how a function is found ------------------------------------------------------------------------------------------


def load_reward(
    spec: str | Callable[..., Any] | None, task: Task | None = None, *, construct: bool = True
) -> RewardFunction:
    """Return the function that `spec` names (`module:name`) or is. None means the task's own `score`.

    A class is called without arguments. `construct=False` only checks that this is possible: its constructor may load a
    model.
    """
    if spec is None:
        if task is None:
            raise ConfigError(KEY, None, "there is no task to take it from: give module:name")
        return RewardFunction.of(task.score, f"the task {task.name}'s score")
    if not isinstance(spec, str):
        return RewardFunction.of(spec)
    function = find_object(KEY, spec)
    if inspect.isclass(function):
        try:
            inspect.signature(function).bind()
            function = function() if construct else function.__new__(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(KEY, spec, f"it is a class, and freewheel calls it without arguments: {error}") from error
    return RewardFunction.of(function, spec)
