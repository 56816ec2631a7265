"""Loads Hugging Face models, or only their configuration. Errors become one ConfigError line with the key.

Called by engines, by the trainer's process and by the checks before a run. Imports torch and transformers when called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.utils.registry import DETAIL_CHARS

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


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
    """Counts the parameters of a model of this configuration. Its weights need not be on this machine."""
    import torch
    from transformers import AutoModelForCausalLM

    with loading_errors("model.path", path), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, trust_remote_code=trust_remote_code
        )
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def loading_errors(key: str, path: str) -> Iterator[None]:
    """Turns what transformers raises for a model it cannot load into a ConfigError of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:DETAIL_CHARS]
        remedy = "give a HF folder, a hub id and a network to fetch it from, or embedded"
        raise ConfigError(key, path, f"it cannot be loaded ({why}): {remedy}") from error


def check_weights(folder: Path) -> None:
    """Raises ConfigError for a file of weights that is cut short or damaged. Reads only headers: milliseconds."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            remedy = f"{file.name} in it is cut short or damaged ({error}): copy or fetch it anew"
            raise ConfigError("model.path", str(folder), remedy) from error
