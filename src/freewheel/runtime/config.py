"""Everything that a training run needs to know: the only place where a default stands.

    schema defaults ◀─ a YAML file ◀─ key=value overrides        merged by `freewheel.runtime.config_files`
           └─▶ TrainConfig: every key checked, and every pair of keys that must agree, before anything starts

`docs/training-configuration.md` is generated from here. A setting that cannot work is refused with the key, the value
and the remedy. Needs no torch and no ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from freewheel.errors import ConfigError
from freewheel.queue.staleness import Bounds
from freewheel.trainer.options import AlgorithmConfig, LoraConfig, OptimizerConfig
from freewheel.utils.checks import check_integer, check_number, check_text

Mode = Literal["sync", "one_step_off", "fully_async"]
THRESHOLDS: Mapping[str, int] = {"sync": 0, "one_step_off": 1}
"""The staleness threshold that a mode fixes."""
Auto = Literal["auto"]

EMBEDDED = "embedded"
"""`model.path` of the model that comes with the package."""
EMBEDDED_LR = 3e-4
USUAL_LR = 1e-6
"""What is usual for models of a billion parameters and more; `lr: auto` takes it for any but the embedded one."""

LARGEST_SEED = 2**64 - 1
LARGEST_PORT = 2**16 - 1
MOST_STEPS = 10**9
"""At a step a second 32 years: more is a slip of the finger, and its time left is a number that nobody can read."""


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


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that is trained."""

    path: str = EMBEDDED
    """`embedded` (it comes with the package), a HF folder, or a hub id."""
    tokenizer: str | None = None
    """Where it differs from `path`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU that has it, else float32."""
    lora: LoraConfig | None = None
    """None trains all parameters."""
    trust_remote_code: bool = False
    """Run code that comes with the model's files."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    def __post_init__(self) -> None:
        check_text("model.path", self.path, "give 'embedded', a folder or a hub id")
        check_text("model.tokenizer", self.tokenizer, "give a folder or a hub id", optional=True)


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts come from."""

    task: str = "word_problems"
    """A built-in task (`word_problems`, `gsm8k`, `rows` for data in the form of samples), or `module:name` of your own:
    how to load, render and score."""
    train: str | None = None
    """A JSONL or Parquet file, a folder or a hub id, as the task reads it. None: what comes with the task."""
    eval: str | None = None
    """The same for held-out prompts. None: what comes with the task, or no evaluation."""
    train_split: str = "train"
    """Which part of `train`, where it has several."""
    eval_split: str = "test"
    """Which part of `eval`, where it has several."""
    limit: int | None = None
    """Use the first so many rows."""
    shuffle: bool = True
    """A new order in each epoch, by `seed`. Off: the order of the file."""
    epochs: int | None = None
    """How often each prompt may be used. None: as often as `trainer.total_steps` needs."""
    system_prompt: str | None = None
    """Put before every prompt, in place of one that a row has."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """`auto`: the tokenizer's, if it has one."""
    max_prompt_tokens: int = 512
    """Longest prompt."""
    too_long: Literal["filter", "truncate_left", "error"] = "filter"
    """What happens to a longer prompt."""

    def __post_init__(self) -> None:
        check_text("data.task", self.task, "give a built-in task's name, or module:name")
        check_integer("data.limit", self.limit, low=1, optional=True)
        check_integer("data.epochs", self.epochs, low=1, optional=True)
        check_integer("data.max_prompt_tokens", self.max_prompt_tokens, low=1)


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are generated, and where."""

    engine: Literal["native", "vllm"] = "native"
    """`native`: continuous batching over a HF decoder, on a CPU or one GPU. `vllm`: vLLM, on any number of GPUs, or its
    CPU build."""
    n: int = 8
    """Responses to a prompt: the size of a group."""
    temperature: float = 1.0
    """Of sampling; training uses the same."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that make up this share. 1: from all."""
    top_k: int = 0
    """0: all tokens."""
    max_new_tokens: int | Auto = "auto"
    """`auto`: the task's own."""
    slots: int | Auto = "auto"
    """Sequences generated at a time by a replica. `auto`: a training step's worth, at most 256."""
    replicas: int | Auto = "auto"
    """Rollouters, each with an engine. `auto`: one a GPU, or one on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    n_gpus_per_node: int | Auto = "auto"
    """GPUs for generation on each of `nnodes`. `auto`: what is there and the trainer leaves."""
    nnodes: int = 1
    """Machines for generation. More than one need `ray.address`."""
    tensor_parallel_size: int = 1
    """GPUs that share each matrix of a replica's model (vllm)."""
    pipeline_parallel_size: int = 1
    """Groups of such GPUs that share a replica's layers (vllm)."""
    gpu_memory_share: float | Auto = "auto"
    """Of a GPU, for weights and KV cache of a replica (vllm). `auto`: 0.9, or 0.4 where training is on it too, over the
    replicas that share it."""
    vllm: dict[str, Any] = {}
    """Any argument of vLLM's engine, by its own name, such as `{enforce_eager: true}`. Given whole it replaces what a
    file or a run that is resumed has; `rollout.vllm.enforce_eager=true` adds to it."""
    urls: list[str] | None = None
    """`vllm serve` servers that generate in place of engines of our own, one a replica."""
    threads: int = 1
    """Of a replica on a CPU. Two on two busy cores are slower than one."""
    rollouter_class: str | None = None
    """`module:name` of a subclass of `Rollouter`."""

    def __post_init__(self) -> None:
        check_integer("rollout.n", self.n, low=1)
        check_number("rollout.temperature", self.temperature, above=0)
        check_number("rollout.top_p", self.top_p, above=0)
        at_most("rollout.top_p", self.top_p, 1, "it is a share")
        check_integer("rollout.top_k", self.top_k, low=0)
        for key in ("max_new_tokens", "slots", "replicas", "n_gpus_per_node"):
            auto_or_integer(f"rollout.{key}", getattr(self, key), low=0 if key == "n_gpus_per_node" else 1)
        for key in ("nnodes", "threads", "tensor_parallel_size", "pipeline_parallel_size"):
            check_integer(f"rollout.{key}", getattr(self, key), low=1)
        if self.gpu_memory_share != "auto":
            check_number("rollout.gpu_memory_share", self.gpu_memory_share, above=0)
            at_most("rollout.gpu_memory_share", self.gpu_memory_share, 1, "it is a share")
        server_urls("rollout.urls", self.urls)
        object_name("rollout.rollouter_class", self.rollouter_class)


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a response becomes a number."""

    function: str | None = None
    """`module:name` of a function, sync or async, of one response or of a batch. None: the task's own."""
    judge: dict[str, Any] | None = None
    """Settings of `LengthPenaltyConfig` for an LLM judge and a length penalty on top of the function. None: neither."""
    concurrency: int = 2048
    """Responses that are scored at a time by a replica. They hold no generation slot."""
    timeout_s: float = 300.0
    """Longest time to score a response; then it has failed."""
    workers: int = 4
    """Threads (or processes) for functions that are not async."""
    executor: Literal["thread", "process"] = "thread"
    """`process` keeps a function that is busy in Python from slowing the engine beside it."""
    retries: int = 2
    """How often a group is scored again that has fewer than two scored responses, before it is dropped."""
    on_failure: str = "mask"
    """A response whose scoring failed: `mask` leaves it out of baseline and loss, `raise` ends the run,
    `fallback: -1.0` gives it that number."""

    def __post_init__(self) -> None:
        object_name("reward.function", self.function)
        check_integer("reward.concurrency", self.concurrency, low=1)
        check_number("reward.timeout_s", self.timeout_s, above=0)
        check_integer("reward.workers", self.workers, low=1)
        check_integer("reward.retries", self.retries, low=0)
        judge_settings(self.judge)
        failure_policy(self.on_failure)


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are taken, and where."""

    total_steps: int = 40
    """Training steps of the run."""
    groups_per_step: int = 32
    """P: groups that a step trains on."""
    micro_batch_tokens: int = 16384
    """Longest micro-batch, padding included. Gradients are accumulated over a step's micro-batches."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    n_gpus_per_node: int | Auto = "auto"
    """GPUs for training on each of `nnodes`. `auto`: one if there is one."""
    nnodes: int = 1
    """Machines for training. More than one need `ray.address`."""
    world_size: int | Auto = "auto"
    """Processes that share the training, each with a shard of the model (FSDP2). `auto`: one a GPU, or one on a CPU."""
    compile: bool | Auto = "auto"
    """Compile the decoder's layers (torch.compile): faster steps after a slower first one. `auto`: on a GPU."""
    threads: int = 1
    """On a CPU. Two on two busy cores are slower than one."""
    save_every_steps: int | None = 20
    """None: only at the end."""
    keep_last: int = 2
    """Checkpoints kept: a resume falls back to the one before where the newest is damaged."""
    keep_best: bool = True
    """The weights that did best on held-out prompts are kept beside them, in `best/`."""
    max_errors: int = 3
    """Attempts at a step that fails (out of memory, say) before the run ends."""
    trainer_class: str | None = None
    """`module:name` of a subclass of `FullyAsyncTrainer`."""

    def __post_init__(self) -> None:
        for key in ("total_steps", "groups_per_step", "micro_batch_tokens", "nnodes", "threads", "max_errors"):
            check_integer(f"trainer.{key}", getattr(self, key), low=1)
        at_most("trainer.total_steps", self.total_steps, MOST_STEPS, "no run lasts that long")
        auto_or_integer("trainer.n_gpus_per_node", self.n_gpus_per_node, low=0)
        auto_or_integer("trainer.world_size", self.world_size, low=1)
        check_integer("trainer.save_every_steps", self.save_every_steps, low=1, optional=True)
        check_integer("trainer.keep_last", self.keep_last, low=1)
        object_name("trainer.trainer_class", self.trainer_class)


class AsyncTrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far generation may run ahead of training, and how long each waits for the other."""

    staleness_threshold: int = 3
    """Versions a sample may lag before generation is held back. `mode` sets it to 0 (sync) or 1 (one_step_off)."""
    max_staleness_allowed: int = 5
    """Versions a sample may lag at most when it is trained on; older is never trained on."""
    selection_window: int | Auto = "auto"
    """W: how far behind the oldest untaken group one that finished earlier may be taken. `auto`: what
    `max_staleness_allowed` leaves; 1 takes groups strictly in order."""
    max_queue_size: int = 1000
    """Groups alive at a time: admitted, generated, scored, queued or in training."""
    min_batch_count: int = 1
    """Fewest batches of `groups_per_step` that must be ready before a step."""
    batch_timeout: float = 30.0
    """Seconds that the trainer waits for a batch before it says so and its peers are checked."""
    generation_timeout: float = 30.0
    """Seconds without a new token, pauses excluded, before a response is given up and its prompt issued again."""
    batch_generation_interval: float = 0.1
    """Pause in seconds between two admissions of prompts while the engine is full. Slots that come free end it."""
    sync_every_steps: int = 1
    """Steps between two weight versions."""
    in_flight_updates: bool = True
    """New weights reach responses in mid-generation. Off: they wait until all that was admitted is done. `mode` sync
    and one_step_off turn it off."""
    max_sync_retries: int = 3
    """How often a weight sync that failed is tried again; until then the old version serves."""
    sync_timeout: float = 30.0
    """Seconds that an engine has to take a version and confirm it."""
    sync_retry_delay: float = 1.0
    """Seconds before a sync is tried again."""
    weight_transport: Literal["auto", "object_store", "ipc", "nccl"] = "auto"
    """How weights get to engines. `ipc`: within a GPU that training and generation share. `nccl`: from GPU to GPU
    (vllm). `object_store`: through host memory, wherever they are. `auto`: the fastest that fits."""
    verify_every_syncs: int = 10
    """How often what an engine holds is compared with what it was sent: at its first sync, after a recovery, and every
    so many. 0: never."""

    def __post_init__(self) -> None:
        for key, low in (
            ("staleness_threshold", 0),
            ("max_staleness_allowed", 0),
            ("max_queue_size", 1),
            ("min_batch_count", 1),
            ("sync_every_steps", 1),
            ("verify_every_syncs", 0),
            ("max_sync_retries", 0),
        ):
            check_integer(f"async_training.{key}", getattr(self, key), low=low)
        for key in ("batch_timeout", "generation_timeout", "sync_timeout"):
            check_number(f"async_training.{key}", getattr(self, key), above=0)
        for key in ("batch_generation_interval", "sync_retry_delay"):
            check_number(f"async_training.{key}", getattr(self, key), low=0)
        auto_or_integer("async_training.selection_window", self.selection_window, low=1)


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Greedy accuracy on held-out prompts, beside training."""

    every_steps: int | None = 5
    """None: only at the start and at the end."""
    prompts: int = 128
    """How many held-out prompts; 0 turns evaluation off."""
    at_start: bool = True
    """Also before the first step: what there is to compare with."""
    temperature: float = 0.0
    """0: the likeliest token each time."""
    samples: int = 1
    """Responses to each, averaged."""

    def __post_init__(self) -> None:
        check_integer("eval.every_steps", self.every_steps, low=1, optional=True)
        check_integer("eval.prompts", self.prompts, low=0)
        check_number("eval.temperature", self.temperature, low=0)
        check_integer("eval.samples", self.samples, low=1)


