"""What a config means on a machine: devices, arithmetic, memory, notes and problems."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freewheel.data.tasks.word_problems import model_path
from freewheel.errors import ConfigError
from freewheel.queue.staleness import StalenessPolicy
from freewheel.runtime import placement
from freewheel.runtime.cluster import place_of, pools
from freewheel.runtime.config import TrainConfig
from freewheel.runtime.config_files import compose, to_config
from freewheel.runtime.model_size import ModelSize, find_folder, read_model_size
from freewheel.runtime.placement import Gpu, Machine
from freewheel.runtime.run_plan import RunPlan, render, resolve

GIB = 1 << 30
H200 = Gpu(name="NVIDIA H200", memory_bytes=140 * GIB)
T4 = Gpu(name="Tesla T4", memory_bytes=15 * GIB, bfloat16=False)
LAPTOP = Machine(cpus=2, memory_bytes=16 * GIB)
SMALL = ModelSize(parameters=500_000_000, layers=24, hidden=896, vocabulary=151_936, kv_width=128)


def machine(*gpus: Gpu) -> Machine:
    return Machine(cpus=16, memory_bytes=128 * GIB, gpus=gpus)


def plan(where: Machine, **sections: dict[str, Any]) -> RunPlan:
    return resolve(to_config(sections), where)


@pytest.mark.parametrize(
    ("gpus", "wanted", "replicas", "trainer", "each"),
    [
        *((1, "auto", 1, 0.5, 0.5), (2, "auto", 1, 1.0, 1.0), (4, "auto", 3, 1.0, 1.0), (8, "auto", 7, 1.0, 1.0)),
        *((1, 3, 3, 0.5, 0.5 / 3), (2, 2, 2, 1.0, 0.5), (3, 3, 3, 1.0, 0.5), (4, 7, 7, 1.0, 1 / 3)),
    ],
)
def test_gpus_are_split_between_training_and_generation(
    gpus: int, wanted: Any, replicas: int, trainer: float, each: float
):
    found = plan(machine(*[H200] * gpus), rollout={"replicas": wanted})
    assert (found.replicas, found.gpus_trainer, found.gpus_per_replica) == (replicas, trainer, pytest.approx(each))
    assert found.gpus_trainer + found.replicas * found.gpus_per_replica <= gpus + 1e-9, "Ray has no more"
    found.check()


@pytest.mark.parametrize(
    ("where", "sections", "expected"),
    [
        (LAPTOP, {}, ("cpu", "cpu", "float32", 1, 1, 0.0, 0.0)),
        (LAPTOP, {"trainer": {"world_size": 2}}, ("cpu", "cpu", "float32", 1, 2, 0.0, 0.0)),
        (LAPTOP, {"model": {"dtype": "bfloat16"}}, ("cpu", "cpu", "bfloat16", 1, 1, 0.0, 0.0)),
        (machine(H200), {}, ("cuda", "cuda", "bfloat16", 1, 1, 0.5, 0.5)),
        (machine(T4), {}, ("cuda", "cuda", "float32", 1, 1, 0.5, 0.5)),
        (machine(H200), {"rollout": {"device": "cpu"}}, ("cuda", "cpu", "float32", 1, 1, 1.0, 0.0)),
        (
            machine(H200),
            {"trainer": {"device": "cpu"}, "rollout": {"n_gpus_per_node": 0}},
            ("cpu", "cpu", "float32", 1, 1, 0.0, 0.0),
        ),
        (machine(*[H200] * 4), {"trainer": {"n_gpus_per_node": 2}}, ("cuda", "cuda", "bfloat16", 2, 2, 1.0, 1.0)),
    ],
)
def test_devices_and_the_type_of_numbers_follow_from_the_machine(
    where: Machine, sections: dict[str, Any], expected: tuple[Any, ...]
):
    found = plan(where, **sections)
    placed = (found.device_trainer, found.device_rollout, found.dtype, found.replicas, found.world_size)
    assert (*placed, found.gpus_trainer, found.gpus_per_replica) == expected
    assert (found.slots, found.max_new_tokens, found.problems) == (256 // found.replicas, 20, ())


@pytest.mark.parametrize(
    ("where", "sections", "key"),
    [
        (LAPTOP, {"trainer": {"device": "cuda"}}, "trainer.device"),
        (LAPTOP, {"rollout": {"device": "cuda"}}, "rollout.device"),
        (LAPTOP, {"rollout": {"n_gpus_per_node": 2}}, "rollout.n_gpus_per_node"),
        (machine(H200), {"rollout": {"n_gpus_per_node": 1}}, "rollout.n_gpus_per_node"),
        (machine(H200, H200), {"rollout": {"n_gpus_per_node": 2}}, "rollout.n_gpus_per_node"),
        (machine(H200), {"rollout": {"engine": "vllm", "tensor_parallel_size": 2}}, "rollout.tensor_parallel_size"),
        (machine(H200, H200), {"trainer": {"n_gpus_per_node": 2}}, "rollout.n_gpus_per_node"),
        (machine(H200, H200), {"async_training": {"weight_transport": "ipc"}}, "async_training.weight_transport"),
        (machine(H200), {"async_training": {"weight_transport": "nccl"}}, "async_training.weight_transport"),
        (machine(H200), {"trainer": {"n_gpus_per_node": 2}}, "trainer.n_gpus_per_node"),
        (machine(H200), {"trainer": {"nnodes": 2}}, "trainer.nnodes"),
        (machine(H200, H200), {"rollout": {"nnodes": 2}}, "rollout.nnodes"),
    ],
)
def test_missing_hardware_is_a_problem_of_the_plan(where: Machine, sections: dict[str, Any], key: str):
    found = plan(where, **sections)
    assert found.problems[0].key == key
    assert str(found.problems[0]) in render(found).plain.replace("\n  ", " ")
    with pytest.raises(ConfigError) as caught:
        found.check()
    assert caught.value.key == key


def test_the_shipped_cluster_is_planned_on_any_machine_and_the_plan_can_be_pickled():
    found = pickle.loads(pickle.dumps(resolve(compose(config_name="cluster"), LAPTOP, model=SMALL)))
    assert not found.problems, "its GPUs are counted by Ray"
    assert (found.replicas, found.gpus_per_replica, found.world_size, found.gpus_trainer) == (2, 1.0, 8, 1.0)
    text = render(found).plain
    assert "FullyAsyncTrainer × 8" in text and "FSDP2" in text and "Rollouter × 2" in text


@pytest.mark.parametrize(
    ("gpus", "engine", "transport"),
    [
        (0, "native", "object_store"),
        (0, "vllm", "object_store"),
        (1, "native", "ipc"),
        (1, "vllm", "ipc"),
        (2, "native", "object_store"),
        (2, "vllm", "nccl"),
    ],
)
def test_weights_take_the_fastest_transport_unless_one_is_chosen(gpus: int, engine: str, transport: str):
    found = plan(machine(*[H200] * gpus), rollout={"engine": engine})
    assert found.transport == transport
    found.check()
    chosen = plan(machine(*[H200] * gpus), async_training={"weight_transport": "object_store"})
    assert chosen.transport == "object_store"


def test_a_shared_gpu_leaves_training_the_larger_part_of_its_memory():
    assert plan(machine(H200), rollout={"engine": "vllm"}).gpu_memory_share == 0.4
    assert plan(machine(H200), rollout={"engine": "vllm", "replicas": 2}).gpu_memory_share == 0.2, "of each"
    assert plan(machine(H200, H200), rollout={"engine": "vllm"}).gpu_memory_share == 0.9
    assert plan(machine(H200, H200), rollout={"engine": "vllm", "replicas": 2}).gpu_memory_share == 0.45
    assert plan(machine(H200), rollout={"engine": "vllm", "gpu_memory_share": 0.25}).gpu_memory_share == 0.25


def test_engines_are_given_no_more_of_a_gpu_than_there_is():
    given = {"engine": "vllm", "replicas": 6, "gpu_memory_share": 0.5}
    (problem,) = plan(machine(H200), rollout=given).problems
    assert str(problem).startswith("rollout.gpu_memory_share = 0.5: 6 engines are on a GPU: give 0.16 at most")
    assert not plan(machine(H200), rollout=given | {"gpu_memory_share": 0.16}).problems
    apart = {"engine": "vllm", "replicas": 2, "n_gpus_per_node": 1, "gpu_memory_share": 0.6}
    assert plan(machine(H200, H200), rollout=apart).problems, "on a GPU without the trainer too"
    assert not plan(machine(H200, H200, H200), rollout=apart | {"n_gpus_per_node": 2}).problems, "each has one"


def test_servers_take_the_place_of_engines_and_of_their_gpus():
    found = plan(machine(H200), rollout={"engine": "vllm", "urls": ["http://a:8000", "http://b:8000"]})
    assert (found.replicas, found.gpus_per_replica, found.gpus_trainer) == (2, 0.0, 1.0)
    assert found.dtype == "bfloat16", "as the trainer computes; a server's GPU is not seen from here"
    found.check()
    text = " ".join(render(found).plain.split())
    assert "asks the vLLM servers http://a:8000, http://b:8000 for responses, 128 at a time each" in text
    assert "vllm engine" not in text and "vLLM loads" not in text
    client = resolve(to_config({"rollout": {"engine": "vllm", "urls": ["http://a:8000"]}}), LAPTOP, model=SMALL)
    assert client.memory_replica == {"weights": 4 * SMALL.parameters}, "a client holds no keys and values"


def test_memory_of_a_process_is_its_share_and_vllm_takes_all_of_its_own():
    one = resolve(to_config({"trainer": {"n_gpus_per_node": 1}}), machine(*[H200] * 8), model=SMALL)
    four = resolve(to_config({"trainer": {"n_gpus_per_node": 4}}), machine(*[H200] * 8), model=SMALL)
    assert four.memory_trainer["optimizer"] * 4 == one.memory_trainer["optimizer"]
    assert four.memory_trainer["activations"] == one.memory_trainer["activations"], "a micro-batch is as long as before"
    vllm = resolve(to_config({"rollout": {"engine": "vllm"}}), machine(H200), model=SMALL)
    assert sum(vllm.memory_replica.values()) == int(0.4 * H200.memory_bytes)


def test_several_engines_on_a_gpu_take_what_their_slots_need_within_their_share():
    """vLLM cannot measure its memory while other engines start on the GPU, so it receives the size of its cache."""
    rollout = {"engine": "vllm", "replicas": 4, "slots": 10, "max_new_tokens": 100}
    four = resolve(to_config({"rollout": rollout}), machine(H200), model=SMALL)
    assert four.engines_on_a_gpu == 4
    token = SMALL.layers * 2 * SMALL.kv_width * 2
    assert four.memory_replica["KV cache"] == int(1.25 * 10 * four.tokens_per_sample * token)
    assert four.memory_replica["workspace"] == 2 << 30, "vLLM needs this on top of a cache of a given size"
    crowded = to_config({"rollout": {**rollout, "slots": 1000, "gpu_memory_share": 0.04}})
    tight = resolve(crowded, machine(H200), model=SMALL)
    assert sum(tight.memory_replica.values()) == int(0.04 * H200.memory_bytes)
    assert plan(machine(H200, H200), rollout={"replicas": 2}).engines_on_a_gpu == 2
    assert plan(machine(H200, H200)).engines_on_a_gpu == 1 and plan(LAPTOP).engines_on_a_gpu == 0


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_the_plan_says_the_batch_and_the_bound_in_numbers(mode: str):
    sections = {"mode": mode, "trainer": {"total_steps": 10, "groups_per_step": 6}, "rollout": {"n": 4}}
    found = resolve(to_config(sections), LAPTOP, rows=30)
    text = render(found).plain
    for part in (
        "6 groups × 4 responses = 24 samples",
        "24 × (512 prompt + 20 new) = 12,768 tokens",
        "30 prompts = 5.0 steps; the run goes over them 2.00 times",
        f"a sample lags at most {found.bounds.max_lag} version",
        f"held back at {StalenessPolicy(found.bounds).room:,} groups",
        *("FullyAsyncMain", "FullyAsyncTrainer", "Rollouter", "MessageQueue", "ParameterSynchronizer"),
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 110
    config = to_config({"mode": mode, "data": {"epochs": 2}, "trainer": {"groups_per_step": 8}})
    ended = resolve(config, LAPTOP, rows=30)
    assert (ended.total_prompts, ended.total_steps) == (60, 8)
    assert "data.epochs = 2 ends it before trainer.total_steps = 40" in render(ended).plain


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rollout": {"top_p": 0.9}}, "top_p"),
        ({"rollout": {"engine": "vllm"}}, "without output"),
        (
            {"mode": "sync", "async_training": {"staleness_threshold": 2, "selection_window": 1}},
            "mode=sync decides async_training.staleness_threshold, selection_window: your values have no effect",
        ),
        ({"rollout": {"replicas": 4}}, "5 threads compute on 2 CPUs"),
        ({"async_training": {"max_queue_size": 40}}, "max_queue_size = 40 holds generation back"),
        ({"ray": {"address": "auto"}}, "looks at this machine"),
        ({"algorithm": {"name": "rloo"}}, "rloo"),
        ({"reward": {"judge": {"api_endpoint": "http://j:1/v1"}}}, "No API key: the judge at http://j:1/v1 is off"),
    ],
)
def test_surprising_settings_are_noted(sections: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert any(says in note for note in plan(LAPTOP, **sections).notes)
    assert not any(says in note for note in plan(LAPTOP).notes)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_embedded_model_is_measured_without_loading_it():
    size = read_model_size(model_path())
    assert size is not None
    weights = (model_path() / "model.safetensors").stat().st_size
    assert 0.9 * weights < size.parameters * 4 < weights
    assert find_folder(TrainConfig()) == model_path()


def test_parameters_are_counted_over_all_shards(tmp_path: Path):
    text = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"num_hidden_layers": 3, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["QwenX"], "text_config": text}))
    for number, shape in enumerate(([10, 8], [3, 8, 8])):
        header = json.dumps(
            {"__metadata__": {}, "w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        ).encode()
        (tmp_path / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    size = read_model_size(tmp_path)
    assert size == ModelSize(
        parameters=80 + 192, layers=3, hidden=8, vocabulary=10, kv_width=4, architecture="QwenX", positions=None
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 3) + b"{}}"])
def test_files_without_a_size_leave_it_unknown(tmp_path: Path, content: bytes):
    assert read_model_size(tmp_path) is None
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "n_head": 2, "n_layer": 1, "vocab_size": 3}')
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read_model_size(tmp_path) is None
    assert "not known" in render(resolve(TrainConfig(), LAPTOP)).plain


def memory(**sections: dict[str, Any]) -> dict[str, int]:
    base = {"model": {"path": "x"}, "data": {"task": "my_module:task"}, "rollout": {"max_new_tokens": 512}}
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}}
    return resolve(to_config(merged), machine(H200), model=SMALL).memory_trainer


def test_settings_that_save_or_cost_memory_change_the_estimate():
    usual = memory()
    assert usual["weights"] + usual["gradients"] + usual["optimizer"] == 16 * SMALL.parameters
    assert memory(model={"gradient_checkpointing": True})["activations"] < usual["activations"]
    assert sum(memory(model={"lora": {}}).values()) < sum(usual.values())
    assert memory(algorithm={"kl_coef": 0.1})["reference"] == 2 * SMALL.parameters
    with_adapters = memory(algorithm={"kl_coef": 0.1}, model={"lora": {}})
    assert "reference" not in with_adapters, "adapters are switched off instead"
    assert memory(algorithm={"name": "ppo"})["critic"] == 18 * SMALL.parameters
    config = to_config({"rollout": {"slots": 10, "max_new_tokens": 88}, "data": {"max_prompt_tokens": 12}})
    found = resolve(config, LAPTOP, model=SMALL)
    assert found.memory_replica["KV cache"] == 10 * 100 * SMALL.layers * 2 * SMALL.kv_width * 4
    assert found.sync_bytes == SMALL.parameters * 4


def test_too_little_memory_is_noted():
    large = ModelSize(parameters=8_000_000_000, layers=32, hidden=4096, vocabulary=128_256, kv_width=1024)
    assert any(
        "A GPU has 140.0 GiB of memory" in note for note in resolve(TrainConfig(), machine(H200), model=large).notes
    )
    assert any("This machine has 16.0 GiB" in note for note in resolve(TrainConfig(), LAPTOP, model=large).notes)
    assert not any("GiB" in note for note in resolve(TrainConfig(), LAPTOP, model=read_model_size(model_path())).notes)


def test_a_file_is_taken_whole_so_no_split_of_it_is_held_out(tmp_path: Path):
    file, other = tmp_path / "all.jsonl", tmp_path / "other.jsonl"
    for path in (file, other):
        path.write_text("{}\n")
    link = tmp_path / "same.jsonl"
    link.symlink_to(file)

    def problems(held_out: Path, **evaluation: Any) -> list[str]:
        data = {"task": "rows", "train": str(file), "eval": str(held_out)}
        found = plan(LAPTOP, model={"path": "org/name"}, data=data, eval=evaluation)
        return [problem.key for problem in found.problems]

    assert problems(file) == problems(link) == ["data.eval"]
    assert problems(other) == problems(file, prompts=0) == []
    assert problems(tmp_path) == [], "a folder has splits"


def test_responses_must_have_room_in_the_model():
    short = ModelSize(parameters=1, layers=1, hidden=1, vocabulary=1, kv_width=1, positions=64)
    assert resolve(TrainConfig(), LAPTOP, model=short).max_prompt_tokens == 44
    found = resolve(to_config({"rollout": {"max_new_tokens": 64}}), LAPTOP, model=short)
    assert [problem.key for problem in found.problems] == ["rollout.max_new_tokens"]


# -- what is here -----------------------------------------------------------------------------------------------------


def test_gpus_are_those_that_the_environment_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\necho "$@" > asked\necho "NVIDIA H200, 143771, 9.0\nTesla T4, [N/A], 7.5\nfailed to communicate"\n'
    )
    smi.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(placement, "_torch_has_cuda", lambda: True)
    for allowed, asks in ((None, False), ("1,0", True)):
        if allowed is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
        first, second = Machine.here().gpus
        assert first == Gpu(name="NVIDIA H200", memory_bytes=143771 << 20, bfloat16=True)
        assert second == Gpu(name="Tesla T4", memory_bytes=0, bfloat16=False)
        assert ("-i 1,0" in (tmp_path / "asked").read_text()) == asks
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert Machine.here().gpus == ()
    assert Machine.here().cpus >= 1 and Machine.here().memory_bytes > GIB


# -- where on a cluster the processes are -----------------------------------------------------------------------------

CLUSTER = {"ray": {"address": "auto"}}
VLLM = {"engine": "vllm", "nnodes": 2, "n_gpus_per_node": 4, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("sections", "training", "generating"),
    [
        (
            {"trainer": {"nnodes": 2, "n_gpus_per_node": 4}, "rollout": {"n_gpus_per_node": 2}},
            [{"CPU": 4.0, "GPU": 4.0}] * 2,
            [{"CPU": 2.0, "GPU": 2.0}],
        ),
        ({"trainer": {"n_gpus_per_node": 1}, "rollout": VLLM}, [{"CPU": 1, "GPU": 1}], [{"CPU": 2, "GPU": 4}] * 2),
        (
            {"trainer": {"nnodes": 2, "world_size": 2, "device": "cpu"}, "rollout": {"device": "cpu"}},
            [{"CPU": 1.0}] * 2,
            [{"CPU": 1.0}],
        ),
    ],
    ids=["the shipped cluster", "an engine has all its GPUs on one machine", "no GPU"],
)
def test_each_machine_of_a_cluster_has_a_bundle(sections: dict[str, Any], training: list[Any], generating: list[Any]):
    found = pools(plan(LAPTOP, **sections, **CLUSTER))
    for role, bundles in (("trainer", training), ("rollout", generating)):
        assert [*map(dict, found[role].bundles)] == bundles and found[role].spread == (len(bundles) > 1)  # type: ignore[index]


def test_training_and_generation_that_share_a_gpu_share_a_bundle_and_cpus_alone_reserve_nothing():
    found = pools(plan(machine(H200)))
    assert found["trainer"] is found["rollout"]
    (bundle,) = found["trainer"].bundles
    assert bundle["GPU"] == 1.0, "the halves of one GPU, not of two"
    assert pools(plan(LAPTOP)) == {}


@given(machines=st.integers(1, 8), count=st.integers(1, 64))
def test_neighbours_are_on_one_machine_and_machines_are_equally_full(machines: int, count: int):
    places = [place_of(number, count, machines) for number in range(count)]
    full = [places.count(machine) for machine in range(machines)]
    assert places == sorted(places) and sum(full) == count and max(full) - min(full) <= 1
