"""`rollout.engine=vllm`: from a run's configuration to a vLLM engine, or to a server of the user's (`rollout.urls`).

    EngineSettings, the model's own config ─▶ engine_arguments ─▶ AsyncEngineArgs(**…) ─▶ VllmEngine
    rollout.vllm: any argument by vLLM's own name ──▲  except those that freewheel must set (`SET_BY_FREEWHEEL`)

`engine_arguments` is pure. The checks run in a child process before a run starts (`freewheel.runtime.preflight`).
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from freewheel.errors import ConfigError
from freewheel.rollout.engines import EngineFactory, EngineSettings, GpuShare, LoadedEngine, RolloutOptions
from freewheel.rollout.models import NUMBER_BYTES, count_parameters, load_causal_lm, load_model_config
from freewheel.rollout.vllm import api
from freewheel.rollout.vllm.remote import RemoteLlm, Server, find_server
from freewheel.rollout.vllm.transfer import BACKENDS, ROLLOUTER, WORKER_EXTENSION, ship

if TYPE_CHECKING:
    from freewheel.sync.weights import Weights

log = logging.getLogger("freewheel.rollout")

SET_BY_FREEWHEEL: Mapping[str, str] = {
    "model": "model.path says it",
    "dtype": "model.dtype says it: training and generation must have the same",
    "tokenizer": "prompts come as tokens, and it has none",
    "skip_tokenizer_init": "prompts come as tokens, and it has no tokenizer",
    "max_num_seqs": "rollout.slots says it",
    "gpu_memory_utilization": "rollout.gpu_memory_share says it",
    "tensor_parallel_size": "rollout.tensor_parallel_size says it",
    "pipeline_parallel_size": "rollout.pipeline_parallel_size says it",
    "data_parallel_size": "rollout.replicas says it",
    "generation_config": "rollout says how responses are sampled",
    "logprobs_mode": "training needs log-probabilities at the sampling temperature",
    "weight_transfer_config": "async_training.weight_transport says how weights get there",
    "worker_extension_cls": "freewheel's own takes over new weights",
}
"""Arguments that `rollout.vllm` must not contain, and why."""
LOGPROBS = "processed_logprobs"
"""At the sampling temperature. If top_p or top_k cut the distribution: of what is left."""
BLOCK_TOKENS = 128
"""A block of vLLM's KV cache on a CPU, by default. Blocks on a GPU are smaller."""
WORKSPACE_BYTES = 2 << 30
"""What an engine takes on a GPU besides weights and KV cache: activations, CUDA graphs, CUDA itself."""
GIB = 2**30
KV_SPARE = 1.25
"""Size of the KV cache, if we set it, relative to what all slots need. The rest keeps prefixes for later prompts."""
LARGEST_SEED = 2**32
"""vLLM seeds numpy's generators too, which take 32 bits."""


