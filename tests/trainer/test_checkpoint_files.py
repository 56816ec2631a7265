"""Damage to a checkpoint's files, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from freewheel.trainer.checkpoint import _difference, _looks_whole, _measure, visible_damage, write_state

STATE = "state.json"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"bytes": 1_633_376, "crc32": 7}, ""),
        ({"bytes": 1_633_376}, ""),
        ({"bytes": 100, "crc32": 8}, "cut off: 100 of 1,633,376 bytes"),
        ({"bytes": 1_633_377}, "too long: 1,633,377 bytes, and 1,633,376 were written"),
        ({"bytes": 1_633_376, "crc32": 8}, "its checksum does not match"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_words(found: dict[str, int], said: str):
    assert _difference({"bytes": 1_633_376, "crc32": 7}, found) == said


def test_what_shows_without_reading_a_checkpoint_through_is_named_with_its_file(tmp_path: Path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"1234")
    told = _measure(weights)
    write_state(tmp_path, STATE, {"step": 1})
    assert visible_damage(tmp_path, STATE) == "" and _looks_whole(tmp_path)
    weights.write_bytes(b"4321")
    assert visible_damage(tmp_path, STATE) == "", "the files are not read"
    assert _difference(told, _measure(weights)) == "its checksum does not match"
    weights.write_bytes(b"1")
    assert visible_damage(tmp_path, STATE) == "weights: cut off: 1 of 4 bytes" and not _looks_whole(tmp_path)
    weights.unlink()
    assert visible_damage(tmp_path, STATE) == f"{weights}: No such file or directory"
    (tmp_path / STATE).write_text("{")
    assert visible_damage(tmp_path, STATE).startswith(f"{tmp_path / STATE}: ")
