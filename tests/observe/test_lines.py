"""Lines are whole, bounded, on disk soon, and never in the way, whatever the disk and the process do."""

from __future__ import annotations

import json
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


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "trace"


@pytest.fixture
def make(folder):
    """`make(name, **settings)`: lines that are closed with the test."""
    opened = []

    def open_lines(name="trainer", **settings):
        opened.append(Lines(folder, name, **{"most_bytes": 10**9, **settings}))
        return opened[-1]

    yield open_lines
    for one in opened:
        one.close()


def read(path: Path) -> list:
    """Return the values of a file. Every line must be JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_until(holds) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_added_items_are_in_the_file_soon(make):
    lines = make()
    assert not lines.path.parent.exists(), "nothing is created before there is something to write"
    lines.add({"number": 1})
    lines.add({"number": 2})
    wait_until(lambda: lines.path.exists() and len(read(lines.path)) == 2)
    lines.add({"number": 3})
    wait_until(lambda: len(read(lines.path)) == 3)
    assert read(lines.path) == [{"number": 1}, {"number": 2}, {"number": 3}]
    assert lines.path.name == f"trainer-{os.getpid()}.jsonl"


def test_many_items_are_written_at_once_and_items_after_the_end_are_counted(make, monkeypatch):
    monkeypatch.setattr(lines_module, "FLUSH_EVERY_S", 3600.0)
    lines = make()
    numbers = range(3 * lines_module.FLUSH_ITEMS)
    for number in numbers:
        lines.add(number)
    wait_until(lambda: lines.path.exists() and len(read(lines.path)) >= lines_module.FLUSH_ITEMS)
    lines.close()
    lines.close()
    assert read(lines.path) == list(numbers) and lines.lost == 0
    lines.add(1)
    assert lines.lost == 1


def test_values_that_json_does_not_have_are_still_a_line(make):
    lines = make()
    lines.add({"nan": math.nan, "most": math.inf, "text": "zwei\nZeilen"})
    lines.add({"half": "\ud800", "thing": Path("x"), "nan": math.nan, 7: "a number for a name"})
    lines.flush()
    first, second = read(lines.path)
    assert first == {"nan": None, "most": None, "text": "zwei\nZeilen"}
    assert (second["thing"], second["nan"], second["7"]) == ("x", None, "a number for a name")


def test_an_item_that_cannot_be_rendered_or_stored_costs_only_itself(make):
    lines = make(most_bytes=200, render=lambda number: b"%d\n" % (6 // number) * (200 if number == 3 else 1))
    for number in (1, 0, 3, 6):
        lines.add(number)
    lines.flush()
    assert (read(lines.path), lines.lost) == ([6, 1], 2)


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_head", [False, True])
def test_the_newest_lines_are_kept_within_the_bound_and_the_start_if_wanted(make, folder, keeps_head):
    most_bytes = 4000
    lines = make(most_bytes=most_bytes, keeps_head=keeps_head)
    for number in range(1000):
        lines.add({"number": number})
        if keeps_head:
            lines.flush()
            assert sum(file.size for file in files_of(folder)) <= most_bytes
    lines.flush()  # much more than a file has room for
    files = files_of(folder)
    assert sum(file.size for file in files) <= most_bytes
    names = {f"trainer-{os.getpid()}{part}.jsonl" for part in ("", ".1", *([".0"] if keeps_head else []))}
    assert {file.path.name for file in files} == names and lines.lost == 0
    first = [row["number"] for file in files if file.is_head for row in read(file.path)]
    newest = [row["number"] for file in files if not file.is_head for row in read(file.path)]
    assert newest == list(range(1000 - len(newest), 1000)), "the newest, without a gap, in order"
    assert first == list(range(len(first))) and bool(first) == keeps_head
    assert (len(newest) + len(first)) * 16 > 0.4 * most_bytes


def test_files_of_earlier_processes_count_for_the_bound(make, folder):
    folder.mkdir()
    for age, name in enumerate(["trainer-12.jsonl", "trainer-11.1.jsonl", "trainer-11.jsonl", "rollouter-0-9.jsonl"]):
        (folder / name).write_text("1\n" * 200)
        os.utime(folder / name, (1000 + age, 1000 + age))
    lines = make(most_bytes=1000)
    lines.add(2)
    lines.flush()
    left = {file.path.name for file in files_of(folder)}
    assert left == {"trainer-11.jsonl", "rollouter-0-9.jsonl", lines.path.name}, "the oldest of this name went"


def test_the_start_of_a_run_survives_a_process_that_died_in_it(make, folder):
    folder.mkdir()
    (folder / "rollouter-0-12.jsonl").write_text('"first"\n')
    lines = make("rollouter-0", most_bytes=1000, keeps_head=True)
    for number in range(300):
        lines.add(number)
        lines.flush()
    assert read(folder / "rollouter-0-12.0.jsonl") == ["first"]
    assert [file.process for file in files_of(folder) if file.is_head] == [12]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_costs_lines_and_nothing_else(make, folder):
    folder.write_text("in its place")
    lines = make()
    lines.add(1)
    lines.flush()
    folder.unlink()
    lines.add(2)
    lines.flush()
    assert (read(lines.path), lines.lost) == ([2], 1)


def test_a_link_in_its_place_is_not_followed(make, tmp_path):
    lines, target = make(), tmp_path / "mine"
    lines.path.parent.mkdir()
    target.write_text("untouched")
    lines.path.symlink_to(target)
    lines.add(1)
    lines.flush()
    assert (target.read_text(), lines.lost) == ("untouched", 1)


def test_a_hanging_disk_does_not_delay_adding(make, monkeypatch):
    monkeypatch.setattr(lines_module, "MOST_WAITING", 10)
    lines = make()
    with lines._lock:  # the writing thread does not come back
        for number in range(25):
            lines.add(number)
    lines.flush()
    assert (read(lines.path), lines.lost) == (list(range(10)), 15)


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


def test_killed_processes_leave_readable_files_that_do_not_mix(tmp_path):
    names = ["alpha", "beta-0", "beta-1"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name, "200000"]) for name in names]
    try:
        wait_until(lambda: sum(file.part == 1 for file in files_of(tmp_path)) == len(writers))
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


def test_an_incomplete_line_is_skipped(tmp_path):
    path = tmp_path / "main-1.jsonl"
    deep, no_text = b"[" * 100_000 + b"]" * 100_000, b'{"d": "\xff"}'
    path.write_bytes(b'{"a": 1}\nnot json\n\xff\xfe\n\n' + no_text + b"\n" + deep + b'\n{"b": 2}\n{"c": ')
    refused = []
    assert list(read_lines(path, refused=lambda: refused.append(1))) == [{"a": 1}, {"b": 2}]
    assert len(refused) == 5, "all but the last, which may become complete"
    assert list(read_lines(tmp_path / "missing")) == []


def test_only_files_of_our_form_are_ours(tmp_path):
    for name in ("main-1.jsonl", "rollouter-10-7.1.jsonl", "main-1.2.jsonl", "main.jsonl", "main-1.json", "notes.txt"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / "main-2.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "main-3.jsonl").mkdir()
    found = {(file.name, file.process, file.part) for file in files_of(tmp_path)}
    assert found == {("main", 1, None), ("rollouter-10", 7, 1)} and files_of(tmp_path / "missing") == []