class Alert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a metric is worth a warning. Names as in metrics.jsonl."""

    above: float | None = None
    """Warn when it is higher."""
    below: float | None = None
    """Warn when it is lower."""


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is recorded, and where it goes beside `metrics.jsonl` in the run directory."""

    tensorboard: bool = False
    """Event files under `tensorboard/` in the run directory."""
    wandb_project: str | None = None
    """None: no Weights & Biases."""
    prometheus_port: int | None = None
    """Serve the metrics on this port of 127.0.0.1; 0 takes any free one."""
    statistics_every_s: float = 10.0
    """Seconds between two `Component Statistics` in the log."""
    alerts: dict[str, Alert] = {}
    """Metric name → thresholds."""
    custom_monitor: str | None = None
    """`module:name` of a function `(trainer_stats, rollouter_stats)`, called with each `Component Statistics`."""
    trace_every: int = 1
    """Every so many groups, one has its life traced. 0: none, and only what components do is traced."""
    trace_mb: float = 64.0
    """Of each component, the newest so many MB of trace are kept. 0: no trace."""
    samples_per_s: float = 1.0
    """Groups a second, of each rollouter, that are kept as text for the sample browser. 0: none."""
    samples_mb: float = 64.0
    """Of each rollouter, the first and the newest samples, so many MB in all. 0: none."""
    dashboard: bool = True
    """Serve the run's page on 127.0.0.1 while it lasts, from a process of its own; the start prints its address."""
    dashboard_port: int = 0
    """Of that page. 0 takes any free one."""

    def __post_init__(self) -> None:
        check_text("observe.wandb_project", self.wandb_project, "give the project's name", optional=True)
        check_integer("observe.prometheus_port", self.prometheus_port, low=0, optional=True)
        at_most("observe.prometheus_port", self.prometheus_port, LARGEST_PORT, "no port is higher")
        check_number("observe.statistics_every_s", self.statistics_every_s, above=0)
        object_name("observe.custom_monitor", self.custom_monitor)
        check_integer("observe.trace_every", self.trace_every, low=0)
        check_number("observe.trace_mb", self.trace_mb, low=0)
        check_number("observe.samples_per_s", self.samples_per_s, low=0)
        check_number("observe.samples_mb", self.samples_mb, low=0)
        check_integer("observe.dashboard_port", self.dashboard_port, low=0)
        at_most("observe.dashboard_port", self.dashboard_port, LARGEST_PORT, "no port is higher")
        for name, alert in self.alerts.items():
            if alert.above is None and alert.below is None:
                raise ConfigError(f"observe.alerts.{name}", {}, "give above, below or both")
            if alert.above is not None and alert.below is not None and alert.above < alert.below:
                raise ConfigError(
                    f"observe.alerts.{name}",
                    {"above": alert.above, "below": alert.below},
                    "every value would then raise it: above must not be less than below",
                )


class JournalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run writes down so that nothing is lost: scored groups, and what each step was trained on."""

    enabled: bool = True
    """Off: groups that are queued, and steps since the last checkpoint, are lost with the process that holds them."""
    keep_groups: int = 256
    """Groups kept for `freewheel inspect --group` after a checkpoint covers their step."""

    def __post_init__(self) -> None:
        check_integer("journal.keep_groups", self.keep_groups, low=0)


class RecoveryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when a part of the run dies."""

    max_restarts: int = 5
    """Times in a row that a part is started anew before a step is trained; then the run ends and can be resumed."""
    backoff_s: float = 1.0
    """Before the second restart in a row; doubled from one to the next, 30 s at most. The first comes at once."""
    silent_s: float = 60.0
    """A part that has not answered for so long is ended and started anew."""

    def __post_init__(self) -> None:
        check_integer("recovery.max_restarts", self.max_restarts, low=0)
        check_number("recovery.backoff_s", self.backoff_s, low=0)
        check_number("recovery.silent_s", self.silent_s, above=0)


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster."""

    address: str | None = None
    """`auto` or `host:port` of a running cluster. None starts one here and ends it with the run."""
    room_s: float = 60.0
    """Longest time that a cluster has to find room for the run: machines that are starting join within it."""

    def __post_init__(self) -> None:
        check_text("ray.address", self.address, "give 'auto' or host:port", optional=True)
        check_number("ray.room_s", self.room_s, above=0)


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. The defaults run on the machine at hand."""

    mode: Mode = "fully_async"
    """`sync`: generate, then train. `one_step_off`: batch k trains while k+1 generates. `fully_async`: streaming."""
    seed: int = 0
    """Of the order of prompts and of every draw."""
    run_dir: str | None = None
    """None: a new folder under `runs/`."""
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
        check_integer("seed", self.seed, low=0)
        at_most("seed", self.seed, LARGEST_SEED, "seeds have 64 bits")
        check_text("run_dir", self.run_dir, "give a folder's path", optional=True)
        check_pairs(self)

    @property
    def staleness_threshold(self) -> int:
        """What holds: `mode` fixes it for the two synchronous modes."""
        return THRESHOLDS.get(self.mode, self.async_training.staleness_threshold)

    @property
    def in_flight_updates(self) -> bool:
        return self.mode == "fully_async" and self.async_training.in_flight_updates

    @property
    def uses_embedded_model(self) -> bool:
        return self.model.path == EMBEDDED

    @property
    def widest_window(self) -> int:
        """W under which no sample lags more than `max_staleness_allowed`."""
        per_version = self.trainer.groups_per_step * self.async_training.sync_every_steps
        return (self.async_training.max_staleness_allowed - self.staleness_threshold) * per_version + 1

    @property
    def bounds(self) -> Bounds:
        """The arithmetic of DESIGN §2, resolved."""
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
        """`optimizer.lr`, `auto` resolved."""
        if self.optimizer.lr != "auto":
            return self.optimizer.lr
        return EMBEDDED_LR if self.uses_embedded_model else USUAL_LR

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


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
