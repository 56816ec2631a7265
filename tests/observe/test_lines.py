"""Lines beside the work: whole, bounded, there soon, and never in the way, whatever the disk and the process do."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freewheel.observe import lines as lines_module
from freewheel.observe.lines import Lines, files_of, read_lines

WAIT_S = 30.0
MANY = 10**9


@pytest.fixture
def made(tmp_path):
    """`made(name, **settings)`: closed with the test."""
    opened = []

    def make(name="trainer", **settings):
        opened.append(Lines(tmp_path / "trace", name, **{"most_bytes": MANY, **settings}))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def whole(path: Path) -> list:
    """Every line must be JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def all_of(folder: Path) -> list:
    return [value for file in files_of(folder) for value in whole(file.path)]


def until(holds) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_what_is_added_is_in_the_file_soon_without_anybody_asking(made):
    lines = made()
    assert not lines.path.parent.exists(), "nothing is created before there is something to write"
    lines.add({"number": 1})
    lines.add({"number": 2})
    until(lambda: lines.path.exists() and len(whole(lines.path)) == 2)
    lines.add({"number": 3})
    until(lambda: len(whole(lines.path)) == 3)
    assert whole(lines.path) == [{"number": 1}, {"number": 2}, {"number": 3}]
    assert lines.path.name == f"trainer-{os.getpid()}.jsonl"


def test_many_lines_do_not_wait_for_the_second_to_pass(made, monkeypatch):
    monkeypatch.setattr(lines_module, "FLUSH_EVERY_S", 3600.0)
    lines = made()
    for number in range(3 * lines_module.FLUSH_ITEMS):
        lines.add(number)
    until(lambda: lines.path.exists() and len(whole(lines.path)) >= lines_module.FLUSH_ITEMS)
    lines.close()
    assert whole(lines.path) == list(range(3 * lines_module.FLUSH_ITEMS))
    assert lines.lost == 0


def test_numbers_and_texts_that_json_does_not_have_are_still_a_line(made):
    lines = made()
    lines.add({"nan": math.nan, "most": math.inf, "text": "zwei\nZeilen"})
    lines.add({"half": "\ud800", "thing": Path("x"), "nan": math.nan, 7: "a number for a name"})
    lines.flush()
    first, second = whole(lines.path)
    assert first == {"nan": None, "most": None, "text": "zwei\nZeilen"}
    assert (second["thing"], second["nan"], second["7"]) == ("x", None, "a number for a name")


