"""Every kind of file gives the same rows, and a damaged file is named with the place of the damage."""

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
    else:  # blank lines are ignored
        path.write_text(json.dumps(rows) if name.endswith("array.json") else f"\n{lines(rows)}  \n\n")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "array.json", "lines.json", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str):
    path = write(tmp_path, name)
    assert load_rows(path) == ROWS
    assert load_rows(str(path), limit=2) == ROWS[:2]


FIRST = lines(ROWS[:1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", FIRST + '{"question": "cut o', r"a\.jsonl, line 2 is not JSON .*cut o"),
        ("a.jsonl", FIRST.encode() + b'{"question": "\xff"}\n', "line 2 is not JSON"),
        ("a.jsonl", FIRST + "[1, 2]\n", r"line 2 is \[1, 2\]: give one JSON object per line"),
        ("a.json", json.dumps([ROWS[0], "x"]), "entry 1 is 'x': give a list of objects"),
        ("a.jsonl", "", r"a\.jsonl' has no rows"),
        ("a.jsonl", "\n \n", r"a\.jsonl' has no rows"),
        ("a.csv", "question,answer\n", r"use one of \.jsonl"),
        ("a.parquet", "PAR1 and then nothing", r"a\.parquet cannot be read as Parquet"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS).encode())[:-10], r"a\.jsonl\.gz is cut short"),
        ("b.jsonl", None, "there is no such file"),
        ("no-such-folder/train.parquet", None, "there is no such file"),
        ("nothing", None, "there is no such file"),
        (".", None, "a folder without data"),
    ],
)
def test_data_that_cannot_be_read_is_named_with_its_place(
    tmp_path: Path, name: str, content: str | bytes | None, said: str
):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=said):
        load_rows(path)
    if "line 2" in said:
        assert load_rows(path, limit=1) == ROWS[:1], "rows that are not read cannot be wrong"


def test_a_folder_is_read_by_split_in_the_order_of_its_files(tmp_path: Path):
    write(tmp_path, "train-00001-of-00002.parquet", ROWS[1:])
    write(tmp_path, "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path, "test.jsonl", ROWS[:2])
    write(tmp_path, "training_notes.json")  # begins with a split's name, and is another word
    assert load_rows(tmp_path, split="train") == ROWS
    assert load_rows(tmp_path, split="test") == ROWS[:2]
    with pytest.raises(DataError, match=r"no file for the split 'dev': it has \['test\.jsonl'"):
        load_rows(tmp_path, split="dev")


class Recorder(ModuleType):
    """The part of `datasets` that is used."""

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


def test_a_name_that_is_not_a_file_is_loaded_from_the_hub(datasets: Recorder):
    assert load_rows("openai/gsm8k", split="test", name="main", limit=2) == ROWS[:2]
    assert datasets.calls == [("openai/gsm8k", "main", "test")]
    with pytest.raises(DataError, match=r"not a local file, and could not be loaded as a dataset on the hub .*offline"):
        load_rows("nobody/nothing")


@pytest.mark.parametrize(("path", "module"), [("a.parquet", "pyarrow.parquet"), ("openai/gsm8k", "datasets")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, module: str
):
    write(tmp_path, "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(DataError, match=f"need {package}: pip install {package}"):
        load_rows(path)


def test_a_missing_key_is_named_with_those_that_are_there():
    require({"question": "?", "answer": 0}, ["question", "answer"], "here")
    with pytest.raises(DataError, match=r"a\.jsonl, row 3: no question and no answer; its keys are \['q', 'answer'\]"):
        require({"q": "?", "answer": None}, ["question", "answer"], "a.jsonl, row 3")
