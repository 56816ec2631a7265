"""Checks of settings that more than one section of the schema needs, and of every pair of keys that must agree.

`freewheel.runtime.config` calls them while a config is made. What depends on the machine is the plan's business
(`freewheel.runtime.plan`). A key that another makes useless is refused where somebody must have given it on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.runtime.config import TrainConfig

OWN_ROWS = "word_problems"
"""The task that makes its rows itself."""
NO_ROWS = "rows"
"""The task that brings none."""
KEY_PARAMETERS = ("key", "api_key", "api-key", "apikey", "access_token", "token", "code", "sig", "signature")
"""Of a URL, by which services take a key that others take in a header."""
RESPONSE_BYTES = 512
"""Of memory, less than which no response takes with its arrays and its reward, however short it is."""
GIB = 2**30
TASK_NAME = re.compile(r"[\w.-]+(:\w+)?")
WORDS_ELSEWHERE = ("gsm8k",)
"""Built-in tasks whose words the embedded model does not know."""


def auto_or_integer(key: str, value: Any, *, low: int) -> None:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise ConfigError(key, value, f"give 'auto' or a whole number of at least {low}")


def object_name(key: str, value: str | None) -> None:
    if value is not None and (not isinstance(value, str) or not all(value.partition(":")[::2])):
        raise ConfigError(key, value, "give module:name, such as my_package.rewards:score")


def at_most(key: str, value: int | float | None, high: int | float, what: str) -> None:
    if value is not None and value > high:
        raise ConfigError(key, value, f"{what}: give at most {high}")


def server_urls(key: str, urls: list[str] | None) -> None:
    if urls is None:
        return
    if not urls:
        raise ConfigError(key, urls, "give one URL or more, or leave it out")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(key, url, "give the address of a `vllm serve`, such as http://127.0.0.1:8000")
        if has_key(url):
            raise ConfigError(key, "<hidden>", "a run's settings are written to its folder: no key in a URL")


def failure_policy(on_failure: str) -> None:
    """What the reward stage would refuse when it is made; it alone knows how to read it."""
    if on_failure == "mask":
        return  # as by default: its module takes a quarter of a second to import, and every command reads settings
    from freewheel.rollout.reward_policy import GroupPolicy

    GroupPolicy.of(on_failure, 0)


def judge_settings(judge: Mapping[str, Any] | None) -> None:
    """What the reward manager would refuse when it is made, said by its full name. A key must not stand in it."""
    if judge is None:
        return
    where = _find_key(judge)
    if where is not None:
        raise ConfigError(
            f"reward.judge.{where}",
            "<hidden>",
            "a run's settings are written to its folder, and a key must not be: put it into the environment as "
            "OPENAI_API_KEY, or name another variable in reward.judge.judge.api_key_env",
        )
    from freewheel.rewards.config import as_config

    try:
        as_config(dict(judge))
    except ConfigError as error:
        raise error.renamed(f"reward.judge.{error.key.removeprefix('length_penalty_config.')}") from None


def _find_key(value: Any) -> str | None:
    """The dotted place of an `api_key` within, or of a URL that has one."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        if (name == "api_key" and inner is not None) or has_key(inner):
            return str(name)
        found = _find_key(inner)
        if found is not None:
            return f"{name}.{found}"
    return None


def has_key(value: Any) -> bool:
    """Whether a URL carries a key among its parameters."""
    if not isinstance(value, str) or not value.lstrip().startswith(("http://", "https://")):
        return False
    query = value.partition("?")[2].partition("#")[0]
    return any(name.lower() in KEY_PARAMETERS for name, _ in parse_qsl(query))


def check_pairs(config: TrainConfig) -> None:
    """Every two keys that must agree."""
    for check in (_staleness, _queue, _devices, _engine, _ranks, _algorithm, _optimizer, _data, _evaluation):
        check(config)


