"""Builds the components of a run from its configuration, without Ray.

    data.train, data.eval ─ read_rows ─▶ rows that the task can score ─▶ Prompts
    RolloutSide: tokenizer, task, prompts, engine, reward stage ─▶ Rollouter
    TrainSide:   model, backend, checkpoints                    ─▶ FullyAsyncTrainer
    open_queue:  journal.sqlite ─▶ restore                      ─▶ MessageQueue
    synchronizer: the replicas                                  ─▶ ParameterSynchronizer

Called by the actors, `freewheel eval`, the checks before a run, and tests that run a whole pipeline in one process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from freewheel.data.group import Ticket
from freewheel.data.prompts import PromptStream, Rendering, render_rows
from freewheel.data.sources import is_on_hub
from freewheel.data.tasks import TASKS, Task, get_task
from freewheel.errors import ConfigError, DataError
from freewheel.observe.run_folder import JOURNAL
from freewheel.observe.samples import attach_samples, detach_samples
from freewheel.observe.trace import attach_trace, detach_trace
from freewheel.queue.journal import (
    CheckpointMark,
    Journal,
    JournalBusy,
    JournalDamaged,
    JournalError,
    JournalFormat,
    JournalWriter,
    is_temporary,
    set_aside,
)
from freewheel.queue.message_queue import MessageQueue
from freewheel.queue.restore import Restored, restore
from freewheel.rollout.engine_factories import EngineSettings, LoadedEngine, find_engine, load_causal_lm, loading_errors
from freewheel.runtime.config import DEFAULT, OWN_ROWS, ROLLOUTER_CLASSES, TRAINER_CLASSES, ObserveConfig, TrainConfig
from freewheel.runtime.model_size import model_folder
from freewheel.utils.registry import Registry, find_object

if TYPE_CHECKING:
    from freewheel.data.group import Array, Prompt
    from freewheel.data.tasks import Task
    from freewheel.queue.client import QueueClient
    from freewheel.rollout.evaluation import EvalResult
    from freewheel.rollout.generation import Sampling
    from freewheel.rollout.reward_stage import RewardStage
    from freewheel.rollout.rollouter import Rollouter
    from freewheel.runtime.run_plan import RunPlan
    from freewheel.runtime.training_ranks import Ranks
    from freewheel.sync.synchronizer import ParameterSynchronizer, Replica
    from freewheel.trainer.backend import Backend, Evaluate, Publisher
    from freewheel.trainer.trainer import FullyAsyncTrainer


log = logging.getLogger("freewheel.queue")

T = TypeVar("T")

_MONITOR_ARGUMENTS = ("trainer_stats", "rollouter_stats")
_MB = 1_000_000
_BUSY_S = 60.0
"""Longest wait for another process to release the journal: a killed run's last process may be slow to end."""
_RETRY_S = 1.0
_WARN_AGAIN_S = 60.0
"""Time between two warnings that the journal cannot be written yet."""


def synchronizer(
    config: TrainConfig,
    replicas: Mapping[str, Replica],
    queue: QueueClient,
    *,
    version: int = 0,
    versions: Mapping[str, int] | None = None,
) -> ParameterSynchronizer:
    """`versions`: what each replica holds, for a restarted synchronizer."""
    from freewheel.sync.synchronizer import ParameterSynchronizer

    return ParameterSynchronizer(
        replicas=replicas,
        queue=queue,
        version=version,
        versions=versions,
        timeout_s=config.async_training.sync_timeout,
        max_retries=config.async_training.max_sync_retries,
        retry_delay_s=config.async_training.sync_retry_delay,
        verify_every=config.async_training.verify_every_syncs,
        drain=not config.in_flight_updates,
    )


def load_tokenizer(config: TrainConfig) -> Any:
    from transformers import AutoTokenizer

    key, path = "model.path", model_folder(config)
    if config.model.tokenizer is not None:
        key, path = "model.tokenizer", str(Path(config.model.tokenizer).expanduser())
    with loading_errors(key, path):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)


