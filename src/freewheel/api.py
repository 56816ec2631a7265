"""The Python API behind `freewheel.train` and `freewheel.evaluate`, and the start path that `freewheel train` shares.

    model, data, reward, config ─▶ settings ─ compose ─▶ RunRequest ─ make_plan ─▶ FullyAsyncMain ─▶ RunResult
      │ rows, model objects: private files in the run directory                                 │
      └ functions, classes: in memory only, named `in_memory:NAME` in config.yaml               └─▶ Run

A run uses the calling thread if that can handle Ctrl-C. Otherwise it uses a separate thread: in a notebook, whose main
thread has an event loop, and in the background. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freewheel.errors import ConfigError, DataError, FreewheelError, format_value
from freewheel.observe.run_folder import CONFIG, FINAL, TEXT_LOG
from freewheel.utils.files import private_folder, write_atomically
from freewheel.utils.registry import IN_MEMORY, kept_in_memory, objects_in_memory

if TYPE_CHECKING:
    from freewheel.rollout.evaluation import EvalResult
    from freewheel.runtime.account import RunResult
    from freewheel.runtime.config import TrainConfig
    from freewheel.runtime.main import FullyAsyncMain
    from freewheel.runtime.start import RunRequest

Status = Literal["running", "finished", "stopped", "failed"]
Show = Literal["auto", "plain", "off"]
"""`auto`: a live panel on a terminal, else lines. `plain`: lines. `off`: nothing."""
Settings = Mapping[str, Any]
"""Configuration values by key: flat (`{"trainer.total_steps": 100}`), nested, or both."""

ROWS_TASK = "rows"
"""The task that reads rows as they are given."""
OWN_FILES = {"data.train": "data/train.jsonl", "data.eval": "data/eval.jsonl", "model.path": "model",
             "model.tokenizer": "tokenizer"}  # fmt: skip
"""The folder of a run directory for rows and models that were given as Python objects."""
SHOWN_ERROR_CHARS = 500


class RunFailed(FreewheelError):
    """A run ended with an error. `run` is the run: its log has more, and `run.resume()` continues it."""

    def __init__(self, run: Run, error: BaseException | None) -> None:
        why = f"{type(error).__name__}: {error}"[:SHOWN_ERROR_CHARS] if error is not None else "see the log"
        super().__init__(
            f"the run failed after step {run.steps}: {why}\nLog: {run.run_dir / TEXT_LOG}. "
            f"Continue it with run.resume() or freewheel.Run({str(run.run_dir)!r}).resume()"
        )
        self.run = run
        self.error = error


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of a model on held-out rows."""

    mean: float
    """Mean score over all responses that were scored; NaN where none was."""
    stderr: float
    """Standard error of the mean over prompts; NaN with fewer than two prompts."""
    scores: list[list[float]]
    """One list per prompt with one score per response; NaN where generation or scoring failed."""
    responses: list[list[str]]
    """The text of each response, in the same shape."""
    parts: dict[str, float] = field(default_factory=dict)
    """Means of the named numbers that a reward function returned next to its score."""
    failed: int = 0
    """Responses without a score."""


def train(
    model: Any = None,
    data: Any = None,
    reward: Callable[..., Any] | str | None = None,
    *,
    eval_data: Any = None,
    tokenizer: Any = None,
    config: Settings | TrainConfig | str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    background: bool = False,
    show: Show | None = None,
) -> Run:
    """Train a policy with reinforcement learning and return the run. Without arguments: the embedded model on its task.

    `model`: `"embedded"`, a HF folder, a hub id, or a transformers model object (then give `tokenizer` as well).
    `data`, `eval_data`: rows (any iterable of mappings with a `prompt`, text or chat messages), a file, a folder or a
    hub id. `reward`: any function `(response, row)`, sync or async, or one in verl's or TRL's convention; without one
    the rows' own rule scores. `config`: settings by key, a YAML file, or a `TrainConfig`. A setting that names an
    object as `module:name` also takes the object itself.

    Blocks until the run ends and shows it meanwhile. Ctrl-C finishes the step, saves, and returns a run with the status
    `stopped`. `background=True` returns at once. Raises `ConfigError` or `DataError` before anything starts, and
    `RunFailed` when the run fails.
    """
    from freewheel.runtime.config_files import compose, merge, to_config
    from freewheel.runtime.start import RunRequest, find_local_modules, new_run

    find_local_modules()
    objects = dict[str, Any]()
    base, settings = _read_config(config, objects)
    files = _OwnFiles()
    settings |= _named_inputs(model, tokenizer, data, eval_data, reward, files, objects)
    if run_dir is not None:
        settings["run_dir"] = os.fspath(run_dir)
    values = merge(**base, settings=settings)
    if data is not None:
        values["data"]["task"] = _task_of_rows(values["data"].get("task"))
    composed = new_run(to_config(values))
    folder = Path(composed.run_dir or "").absolute()
    composed = compose(base=composed, settings=files.settings(folder))
    run = Run(folder, _exists=False)
    run._objects = objects
    run._start(RunRequest(config=composed), files, background=background, show=show)
    return run


