"""Every test starts without keys, proxies and the user's cache, and with a Ctrl-C handler as in a terminal."""

from __future__ import annotations

import contextlib
import signal
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
