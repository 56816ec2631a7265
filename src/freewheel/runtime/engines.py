"""Which engine a rollouter's process generates with, made from what a run says of it.

    rollout.engine ─▶ native: the model in this process
                   ├▶ vllm:   vLLM's engine in processes of its own        ─▶ Loaded: engine, generation config
                   └▶ vllm with rollout.urls: a server of the user's

Called by `RolloutSide` and by `freewheel eval`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from freewheel.runtime.config import TrainConfig

if TYPE_CHECKING:
    from freewheel.rollout.engine import Engine
    from freewheel.runtime.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine that is ready."""

    engine: Engine
    generation_config: Any
    """The model's own, which may say what ends a response."""


def load_engine(
    *, config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int = 0, replica: int = 0
) -> Loaded:
    """`longest_tokens`: of the prompts. Takes as long as loading the model does."""
    if config.rollout.urls is not None:
        return _server(config, plan, model_path, longest_tokens, version, config.rollout.urls[replica])
    load = _vllm if config.rollout.engine == "vllm" else _native
    return load(config, plan, model_path, longest_tokens, version)


def _native(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int) -> Loaded:
    from freewheel.rollout.native import NativeEngine
    from freewheel.runtime.building import load_causal_lm

    model = load_causal_lm(model_path, config, plan.dtype).to(plan.device_rollout)
    engine = NativeEngine(
        model,
        slots=plan.slots,
        max_prompt_tokens=_longest(config, plan, model.config, longest_tokens),
        max_new_tokens=plan.max_new_tokens,
        version=version,
    )
    return Loaded(engine=engine, generation_config=model.generation_config)


def _vllm(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int) -> Loaded:
    from freewheel.rollout.vllm import api, orphan, settings
    from freewheel.rollout.vllm.engine import VllmEngine
    from freewheel.rollout.vllm.transfer import BACKENDS, WORKER_EXTENSION, shipped
    from freewheel.runtime.building import load_model_config

    api.require()
    settings.set_environment(plan.device_rollout)
    orphan.claim()
    api.check_device(plan.device_rollout)
    r = config.rollout
    api.check_sampling("rollout", temperature=r.temperature, top_p=r.top_p, top_k=r.top_k)
    api.check_sampling("eval", temperature=config.eval.temperature)
    model_config, generation_config = load_model_config(model_path, config)
    api.check_attention(plan.device_rollout, model_path, model_config)
    longest = _longest(config, plan, model_config, longest_tokens)
    arguments = settings.engine_arguments(
        config=config,
        plan=plan,
        model_path=model_path,
        model_config=model_config,
        max_model_len=longest + plan.max_new_tokens,
        backend=BACKENDS[plan.transport],
        worker_extension=WORKER_EXTENSION,
        known=api.argument_names(),
    )
    engine = VllmEngine(
        partial(api.Llm, api.start(arguments, config.rollout.vllm), seeded=plan.device_rollout == "cpu"),
        shipped=partial(shipped, workers=r.tensor_parallel_size * r.pipeline_parallel_size),
        slots=plan.slots,
        max_prompt_tokens=longest,
        max_new_tokens=plan.max_new_tokens,
        vocabulary=model_config.get_text_config(decoder=True).vocab_size,
        version=version,
    )
    return Loaded(engine=engine, generation_config=generation_config)


def _server(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int, url: str) -> Loaded:
    from freewheel.rollout.vllm.engine import VllmEngine
    from freewheel.rollout.vllm.remote import RemoteLlm, find_server
    from freewheel.rollout.vllm.transfer import shipped
    from freewheel.runtime.building import load_causal_lm, load_model_config
    from freewheel.sync.weights import Weights, pack

    def initial() -> Weights:
        """What the server was started from, or was given by an earlier run, is not for us to know."""
        model = load_causal_lm(model_path, config, plan.dtype)
        return pack({name: parameter.detach() for name, parameter in model.named_parameters()})

    model_config, generation_config = load_model_config(model_path, config)
    longest = _longest(config, plan, model_config, longest_tokens)
    engine = VllmEngine(
        partial(RemoteLlm, find_server(url, longest + plan.max_new_tokens, plan.dtype)),
        shipped=shipped,
        slots=plan.slots,
        max_prompt_tokens=longest,
        max_new_tokens=plan.max_new_tokens,
        vocabulary=model_config.get_text_config(decoder=True).vocab_size,
        version=version,
        initial=initial,
    )
    return Loaded(engine=engine, generation_config=generation_config)


def _longest(config: TrainConfig, plan: Plan, model_config: Any, longest_tokens: int) -> int:
    """A rollouter of the user's may go on from a response: a later turn is a prompt too."""
    if config.rollout.rollouter_class is None:
        return longest_tokens
    positions = getattr(model_config, "max_position_embeddings", None) or math.inf
    return max(longest_tokens, int(min(plan.max_prompt_tokens, positions - plan.max_new_tokens)))
