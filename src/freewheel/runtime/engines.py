"""Which engine a rollouter's process generates with, made from what a run says of it.

    rollout.engine ─▶ native: the model in this process
                   ├▶ vllm:   vLLM's engine in processes of its own        ─▶ Loaded: engine, generation config
                   └▶ vllm with rollout.urls: a server of the user's

Called by `RolloutSide` and by `freewheel eval`. `check_engine` goes the same way as far as nothing is loaded: before a
run starts, in a child process (`freewheel.runtime.engines`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from freewheel.errors import ConfigError
from freewheel.runtime.config import TrainConfig

if TYPE_CHECKING:
    from freewheel.rollout.engine import Engine
    from freewheel.runtime.plan import Plan

log = logging.getLogger("freewheel.runtime")


class PromptsTooLong(ConfigError):
    """The model has no positions for the longest prompt and a response to it."""

    def __init__(self, config: TrainConfig, *, prompt: int, response: int, positions: int) -> None:
        self.why = f"a prompt has {prompt} tokens, a response up to {response}, and the model has {positions} for both"
        most = max(0, positions - response)
        remedy = f"{self.why}: give at most {most}, and longer prompts are left out"
        super().__init__("data.max_prompt_tokens", config.data.max_prompt_tokens, remedy)


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


def check_engine(*, config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int) -> None:
    """Raises what `load_engine` would refuse, for every replica. Loads no model. vLLM's part alone: what the native
    engine refuses, a plan and the model's own files say."""
    if config.rollout.engine != "vllm":
        return
    if config.rollout.urls is None:
        from freewheel.rollout.vllm import api

        arguments = _vllm_setup(config, plan, model_path, longest_tokens).arguments
        api.engine_config(arguments, config.rollout.vllm)
        return
    for url in config.rollout.urls:
        _server_setup(config, plan, model_path, longest_tokens, url)


# -- native -----------------------------------------------------------------------------------------------------------


def _native(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int) -> Loaded:
    from freewheel.rollout.native import NativeEngine
    from freewheel.runtime.building import load_causal_lm

    model = load_causal_lm(model_path, config, plan.dtype).to(plan.device_rollout)
    longest = _longest(config, plan, model.config, longest_tokens)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and longest + plan.max_new_tokens > positions:
        raise PromptsTooLong(config, prompt=longest, response=plan.max_new_tokens, positions=positions)
    engine = NativeEngine(
        model,
        slots=plan.slots,
        max_prompt_tokens=longest,
        max_new_tokens=plan.max_new_tokens,
        version=version,
    )
    return Loaded(engine=engine, generation_config=model.generation_config)


# -- vLLM -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What an engine is made with, checked."""

    model_config: Any
    generation_config: Any
    longest: int
    """Tokens of a prompt, at most."""
    arguments: dict[str, Any]
    """Of vLLM's own engine."""

    @property
    def vocabulary(self) -> int:
        return int(self.model_config.get_text_config(decoder=True).vocab_size)


def _vllm_setup(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int) -> _Setup:
    from freewheel.rollout.vllm import api, settings
    from freewheel.rollout.vllm.transfer import BACKENDS, WORKER_EXTENSION
    from freewheel.runtime.building import count_parameters, load_model_config

    api.require()
    settings.set_environment(plan.device_rollout)
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
        parameters=count_parameters(model_path, model_config, config),
        gpu_bytes=api.gpu_bytes() if plan.device_rollout == "cuda" else 0,
    )
    return _Setup(model_config=model_config, generation_config=generation_config, longest=longest, arguments=arguments)


def _vllm(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int) -> Loaded:
    from freewheel.rollout.vllm import api, orphan
    from freewheel.rollout.vllm.engine import VllmEngine
    from freewheel.rollout.vllm.transfer import shipped

    orphan.claim()
    setup = _vllm_setup(config, plan, model_path, longest_tokens)
    log.info("vLLM loads and compiles %s now; it is silent until that is done, a minute or more", model_path)
    r = config.rollout
    engine = VllmEngine(
        partial(api.Llm, api.start(setup.arguments, r.vllm), seeded=plan.device_rollout == "cpu"),
        shipped=partial(shipped, workers=r.tensor_parallel_size * r.pipeline_parallel_size),
        slots=plan.slots,
        max_prompt_tokens=setup.longest,
        max_new_tokens=plan.max_new_tokens,
        vocabulary=setup.vocabulary,
        version=version,
    )
    return Loaded(engine=engine, generation_config=setup.generation_config)


