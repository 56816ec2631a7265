"""vLLM as an engine: `VllmEngine` over an `AsyncLLM` in the rollouter's process, or over a server.

engine.py      VllmEngine: the engine protocol; VllmFactory: from a run's configuration to vLLM's arguments, with checks
api.py         vLLM's calls, whatever its release; versions of tokens
remote.py      the same calls to a `vllm serve`
transfer.py    how weights get to vLLM's workers: the rollouter's side
worker.py      the workers' side
"""
