"""The configuration of a training run: every key, its default and its checks.

    schema defaults ◀─ a YAML file ◀─ key=value overrides        merged by `freewheel.runtime.config_files`
           └─▶ TrainConfig: checks every key, and every pair of keys that must agree, before anything starts

The only place of a default. `docs/configuration.md` is generated from the docstrings of the keys. A setting
that cannot work is a `ConfigError` with the key, the value and the remedy. A key that another key makes useless is
refused if the user must have set it on purpose. What depends on the machine is checked by the plan
(`freewheel.runtime.run_plan`). Imports neither torch nor ray.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta

from freewheel.errors import ConfigError
from freewheel.queue.staleness import Bounds
from freewheel.rollout.engine_factories import ENGINES, find_engine
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.utils.checks import Count, CountOrZero, NotNegative, Positive, Text, check_fields, check_integer
from freewheel.utils.registry import Registry

Mode = Literal["sync", "one_step_off", "fully_async"]
THRESHOLDS: Mapping[str, int] = {"sync": 0, "one_step_off": 1}
"""The staleness threshold that a mode fixes."""
Auto = Literal["auto"]

EMBEDDED = "embedded"
"""`model.path` of the model that ships with the package."""
_EMBEDDED_LR = 3e-4
_USUAL_LR = 1e-6
"""`lr: auto` for any other model: usual for models of a billion parameters and more."""
DEFAULT = "default"
ROLLOUTER_CLASSES: Registry[Any] = Registry(
    {DEFAULT: "freewheel.rollout.rollouter:Rollouter"}, example="my_rollouter:MyRollouter"
)
TRAINER_CLASSES: Registry[Any] = Registry(
    {DEFAULT: "freewheel.trainer.trainer:FullyAsyncTrainer"}, example="my_trainer:MyTrainer"
)
OWN_ROWS = "word_problems"
"""The task that makes its own rows."""
_NO_ROWS = "rows"
"""The task that ships without rows."""
_UNKNOWN_WORDS = ("gsm8k",)
"""Built-in tasks with words that the embedded model does not know."""

_LARGEST_SEED = 2**64 - 1
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
_Port = Annotated[int, Meta(ge=0, le=2**16 - 1)]
_MOST_STEPS = 10**9
"""More is a typing error: 32 years at a step per second."""
_TASK_NAME = re.compile(r"[\w.-]+(:\w+)?")
_KEY_PARAMETERS = ("key", "api_key", "api-key", "apikey", "access_token", "token", "code", "sig", "signature")
"""Parameters of a URL in which services accept an API key."""


# -- the schema -------------------------------------------------------------------------------------------------------


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that is trained."""

    path: Text = EMBEDDED
    """`embedded` (it ships with the package), a HF folder, or a hub id."""
    tokenizer: Text | None = None
    """A folder or a hub id. None: `path`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU that has it, else float32."""
    lora: LoraConfig | None = None
    """None trains all parameters."""
    trust_remote_code: bool = False
    """Run code from the model's files."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts come from."""

    task: Text = "word_problems"
    """How to load, render and score rows: a built-in task (`word_problems`, `gsm8k`, `rows` for data in the form of
    samples), or `module:name` of your own."""
    train: str | None = None
    """A JSONL or Parquet file, a folder or a hub id, as the task reads it. None: the task's own rows."""
    eval: str | None = None
    """The same for held-out prompts. None: the task's own, or no evaluation."""
    train_split: str = "train"
    """The split of `train`, if it has several."""
    eval_split: str = "test"
    """The split of `eval`, if it has several."""
    limit: Count | None = None
    """Use only this many rows, from the start."""
    shuffle: bool = True
    """Use a new order in each epoch, from `seed`. Off: the order of the file."""
    epochs: Count | None = None
    """How often each prompt may be used. None: as often as `trainer.total_steps` needs."""
    system_prompt: str | None = None
    """Put before every prompt. Replaces a row's own system prompt."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """`auto`: use the tokenizer's template, if it has one."""
    max_prompt_tokens: Count = 512
    """Longest prompt."""
    too_long: Literal["filter", "truncate_left", "error"] = "filter"
    """What happens to a longer prompt."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are generated, and where."""

    engine: str = "native"
    """`native`: continuous batching over a HF decoder, on a CPU or one GPU. `vllm`: vLLM, on any number of GPUs, or its
    CPU build. Or `module:name` of your own `EngineFactory`."""
    n: Count = 8
    """Responses to a prompt: the size of a group."""
    temperature: Positive = 1.0
    """Sampling temperature; training uses the same."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens that make up this share. 1: from all."""
    top_k: CountOrZero = 0
    """Sample from this many most likely tokens. 0: from all."""
    max_new_tokens: Count | Auto = "auto"
    """Longest response. `auto`: the task's own."""
    slots: Count | Auto = "auto"
    """Sequences that a replica generates at a time. `auto`: a training step's worth, at most 256."""
    replicas: Count | Auto = "auto"
    """Rollouters, each with an engine. `auto`: one per GPU, or one on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    n_gpus_per_node: CountOrZero | Auto = "auto"
    """GPUs for generation on each of `nnodes`. `auto`: all that the trainer leaves."""
    nnodes: Count = 1
    """Machines for generation. More than one needs `ray.address`."""
    tensor_parallel_size: Count = 1
    """GPUs that share each matrix of a replica's model (vllm)."""
    pipeline_parallel_size: Count = 1
    """Groups of such GPUs that share a replica's layers (vllm)."""
    gpu_memory_share: PositiveShare | Auto = "auto"
    """Share of a GPU for a replica's weights and KV cache (vllm). `auto`: 0.9, or 0.4 on a GPU that also trains,
    divided by the replicas on it."""
    vllm: dict[str, Any] = {}
    """Any argument of vLLM's engine, by its own name, such as `{enforce_eager: true}`. A whole mapping replaces the one
    of a file or of a resumed run; `rollout.vllm.enforce_eager=true` adds to it."""
    urls: list[str] | None = None
    """`vllm serve` servers that generate instead of engines in the run, one per replica."""
    threads: Count = 1
    """Threads of a replica on a CPU. Two on two busy cores are slower than one."""
    rollouter_class: str | None = None
    """`default`, or `module:name` of a subclass of `Rollouter`. None: `default`."""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a response becomes a number."""

    function: str | None = None
    """`module:name` of a function, sync or async, for one response or a batch. None: the task's own."""
    judge: dict[str, Any] | None = None
    """Settings of `LengthPenaltyConfig`: an LLM judge and a length penalty on top of the function. None: neither."""
    concurrency: Count = 2048
    """Responses that a replica scores at a time. They hold no generation slot."""
    timeout_s: Positive = 300.0
    """Longest time to score a response; after that it has failed."""
    workers: Count = 4
    """Threads (or processes) for functions that are not async."""
    executor: Literal["thread", "process"] = "thread"
    """`process` keeps a function that computes in Python from slowing the engine."""
    retries: CountOrZero = 2
    """How often a group with fewer than two scored responses is scored again before it is dropped."""
    on_failure: str = "mask"
    """What happens to a response whose scoring failed: `mask` leaves it out of baseline and loss, `raise` ends the run,
    `fallback: -1.0` gives it that reward."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are taken, and where."""

    total_steps: Annotated[int, Meta(ge=1, le=_MOST_STEPS)] = 40
    """Training steps of the run."""
    groups_per_step: Count = 32
    """P: groups that a step trains on."""
    micro_batch_tokens: Count = 16384
    """Largest micro-batch in tokens, padding included. A step accumulates gradients over its micro-batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    n_gpus_per_node: CountOrZero | Auto = "auto"
    """GPUs for training on each of `nnodes`. `auto`: one, if there is one."""
    nnodes: Count = 1
    """Machines for training. More than one needs `ray.address`."""
    world_size: Count | Auto = "auto"
    """Training processes, each with a shard of the model (FSDP2). `auto`: one per GPU, or one on a CPU."""
    compile: bool | Auto = "auto"
    """Compile the decoder's layers (torch.compile): a slower first step, faster ones after it. `auto`: on a GPU."""
    threads: Count = 1
    """Threads on a CPU. Two on two busy cores are slower than one."""
    save_every_steps: Count | None = 20
    """Steps between two checkpoints. None: only at the end."""
    keep_last: Count = 2
    """Checkpoints to keep: a resume falls back to the previous one if the newest is damaged."""
    keep_best: bool = True
    """Keep the weights that did best on held-out prompts, in `best/`."""
    max_errors: Count = 3
    """Attempts at a failing step (out of memory, say) before the run ends."""
    trainer_class: str | None = None
    """`default`, or `module:name` of a subclass of `FullyAsyncTrainer`. None: `default`."""


class AsyncTrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far generation may run ahead of training, and how long each waits for the other."""

    staleness_threshold: CountOrZero = 3
    """Versions a sample may lag before generation is held back. `mode` fixes it at 0 (sync) or 1 (one_step_off)."""
    max_staleness_allowed: CountOrZero = 5
    """Versions a sample may lag at most when it is trained on; older is never trained on."""
    selection_window: Count | Auto = "auto"
    """W: the trainer takes the first finished groups among the W oldest ones that it has not taken. 1: strictly in
    order. `auto`: the largest that `max_staleness_allowed` permits."""
    max_queue_size: Count = 1000
    """Most groups alive at a time: admitted, in generation, in scoring, queued or in training."""
    min_batch_count: Count = 1
    """Batches of `groups_per_step` that must be ready before a step."""
    batch_timeout: Positive = 30.0
    """Seconds that the trainer waits for a batch before it warns and other components are checked."""
    generation_timeout: Positive = 30.0
    """Seconds without a new token, pauses excluded, before a response is abandoned and its prompt issued again."""
    batch_generation_interval: NotNegative = 0.1
    """Seconds between two admissions of prompts while the engine is full. A free slot ends the pause."""
    sync_every_steps: Count = 1
    """Steps between two weight versions."""
    in_flight_updates: bool = True
    """Load new weights in the middle of responses. Off: wait until all admitted responses are complete. Modes sync and
    one_step_off turn it off."""
    max_sync_retries: CountOrZero = 3
    """How often a failed weight sync is retried. Meanwhile engines use the old version."""
    sync_timeout: Positive = 30.0
    """Seconds for an engine to load a version and confirm it."""
    sync_retry_delay: NotNegative = 1.0
    """Seconds before a failed sync is retried."""
    weight_transport: Literal["auto", "object_store", "ipc", "nccl"] = "auto"
    """How weights reach engines. `ipc`: within a GPU that training and generation share. `nccl`: from GPU to GPU
    (vllm). `object_store`: through host memory, everywhere. `auto`: the fastest that works."""
    verify_every_syncs: CountOrZero = 10
    """Compare an engine's weights with those sent at its first sync, after a recovery, and at every this many syncs.
    0: never."""


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation on held-out prompts during training."""

    every_steps: Count | None = 5
    """Steps between two evaluations. None: only at the start and at the end."""
    prompts: CountOrZero = 128
    """How many held-out prompts; 0 turns evaluation off."""
    at_start: bool = True
    """Also evaluate before the first step, for comparison."""
    temperature: NotNegative = 0.0
    """Sampling temperature. 0: always the most likely token."""
    samples: Count = 1
    """Responses per prompt; their rewards are averaged."""


