"""Reading what a run writes while it writes it: whole lines only, nothing twice, and curves that keep their spikes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from freewheel.dashboard.web.runs import Settings, flat
from freewheel.dashboard.web.views import curve, learning, thin
from freewheel.inspect.metrics import Columns, mean_over_time, plain, rates
from freewheel.observe import lines as tail
from freewheel.observe.lines import Folder, Tail

CURVES = arrays.arrays(
    np.float64, st.integers(0, 400), elements=st.floats(allow_nan=True, allow_infinity=True, width=32)
)


def lines_of(found: Tail) -> list[bytes]:
    return [line for block in found.look() for line in block.lines]


# -- lines ------------------------------------------------------------------------------------------------------------


def test_half_a_line_waits_for_its_other_half(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntw")
    read = Tail(path)
    assert lines_of(read) == [b"one"]
    assert lines_of(read) == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert lines_of(read) == [b"two", b"three"]
    assert lines_of(read) == []


def test_blocks_say_where_their_lines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tail, "BLOCK_BYTES", 8)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"abc\ndef\nghi\njkl\n")
    blocks = list(Tail(path).look())
    assert [block.offset for block in blocks] == [0, 8]
    assert [line for block in blocks for line in block.lines] == [b"abc", b"def", b"ghi", b"jkl"]


def test_a_line_longer_than_a_block_is_read_and_one_beyond_all_bounds_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tail, "BLOCK_BYTES", 8)
    monkeypatch.setattr(tail, "LONGEST_LINE_BYTES", 32)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 20 + b"\n" + b"y" * 200 + b"\nend\n")
    found = lines_of(Tail(path))
    assert found[0] == b"x" * 20
    assert found[-1] == b"end"
    assert all(len(line) < 64 for line in found)


def test_a_file_that_was_replaced_or_shortened_is_read_from_its_start(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\n")
    read = Tail(path)
    assert (lines_of(read), read.generation) == ([b"one", b"two"], 0)
    path.unlink()
    assert (lines_of(read), read.exists) == ([], False)
    path.write_bytes(b"three\n")
    assert lines_of(read) == [b"three"]
    path.write_bytes(b"4\n")
    assert lines_of(read) == [b"4"]
    assert read.generation >= 1


def test_links_and_pipes_are_not_opened(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"mine\n")
    (tmp_path / "link.jsonl").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("link", "pipe", "folder"):
        assert lines_of(Tail(tmp_path / f"{name}.jsonl")) == []


def test_a_file_that_is_rotated_to_another_name_is_not_read_twice(tmp_path: Path):
    folder, gone = Folder(tmp_path), []

    def look() -> list[bytes]:
        return sorted(line for _, blocks in folder.look(gone.append) for block in blocks for line in block.lines)

    (tmp_path / "a.jsonl").write_bytes(b"one\n")
    assert look() == [b"one"]
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"two\n")
    (tmp_path / "a.jsonl").rename(tmp_path / "a.1.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"three\n")
    assert look() == [b"three", b"two"] and gone == []
    (tmp_path / "a.1.jsonl").unlink()
    assert look() == [] and len(gone) == 1


def test_a_folder_that_does_not_exist_is_empty(tmp_path: Path):
    folder = Folder(tmp_path / "none")
    assert list(folder.look(print)) == [] and not folder.exists


# -- curves -----------------------------------------------------------------------------------------------------------


@given(CURVES, st.integers(4, 60))
def test_thinning_keeps_the_ends_the_extremes_and_the_order(values: np.ndarray, most: int):
    kept = thin(values, most)
    finite = values[np.isfinite(values)]
    assert len(kept) <= most
    assert np.all(np.diff(kept) > 0)
    assert np.isfinite(values[kept]).all()
    if len(finite):
        places = np.flatnonzero(np.isfinite(values))
        assert values[kept].min() == finite.min() and values[kept].max() == finite.max()
        assert kept[0] == places[0] and kept[-1] == places[-1]
    if len(finite) <= most:
        assert len(kept) == len(finite)


@given(st.integers(0, 99_999))
def test_a_spike_of_one_step_in_a_hundred_thousand_stays(where: int):
    values = np.zeros(100_000)
    values[where] = 1.0
    assert where in thin(values)
    assert where in thin(-values)


def test_a_thinned_curve_is_between_the_same_lows_and_highs_everywhere():
    values = np.random.default_rng(0).normal(size=20_000)
    kept = thin(values, 400)
    width = 101 * 10  # ten buckets: 20,000 points in 199 of them
    for start in range(0, 20_000, width):
        window = values[start : start + width]
        shown = values[kept[(kept >= start) & (kept < start + width)]]
        assert shown.max() == window.max() and shown.min() == window.min()


def test_a_curve_is_short_plain_and_without_what_is_no_number():
    found = curve(np.array([1.0, 2.0, 3.0]), np.array([0.123456789, math.nan, math.inf]))
    assert found == {"x": [1], "y": [0.1234568]}


def test_columns_grow_and_are_cut():
    columns = Columns(["a", "b"])
    for start in range(0, 5_000, 50):
        columns.extend([(float(at), None) for at in range(start, start + 50)])
    assert columns.rows == 5_000 and columns["a"][-1] == 4_999
    assert columns.last("a") == 4_999 and columns.last("b") is None
    columns.rows = 10
    assert columns.since(8) == {"a": [8, 9]}


def test_a_counter_that_was_begun_anew_has_no_negative_rate():
    found = rates(np.array([0.0, 10.0, 30.0, 4.0]), np.array([0.0, 1.0, 2.0, 4.0]))
    assert plain(found) == [None, 10, 20, 2]


def test_a_mean_weighs_each_value_by_the_time_that_it_stands_for():
    assert mean_over_time(np.array([10.0, 10.0, 10.0, 1.0]), np.array([1.0, 2.0, 3.0, 10.0])) == pytest.approx(3.7)
    assert mean_over_time(np.array([math.nan, 4.0]), np.array([5.0, 6.0])) == 4
    assert mean_over_time(np.array([4.0]), np.array([0.0])) == 4
    assert mean_over_time(np.array([math.nan]), np.array([1.0])) is None and mean_over_time(NOTHING, NOTHING) is None


def test_the_time_for_which_a_run_was_stopped_is_no_part_of_a_mean():
    values, night_s = np.array([10.0] * 10 + [1.0] * 10), 36_000.0
    times = np.array([*np.arange(10.0) * 9.5, *night_s + np.arange(10.0) * 9.5])
    assert mean_over_time(values, times) == pytest.approx((10 * 9 + 1 * 10) / 19, rel=1e-3)


# -- does it learn? ---------------------------------------------------------------------------------------------------

NOTHING = np.array([])


def trend(**given: list[float]) -> str:
    names = ("steps", "rewards", "eval_steps", "held_out", "errors")
    return learning(**{name: np.array(given.get(name, []), float) for name in names}).trend


def test_held_out_rewards_decide_when_there_are_two():
    assert trend(eval_steps=[0, 40], held_out=[0.1, 0.9], errors=[0.02, 0.02]) == "up"
    assert trend(eval_steps=[0, 40], held_out=[0.9, 0.1], errors=[0.02, 0.02]) == "down"
    assert trend(eval_steps=[0, 40], held_out=[0.50, 0.53], errors=[0.02, 0.02]) == "flat"
    assert trend(eval_steps=[0, 40], held_out=[0.5, 0.5], errors=[0.0, 0.0]) == "flat"


def test_before_that_the_rewards_of_training_do_and_too_few_steps_say_nothing():
    steps = list(range(100))
    assert trend(steps=steps, rewards=[step / 100 for step in steps]) == "up"
    noise = np.random.default_rng(1).normal(size=100).tolist()
    assert trend(steps=steps, rewards=noise) == "flat"
    assert trend(steps=steps[:5], rewards=[0.1, 0.2, 0.3, 0.4, 0.5]) == "unknown"
    assert learning(steps=NOTHING, rewards=NOTHING, eval_steps=NOTHING, held_out=NOTHING, errors=NOTHING).words


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_read_again_when_they_change_and_garbage_is_empty(tmp_path: Path):
    settings = Settings(tmp_path)
    settings.look()
    assert settings.values == {}
    (tmp_path / "config.yaml").write_text("trainer:\n  total_steps: 7\n  odd: .nan\n")
    settings.look()
    assert settings.number("trainer.total_steps") == 7 and settings.get("no.such", "x") == "x"
    assert settings.number("trainer.odd") is None
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe: [")
    os.utime(tmp_path / "config.yaml", ns=(1, 1))
    settings.look()
    assert settings.values == {}


def test_a_file_of_aliases_does_not_grow_in_memory(tmp_path: Path):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (tmp_path / "config.yaml").write_text(bomb)
    settings = Settings(tmp_path)
    settings.look()
    assert settings.values == {}


def test_settings_are_compared_by_their_full_names():
    assert flat({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": "1", "a.c": "{}", "d": "null"}