def evaluate(
    model: Any = None,
    data: Any = None,
    reward: Callable[..., Any] | str | None = None,
    *,
    task: str | None = None,
    tokenizer: Any = None,
    prompts: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    config: Settings | None = None,
) -> Evaluation:
    """Generate responses to rows with a model, score them, and return the mean. Needs no Ray and no run.

    `model`: what `train` takes, a `Run`, or a run's folder; without it, the embedded model. `data`: what `train` takes;
    without it, the run's held-out rows or those of `task`. `prompts`: how many rows (all rows given in Python, else
    128). `samples`: responses to each (1). `temperature`: of sampling (0, the likeliest token each time). Only the
    reward function scores: no judge and no length penalty.
    """
    from freewheel.runtime.config import EMBEDDED
    from freewheel.runtime.config_files import compose
    from freewheel.runtime.evaluation import eval_config, find_target
    from freewheel.runtime.start import find_local_modules

    find_local_modules()
    objects = dict(model._objects) if isinstance(model, Run) else {}
    name, files = model.run_dir if isinstance(model, Run) else model, _OwnFiles()
    settings = _plain_settings(config or {}, objects) | _named_inputs(
        name, tokenizer, None, data, reward, files, objects
    )
    with tempfile.TemporaryDirectory(prefix="freewheel-") as scratch, kept_in_memory(objects):
        files.write(Path(scratch))
        settings |= files.settings(Path(scratch))
        target = find_target(str(settings.pop("model.path", EMBEDDED)))
        if data is not None and task is None:
            task = _task_of_rows(target.run.data.task if target.run else None)
        if "data.eval" in files.given:
            settings.setdefault("data.too_long", "error")  # else rows and responses would not correspond
            prompts = prompts or files.row_counts["data.eval"]
        given = settings.pop("data.eval", None)
        found = eval_config(target, task=task, data=given, prompts=prompts, samples=samples, temperature=temperature)
        return _measure(compose(base=found, settings=settings))


