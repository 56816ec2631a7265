"""Rows come out of every kind of file alike, and a file that is wrong is named with the place where it is."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freewheel.data.sources import load_rows, require
from freewheel.errors import DataError

ROWS = [
    {"question": "What is 1 + 1?", "answer": "#### 2", "extra": {"level": 1, "tags": ["a", "ü"]}},
    {"question": "What is 2 + 2?", "answer": "#### 4", "extra": {"level": 2, "tags": []}},
    {"question": "What is 3 + 3?", "answer": "#### 6", "extra": {"level": 3, "tags": ["b"]}},
]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(folder: Path, name: str, rows: list[Any] = ROWS) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines(rows).encode()))
    else:
        path.write_text(json.dumps(rows) if name.endswith("array.json") else lines(rows))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "array.json", "lines.json", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str):
    path = write(tmp_path, name)
    assert load_rows(path) == ROWS
    assert load_rows(str(path), limit=2) == ROWS[:2]


def test_blank_lines_are_passed_over(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + lines(ROWS[:1]) + "  \n\n" + lines(ROWS[1:]) + "\n")
    assert load_rows(path) == ROWS


def test_a_bad_line_is_named_with_its_number_and_its_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(ROWS[:1]) + '{"question": "cut o')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 is not JSON .*cut o"):
        load_rows(path)
    assert load_rows(path, limit=1) == ROWS[:1]  # what is not read cannot be wrong


def test_a_line_that_is_no_object_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"line 2 is \[1, 2\]: give one JSON object a line"):
        load_rows(write(tmp_path, "a.jsonl", [ROWS[0], [1, 2]]))
    with pytest.raises(DataError, match="entry 1 is 'x': give a list of objects"):
        load_rows(write(tmp_path, "array.json", [ROWS[0], "x"]))


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS[:1]).encode() + b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        load_rows(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.jsonl' has no rows"):
        load_rows(path)


def test_a_damaged_file_is_named(tmp_path: Path):
    parquet = write(tmp_path, "a.parquet")
    parquet.write_bytes(parquet.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        load_rows(parquet)
    packed = write(tmp_path, "a.jsonl.gz")
    packed.write_bytes(packed.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is cut short"):
        load_rows(packed)


def test_a_file_that_is_not_there_is_not_taken_for_a_name_on_the_hub(tmp_path: Path):
    for path in (tmp_path / "train.jsonl", "no-such-folder/train.parquet", tmp_path / "nothing"):
        with pytest.raises(DataError, match="there is no such file"):
            load_rows(path)


def test_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "a.csv").write_text("question,answer\n")
    with pytest.raises(DataError, match=r"use one of \.jsonl"):
        load_rows(tmp_path / "a.csv")


def test_a_folder_is_read_by_split_in_the_order_of_its_files(tmp_path: Path):
    write(tmp_path, "train-00001-of-00002.parquet", ROWS[1:])
    write(tmp_path, "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path, "test.jsonl", ROWS[:2])
    write(tmp_path, "training_notes.json")  # begins with a split's name, and is another word
    assert load_rows(tmp_path, split="train") == ROWS
    assert load_rows(tmp_path, split="test") == ROWS[:2]
    with pytest.raises(DataError, match=r"no file for the split 'dev': it has \['test\.jsonl'"):
        load_rows(tmp_path, split="dev")


def test_a_folder_without_data_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="a folder without data"):
        load_rows(tmp_path, split="train")


class Recorder(ModuleType):
    """`datasets`, as much of it as is called."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.calls: list[tuple[Any, ...]] = []

    def load_from_disk(self, path: str) -> Any:
        self.calls.append((path,))
        return {"train": ROWS, "test": ROWS[:1]} if path.endswith("both") else ROWS

    def load_dataset(self, path: str, name: str | None, split: str) -> Any:
        self.calls.append((path, name, split))
        if path == "nobody/nothing":
            raise ConnectionError("offline")
        return ROWS


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = Recorder()
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_saved_dataset_is_opened_by_datasets(tmp_path: Path, datasets: Recorder):
    one, both = tmp_path / "one", tmp_path / "both"
    for folder, mark in ((one, "state.json"), (both, "dataset_dict.json")):
        folder.mkdir()
        (folder / mark).write_text("{}")
    assert load_rows(one) == ROWS
    assert load_rows(both, split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"no split 'dev': it has \['train', 'test'\]"):
        load_rows(both, split="dev")


def test_a_name_that_is_no_file_is_asked_of_the_hub(datasets: Recorder):
    assert load_rows("openai/gsm8k", split="test", name="main", limit=2) == ROWS[:2]
    assert datasets.calls == [("openai/gsm8k", "main", "test")]
    with pytest.raises(DataError, match=r"no file here, and as a dataset on the hub it could not be loaded .*offline"):
        load_rows("nobody/nothing")


@pytest.mark.parametrize(("path", "package"), [("a.parquet", "pyarrow"), ("openai/gsm8k", "datasets")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, package: str
):
    write(tmp_path, "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"need {package}: pip install {package}"):
        load_rows(path)


def test_a_missing_key_is_named_with_those_that_are_there():
    require({"question": "?", "answer": 0}, ["question", "answer"], "here")
    with pytest.raises(DataError, match=r"a\.jsonl, row 3: no question and no answer; its keys are \['q', 'answer'\]"):
        require({"q": "?", "answer": None}, ["question", "answer"], "a.jsonl, row 3")
