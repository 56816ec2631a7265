"""The engines that `rollout.engine` can name, what a run needs to know about an engine before it starts one, and how
models are loaded.

    rollout.engine ─▶ find_engine ─▶ EngineFactory ┬▶ check_options, require, check     before anything starts
                                                   ├▶ transports, estimate_memory, …    for the plan
                                                   └▶ load(EngineSettings) ─▶ LoadedEngine, in the rollouter's process

`native`, `vllm` and `module:name` are found the same way. To add an engine, write a subclass of `EngineFactory` and add
a line to `ENGINES`. A plan must be possible without torch, so only the functions that load models import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freewheel.errors import ConfigError
from freewheel.utils.registry import DETAIL_CHARS, Registry

if TYPE_CHECKING:
    from freewheel.rollout.engine import Engine

KEY = "rollout.engine"
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
VLLM_KEYS = ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_share", "vllm", "urls")
"""Keys of `rollout` that only the engine vllm has."""
Transport = Literal["object_store", "ipc", "nccl"]
"""How weights travel: through host memory, within one GPU, or from GPU to GPU."""


RolloutOptions = Any
"""The section `rollout` of a run's configuration, as `freewheel.runtime.config` defines it."""


@dataclass(frozen=True, kw_only=True)
class GpuShare:
    """One engine's part of a GPU."""

    gpu_bytes: int
    share: float
    """This engine's share of the GPU's memory."""
    engines: int
    """Engines on that GPU."""


class PromptsTooLong(ConfigError):
    """The model has too few positions for the longest prompt and a response."""

    def __init__(self, max_prompt_tokens: int, *, prompt: int, response: int, positions: int) -> None:
        self.why = f"a prompt has {prompt} tokens, a response up to {response}, and the model has {positions} for both"
        most = max(0, positions - response)
        remedy = f"{self.why}: give at most {most}, and longer prompts are left out"
        super().__init__("data.max_prompt_tokens", max_prompt_tokens, remedy)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """A run's settings for one of its engines, with every `auto` resolved."""

    options: RolloutOptions
    model_path: str
    """A folder, or an id on the Hugging Face hub."""
    trust_remote_code: bool
    dtype: str
    device: Literal["cpu", "cuda"]
    transport: Transport
    slots: int
    """Sequences at a time."""
    longest_prompt: int
    """Tokens of the longest prompt in the data."""
    max_prompt_tokens: int
    """`data.max_prompt_tokens`, or less if the model has fewer positions."""
    asked_prompt_tokens: int
    """`data.max_prompt_tokens` itself, for messages."""
    max_new_tokens: int
    gpu_memory_share: float
    engines_on_a_gpu: int
    seed: int
    eval_temperature: float
    version: int = 0
    """Version of the weights in `model_path`."""
    replica: int = 0
    """The number of the rollouter."""

    def prompt_limit(self, model_config: Any) -> int:
        """The longest prompt the engine must take. A custom rollouter may continue a response; the text so far is then
        the prompt of the next turn."""
        if self.options.rollouter_class is None:
            return self.longest_prompt
        positions = getattr(model_config, "max_position_embeddings", None) or math.inf
        return max(self.longest_prompt, int(min(self.max_prompt_tokens, positions - self.max_new_tokens)))


@dataclass(frozen=True, kw_only=True)
class LoadedEngine:
    """An engine that is ready."""

    engine: Engine
    generation_config: Any
    """The model's own, which may name tokens that end a response."""