class Run:
    """A training run in a folder: one that this process started, or, as `Run(folder)`, any run on disk."""

    def __init__(self, folder: str | os.PathLike[str], *, _exists: bool = True) -> None:
        from freewheel.observe.recorder import StepCounter

        self.run_dir = Path(folder).expanduser().absolute()
        if _exists and not self.run_dir.is_dir():
            raise ConfigError("run_dir", str(folder), "there is no such folder: give the one that the run printed")
        self._counter = StepCounter(self.run_dir)
        self._live: _LiveRun | None = None
        self._objects: dict[str, Any] = {}
        """What settings name as `in_memory:name`."""

    def __repr__(self) -> str:
        return f"<Run {self.run_dir} {self.status} at step {self.steps}>"

    @property
    def status(self) -> Status:
        """`running`, `finished`, `stopped` (it can be resumed), or `failed` (known only in the process that ran it)."""
        if self._live is not None and not self._live.end.done():
            return "running"
        if self._live is not None and self._live.result is not None:
            return self._live.result.outcome
        from freewheel.inspect.run import live_holder

        if live_holder(self.run_dir):
            return "running"
        return "finished" if (self.run_dir / FINAL).is_dir() else "stopped"

    @property
    def error(self) -> BaseException | None:
        """Why the run failed; None where it did not, or ran in another process."""
        result = self._live.result if self._live is not None else None
        return result.error if result is not None else None

    @property
    def steps(self) -> int:
        """The last step with metrics."""
        return self._counter.look()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step with everything that was measured, evaluations included. docs/metrics.md has the names."""
        from freewheel.observe.recorder import read_metrics

        found: dict[int, dict[str, Any]] = {}
        for kind in ("step", "eval"):
            for row in read_metrics(self.run_dir, kind):
                del row["kind"]
                found[row["step"]] = row | found.get(row["step"], {})
        return [found[step] for step in sorted(found)]

    def to_pandas(self) -> Any:
        """`metrics` as a DataFrame by step. Needs pandas."""
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]

        return pandas.DataFrame(self.metrics).set_index("step")

    @property
    def model_path(self) -> Path:
        """A HF folder with the newest weights: the final ones, or those of the last checkpoint."""
        from freewheel.runtime.evaluation import find_target

        return Path(find_target(str(self.run_dir)).path)

    @property
    def dashboard_url(self) -> str | None:
        """The run's page in a browser while it runs in this process."""
        return (self._live.shown.page or None) if self._live is not None else None

    def evaluate(self, data: Any = None, reward: Callable[..., Any] | str | None = None, **options: Any) -> Evaluation:
        """`freewheel.evaluate` with the newest weights. Data and reward are the run's own unless given."""
        return evaluate(self, data, reward, **options)

    def resume(
        self,
        config: Settings | None = None,
        *,
        reward: Callable[..., Any] | str | None = None,
        background: bool = False,
        show: Show | None = None,
    ) -> Run:
        """Continue in the same folder, for example with `{"trainer.total_steps": 200}`, without skipping or repeating a
        prompt. In a process other than the one that started the run, pass a reward again if it is not in a file."""
        from freewheel.runtime.start import find_local_modules, resume

        find_local_modules()
        objects = dict(self._objects)
        settings = _plain_settings(config or {}, objects)
        if reward is not None:
            settings["reward.function"] = _name_object("reward", reward, objects)
        request = resume(str(self.run_dir), settings=settings)
        self._objects = objects
        self._start(request, _OwnFiles(), background=background, show=show)
        return self

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for a run in the background and return it. Raises what `train` would. A run that has not ended
        after `timeout_s` is returned as it is. Raises `FreewheelError` for a run of another process."""
        from freewheel.inspect.run import live_holder

        if self._live is None and (holder := live_holder(self.run_dir)):
            raise FreewheelError(
                f"{self.run_dir} is in use by {holder}: only the Run that started it can wait for it or stop it. Send "
                "that process SIGTERM, and it finishes the step, saves and ends; `status` tells when"
            )
        if self._live is not None and futures.wait([self._live.end], timeout_s).done:
            self._live.end.result()  # raises the error that prevented the start
            if self.status == "failed":
                raise RunFailed(self, self.error)
        return self

    def stop(self, timeout_s: float | None = None) -> Run:
        """Finish the step, save, and end. Waits for that, and raises what `wait` does."""
        if self._live is not None:
            self._live.request_stop()
        return self.wait(timeout_s)

    def _start(self, request: RunRequest, files: _OwnFiles, *, background: bool, show: Show | None) -> None:
        """Write the files, check everything, and run. A start that is refused leaves nothing behind."""
        if show not in (None, "auto", "plain", "off"):
            raise ConfigError("show", show, "choose auto, plain or off")
        with _ONE_AT_A_TIME:
            if (other := _LiveRun.current) is not None and not other.end.done():
                raise FreewheelError(f"this process already trains {other.run_dir}: wait for it or stop it first")
            try:
                files.write(self.run_dir)
                with kept_in_memory(self._objects):
                    shown = show or ("off" if background else "auto")
                    live = _LiveRun(request, self._objects, files, shown)
            except BaseException:
                files.discard()
                raise
            self._live = _LiveRun.current = live
        if background:
            live.start_thread()
            return
        live.run_here()
        self.wait()


def drive(request: RunRequest, shown: Any) -> RunResult:
    """Run to the end, shown in a view and served as a page."""
    return _run_shown(_make_main(request, shown), shown)


def _make_main(request: RunRequest, shown: Any) -> FullyAsyncMain:
    """Plan the run on this machine. Raises the first problem that would prevent it."""
    from freewheel.dashboard.web.child import page_for_run
    from freewheel.runtime.main import FullyAsyncMain
    from freewheel.runtime.start import make_plan

    plan = make_plan(request.config)
    plan.check()
    served = partial(page_for_run, request.config, shown)
    return FullyAsyncMain(
        config=request.config, plan=plan, resume=request.resume, changed=request.changed, view=shown, alongside=served
    )


def _run_shown(main: FullyAsyncMain, shown: Any) -> RunResult:
    from freewheel.dashboard.terminal import says_warnings

    with shown, says_warnings(shown):
        return main.run()


# -- a run in this process --------------------------------------------------------------------------------------------

_ONE_AT_A_TIME = threading.Lock()
"""A run's Ray, log files and trace belong to the whole process."""