class Alert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a metric raises a warning. Names as in metrics.jsonl."""

    above: float | None = None
    """Warn when it is higher."""
    below: float | None = None
    """Warn when it is lower."""


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is recorded, and where it goes besides `metrics.jsonl` in the run directory."""

    tensorboard: bool = False
    """Event files under `tensorboard/` in the run directory."""
    wandb_project: Text | None = None
    """None: no Weights & Biases."""
    prometheus_port: _Port | None = None
    """Serve the metrics on this port of 127.0.0.1; 0 takes any free one."""
    statistics_every_s: Positive = 10.0
    """Seconds between two `Component Statistics` in the log."""
    alerts: dict[str, Alert] = {}
    """Metric name → thresholds."""
    custom_monitor: str | None = None
    """`module:name` of a function `(trainer_stats, rollouter_stats)`, called with each `Component Statistics`."""
    trace_every: CountOrZero = 1
    """Trace one group in this many from prompt to weight update. 0: trace components only."""
    trace_mb: NotNegative = 64.0
    """MB of trace to keep per component, the newest. 0: no trace."""
    samples_per_s: NotNegative = 1.0
    """Groups per second and rollouter to keep as text for the sample browser. 0: none."""
    samples_mb: NotNegative = 64.0
    """MB of samples to keep per rollouter, the first and the newest. 0: none."""
    dashboard: bool = True
    """Serve the run's page on 127.0.0.1 during the run, from a separate process. The run prints its address at
    start."""
    dashboard_port: _Port = 0
    """Port of that page. 0 takes any free one."""


class JournalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run records so that nothing is lost: scored groups, and the groups of each step."""

    enabled: bool = True
    """Off: queued groups and steps since the last checkpoint are lost with the process that holds them."""
    keep_groups: CountOrZero = 256
    """Groups to keep for `freewheel inspect --group` after a checkpoint covers their step."""


class RecoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when a component dies."""

    max_restarts: CountOrZero = 5
    """Restarts of a component in a row, without a trained step in between. Then the run ends and can be resumed."""
    backoff_s: NotNegative = 1.0
    """Seconds before the second restart in a row. Doubles with each further one, up to 30 s. The first is immediate."""
    silent_s: Positive = 60.0
    """Kill and restart a component that has not answered for this many seconds."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster."""

    address: Text | None = None
    """`auto` or `host:port` of a running cluster. None: start one here and end it with the run."""
    room_s: Positive = 60.0
    """Longest wait for room on the cluster: machines may still be joining."""


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. The defaults run on this machine."""

    mode: Mode = "fully_async"
    """`sync`: generate, then train. `one_step_off`: batch k trains while k+1 generates. `fully_async`: streaming."""
    seed: int = 0
    """Seed of the order of prompts and of every random draw."""
    run_dir: Text | None = None
    """Folder of the run. None: a new one under `runs/`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    journal: JournalConfig = JournalConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    ray: RayConfig = RayConfig()

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, low=0, high=_LARGEST_SEED)  # beyond the bounds that msgspec can check
        check_fields(self)
        for name in self.__struct_fields__:
            if isinstance(section := getattr(self, name), msgspec.Struct):
                check_fields(section, f"{name}.")
        for check in _CHECKS:
            for key, remedy in check(self) or ():
                raise ConfigError(key, reduce(getattr, key.split("."), self), remedy)

    @property
    def staleness_threshold(self) -> int:
        """The threshold in effect: the two synchronous modes fix it."""
        return THRESHOLDS.get(self.mode, self.async_training.staleness_threshold)

    @property
    def in_flight_updates(self) -> bool:
        return self.mode == "fully_async" and self.async_training.in_flight_updates

    @property
    def uses_embedded_model(self) -> bool:
        return self.model.path == EMBEDDED

    @property
    def widest_window(self) -> int:
        """The largest W at which no sample lags more than `max_staleness_allowed`."""
        per_version = self.trainer.groups_per_step * self.async_training.sync_every_steps
        return (self.async_training.max_staleness_allowed - self.staleness_threshold) * per_version + 1

    @property
    def bounds(self) -> Bounds:
        """The bounds of staleness and of the queue, resolved from mode and settings."""
        a = self.async_training
        window = 1 if self.mode != "fully_async" else a.selection_window
        return Bounds(
            groups_per_step=self.trainer.groups_per_step,
            steps_per_version=a.sync_every_steps,
            threshold=self.staleness_threshold,
            window=self.widest_window if window == "auto" else window,
            max_alive=a.max_queue_size,
            max_lag_allowed=max(a.max_staleness_allowed, self.staleness_threshold),
            min_batches=a.min_batch_count,
            drain=not self.in_flight_updates,
            total_groups=self.trainer.total_steps * self.trainer.groups_per_step,
        )

    @property
    def lr(self) -> float:
        """`optimizer.lr` with `auto` resolved."""
        if self.optimizer.lr != "auto":
            return self.optimizer.lr
        return _EMBEDDED_LR if self.uses_embedded_model else _USUAL_LR

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


# -- checks across keys -----------------------------------------------------------------------------------


_Problems = Iterator[tuple[str, str]]
"""Keys with their remedies. Only the first is used: later checks may assume that there was none before."""


def _urls(config: TrainConfig) -> _Problems:
    urls = config.rollout.urls
    if urls == []:
        yield "rollout.urls", "give one URL or more, or leave it out"
    for url in urls or ():
        if not url.startswith(("http://", "https://")):
            yield "rollout.urls", "give addresses of `vllm serve`, such as http://127.0.0.1:8000"
        if has_key(url):
            remedy = "the configuration is written to the run directory: give a URL without a key"
            raise ConfigError("rollout.urls", "<hidden>", remedy)