def test_an_item_that_cannot_be_rendered_costs_itself(made):
    lines = made(render=lambda number: b"%d\n" % (6 // number))
    for number in (1, 0, 3):
        lines.add(number)
    lines.flush()
    assert whole(lines.path) == [6, 2]
    assert lines.lost == 1


def test_after_its_end_nothing_is_written_and_all_is_counted(made):
    lines = made()
    lines.add(1)
    lines.close()
    lines.close()
    lines.add(2)
    assert (whole(lines.path), lines.lost) == ([1], 1)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_within_the_bound(made, tmp_path):
    lines = made(most_bytes=2000)
    for number in range(1000):
        lines.add({"number": number})
        if number % 7 == 0:
            lines.flush()
            assert sum(file.size for file in files_of(tmp_path / "trace")) <= 2000
    lines.flush()
    kept = [row["number"] for row in all_of(tmp_path / "trace")]
    assert kept == list(range(1000 - len(kept), 1000)), "the newest, without a gap, in order"
    assert len(kept) * 16 > 800, "about half of the bound at least"
    names = sorted(file.path.name for file in files_of(tmp_path / "trace"))
    assert names == [f"trainer-{os.getpid()}.1.jsonl", f"trainer-{os.getpid()}.jsonl"]
    assert lines.lost == 0


def test_the_beginning_is_kept_beside_the_newest(made, tmp_path):
    lines = made("rollouter-0", most_bytes=4000, keeps_head=True)
    for number in range(1000):
        lines.add({"number": number})
        lines.flush()
    assert sum(file.size for file in files_of(tmp_path / "trace")) <= 4000
    head, *rest = sorted(files_of(tmp_path / "trace"), key=lambda file: (file.part is None, file.part))
    first = [row["number"] for row in whole(head.path)]
    assert head.is_head and first == list(range(len(first))) and len(first) * 16 > 500
    newest = [row["number"] for file in rest for row in whole(file.path)]
    assert newest == list(range(1000 - len(newest), 1000))


def test_what_no_file_has_room_for_is_counted(made):
    lines = made(most_bytes=200)
    lines.add("x" * 300)
    lines.add("y")
    lines.flush()
    assert (whole(lines.path), lines.lost) == (["y"], 1)


def test_files_of_processes_before_it_count_for_the_bound(made, tmp_path):
    folder = tmp_path / "trace"
    folder.mkdir()
    for age, name in enumerate(["trainer-12.jsonl", "trainer-11.1.jsonl", "trainer-11.jsonl", "rollouter-0-9.jsonl"]):
        (folder / name).write_text("1\n" * 200)
        os.utime(folder / name, (1000 + age, 1000 + age))
    lines = made(most_bytes=1000)
    lines.add(2)
    lines.flush()
    left = {file.path.name for file in files_of(folder)}
    assert left == {"trainer-11.jsonl", "rollouter-0-9.jsonl", lines.path.name}, "the oldest went, and no other's"


def test_the_file_of_one_that_died_in_a_runs_beginning_is_that_beginning(made, tmp_path):
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "rollouter-0-12.jsonl").write_text('"first"\n')
    lines = made("rollouter-0", most_bytes=1000, keeps_head=True)
    for number in range(300):
        lines.add(number)
        lines.flush()
    assert whole(folder / "rollouter-0-12.0.jsonl") == ["first"]
    assert [file.process for file in files_of(folder) if file.is_head] == [12]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_lines_raises_nothing_and_ends_when_there_is_room(made, caplog):
    caplog.set_level(logging.INFO, logger="freewheel")
    lines = made()
    lines.path.parent.mkdir()
    lines.path.symlink_to("/dev/full")
    for number in range(10):
        lines.add(number)
        lines.flush()
    assert lines.lost == 10
    lines.path.unlink()
    lines.add(10)  # goes to the old file once more, which is then opened anew
    lines.flush()
    lines.add(11)
    lines.flush()
    assert (whole(lines.path), lines.lost) == ([11], 11)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written (No space left on device): lines are lost" in text for text in said) == 1
    assert any("can be written again; 11 lines were lost" in text for text in said)


def test_a_folder_that_cannot_be_made_costs_lines_and_nothing_else(made, tmp_path):
    (tmp_path / "trace").write_text("in its place")
    lines = made()
    for number in range(5):
        lines.add(number)
    lines.flush()
    assert lines.lost == 5
    (tmp_path / "trace").unlink()
    lines.add(5)
    lines.flush()
    assert whole(lines.path) == [5]


def test_a_disk_that_hangs_holds_up_nobody_who_adds(made, monkeypatch):
    monkeypatch.setattr(lines_module, "MOST_WAITING", 10)
    lines = made()
    with lines._lock:  # who writes does not come back
        for number in range(25):
            lines.add(number)
    lines.flush()
    assert (whole(lines.path), lines.lost) == (list(range(10)), 15)


def test_a_link_in_its_place_is_not_followed(made, tmp_path):
    lines = made()
    lines.path.parent.mkdir()
    target = tmp_path / "mine"
    target.write_text("untouched")
    lines.path.symlink_to(target)
    lines.add(1)
    lines.flush()
    assert (target.read_text(), lines.lost) == ("untouched", 1)


WRITER = """
import itertools, sys
from freewheel.observe import lines as lines_module
from freewheel.observe.lines import Lines
lines_module.FLUSH_EVERY_S = 0.01
lines = Lines(sys.argv[1], sys.argv[2], most_bytes=int(sys.argv[3]))
for number in itertools.count():
    lines.add({"number": number, "text": sys.argv[2] * 20})
    if number % 100 == 0:
        lines.flush()
"""


def test_a_kill_leaves_files_that_can_be_read_and_processes_do_not_mix(tmp_path):
    names = ["alpha", "beta-0", "beta-1"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name, "200000"]) for name in names]
    try:
        until(lambda: sum(file.part == 1 for file in files_of(tmp_path)) == len(writers))
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait(WAIT_S)
    for name, writer in zip(names, writers, strict=True):
        rows = [row for file in files_of(tmp_path, name) if file.process == writer.pid for row in read_lines(file.path)]
        assert all(row["text"] == name * 20 for row in rows)
        numbers = [row["number"] for row in rows]
        assert numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_line_that_is_not_whole_is_passed_over(tmp_path):
    path = tmp_path / "main-1.jsonl"
    deep, no_text = b"[" * 100_000 + b"]" * 100_000, b'{"d": "\xff"}'
    path.write_bytes(b'{"a": 1}\nnot json\n\xff\xfe\n\n' + no_text + b"\n" + deep + b'\n{"b": 2}\n{"c": ')
    assert list(read_lines(path)) == [{"a": 1}, {"b": 2}]
    assert list(read_lines(tmp_path / "missing")) == []


def test_only_files_of_the_form_are_taken_for_ours(tmp_path):
    for name in ("main-1.jsonl", "rollouter-10-7.1.jsonl", "main-1.2.jsonl", "main.jsonl", "main-1.json", "notes.txt"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / "main-2.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "main-3.jsonl").mkdir()
    assert {(file.name, file.process, file.part) for file in files_of(tmp_path)} == {
        ("main", 1, None),
        ("rollouter-10", 7, 1),
    }
    assert files_of(tmp_path / "missing") == []