class _LiveRun:
    """One run from its start to its end, in the calling thread or in a separate one."""

    current: _LiveRun | None = None

    def __init__(self, request: RunRequest, objects: Mapping[str, Any], files: _OwnFiles, show: Show) -> None:
        from freewheel.dashboard.terminal import PlainView, view

        self.run_dir = request.config.run_dir
        self.end: Future[RunResult] = Future()
        self._objects, self._files = objects, files
        self.shown: Any = PlainView(io.StringIO()) if show == "off" else view(plain=show == "plain")
        self._main = _make_main(request, self.shown)
        self.request_stop = self._main.request_stop

    @property
    def result(self) -> RunResult | None:
        """How the run ended; None while it lasts, or if it was refused."""
        return self.end.result() if self.end.done() and self.end.exception() is None else None

    def run_here(self) -> None:
        """Block until the end. Ctrl-C ends the run after its step, in whichever thread the run is."""
        if threading.current_thread() is threading.main_thread() and not _has_loop():
            with _signal_handlers_kept():  # the run handles Ctrl-C and SIGTERM itself
                self._run()
            return
        self.start_thread()
        while not self.end.done():
            try:
                futures.wait([self.end])
            except KeyboardInterrupt:
                self.request_stop()

    def start_thread(self) -> None:
        """Run in a thread. The end of the program ends the run as Ctrl-C does: it saves first."""
        threading.Thread(target=self._run, name="freewheel-run").start()
        threading.Thread(target=self._stop_with_program, name="freewheel-end", daemon=True).start()

    def _stop_with_program(self) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self.end.done():
            main.join(1.0)
        self.request_stop()

    def _run(self) -> None:
        try:
            with kept_in_memory(self._objects):
                self.end.set_result(_run_shown(self._main, self.shown))
        except BaseException as error:  # noqa: BLE001  # raised to the caller who waits for the run
            self._files.discard()
            self.end.set_exception(error)


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the program's handlers of Ctrl-C and SIGTERM afterwards, because a run and Ray replace them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


# -- what was given ----------------------------------------------------------------------------------------------------