def use_threads(count: int) -> None:
    """Limit this process to its share of the cores."""
    import torch

    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def stop_token_ids(tokenizer: Any, generation_config: Any, task: Task) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's, the model's and the task's."""
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    for text in task.stop:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ConfigError("data.task", task.name, f"its stop {text!r} is {len(ids)} tokens here, not one")
        found.update(ids)
    return tuple(sorted(found))


def decoder(tokenizer: Any) -> Callable[[Array], str]:
    """Return a function from a response to its text, without special tokens. Calls the backend of a fast tokenizer
    directly: its Python wrapper takes longer than the decoding."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or tokenizer.clean_up_tokenization_spaces:
        return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
    return lambda tokens: str(fast.decode(tokens.tolist(), skip_special_tokens=True))


def pad_token_id(tokenizer: Any) -> int:
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    return 0


def load_engine(config: TrainConfig, plan: RunPlan, **given: Any) -> LoadedEngine:
    """Load the engine with its model. `given`: see `engine_settings`."""
    return find_engine(config.rollout.engine).load(engine_settings(config, plan, **given))


def engine_settings(
    config: TrainConfig, plan: RunPlan, *, model_path: str, longest_tokens: int, version: int = 0, replica: int = 0
) -> EngineSettings:
    """`longest_tokens`: of the longest prompt. `version`: of the weights at `model_path`."""
    return EngineSettings(
        options=config.rollout,
        model_path=model_path,
        trust_remote_code=config.model.trust_remote_code,
        dtype=plan.dtype,
        device=plan.device_rollout,
        transport=plan.transport,
        slots=plan.slots,
        longest_prompt=longest_tokens,
        max_prompt_tokens=plan.max_prompt_tokens,
        asked_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=plan.max_new_tokens,
        gpu_memory_share=plan.gpu_memory_share,
        engines_on_a_gpu=plan.engines_on_a_gpu,
        seed=config.seed,
        eval_temperature=config.eval.temperature,
        version=version,
        replica=replica,
    )


class RolloutSide:
    """What a rollouter's process holds: an engine, prompts and their reward function."""

    prompts: PromptStream

    def __init__(
        self, *, config: TrainConfig, plan: RunPlan, name: str, model_path: str, version: int = 0, trains: bool = True
    ) -> None:
        """`version`: of the weights at `model_path`. `trains`: False for an evaluation alone, without training rows."""
        from freewheel.rollout.reward_functions import load_reward

        use_threads(config.rollout.threads)
        self.config, self.plan, self.name = config, plan, name
        number = name.rpartition("-")[2]
        self.tokenizer = load_tokenizer(config)
        source = Prompts(config, self.tokenizer)
        self.task = source.task
        if trains:
            self.prompts = source.train()
        self.held_out = source.held_out()
        self.reward = load_reward(config.reward.function, source.task)
        loaded = load_engine(
            config,
            plan,
            model_path=model_path,
            longest_tokens=source.longest_tokens,
            version=version,
            replica=int(number) if number.isdecimal() else 0,
        )
        self.engine = loaded.engine
        self.stop_token_ids = stop_token_ids(self.tokenizer, loaded.generation_config, source.task)

    def rollouter(self, queue: QueueClient) -> Rollouter:
        config, rollout = self.config, self.config.rollout
        kind: type[Rollouter] = find_class("rollout.rollouter_class", rollout.rollouter_class, ROLLOUTER_CLASSES)
        return kind(
            name=self.name,
            engine=self.engine,
            prompt=self.prompts.prompt,
            rewards=self._reward_stage(),
            queue=queue,
            sampling=self._sampling(
                n=rollout.n, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
            ),
            decode=decoder(self.tokenizer),
            capacity=max(1, self.plan.slots // rollout.n),
            generation_timeout_s=config.async_training.generation_timeout,
            interval_s=config.async_training.batch_generation_interval,
            drop_zero_variance=config.algorithm.zero_variance == "drop",
        )

    def _reward_stage(self) -> RewardStage:
        from freewheel.rollout.reward_stage import RewardStage

        settings = msgspec.structs.asdict(self.config.reward)
        del settings["function"]  # loaded already
        return RewardStage(score=self.reward, **settings)

    async def evaluate(self, share: int = 0, shares: int = 1, *, keep_responses: bool = False) -> EvalResult | None:
        """Evaluate every `shares`-th held-out prompt with the engine's current weights and the reward function alone,
        without judge and retries. None: this share is empty."""
        from freewheel.rollout.evaluation import evaluate, held_out_score
        from freewheel.rollout.reward_workers import FunctionRunner

        places = range(share, len(self.held_out), shares)
        if not places:
            return None
        reward = self.config.reward
        async with FunctionRunner(
            self.reward, workers=reward.workers, executor=reward.executor, timeout_s=reward.timeout_s
        ) as runner:
            return await evaluate(
                self.engine,
                [self.held_out[place] for place in places],
                held_out_score(runner, decoder(self.tokenizer)),
                self._sampling(n=self.config.eval.samples, temperature=self.config.eval.temperature),
                timeout_s=self.config.async_training.generation_timeout,
                ordinals=places,
                keep_responses=keep_responses,
            )

    def _sampling(self, *, n: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        from freewheel.rollout.generation import Sampling

        return Sampling(
            n=n,
            max_new_tokens=self.plan.max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=self.stop_token_ids,
            seed=self.config.seed,
        )


def evaluation_metrics(results: Sequence[EvalResult | None]) -> dict[str, float] | None:
    """Merge the replicas' results into metrics, with the parts of the reward by name. None: there were no prompts."""
    from freewheel.rollout.evaluation import EvalResult

    found = [result for result in results if result is not None]
    if not found:
        return None
    whole = EvalResult.joined(found)
    parts: dict[str, float] = {}
    for name, part in whole.parts.items():  # the metrics below win over a part of the same name
        parts |= {f"eval/{name}": part.mean, f"eval/{name}_se": part.error}
    return {
        **parts,
        "eval/reward": whole.reward.mean,
        "eval/reward_se": whole.reward.error,
        "eval/prompts": float(len(whole.scores)),
        "eval/failed": float(whole.failed),
        "eval/truncation_ratio": whole.truncated_share,
        "eval/response_length_mean": whole.mean_tokens,
        "eval/version_min": float(whole.versions[0]),
        "eval/version_max": float(whole.versions[-1]),
    }


def backend_settings(config: TrainConfig, plan: RunPlan) -> dict[str, Any]:
    """Return the backend settings of all training processes, without their device."""
    return {
        "algorithm": config.algorithm,
        "optimizer": msgspec.structs.replace(config.optimizer, lr=config.lr),
        "dtype": plan.dtype,  # the same as the engines: checksums depend on it
        "lora": config.model.lora,
        "activation_checkpointing": config.model.gradient_checkpointing,
        "micro_batch_tokens": config.trainer.micro_batch_tokens,
        "compile": plan.compile,
        "temperature": config.rollout.temperature,
        "seed": config.seed,
    }


class TrainSide:
    """What the trainer's process holds."""

    def __init__(
        self, *, config: TrainConfig, plan: RunPlan, run_dir: str, resume: str | None, ranks: Ranks | None = None
    ) -> None:
        """`ranks`: the other training processes, if there are any."""
        from freewheel.trainer.checkpoint import CheckpointStore, Resumed, RunSaver
        from freewheel.trainer.torch_backend import TorchBackend

        use_threads(config.trainer.threads)
        self.config, self.plan = config, plan
        self.tokenizer = load_tokenizer(config)
        model = load_causal_lm(  # in the type of the files, for the export
            model_folder(config), "auto", trust_remote_code=config.model.trust_remote_code
        )
        settings = backend_settings(config, plan)
        self.backend: Backend
        if ranks is None:
            self.backend = TorchBackend(model, device=plan.device_trainer, **settings)
        else:
            self.backend = ranks.lead(model, device=plan.device_trainer, settings=settings)
        self.store = store = CheckpointStore(Path(run_dir), keep_last=config.trainer.keep_last)
        self.saver = RunSaver(store=store, model=model, tokenizer=self.tokenizer, config=config.to_dict())
        self._trainer: FullyAsyncTrainer | None = None
        self.resumed: Resumed | None = None
        if resume is not None:
            loaded = store.load(Path(resume))
            self.resumed = Resumed.of(Path(resume), loaded.state)
            self.backend.load_files(loaded.tensor_files(), loaded.state["backend"])

    def trainer(self, queue: QueueClient, publisher: Publisher, evaluate: Evaluate) -> FullyAsyncTrainer:
        from freewheel.sync.broadcast import packer_for
        from freewheel.trainer.trainer import Schedule

        config = self.config
        kind: type[FullyAsyncTrainer] = find_class(
            "trainer.trainer_class", config.trainer.trainer_class, TRAINER_CLASSES
        )
        trainer = self._trainer = kind(
            backend=self.backend,
            queue=queue,
            publisher=publisher,
            saver=self.saver,
            evaluate=evaluate,
            bounds=config.bounds,
            schedule=Schedule(
                total_steps=config.trainer.total_steps,
                save_every=config.trainer.save_every_steps,
                eval_every=config.eval.every_steps,
                eval_at_start=config.eval.at_start,
                batch_timeout_s=config.async_training.batch_timeout,
                max_errors=config.trainer.max_errors,
            ),
            step=self.resumed.step if self.resumed else 0,
            version=self.resumed.version if self.resumed else 0,
            keep_best=config.trainer.keep_best,
            pad_token_id=pad_token_id(self.tokenizer),
            packer=packer_for(self.plan.transport),
        )
        return trainer

    def export(self, folder: str) -> None:
        """Write the current weights to a folder of the run, in the type that the model's files had."""
        from freewheel.sync.weights import pack

        step = self._trainer.global_steps if self._trainer is not None else 0
        weights = pack(self.backend.weights(stored=True))
        self.store.export(Path(folder), step, lambda scratch: self.saver.write_hf(scratch, weights))


# -- objects that settings name ---------------------------------------------------------------------------------------


def find_monitor(config: TrainConfig) -> Any:
    """Return the function that `observe.custom_monitor` names, if any."""
    key, spec = "observe.custom_monitor", config.observe.custom_monitor
    if spec is None:
        return None
    monitor = find_object(key, spec)
    if not callable(monitor):
        raise ConfigError(key, spec, "it cannot be called: name a function")
    _check_arguments(key, spec, monitor, _MONITOR_ARGUMENTS, {})
    return monitor


def find_class(key: str, spec: str | None, classes: Registry[type[T]]) -> type[T]:
    """Return the class that a setting names. It must be a subclass of the default, with the same arguments."""
    base = classes.find(key, DEFAULT)
    if spec is None:
        return base
    found = classes.find(key, spec)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(key, spec, f"it must be a subclass of {base.__name__}")
    needed = [name for name, one in inspect.signature(base).parameters.items() if one.default is one.empty]
    _check_arguments(key, spec, found, (), dict.fromkeys(needed))
    return found


def _check_arguments(
    key: str, spec: str | None, found: Any, by_place: Sequence[str], by_name: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # a builtin may have no signature
    try:
        signature.bind(*by_place, **by_name)
    except TypeError as error:
        wanted = ", ".join((*by_place, *by_name))
        raise ConfigError(key, spec, f"it is called with ({wanted}), which it does not accept: {error}") from error


# -- prompts ----------------------------------------------------------------------------------------------------------

RowsKey = Literal["train", "eval"]
"""The key of `data` that names the rows."""


def is_here(task: str, path: str | None) -> bool:
    """Whether rows can be read without a download. `path`: `data.train` or `data.eval`."""
    return task == OWN_ROWS or (path is not None and not is_on_hub(path))


def is_measured(config: TrainConfig) -> bool:
    """Whether there are held-out rows: none if `data.train` is given and `data.eval` is not."""
    return config.eval.prompts > 0 and (config.data.eval is not None or config.data.train is None)


def read_rows(config: TrainConfig, task: Task, use: RowsKey) -> Sequence[Any]:
    """Read the rows of `data.train` or `data.eval`. Raises a `ConfigError` for rows that cannot be read or scored."""
    data, key = config.data, f"data.{use}"
    path, split = (data.train, data.train_split) if use == "train" else (data.eval, data.eval_split)
    try:
        rows = task.load(split, path, limit=data.limit if use == "train" else None)
    except DataError as error:
        raise ConfigError(key, path, str(error)) from error
    except OSError as error:
        raise ConfigError(key, path, f"it cannot be read ({error}): give a file that can") from error
    except ConfigError as error:
        raise error.renamed(f"{key}_split") if error.key == "split" else error from None
    if config.reward.function is None and data.task in TASKS:  # scoring with a user's task may take long
        for place, row in enumerate(rows):
            if why := _why_unscorable(task, row):
                remedy = "correct it (docs/tasks.md has the fields), or give your own reward.function"
                raise ConfigError(key, path, f"row {place} cannot be scored: {why}: {remedy}")
    return rows


def _why_unscorable(task: Task, row: Any) -> str:
    """Return why the task refuses the row, whatever the response is; empty if it does not."""
    try:
        task.score("", row)
    except (ConfigError, DataError) as error:
        if isinstance(error, ConfigError) and error.key == "data_source":
            return f"there is no rule for its data_source {row['data_source']!r}"
        return str(error)
    except Exception:  # noqa: BLE001  # a rule may fail on an empty response
        return ""
    return ""


class Prompts:
    """The rendered prompts of a run, for training and evaluation."""

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self.task: Task = get_task(config.data.task)
        self.longest_tokens = 1
        """Tokens of the longest prompt rendered so far. An engine's slots must hold it."""
        self._config = config
        self._tokenizer = tokenizer

    def train(self) -> PromptStream:
        data = self._config.data
        prompts = self._render(read_rows(self._config, self.task, "train"), "train")
        return PromptStream(prompts, seed=self._config.seed, shuffle=data.shuffle, epochs=data.epochs)

    def held_out(self) -> list[Prompt]:
        """Return `eval.prompts` of the held-out prompts, spread evenly over all of them: rows may be sorted."""
        if not is_measured(self._config):
            return []
        rows = read_rows(self._config, self.task, "eval")
        count = min(self._config.eval.prompts, len(rows))
        return self._render([rows[place * len(rows) // count] for place in range(count)], "eval")

    def _render(self, rows: Sequence[Any], use: RowsKey) -> list[Prompt]:
        data = self._config.data
        rendering = Rendering(system_prompt=data.system_prompt, chat_template=data.chat_template)
        try:
            prompts = render_rows(
                rows,
                lambda row: self.task.render(row, self._tokenizer, rendering),
                max_prompt_tokens=data.max_prompt_tokens,
                too_long=data.too_long,
            )
        except DataError as error:
            raise ConfigError(f"data.{use}", getattr(data, use), str(error)) from error
        self.longest_tokens = max(self.longest_tokens, *(len(prompt.tokens) for prompt in prompts))
        return prompts


# -- the queue --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedQueue:
    """A queue with its journal."""

    queue: MessageQueue
    journal: JournalWriter | None
    notes: list[str] = field(default_factory=list)
    """What was found in the journal, for the log."""

    async def close(self) -> None:
        await self.queue.close()
        if self.journal is not None:
            await self.journal.close()


async def open_queue(
    config: TrainConfig,
    run_dir: Path,
    *,
    total_prompts: int | None,
    checkpoint: CheckpointMark | None,
    in_flight: Mapping[str, Sequence[Ticket]] | None = None,
) -> OpenedQueue:
    """Open the queue of a run, whatever state its journal is in.

    `checkpoint`: where a run begins or continues. None: restart a queue that died, while trainer and rollouters live;
    `in_flight` are then the rollouters' tickets. Waits while the journal's disk is full, or while another process
    writes the journal. Raises a `JournalError`.
    """
    if not config.journal.enabled:
        assert checkpoint is not None, "without a journal a queue cannot be restarted"
        start = msgspec.structs.asdict(checkpoint)
        return OpenedQueue(MessageQueue(bounds=config.bounds, total_prompts=total_prompts, **start), None)
    work = partial(restore, total=total_prompts, checkpoint=checkpoint, in_flight=in_flight)
    notes: list[str] = []
    path = run_dir / JOURNAL
    try:
        writer, restored = await _restore_when_possible(path, work)
    except JournalFormat:  # it is intact: the version of freewheel that wrote it can continue it
        raise
    except JournalDamaged as error:
        if checkpoint is None:
            raise
        aside = await asyncio.to_thread(set_aside, path)
        notes = [
            f"The journal cannot be read and is kept as {aside.name} ({error}): queued groups are generated again, and "
            f"training continues from the checkpoint of step {checkpoint.step}"
        ]
        writer, restored = await _restore_when_possible(path, work)
    queue = MessageQueue(
        bounds=config.bounds,
        total_prompts=total_prompts,
        journal=writer,
        restored=restored,
        keep_groups=config.journal.keep_groups,
    )
    return OpenedQueue(queue, writer, [*notes, *restored.notes])


def check_journal(run_dir: Path) -> None:
    """Raise unless the journal has every step of the run. A run without a usable checkpoint continues from that."""
    try:
        with closing(Journal(run_dir / JOURNAL, readonly=True)) as journal:
            has_every_step = journal.base().step == 0
    except (JournalError, OSError):
        has_every_step = False
    if not has_every_step:
        raise ConfigError("resume", str(run_dir), "there is no checkpoint in it that can be loaded: start a new run")


async def _restore_when_possible(path: Path, work: Callable[[Journal], Restored]) -> tuple[JournalWriter, Restored]:
    """Retry until the journal can be written."""
    clock = asyncio.get_running_loop().time
    began, warned = clock(), -_WARN_AGAIN_S
    while True:
        try:
            return await _read(path, work)
        except Exception as error:
            busy = isinstance(error, JournalBusy)
            if not (busy or is_temporary(error)) or (busy and clock() - began > _BUSY_S):
                raise
            if clock() - warned >= _WARN_AGAIN_S:
                log.warning("%s; the run continues once this is resolved", error)
                warned = clock()
        await asyncio.sleep(_RETRY_S)


async def _read(path: Path, work: Callable[[Journal], Restored]) -> tuple[JournalWriter, Restored]:
    """Open and read the journal. Either may find damage."""
    writer = JournalWriter(journal=await asyncio.to_thread(Journal, path))
    try:
        return writer, await writer.read(work)
    except BaseException:
        await writer.close()
        raise


# -- recording ---------------------------------------------------------------------------------------------------------


def start_recording(
    settings: ObserveConfig, run_dir: str | os.PathLike[str], component: str, *, samples: bool = False
) -> None:
    """Start the trace, and with `samples` the samples, of one process. Later problems are logged, not raised."""
    attach_trace(run_dir, component, every=settings.trace_every, most_bytes=int(settings.trace_mb * _MB))
    if samples:
        most_bytes = int(settings.samples_mb * _MB)
        attach_samples(run_dir, component, per_s=settings.samples_per_s, most_bytes=most_bytes)


def end_recording() -> None:
    """Write the rest. Has no effect if nothing was started."""
    detach_trace()
    detach_samples()