# -- a server ---------------------------------------------------------------------------------------------------------


def _server_setup(
    config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, url: str
) -> tuple[_Setup, Any]:
    from freewheel.rollout.vllm.remote import find_server
    from freewheel.runtime.building import load_model_config

    model_config, generation_config = load_model_config(model_path, config)
    longest = _longest(config, plan, model_config, longest_tokens)
    server = find_server(url, longest + plan.max_new_tokens, plan.dtype)
    setup = _Setup(model_config=model_config, generation_config=generation_config, longest=longest, arguments={})
    return setup, server


def _server(config: TrainConfig, plan: Plan, model_path: str, longest_tokens: int, version: int, url: str) -> Loaded:
    from freewheel.rollout.vllm.engine import VllmEngine
    from freewheel.rollout.vllm.remote import RemoteLlm
    from freewheel.rollout.vllm.transfer import shipped
    from freewheel.runtime.building import load_causal_lm
    from freewheel.sync.weights import Weights, pack

    def initial() -> Weights:
        """What the server was started from, or was given by an earlier run, is not for us to know."""
        model = load_causal_lm(model_path, config, plan.dtype)
        return pack({name: parameter.detach() for name, parameter in model.named_parameters()})

    setup, server = _server_setup(config, plan, model_path, longest_tokens, url)
    engine = VllmEngine(
        partial(RemoteLlm, server),
        shipped=shipped,
        slots=plan.slots,
        max_prompt_tokens=setup.longest,
        max_new_tokens=plan.max_new_tokens,
        vocabulary=setup.vocabulary,
        version=version,
        initial=initial,
    )
    return Loaded(engine=engine, generation_config=setup.generation_config)


def _longest(config: TrainConfig, plan: Plan, model_config: Any, longest_tokens: int) -> int:
    """A rollouter of the user's may go on from a response: a later turn is a prompt too."""
    if config.rollout.rollouter_class is None:
        return longest_tokens
    positions = getattr(model_config, "max_position_embeddings", None) or math.inf
    return max(longest_tokens, int(min(plan.max_prompt_tokens, positions - plan.max_new_tokens)))


LOOK_S = 180.0
"""For vLLM's import on a cold disk. One that takes longer is left to the rollouters."""
LAST_CHARS = 300
"""Of the line that a child died with."""


def engine_problems(plan: Plan, model: Path | None) -> list[ConfigError]:
    """What stands against the run's engine on this machine. `model`: its folder, where it is here."""
    rollout = plan.config.rollout
    if rollout.engine != "vllm":
        return []
    if rollout.urls is None:
        from freewheel.rollout.vllm.api import require

        try:
            require()
        except ConfigError as error:
            return [error]
    if plan.config.ray.address is not None or model is None:
        return []
    return _asked(plan, str(model))


def _asked(plan: Plan, model: str) -> list[ConfigError]:
    path = os.pathsep.join(filter(None, sys.path))  # a user's task may be in the working directory
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    try:
        done = subprocess.run(
            command,
            input=pickle.dumps((plan, model)),
            capture_output=True,
            timeout=LOOK_S,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return []
    if done.returncode == 0:
        found: ConfigError | None = pickle.loads(done.stdout)  # from our own child
        return [] if found is None else [found]
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    why = lines[-1].strip()[:LAST_CHARS] if lines else f"its import ended with {done.returncode}"
    return [ConfigError("rollout.engine", plan.config.rollout.engine, f"it cannot be used here: {why}")]


def _answer(given: BinaryIO) -> bytes:
    """In the child."""
    from freewheel.runtime.building import Prompts, is_here, load_tokenizer
    from freewheel.runtime.engines import check_engine

    plan, model = pickle.load(given)  # from our own parent
    config = plan.config
    try:
        longest = 1
        if is_here(config.data.task, config.data.train):
            source = Prompts(config, load_tokenizer(config))
            source.train()
            longest = source.longest_tokens
        check_engine(config=config, plan=plan, model_path=model, longest_tokens=longest)
    except ConfigError as error:
        return pickle.dumps(error)
    return pickle.dumps(None)


def main() -> None:
    """Standard output is for the answer alone, whatever the libraries print."""
    answer_to = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answer_to, "wb") as out, contextlib.suppress(BrokenPipeError):
        out.write(_answer(sys.stdin.buffer))


if __name__ == "__main__":
    main()