def _read_config(config: Any, objects: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `compose` that name the base, and the settings that override it."""
    from freewheel.runtime.config import TrainConfig
    from freewheel.runtime.config_files import configs

    if config is None or isinstance(config, Mapping):
        return {}, _plain_settings(config or {}, objects)
    if isinstance(config, TrainConfig):
        return {"base": config}, {}
    path = Path(config).expanduser()
    if path.is_file():
        return {"config_path": path.parent, "config_name": path.name}, {}
    if str(config) in configs():
        return {"config_name": str(config)}, {}
    raise ConfigError("config", str(config), f"there is no such file: give one, settings, or {', '.join(configs())}")


def _task_of_rows(task: Any) -> Any:
    """Return the task that reads the rows which were given: the configured one, if it does not make its own."""
    from freewheel.runtime.config import OWN_ROWS

    return ROWS_TASK if task in (None, OWN_ROWS) else task


def _plain_settings(config: Settings, objects: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the settings with a name in place of each object."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        full = f"{path}.{key}".removeprefix(".")
        if isinstance(value, Mapping):
            found[key] = _plain_settings(value, objects, full)
        elif value is None or isinstance(value, bool | int | float | str | list | tuple):
            found[key] = value
        else:
            found[key] = os.fspath(value) if isinstance(value, os.PathLike) else _name_object(full, value, objects)
    return found


def _named_inputs(
    model: Any, tokenizer: Any, data: Any, eval_data: Any, reward: Any, files: _OwnFiles, objects: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings that name the inputs. Rows and models become files; a function stays in memory."""
    settings: dict[str, Any] = {}
    if model is not None and not isinstance(model, str | os.PathLike) and tokenizer is None:
        raise ConfigError("tokenizer", None, "a model object has no tokenizer with it: give tokenizer= as well")
    inputs = {"model.path": model, "model.tokenizer": tokenizer, "data.train": data, "data.eval": eval_data}
    for key, value in inputs.items():
        if isinstance(value, str | os.PathLike):
            settings[key] = os.fspath(value)
        elif value is not None:
            settings[key] = files.add(key, value)
    if reward is not None:
        settings["reward.function"] = _name_object("reward", reward, objects)
    return settings


def _name_object(key: str, value: Any, objects: dict[str, Any]) -> str:
    """`module:name` of an object. An object that other processes cannot import by name is kept in memory and sent by
    value."""
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    name, module = named.__qualname__, sys.modules.get(named.__module__)
    can_import = module is not None and _can_import(module.__name__)
    if can_import and reduce(lambda one, part: getattr(one, part, None), name.split("."), module) is value:
        return f"{named.__module__}:{name}"
    import ray.cloudpickle

    cloudpickle: Any = ray.cloudpickle
    if module is not None and not can_import and module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        remedy = (
            f"it cannot be sent to the processes of the run ({type(error).__name__}: {error}). Create clients, locks "
            "and open files inside the function"
        )
        raise ConfigError(key, value, remedy) from error
    base = kept = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "object"
    count = 1
    others = objects_in_memory()  # of a run in the background
    while objects.get(kept, value) is not value or others.get(kept, value) is not value:
        count += 1
        kept = f"{base}_{count}"
    objects[kept] = value
    return f"{IN_MEMORY}:{kept}"


def _can_import(module: str) -> bool:
    """Whether a fresh process finds the module where this one looks. It has another `__main__`."""
    top = module.partition(".")[0]
    return top != "__main__" and (top in sys.builtin_module_names or PathFinder.find_spec(top) is not None)


class _OwnFiles:
    """Rows and models that were given as Python objects, as private files of a run directory, so that a resumed run
    finds them."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self._folder: Path | None = None
        self._created: list[Path] = []
        """Folders that `write` created, outer ones first."""
        self.row_counts: dict[str, int] = {}

    def add(self, key: str, value: Any) -> str:
        """Take a value and return a placeholder for its path, until the folder is known."""
        if key.startswith("data.") and (isinstance(value, Mapping) or not isinstance(value, Iterable)):
            remedy = "give rows (mappings with a prompt), a file, a folder or a hub id. Of several splits give one"
            raise ConfigError(key, value, remedy)
        if key.startswith("model.") and not hasattr(value, "save_pretrained"):
            raise ConfigError(key, value, "give a name, or an object of transformers with save_pretrained")
        self.given[key] = value
        return OWN_FILES[key]

    def settings(self, folder: Path) -> dict[str, str]:
        return {key: str(folder / OWN_FILES[key]) for key in self.given}

    def write(self, folder: Path) -> None:
        if not self.given:
            return
        self._folder = folder
        self._created = [path for path in (*reversed(folder.parents), folder, folder / "data") if not path.exists()]
        private_folder(folder)
        for key, value in self.given.items():
            path = folder / OWN_FILES[key]
            if key.startswith("data."):
                rows = _as_lines(key, value)
                self.row_counts[key] = len(rows)
                private_folder(path.parent)
                write_atomically(path, b"".join(rows))
            else:
                value.save_pretrained(private_folder(path))

    def discard(self) -> None:
        """Remove what `write` created, unless a run has started there."""
        if self._folder is None or (self._folder / CONFIG).exists():
            return
        for key in self.given:
            path = self._folder / OWN_FILES[key]
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for path in reversed(self._created):
            with contextlib.suppress(OSError):  # something else is in it
                path.rmdir()


def _as_lines(key: str, rows: Iterable[Any]) -> list[bytes]:
    lines = []
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            remedy = "give a mapping with a prompt, such as {'prompt': 'What is 2 + 2?', 'answer': 4}"
            raise DataError(f"{key}, row {place} = {format_value(row)}: {remedy}")
        try:
            lines.append(json.dumps(dict(row), default=_plain_value, ensure_ascii=False).encode() + b"\n")
        except (TypeError, ValueError) as error:
            remedy = "rows are kept as JSON in the run directory, so that the run can be resumed"
            raise DataError(f"{key}, row {place} cannot be written as JSON ({error}): {remedy}") from error
    return lines


def _plain_value(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch to Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}: give text, numbers, lists and mappings")


# -- evaluation --------------------------------------------------------------------------------------------------------


def _measure(config: TrainConfig) -> Evaluation:
    """Evaluate in this process, which keeps its number of threads."""
    import torch

    from freewheel.runtime.building import decoder, load_tokenizer
    from freewheel.runtime.evaluation import run_evaluation

    threads, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    try:
        evaluate_it = partial(asyncio.run, run_evaluation(config, keep_responses=True))
        # A thread with an event loop, such as a notebook's, cannot run another one.
        found: EvalResult = ThreadPoolExecutor(1).submit(evaluate_it).result() if _has_loop() else evaluate_it()
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("OMP_NUM_THREADS", None)
        if variable is not None:
            os.environ["OMP_NUM_THREADS"] = variable
    decode = decoder(load_tokenizer(config))
    return Evaluation(
        mean=found.mean,
        stderr=found.reward.error,
        scores=found.scores.tolist(),
        responses=[["" if one is None else decode(one.tokens) for one in row] for row in found.responses],
        parts={name: part.mean for name, part in found.parts.items()},
        failed=found.failed,
    )
