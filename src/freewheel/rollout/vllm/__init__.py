"""vLLM as an engine: `VllmEngine` over an `AsyncLLM` in the rollouter's process, or over a server.

    engine.py     the engine protocol                               tagging.py    versions of tokens
    api.py        vLLM's calls, whatever its release                progress.py   timeouts and busy time
    remote.py     the same calls of a `vllm serve`                  orphan.py     no process outlives its rollouter
    settings.py   from a run's configuration to vLLM's arguments    transfer.py, worker.py, …   how weights get there

docs/engines.md tells of it.
"""