def _staleness(config: TrainConfig) -> None:
    a, threshold = config.async_training, config.staleness_threshold
    if config.mode != "fully_async":
        return  # the mode fixes threshold and window
    if a.max_staleness_allowed < threshold:
        raise ConfigError(
            "async_training.max_staleness_allowed",
            a.max_staleness_allowed,
            f"it must be at least async_training.staleness_threshold ({threshold})",
        )
    if config.bounds.max_lag > a.max_staleness_allowed:
        raise ConfigError(
            "async_training.selection_window",
            a.selection_window,
            f"samples could then lag {config.bounds.max_lag} versions, and async_training.max_staleness_allowed is "
            f"{a.max_staleness_allowed}: give at most {config.widest_window}, or auto",
        )


def _queue(config: TrainConfig) -> None:
    a = config.async_training
    per_version = config.bounds.groups_per_version
    if a.max_queue_size < per_version:
        raise ConfigError(
            "async_training.max_queue_size",
            a.max_queue_size,
            f"a weight version takes trainer.groups_per_step × async_training.sync_every_steps = {per_version} "
            "groups, and all of them must fit: give at least that",
        )
    ready = config.bounds.most_ready // config.trainer.groups_per_step
    if a.min_batch_count > ready:
        raise ConfigError(
            "async_training.min_batch_count",
            a.min_batch_count,
            f"no more than {ready} batches of trainer.groups_per_step ({config.trainer.groups_per_step}) can be ready "
            f"at once under async_training.staleness_threshold ({config.staleness_threshold}) and max_queue_size "
            f"({a.max_queue_size}): give at most {ready}",
        )


def _devices(config: TrainConfig) -> None:
    for name, section in (("trainer", config.trainer), ("rollout", config.rollout)):
        gpus = section.n_gpus_per_node
        if section.device == "cpu" and gpus not in ("auto", 0):
            raise ConfigError(f"{name}.n_gpus_per_node", gpus, f"{name}.device is cpu: give 0, or device=cuda")
        if section.device == "cuda" and gpus == 0:
            raise ConfigError(f"{name}.n_gpus_per_node", gpus, f"{name}.device is cuda: give 1 or more, or auto")
    r = config.rollout
    if isinstance(r.replicas, int) and isinstance(r.n_gpus_per_node, int):
        gpus = r.n_gpus_per_node * r.nnodes
        used = r.replicas * r.tensor_parallel_size * r.pipeline_parallel_size
        if used < gpus:
            raise ConfigError(
                "rollout.replicas",
                r.replicas,
                f"they use {used} of the GPUs, and rollout.n_gpus_per_node × nnodes = {gpus}: give replicas=auto, or "
                "fewer GPUs",
            )


def _engine(config: TrainConfig) -> None:
    """What the native engine has no use for."""
    r = config.rollout
    if r.engine == "vllm":
        if r.urls is not None and r.replicas not in ("auto", len(r.urls)):
            raise ConfigError(
                "rollout.replicas", r.replicas, f"servers that rollout.urls names: {len(r.urls)}; give auto"
            )
        return
    given = {
        "tensor_parallel_size": r.tensor_parallel_size != 1,
        "pipeline_parallel_size": r.pipeline_parallel_size != 1,
        "gpu_memory_share": r.gpu_memory_share != "auto",
        "vllm": bool(r.vllm),
        "urls": r.urls is not None,
    }
    for key, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"rollout.{key}", getattr(r, key), "the native engine has none: leave it out, or rollout.engine=vllm"
            )


def _ranks(config: TrainConfig) -> None:
    """Processes and GPUs must say the same of training."""
    t = config.trainer
    if t.world_size == "auto" or t.device == "cpu" or t.n_gpus_per_node == "auto":
        return
    gpus = t.nnodes * t.n_gpus_per_node
    if gpus and t.world_size != gpus:
        raise ConfigError(
            "trainer.world_size",
            t.world_size,
            f"each process has a GPU, and trainer.nnodes × n_gpus_per_node = {gpus}: give auto",
        )


