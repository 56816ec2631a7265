"""Saves: what is read is what was written, a save is there whole or not at all, and nothing is ever unpickled."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from freewheel.data import DataError, DataProto, object_array, storage
from freewheel.data.storage import MANIFEST

from .conftest import batches, sample_batch, small_batch

NAN, INF = float("nan"), float("inf")


def reloaded(data: DataProto, path: Path) -> DataProto:
    data.save(path)
    return DataProto.load(path)


def edit(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | changes))


@given(data=batches())
@settings(deadline=None, max_examples=40)
def test_what_is_loaded_is_what_was_saved(data: DataProto):
    with tempfile.TemporaryDirectory() as directory:
        assert reloaded(data, Path(directory) / "save") == data


def test_a_batch_of_the_spec_comes_back_with_its_keys_in_order(tmp_path: Path):
    data = sample_batch(2, prompt_tokens=1024, response_tokens=2048)
    again = reloaded(data, tmp_path / "deep" / "path")
    assert again == data and again.batch is not None and data.batch is not None
    assert [*again.batch.keys()] == [*data.batch.keys()]
    assert [*again.non_tensor_batch] == [*data.non_tensor_batch]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "bfloat16", "float16", "float64", "int8", "uint8", "uint16", "int64", "complex64", "float8_e4m3fn"],
)
def test_every_kind_of_tensor_comes_back(dtype: str, tmp_path: Path):
    data = DataProto.from_dict({"x": torch.tensor([[0, 1], [1, 0]]).to(getattr(torch, dtype))})
    again = reloaded(data, tmp_path / "save")
    assert again.batch is not None and data.batch is not None
    assert again.batch["x"].dtype == data.batch["x"].dtype
    assert again.batch["x"].float().equal(data.batch["x"].float()) if dtype != "complex64" else again == data


def test_values_of_every_kind_come_back_as_they_were(tmp_path: Path):
    values = {
        "floats": [NAN, INF, -INF, 0.1, 1e308, -0.0],
        "pair": ({"a": (1, None, True)}, "ü\ud800\n"),
        "looks like ours": {"$float": "nan", "x": 1},
        "numbers": [np.float32(0.1), np.int64(2**40), np.bool_(True), np.float64(NAN), np.uint64(2**64 - 1)],
        "tensor": torch.tensor([1.5, NAN], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "text": np.array([["a", "bcd"]]),
        "objects": np.array([[{}, None]], dtype=object),
        "empty": [[], {}, (), np.zeros((0, 2))],
        "large": 10**30,
    }
    data = DataProto.from_dict(
        non_tensors={"o": [values, values], "n": np.zeros((2, 3), dtype=np.float32)}, meta_info=values
    )
    again = reloaded(data, tmp_path / "save")
    assert again == data
    for original, read in zip(values["numbers"], again.meta_info["numbers"], strict=True):
        assert type(original) is type(read)
    json.loads((tmp_path / "save" / MANIFEST).read_text(), parse_constant=pytest.fail)  # strict JSON


def test_slices_views_and_shared_memory_are_saved_as_what_they_show(tmp_path: Path):
    base = torch.arange(12.0).reshape(4, 3)
    data = DataProto.from_dict({"a": base, "b": base, "c": base.t()[:, :].t(), "d": base[:, 1:]}, meta_info={"m": base})
    assert reloaded(data[1:3], tmp_path / "save") == data[1:3]
    columns = DataProto.from_dict({"t": base.t().contiguous().t()})
    assert reloaded(columns, tmp_path / "other") == columns


def test_batches_without_tensors_rows_or_anything_come_back(tmp_path: Path):
    data = small_batch([1, 2])
    for index, some in enumerate([DataProto(), data[:0], data.select([]), data.select([], []), data.select(["x"], [])]):
        again = reloaded(some, tmp_path / str(index))
        assert again == some and (again.batch is None) is (some.batch is None)


class Unknown:
    def __repr__(self) -> str:
        return "<Unknown>"


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (DataProto(meta_info={"a": [{"b": Unknown()}]}), ["meta_info['a'][0]['b']", "<Unknown>", "pop"]),
        (DataProto(meta_info={"a": {1: 2}}), ["meta_info['a']", "key 1", "text"]),
        (DataProto(meta_info={1: 2}), ["meta_info", "key 1"]),
        (DataProto(meta_info={"a": {1, 2}}), ["meta_info['a']", "set"]),
        (DataProto(meta_info={"a": b"bytes"}), ["meta_info['a']", "bytes"]),
        (DataProto(meta_info={"a": np.longdouble(1)}), ["meta_info['a']", "longdouble"]),
        (DataProto.from_dict(non_tensors={"o": [1, Unknown()]}), ["non_tensor_batch['o'][1]", "<Unknown>"]),
        (DataProto.from_dict(non_tensors={"d": np.array(["2020"], dtype="M8[D]")}), ["['d']", "datetime64"]),
        (DataProto.from_dict({"x": torch.zeros(1, dtype=torch.complex128)}), ["batch['x']", "complex128"]),
    ],
)
def test_what_a_file_cannot_hold_is_named_before_anything_is_written(data: DataProto, names: list[str], tmp_path: Path):
    with pytest.raises(DataError) as error:
        data.save(tmp_path / "save")
    assert all(name in str(error.value) for name in names), str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_save_replaces_the_former_one_and_leaves_nothing_of_it(tmp_path: Path):
    path = tmp_path / "save"
    small_batch([1, 2]).save(path)
    small_batch([3]).save(str(path))
    assert DataProto.load(str(path)) == small_batch([3])
    assert len(list(path.iterdir())) == 2


def test_a_loaded_batch_outlives_the_next_save_to_its_path(tmp_path: Path):
    small_batch([1, 2]).save(tmp_path / "save")
    former = DataProto.load(tmp_path / "save")
    small_batch([3]).save(tmp_path / "save")
    assert former == small_batch([1, 2])


def test_a_reader_whom_a_save_overtakes_gets_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "save"
    small_batch([1, 2]).save(path)
    read = storage._read

    def overtaken(*arguments: Any) -> storage.Saved:
        monkeypatch.setattr(storage, "_read", read)
        small_batch([3]).save(path)
        return read(*arguments)

    monkeypatch.setattr(storage, "_read", overtaken)
    assert DataProto.load(path) == small_batch([3])


@pytest.mark.parametrize("step", ["tensors", "manifest", "rename"])
def test_a_save_that_fails_midway_leaves_the_former_one(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "save"
    small_batch([1, 2]).save(path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    if step == "tensors":
        monkeypatch.setattr(safetensors.torch, "save_file", fail)
    else:
        monkeypatch.setattr(Path, "write_text" if step == "manifest" else "replace", fail)
    with pytest.raises(OSError, match="no space"):
        small_batch([3]).save(path)
    assert DataProto.load(path) == small_batch([1, 2])
    assert len(list(path.iterdir())) == 2


def test_leftovers_of_a_killed_save_do_no_harm_and_are_removed(tmp_path: Path):
    path = tmp_path / "save"
    path.mkdir()
    (path / f"tensors-{'0' * 32}.safetensors").write_bytes(b"half")
    (path / f"{MANIFEST}.new").write_text("{")
    with pytest.raises(DataError, match="cut short"):
        DataProto.load(path)
    assert reloaded(small_batch([1]), path) == small_batch([1])
    assert len(list(path.iterdir())) == 2


def test_what_is_not_ours_is_not_written_over(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "mine.txt").write_text("mine")
    for name in ("file", "dir"):
        with pytest.raises(DataError, match="is not a saved DataProto"):
            small_batch([1]).save(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_files_that_were_cut_short_are_refused(tmp_path: Path):
    path = tmp_path / "save"
    small_batch([1, 2]).save(path)
    tensors = next(path.glob("tensors-*"))
    whole = tensors.read_bytes()
    for size in (0, 4, 20, len(whole) - 1):
        tensors.write_bytes(whole[:size])
        with pytest.raises(DataError, match="damaged"):
            DataProto.load(path)
    tensors.unlink()
    with pytest.raises(DataError, match="damaged"):
        DataProto.load(path)
    manifest = (path / MANIFEST).read_text()
    for size in (0, 1, len(manifest) // 2, len(manifest) - 1):
        (path / MANIFEST).write_text(manifest[:size])
        with pytest.raises(DataError, match="cut short"):
            DataProto.load(path)


def test_other_versions_and_formats_are_refused(tmp_path: Path):
    path = tmp_path / "save"
    small_batch([1]).save(path)
    for changes, said in (
        ({"version": 2}, "version 2"),
        ({"version": None}, "version None"),
        ({"format": "other"}, "freewheel.DataProto"),
    ):
        edit(path, **({"format": "freewheel.DataProto", "version": 1} | changes))
        with pytest.raises(DataError, match=said):
            DataProto.load(path)
    with pytest.raises(FileNotFoundError):
        DataProto.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": "../../secret.safetensors"},
        {"tensors": None},
        {"rows": "many"},
        {"rows": 5},
        {"batch": {"x": "batch/none"}},
        {"batch": ["x"]},
        {"non_tensor_batch": {"o": {"$pickle": "gASVAAAA"}}},
        {"non_tensor_batch": {"o": {"$objects": [[2], [1]]}}},
        {"non_tensor_batch": None},
        {"meta_info": {"a": {"$number": ["float32"]}}},
    ],
)
def test_contents_that_we_would_not_write_are_refused(changes: dict[str, Any], tmp_path: Path):
    small_batch([1]).save(tmp_path / "save")
    edit(tmp_path / "save", **changes)
    with pytest.raises(DataError, match="damaged"):
        DataProto.load(tmp_path / "save")


def test_nothing_on_disk_is_a_pickle(tmp_path: Path):
    DataProto.from_dict({"x": torch.zeros(1)}, {"o": object_array([{"a": np.float32(1)}])}).save(tmp_path / "save")
    assert sorted(path.suffix for path in (tmp_path / "save").iterdir()) == [".json", ".safetensors"]