class EngineFactory:
    """Makes engines of one kind. The defaults suit an engine that runs the model in the rollouter's process."""

    transports: tuple[Transport, ...] = ("object_store", "ipc")
    """Weight transports that the engine supports."""
    has_check = False
    """Whether `check` finds problems that `check_options` and `require` cannot."""

    def check_options(self, options: RolloutOptions) -> None:
        """Raise ConfigError for settings that this engine cannot use. Called for every configuration: reads nothing
        but its argument."""
        usual = type(options)()
        for key in VLLM_KEYS:
            if getattr(options, key) != getattr(usual, key):
                remedy = f"the {options.engine} engine does not have it: leave it out, or give rollout.engine=vllm"
                raise ConfigError(f"rollout.{key}", getattr(options, key), remedy)

    def packages(self, options: RolloutOptions) -> tuple[str, ...]:
        """Python packages that this engine needs beyond those of training."""
        return ()

    def require(self, options: RolloutOptions) -> None:
        """Raise ConfigError if one of `packages` is missing or unusable. Must not import it."""

    def check(self, settings: EngineSettings) -> None:
        """Raise what `load` would refuse, without loading the model. Runs in a child process before a run starts, if
        `has_check`."""

    def load(self, settings: EngineSettings) -> LoadedEngine:
        """Make the engine of one rollouter, in its process. Takes as long as loading the model does."""
        raise NotImplementedError

    # -- for the plan -------------------------------------------------------------------------------------------------

    def describe(self, options: RolloutOptions, slots: int) -> str:
        return f"{options.engine} engine, {slots} slots"

    def start_note(self, options: RolloutOptions) -> str | None:
        """What a user should know about a slow start."""
        return None

    def estimate_memory(
        self, options: RolloutOptions, needed: Mapping[str, int], gpu: GpuShare | None
    ) -> dict[str, int]:
        """Bytes by part for one replica. `needed`: "weights" and "KV cache" for all slots. `gpu`: None on a CPU, or if
        the GPU is not known."""
        return dict(needed)

    def refill_slots(self, slots: int) -> int:
        """How many slots must be free before waiting samples enter next to running ones. For the planner."""
        return 1


class NativeFactory(EngineFactory):
    """`rollout.engine=native`: a Hugging Face decoder in the rollouter's own process, on a CPU or one GPU."""

    def refill_slots(self, slots: int) -> int:
        """An eighth of the slots: a prefill costs half a step, for one sample as for thirty."""
        return max(1, slots // 8)

    def load(self, settings: EngineSettings) -> LoadedEngine:
        from freewheel.rollout.native.engine import NativeEngine

        path, dtype = settings.model_path, settings.dtype
        model = load_causal_lm(path, dtype, trust_remote_code=settings.trust_remote_code).to(settings.device)
        longest, new = settings.prompt_limit(model.config), settings.max_new_tokens
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is not None and longest + new > positions:
            raise PromptsTooLong(settings.asked_prompt_tokens, prompt=longest, response=new, positions=positions)
        engine = NativeEngine(
            model, slots=settings.slots, max_prompt_tokens=longest, max_new_tokens=new, version=settings.version
        )
        return LoadedEngine(engine=engine, generation_config=model.generation_config)


ENGINES: Registry[type[EngineFactory]] = Registry(
    {
        "native": f"{__name__}:NativeFactory",
        "vllm": "freewheel.rollout.vllm.engine:VllmFactory",
    },
    example="my_engine:MyEngineFactory",
)


def find_engine(name: str) -> EngineFactory:
    """The factory for `rollout.engine`. Raises ConfigError for an unknown name."""
    found = ENGINES.find(KEY, name)
    if not (isinstance(found, type) and issubclass(found, EngineFactory)):
        raise ConfigError(KEY, name, f"it must be a subclass of {__name__}.EngineFactory")
    return found()


# -- models ------------------------------------------------------------------------------------------------------------


def load_causal_lm(path: str, dtype: str, *, trust_remote_code: bool) -> Any:
    """`dtype`: the name of a floating-point type, or `auto` for the type of the files."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    check_weights(Path(path))
    with loading_errors("model.path", path):
        return AutoModelForCausalLM.from_pretrained(
            path,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
        )


def load_model_config(path: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model's configuration and its generation configuration, without weights."""
    from transformers import AutoConfig, GenerationConfig

    check_weights(Path(path))
    with loading_errors("model.path", path):
        found = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        return found, GenerationConfig.from_pretrained(path)
    except OSError:  # the model has no generation configuration
        return found, GenerationConfig.from_model_config(found)


def count_parameters(path: str, model_config: Any, *, trust_remote_code: bool) -> int:
    """Count the parameters of a model of this configuration. Its weights need not be on this machine."""
    import torch
    from transformers import AutoModelForCausalLM

    with loading_errors("model.path", path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, trust_remote_code=trust_remote_code
        )
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def loading_errors(key: str, path: str) -> Iterator[None]:
    """Turn what transformers raises for a model it cannot load into a ConfigError of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:DETAIL_CHARS]
        remedy = "give a HF folder, a hub id and a network to fetch it from, or embedded"
        raise ConfigError(key, path, f"it cannot be loaded ({why}): {remedy}") from error


def check_weights(folder: Path) -> None:
    """Raise ConfigError for a file of weights that is cut short or damaged. Reads only headers: milliseconds."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            remedy = f"{file.name} in it is cut short or damaged ({error}): copy or fetch it again"
            raise ConfigError("model.path", str(folder), remedy) from error