def _algorithm(config: TrainConfig) -> None:
    algorithm, groups = config.algorithm, config.trainer.groups_per_step
    if algorithm.name != "ppo" and config.rollout.n < 2:
        raise ConfigError(
            "rollout.n", config.rollout.n, f"{algorithm.name} compares the responses of a group: give at least 2"
        )
    if algorithm.mini_batches > groups:
        raise ConfigError(
            "algorithm.mini_batches",
            algorithm.mini_batches,
            f"a mini-batch holds whole groups, and trainer.groups_per_step is {groups}: give at most that",
        )


def _optimizer(config: TrainConfig) -> None:
    optimizer, total = config.optimizer, config.trainer.total_steps
    if optimizer.warmup_steps > total:
        raise ConfigError(
            "optimizer.warmup_steps",
            optimizer.warmup_steps,
            f"the run has trainer.total_steps = {total} and would never reach its learning rate: give at most that",
        )
    if optimizer.critic_lr is not None and config.algorithm.name != "ppo":
        raise ConfigError(
            "optimizer.critic_lr",
            optimizer.critic_lr,
            f"{config.algorithm.name} has no critic: leave it out, or set algorithm.name=ppo",
        )


def _data(config: TrainConfig) -> None:
    data = config.data
    if not TASK_NAME.fullmatch(data.task):  # which a new run's folder is named after
        raise ConfigError("data.task", data.task, "give a built-in task's name, or module:name")
    if data.task == OWN_ROWS and (data.train or data.eval):
        key = "train" if data.train else "eval"
        raise ConfigError(
            f"data.{key}",
            getattr(data, key),
            f"{OWN_ROWS} makes its own rows: leave it out, or choose another data.task",
        )
    if data.task == NO_ROWS and data.train is None:
        raise ConfigError("data.train", None, f"the task {NO_ROWS} brings no data: give a file, a folder or a hub id")
    if config.uses_embedded_model and data.task in WORDS_ELSEWHERE:
        raise ConfigError(
            "model.path",
            config.model.path,
            f"the embedded model knows the words of {OWN_ROWS} only: give a folder or a hub id for {data.task}",
        )


def _evaluation(config: TrainConfig) -> None:
    data, evaluation = config.data, config.eval
    if evaluation.samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            "eval.samples",
            evaluation.samples,
            "at eval.temperature 0 all responses to a prompt are the same: give 1, or a temperature above 0",
        )
    if evaluation.prompts and (data.train, data.train_split) == (data.eval, data.eval_split):
        raise ConfigError(
            "data.eval_split",
            data.eval_split,
            "the held-out prompts would be those that are trained on: give another split or file, or eval.prompts=0",
        )


def step_in_memory(config: TrainConfig, memory_bytes: int) -> list[ConfigError]:
    """A step's responses are in memory at once, on the machine that trains. `memory_bytes`: of that; 0: not known."""
    n, groups = config.rollout.n, config.trainer.groups_per_step
    least = n * groups * RESPONSE_BYTES
    if not memory_bytes or least <= memory_bytes or config.ray.address is not None:
        return []
    key, value, other = ("rollout.n", n, "trainer.groups_per_step") if n >= groups else (
        "trainer.groups_per_step", groups, "rollout.n"
    )  # fmt: skip
    remedy = f"a step has {n * groups:,} responses, which take at least {least / GIB:,.1f} GiB, and this machine has "
    return [ConfigError(key, value, f"{remedy}{memory_bytes / GIB:,.1f}: give less, or a smaller {other}")]


def held_out_file(config: TrainConfig) -> list[ConfigError]:
    """A single file is taken whole, whatever the split. Asks the disk, and so is the plan's to ask."""
    data = config.data
    if not config.eval.prompts or data.train is None or data.eval is None:
        return []
    train, held_out = Path(data.train).expanduser(), Path(data.eval).expanduser()
    if not (train.is_file() and held_out.is_file() and train.samefile(held_out)):
        return []
    remedy = "the held-out prompts would be those that are trained on, for a file is taken whole: give another file, "
    return [ConfigError("data.eval", data.eval, remedy + "or eval.prompts=0")]
