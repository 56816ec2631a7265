"""A headless Chromium for tests. Every test also fails if the page reports an error or requests another host.

Needs the package `playwright` and a Chromium (`apt-get install chromium`; FREEWHEEL_CHROMIUM names another). Without
them these tests are skipped, and fail where CI=true.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 20_000
WIDE = {"width": 1440, "height": 960}
PHONE = {"width": 390, "height": 844}


def chromium() -> str | None:
    return os.environ.get("FREEWHEEL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One per module: Playwright's event loop stays active in this thread, and asynchronous tests need their own."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("the package playwright is not installed: pip install 'freewheel[dev]'")
    path = chromium()
    if path is None:
        _missing("there is no Chromium: apt-get install chromium, or name one in FREEWHEEL_CHROMIUM")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


def _missing(why: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start `freewheel dashboard` and return its address; `serve.stop()` ends every started one."""
    begun: list[subprocess.Popen[str]] = []

    def start(*names: Path) -> str:
        command = [sys.executable, "-m", "freewheel", "dashboard", *map(str, names)]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert begun[-1].stdout is not None
        return begun[-1].stdout.readline().split()[-1]

    def stop() -> None:
        for one in begun:
            one.terminate()
            one.communicate(timeout=30)
        begun.clear()

    start.stop = stop
    yield start
    stop()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address. After the test, fail if the page reported an error or requested another host."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def start(url: str, *, size: dict[str, int] = WIDE, allowed: tuple[str, ...] = (), **options: Any) -> Any:
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        host = urlsplit(url).netloc

        def said(text: str) -> None:
            if not any(one in text for one in allowed):
                troubles.append(text)

        page.on("console", lambda one: said(f"console: {one.text}") if one.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said(f"error: {error}"))
        page.on("request", lambda one: None if urlsplit(one.url).netloc == host else said(f"asked {one.url}"))
        page.goto(url)
        page.wait_for_selector("#content .panel")
        return page

    yield start
    for context in contexts:
        context.close()
    assert troubles == []
