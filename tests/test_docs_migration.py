"""The pages for those who come from elsewhere: what they are sent to exists. That what they come from is spelt as it is
there is checked where those packages are installed (tests/integrations), for OpenRLHF by the flags of its release."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from freewheel.runtime.config_files import all_keys, compose

from .documents import DOCS, INLINE

PAGES = ["from-verl.md", "from-trl.md", "from-openrlhf.md"]
KNOWN = {*all_keys(), *(key.rpartition(".")[0] for key in all_keys())}
OPENRLHF_FLAGS = Path(__file__).parent / "openrlhf_flags.txt"
"""Names that `openrlhf.cli.train_ppo_ray` of the release on the page takes."""
NONE = "–"
COMPANIONS = {"data.task": ["data.train=rows.jsonl"], "algorithm.baseline": ["algorithm.name=reinforce_pp"]}
"""What a setting cannot be without."""


def rows(page: str) -> list[list[str]]:
    """(theirs, ours, note) of every row of a page's tables."""
    found = [line.strip("|").split(" | ") for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in found if "freewheel" not in row[1]]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_ours_exists(page: str):
    told = rows(page)
    assert len(told) > 30
    for theirs, ours, note in told:
        assert INLINE.search(theirs), theirs
        assert ours == NONE or ours == "both of them" or INLINE.search(ours), f"{theirs}: {ours}"
        assert [key for key in INLINE.findall(ours) if key not in KNOWN] == [], theirs
        for key, _ in re.findall(r"`([a-z_]+\.[a-z_.]+)=([^`]+)`", note):
            assert key in KNOWN, f"{theirs}: {note}"


@pytest.mark.parametrize("page", PAGES)
def test_a_setting_that_a_note_gives_is_a_setting(page: str):
    given = {one for *_, note in rows(page) for one in re.findall(r"`([a-z_]+\.[a-z_.]+=[^`]+)`", note)}
    assert given, "or nothing is checked here"
    for setting in given:
        compose([setting, *COMPANIONS.get(setting.partition("=")[0], [])])


@pytest.mark.parametrize("page", PAGES)
def test_what_has_no_counterpart_says_why(page: str):
    assert [theirs for theirs, ours, note in rows(page) if ours == NONE and not note] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_key_of_theirs_stands_once(page: str):
    section, seen = "", set()
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("## "):
            section = line
        if line.startswith("| `"):
            for key in INLINE.findall(line.split(" | ")[0]):
                assert (section, key) not in seen, f"{key} stands twice"
                seen.add((section, key))


def test_the_flags_of_openrlhf_are_its_own():
    flags = set(OPENRLHF_FLAGS.read_text().split())
    named = {name for theirs, *_ in rows("from-openrlhf.md") for name in INLINE.findall(theirs)}
    assert [name for name in sorted(named) if name.removeprefix("--") not in flags] == []
