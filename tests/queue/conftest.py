"""A journal for the queue's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freewheel.queue.journal import Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    one = Journal(path)
    yield one
    one.close()
