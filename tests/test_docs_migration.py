"""The migration tables: every freewheel key on them exists, and every setting they suggest is accepted.

That the other trainer's names exist is checked where it is installed (tests/integrations), and for OpenRLHF against
the flags of its release.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freewheel.runtime.config_files import all_keys, compose

from .documents import INLINE, migration_tables

PAGES = ["verl.md", "trl.md", "from-openrlhf.md"]
KNOWN = {*all_keys(), *(key.rpartition(".")[0] for key in all_keys())}
OPENRLHF_FLAGS = Path(__file__).parent / "openrlhf_flags.txt"
"""The flags of `openrlhf.cli.train_ppo_ray` in the release that the page names."""
NONE = "–"
COMPANIONS = {"data.task": ["data.train=rows.jsonl"], "algorithm.baseline": ["algorithm.name=reinforce_pp"]}
"""Settings that a setting requires."""


def read_rows(page: str) -> list[list[str]]:
    """Return (theirs, ours, note) of every row of a page's migration tables."""
    found = [line.strip("|").split(" | ") for line in migration_tables(page).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found if "freewheel" not in row[1]]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_keys_of_freewheel_that_exist_or_a_reason_why_there_is_none(page: str):
    rows = read_rows(page)
    assert len(rows) > 30
    for theirs, ours, note in rows:
        assert INLINE.search(theirs), theirs
        assert ours == "both of them" or INLINE.search(ours) or (ours == NONE and note), f"{theirs}: {ours}: no reason"
        assert [key for key in INLINE.findall(ours) if key not in KNOWN] == [], theirs


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_in_a_note_is_accepted(page: str):
    settings = {one for *_, note in read_rows(page) for one in re.findall(r"`([a-z_]+\.[a-z_.]+=[^`]+)`", note)}
    assert settings, "the page has no settings in its notes"
    for setting in settings:
        compose([setting, *COMPANIONS.get(setting.partition("=")[0], [])])


@pytest.mark.parametrize("page", PAGES)
def test_each_foreign_key_is_listed_once_per_section(page: str):
    section, seen = "", set()
    for line in migration_tables(page).splitlines():
        if line.startswith("##"):
            section = line
        if line.startswith("| `"):
            for key in INLINE.findall(line.split(" | ")[0]):
                assert (section, key) not in seen, f"{key} is listed twice"
                seen.add((section, key))


def test_every_openrlhf_flag_exists_in_openrlhf():
    flags = set(OPENRLHF_FLAGS.read_text().split())
    named = {name for theirs, *_ in read_rows("from-openrlhf.md") for name in INLINE.findall(theirs)}
    assert [name for name in sorted(named) if name.removeprefix("--") not in flags] == []