class VllmFactory(EngineFactory):
    """vLLM in processes of its own, on any number of GPUs or on a CPU."""

    transports = ("object_store", "ipc", "nccl")
    has_check = True

    def check_options(self, options: RolloutOptions) -> None:
        if options.urls is None:
            check_arguments(options.vllm, None)  # vLLM itself knows which other names exist
        elif options.replicas not in ("auto", len(options.urls)):
            remedy = f"rollout.urls names {len(options.urls)} servers: give auto"
            raise ConfigError("rollout.replicas", options.replicas, remedy)

    def packages(self, options: RolloutOptions) -> tuple[str, ...]:
        return ("vllm",) if options.urls is None else ()

    def require(self, options: RolloutOptions) -> None:
        if options.urls is None:
            api.require()

    def check(self, settings: EngineSettings) -> None:
        urls = settings.options.urls
        if urls is None:
            api.engine_config(_check(settings).arguments, settings.options.vllm)
        for replica in range(len(urls or ())):
            _check(replace(settings, replica=replica))

    def load(self, settings: EngineSettings) -> LoadedEngine:
        from freewheel.rollout.vllm.engine import VllmEngine

        checked, path = _check(settings), settings.model_path
        connect: Callable[..., Any]
        if checked.server is None:
            log.info("vLLM loads and compiles %s now; it is silent until that is done, a minute or more", path)
            llm = api.start(checked.arguments, settings.options.vllm)
            connect = partial(api.Llm, llm, seeded=settings.device == "cpu")
        else:
            connect = partial(RemoteLlm, checked.server)
        engine = VllmEngine(
            connect,
            ship=partial(ship, replica=settings.replica, workers=_workers(settings.options)),
            slots=settings.slots,
            max_prompt_tokens=checked.longest,
            max_new_tokens=settings.max_new_tokens,
            vocabulary=int(checked.model_config.get_text_config(decoder=True).vocab_size),
            version=settings.version,
            initial=None if checked.server is None else partial(_read_weights, settings),
        )
        return LoadedEngine(engine=engine, generation_config=checked.generation_config)

    # -- for the plan -------------------------------------------------------------------------------------------------

    def describe(self, options: RolloutOptions, slots: int) -> str:
        if options.urls is None:
            return super().describe(options, slots)
        many = len(options.urls) > 1
        servers = f"the vLLM server{'s' * many} {', '.join(options.urls)}"
        return f"asks {servers} for responses, {slots} at a time{' each' * many}"

    def start_note(self, options: RolloutOptions) -> str | None:
        if options.urls is not None:
            return None
        return "vLLM loads and compiles the model first, and is silent meanwhile: a minute or more"

    def estimate_memory(
        self, options: RolloutOptions, needed: Mapping[str, int], gpu: GpuShare | None
    ) -> dict[str, int]:
        """A vLLM that is alone on its GPU takes its whole share, whatever its slots need."""
        if options.urls is not None:
            return {"weights": needed["weights"]}  # sent once at the start; keys and values are the server's
        if gpu is None:
            return dict(needed)
        weights = needed["weights"] // (options.tensor_parallel_size * options.pipeline_parallel_size)
        if gpu.engines == 1:
            return {"weights": weights, "KV cache": max(0, int(gpu.share * gpu.gpu_bytes) - weights)}
        room = max(0, kv_room(gpu.share, gpu.gpu_bytes, weights))
        cache = min(room, int(needed["KV cache"] * KV_SPARE))
        return {"weights": weights, "KV cache": cache, "workspace": WORKSPACE_BYTES}


# -- vLLM's arguments -------------------------------------------------------------------------------------------------


