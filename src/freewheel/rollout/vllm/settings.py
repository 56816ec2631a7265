"""From a run's settings to the arguments of a vLLM engine.

    TrainConfig, Plan, the model's own config ─▶ engine_arguments ─▶ AsyncEngineArgs(**…)
    rollout.vllm: any argument by vLLM's own name ──────▲  what only freewheel can know is refused, with the reason

Pure: which arguments this vLLM knows is given. Needs no vLLM.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.runtime.config import TrainConfig
    from freewheel.runtime.plan import Plan

SET_HERE: Mapping[str, str] = {
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
"""Arguments that cannot be given in `rollout.vllm`, and why."""
LOGPROBS = "processed_logprobs"
"""At the sampling temperature. Where top_p or top_k cut the distribution, those of what is left."""
BLOCK_TOKENS = 128
"""Of vLLM's KV cache on a CPU, where nobody says otherwise. A GPU's are smaller."""
WORKSPACE_BYTES = 2 << 30
"""Of a GPU, for an engine beside weights and KV cache: activations, CUDA graphs, CUDA's own."""
GIB = 2**30
KV_SPARE = 1.25
"""KV cache whose size we say, in units of what all slots take: the rest is for prefixes that are kept."""
LARGEST_SEED = 2**32
"""Of numpy's generators, which vLLM seeds too."""
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


def environment(device: str) -> dict[str, str]:
    """Variables that vLLM reads when it is imported, where the user has not set them."""
    found = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # what a command prints is for programs to read
        "VLLM_NO_USAGE_STATS": "1",  # a run tells nobody about itself
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process with threads must not be forked
    }
    if device == "cpu":
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # `rollout.threads` are this process's, and others share cores
    return found


def set_environment(device: str, environ: MutableMapping[str, str] = os.environ) -> None:
    for name, value in environment(device).items():
        environ.setdefault(name, value)


def check_arguments(given: Mapping[str, Any], known: Collection[str] | None) -> None:
    """Raises for an argument of `rollout.vllm` that is freewheel's to set, or that this vLLM does not know. `known`:
    None where that cannot be asked yet."""
    for key, value in given.items():
        if key in SET_HERE:
            raise ConfigError(f"rollout.vllm.{key}", value, f"{SET_HERE[key]}: leave it out")
        if known is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            remedy = f"did you mean {' or '.join(near)}?" if near else "see AsyncEngineArgs of vLLM for their names"
            raise ConfigError(f"rollout.vllm.{key}", value, f"this vLLM has no such argument: {remedy}")


def engine_arguments(
    *,
    config: TrainConfig,
    plan: Plan,
    model_path: str,
    model_config: Any,
    max_model_len: int,
    backend: str,
    worker_extension: str,
    known: Collection[str],
    parameters: int,
    gpu_bytes: int = 0,
) -> dict[str, Any]:
    """`model_config`: the model's, as transformers reads it. `backend`, `worker_extension`: how weights arrive.
    `parameters`: of the model. `gpu_bytes`: the memory of the GPU that it is to be on."""
    given = config.rollout.vllm
    check_arguments(given, known)
    if given.get("max_model_len", max_model_len) < max_model_len:
        raise ConfigError(
            "rollout.vllm.max_model_len",
            given["max_model_len"],
            f"the longest prompt and rollout.max_new_tokens are {max_model_len} tokens: give that or more, or leave it",
        )
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": plan.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": config.seed % LARGEST_SEED,
        "max_model_len": max_model_len,
        "max_num_seqs": plan.slots,
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "pipeline_parallel_size": config.rollout.pipeline_parallel_size,
        "logprobs_mode": LOGPROBS,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": worker_extension,
    }
    if config.rollout.tensor_parallel_size * config.rollout.pipeline_parallel_size > 1:
        # A replica has its GPUs in one bundle of Ray's. vLLM's own choice there would be a bundle for each.
        arguments["distributed_executor_backend"] = "mp"
    needed = partial(kv_bytes, model_config, plan.dtype, max_model_len=given.get("max_model_len", max_model_len))
    if plan.device_rollout == "cuda":
        arguments["gpu_memory_utilization"] = plan.gpu_memory_share
        if plan.engines_on_a_gpu > 1 and "kv_cache_memory_bytes" not in given:
            # vLLM measures what its share leaves it while it starts, and takes what the others take meanwhile for its
            # own: it would find no room at all.
            weights = parameters * NUMBER_BYTES[plan.dtype]
            room = kv_room(plan.gpu_memory_share, gpu_bytes, weights)
            if room < needed(1):
                raise _crowded(config, plan, gpu_bytes, weights + WORKSPACE_BYTES, needed(1))
            arguments["kv_cache_memory_bytes"] = min(room, needed(plan.slots))
    else:  # left to itself it takes nine tenths of the memory
        arguments["kv_cache_memory_bytes"] = needed(plan.slots)
    return arguments | given


def kv_room(share: float, gpu_bytes: int, weights: int) -> int:
    """What an engine's share of a GPU leaves for keys and values; below 0 where not even the rest fits."""
    return int(share * gpu_bytes) - weights - WORKSPACE_BYTES


def _crowded(config: TrainConfig, plan: Plan, gpu_bytes: int, beside: int, sequence: int) -> ConfigError:
    return ConfigError(
        "rollout.replicas",
        config.rollout.replicas,
        f"{plan.engines_on_a_gpu} engines are on a GPU, {plan.gpu_memory_share * gpu_bytes / GIB:.1f} GiB for each; "
        f"weights and workspace take {beside / GIB:.1f}, one sequence at its longest {sequence / GIB:.1f}: give fewer, "
        "raise rollout.gpu_memory_share, or lower rollout.max_new_tokens or data.max_prompt_tokens",
    )


def kv_bytes(model_config: Any, dtype: str, slots: int, *, max_model_len: int) -> int:
    """For all slots at their longest, in whole blocks."""
    text = model_config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    token = text.num_hidden_layers * 2 * kv_heads * head * NUMBER_BYTES[dtype]
    blocks = slots * -(-max_model_len // BLOCK_TOKENS) + 1  # one is never given away
    return int(token * BLOCK_TOKENS * blocks * KV_SPARE)