def _reward(config: TrainConfig) -> None:
    check_judge(config.reward.judge)
    if config.reward.on_failure != "mask":  # not for the default: the import takes a quarter of a second
        from freewheel.rollout.reward_stage import GroupPolicy

        GroupPolicy.of(config.reward.on_failure, 0)


def check_judge(judge: Mapping[str, Any] | None) -> None:
    """Check the settings of `reward.judge` as the reward manager does. They must not contain an API key."""
    if judge is None:
        return
    where = _find_key(judge)
    if where is not None:
        raise ConfigError(
            f"reward.judge.{where}",
            "<hidden>",
            "the configuration is written to the run directory, and a key must not be: put it into the environment as "
            "OPENAI_API_KEY, or name another variable in reward.judge.judge.api_key_env",
        )
    from freewheel.rewards.config import as_config

    try:
        as_config(dict(judge))
    except ConfigError as error:
        raise error.renamed(f"reward.judge.{error.key.removeprefix('length_penalty_config.')}") from None


def _find_key(value: Any) -> str | None:
    """Return the dotted name of an `api_key` inside `value`, or of a URL that contains one."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        if (name == "api_key" and inner is not None) or has_key(inner):
            return str(name)
        found = _find_key(inner)
        if found is not None:
            return f"{name}.{found}"
    return None


def has_key(value: Any) -> bool:
    """Whether a URL carries an API key among its parameters."""
    if not isinstance(value, str) or not value.lstrip().startswith(("http://", "https://")):
        return False
    query = value.partition("?")[2].partition("#")[0]
    return any(name.lower() in _KEY_PARAMETERS for name, _ in parse_qsl(query))


def _alerts(config: TrainConfig) -> None:
    for name, alert in config.observe.alerts.items():
        if alert.above is None and alert.below is None:
            raise ConfigError(f"observe.alerts.{name}", {}, "give above, below or both")
        if alert.above is not None and alert.below is not None and alert.above < alert.below:
            remedy = "every value would then raise it: above must not be less than below"
            raise ConfigError(f"observe.alerts.{name}", msgspec.structs.asdict(alert), remedy)


def _staleness(config: TrainConfig) -> _Problems:
    allowed, threshold = config.async_training.max_staleness_allowed, config.staleness_threshold
    if config.mode != "fully_async":
        return  # the mode fixes threshold and window
    if allowed < threshold:
        remedy = f"it must be at least async_training.staleness_threshold ({threshold})"
        yield "async_training.max_staleness_allowed", remedy
    if config.bounds.max_lag > allowed:
        remedy = (
            f"samples could then lag {config.bounds.max_lag} versions, and async_training.max_staleness_allowed is "
        )
        yield "async_training.selection_window", f"{remedy}{allowed}: give at most {config.widest_window}, or auto"


def _queue(config: TrainConfig) -> _Problems:
    a, groups_per_step = config.async_training, config.trainer.groups_per_step
    per_version = config.bounds.groups_per_version
    if a.max_queue_size < per_version:
        remedy = f"a weight version takes trainer.groups_per_step × async_training.sync_every_steps = {per_version} "
        yield "async_training.max_queue_size", f"{remedy}groups, and all of them must fit: give at least that"
    ready = config.bounds.most_ready // groups_per_step
    if a.min_batch_count > ready:
        yield (
            "async_training.min_batch_count",
            f"no more than {ready} batches of trainer.groups_per_step ({groups_per_step}) can be ready at once under "
            f"async_training.staleness_threshold ({config.staleness_threshold}) and max_queue_size "
            f"({a.max_queue_size}): give at most {ready}",
        )


def _devices(config: TrainConfig) -> _Problems:
    for name, section in (("trainer", config.trainer), ("rollout", config.rollout)):
        gpus = section.n_gpus_per_node
        if section.device == "cpu" and gpus not in ("auto", 0):
            yield f"{name}.n_gpus_per_node", f"{name}.device is cpu: give 0, or device=cuda"
        if section.device == "cuda" and gpus == 0:
            yield f"{name}.n_gpus_per_node", f"{name}.device is cuda: give 1 or more, or auto"
    r = config.rollout
    if isinstance(r.replicas, int) and isinstance(r.n_gpus_per_node, int):
        gpus = r.n_gpus_per_node * r.nnodes
        used = r.replicas * r.tensor_parallel_size * r.pipeline_parallel_size
        if used < gpus:
            remedy = f"they use {used} of the GPUs, and rollout.n_gpus_per_node × nnodes = {gpus}: "
            yield "rollout.replicas", remedy + "give replicas=auto, or fewer GPUs"


def _engine(config: TrainConfig) -> None:
    """A user's own engine is checked only before a run starts: reading a configuration must not import a user's
    code."""
    name = config.rollout.engine
    if name in ENGINES or ":" not in name:
        find_engine(name).check_options(config.rollout)


def _ranks(config: TrainConfig) -> _Problems:
    t = config.trainer
    if t.world_size == "auto" or t.device == "cpu" or t.n_gpus_per_node == "auto":
        return
    gpus = t.nnodes * t.n_gpus_per_node
    if gpus and t.world_size != gpus:
        yield "trainer.world_size", f"each process has a GPU, and trainer.nnodes × n_gpus_per_node = {gpus}: give auto"


def _algorithm(config: TrainConfig) -> _Problems:
    algorithm, groups = config.algorithm, config.trainer.groups_per_step
    if algorithm.compares_responses and config.rollout.n < 2:
        yield "rollout.n", f"{algorithm.estimator} compares the responses of a group: give at least 2"
    if algorithm.mini_batches > groups:
        remedy = f"a mini-batch holds whole groups, and trainer.groups_per_step is {groups}: give at most that"
        yield "algorithm.mini_batches", remedy


def _optimizer(config: TrainConfig) -> _Problems:
    optimizer, total = config.optimizer, config.trainer.total_steps
    if optimizer.warmup_steps > total:
        remedy = f"the run has trainer.total_steps = {total} and would never reach its learning rate: give at most that"
        yield "optimizer.warmup_steps", remedy
    if optimizer.critic_lr is not None and not config.algorithm.uses_critic:
        remedy = f"{config.algorithm.estimator} has no critic: leave it out, or set algorithm.name=ppo"
        yield "optimizer.critic_lr", remedy


def _data(config: TrainConfig) -> _Problems:
    data = config.data
    if not _TASK_NAME.fullmatch(data.task):  # a new run's folder is named after it
        yield "data.task", "give a built-in task's name, or module:name"
    if data.task == OWN_ROWS and (data.train or data.eval):
        key = "data.train" if data.train else "data.eval"
        yield key, f"{OWN_ROWS} makes its own rows: leave it out, or choose another data.task"
    if data.task == _NO_ROWS and data.train is None:
        yield "data.train", f"the task {_NO_ROWS} has no rows of its own: give a file, a folder or a hub id"
    if config.uses_embedded_model and data.task in _UNKNOWN_WORDS:
        remedy = f"the embedded model knows the words of {OWN_ROWS} only: give a folder or a hub id for {data.task}"
        yield "model.path", remedy


def _evaluation(config: TrainConfig) -> _Problems:
    data, evaluation = config.data, config.eval
    if evaluation.samples > 1 and evaluation.temperature == 0:
        remedy = "at eval.temperature 0 all responses to a prompt are the same: give 1, or a temperature above 0"
        yield "eval.samples", remedy
    if evaluation.prompts and (data.train, data.train_split) == (data.eval, data.eval_split):
        remedy = (
            "the run would be evaluated on prompts that it trains on: give another split or file, or eval.prompts=0"
        )
        yield "data.eval_split", remedy


_CHECKS: tuple[Callable[[TrainConfig], _Problems | None], ...] = (
    *(_urls, _reward, _alerts),
    *(_staleness, _queue, _devices, _engine, _ranks, _algorithm, _optimizer, _data, _evaluation),
)


def held_out_file(config: TrainConfig) -> list[ConfigError]:
    """Return a problem if one file is both trained and evaluated on: the splits of a file are all of its rows."""
    data = config.data
    if not config.eval.prompts or data.train is None or data.eval is None:
        return []
    train, held_out = Path(data.train).expanduser(), Path(data.eval).expanduser()
    if not (train.is_file() and held_out.is_file() and train.samefile(held_out)):
        return []
    why = "the run would be evaluated on prompts that it trains on, because a file is used as a whole"
    return [ConfigError("data.eval", data.eval, f"{why}: give another file, or eval.prompts=0")]