def set_environment(device: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that vLLM reads when it is imported. Variables that the user has set stay."""
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for programs to read
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no telemetry
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a process with threads must not fork
    if device == "cpu":  # `rollout.threads` belongs to this process; others share cores
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environ[ROLLOUTER] = str(os.getpid())  # vLLM's processes end with this one


def check_arguments(given: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raises ConfigError for an argument in `rollout.vllm` that freewheel sets, or that this vLLM does not have.
    `known`: None before vLLM can be asked."""
    for key, value in given.items():
        if key in SET_BY_FREEWHEEL:
            raise ConfigError(f"rollout.vllm.{key}", value, f"{SET_BY_FREEWHEEL[key]}: leave it out")
        if known is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            remedy = f"did you mean {' or '.join(near)}?" if near else "see AsyncEngineArgs of vLLM for their names"
            raise ConfigError(f"rollout.vllm.{key}", value, f"this vLLM has no such argument: {remedy}")


def engine_arguments(
    settings: EngineSettings,
    model_config: Any,
    *,
    max_model_len: int,
    known: Collection[str],
    parameters: int,
    gpu_bytes: int = 0,
) -> dict[str, Any]:
    """`model_config`: the model's, as transformers reads it. `parameters`: the model's number of them. `gpu_bytes`: the
    memory of the GPU that the engine will be on."""
    options = settings.options
    given: dict[str, Any] = options.vllm
    check_arguments(given, known)
    if given.get("max_model_len", max_model_len) < max_model_len:
        raise ConfigError(
            "rollout.vllm.max_model_len",
            given["max_model_len"],
            f"the longest prompt and rollout.max_new_tokens are {max_model_len} tokens: give that or more, or leave it",
        )
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": settings.seed % LARGEST_SEED,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.slots,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "logprobs_mode": LOGPROBS,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKENDS[settings.transport]},
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if _workers(options) > 1:
        # A replica's GPUs are in one bundle of Ray's. vLLM would by default ask Ray for a bundle per GPU.
        arguments["distributed_executor_backend"] = "mp"
    longest = given.get("max_model_len", max_model_len)
    needed = partial(kv_bytes, model_config, settings.dtype, max_model_len=longest)
    if settings.device == "cuda":
        arguments["gpu_memory_utilization"] = settings.gpu_memory_share
        if settings.engines_on_a_gpu > 1 and "kv_cache_memory_bytes" not in given:
            # vLLM measures free memory while it starts. Other engines that start at the same time would confuse it.
            weights = parameters * NUMBER_BYTES[settings.dtype]
            room = kv_room(settings.gpu_memory_share, gpu_bytes, weights)
            if room < needed(1):
                raise _crowded(settings, gpu_bytes, weights + WORKSPACE_BYTES, needed(1))
            arguments["kv_cache_memory_bytes"] = min(room, needed(settings.slots))
    else:  # by default vLLM takes nine tenths of the memory
        arguments["kv_cache_memory_bytes"] = needed(settings.slots)
    return arguments | given


def kv_room(share: float, gpu_bytes: int, weights: int) -> int:
    """What an engine's share of a GPU leaves for keys and values. Negative if not even the rest fits."""
    return int(share * gpu_bytes) - weights - WORKSPACE_BYTES


def _crowded(settings: EngineSettings, gpu_bytes: int, fixed: int, sequence: int) -> ConfigError:
    return ConfigError(
        "rollout.replicas",
        settings.options.replicas,
        f"{settings.engines_on_a_gpu} engines are on a GPU, {settings.gpu_memory_share * gpu_bytes / GIB:.1f} GiB for "
        f"each; weights and workspace take {fixed / GIB:.1f}, one sequence at its longest {sequence / GIB:.1f}: give "
        "fewer, raise rollout.gpu_memory_share, or lower rollout.max_new_tokens or data.max_prompt_tokens",
    )


def kv_bytes(model_config: Any, dtype: str, slots: int, *, max_model_len: int) -> int:
    """KV cache for all slots at full length, in whole blocks."""
    text = model_config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    token = text.num_hidden_layers * 2 * kv_heads * head * NUMBER_BYTES[dtype]
    blocks = slots * -(-max_model_len // BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    return int(token * BLOCK_TOKENS * blocks * KV_SPARE)


def _workers(options: RolloutOptions) -> int:
    return int(options.tensor_parallel_size * options.pipeline_parallel_size)


# -- checks and loading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """The checked ingredients of an engine."""

    model_config: Any
    generation_config: Any
    longest: int
    """Tokens of the longest prompt."""
    arguments: dict[str, Any]
    """For vLLM's own engine. Empty if there is a server."""
    server: Server | None


def _check(settings: EngineSettings) -> _Checked:
    """Raise what vLLM or the server would refuse, as far as that is known without loading the model."""
    options, path = settings.options, settings.model_path
    if options.urls is None:
        api.require()
        set_environment(settings.device)
        api.check_device(settings.device)
        api.check_sampling("rollout", temperature=options.temperature, top_p=options.top_p, top_k=options.top_k)
        api.check_sampling("eval", temperature=settings.eval_temperature)
    model_config, generation_config = load_model_config(path, trust_remote_code=settings.trust_remote_code)
    longest = settings.prompt_limit(model_config)
    max_model_len = longest + settings.max_new_tokens
    arguments: dict[str, Any] = {}
    server = None
    if options.urls is None:
        api.check_attention(settings.device, path, model_config)
        arguments = engine_arguments(
            settings,
            model_config,
            max_model_len=max_model_len,
            known=api.argument_names(),
            parameters=count_parameters(path, model_config, trust_remote_code=settings.trust_remote_code),
            gpu_bytes=api.gpu_bytes() if settings.device == "cuda" else 0,
        )
    else:
        server = find_server(options.urls[settings.replica], max_model_len, settings.dtype)
    return _Checked(
        model_config=model_config,
        generation_config=generation_config,
        longest=longest,
        arguments=arguments,
        server=server,
    )


def _read_weights(settings: EngineSettings) -> Weights:
    """The weights that a server gets first: it may have been started with others, or hold those of an earlier run."""
    from freewheel.sync.weights import pack

    model = load_causal_lm(settings.model_path, settings.dtype, trust_remote_code=settings.trust_remote_code)
    return pack({name: parameter.detach() for name, parameter in model.named_parameters()})
