"""Every test starts without keys, proxies and the user's cache, and with a Ctrl-C handler as in a terminal. Tests of
whole runs share a Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOREIGN = (
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "OPENAI_MODEL",
    "TRAIN_WITH_MONITOR",
    "MONITOR_CACHE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
)
"""Environment variables that would change what a judge does."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)


with contextlib.suppress(ImportError):  # an integration's environment may lack it
    from hypothesis import settings

    # On a busy machine an example may take any time, so the time of one example says nothing about the code.
    settings.register_profile("freewheel", deadline=None)
    settings.load_profile("freewheel")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FREEWHEEL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for the runs of a module: its start takes longer than a small run. Runs find `user_code`."""
    import ray

    user_code = str(Path(__file__).parent / "user_code")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(user_code)
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=128 << 20,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}},
        )
        try:
            yield
        finally:
            ray.shutdown()
