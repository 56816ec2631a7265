"""Each folder here needs a library with an environment of its own (`make env-verl`, `env-trl`, `env-vllm`)."""

from __future__ import annotations

import importlib.util

NEEDS = {"verl": "verl", "trl": "trl", "vllm": "vllm", "test_group_collector.py": "hypothesis"}
"""What is collected, only where this is installed."""

collect_ignore = [path for path, library in NEEDS.items() if importlib.util.find_spec(library) is None]
