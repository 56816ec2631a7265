"""`load_rows`: rows from a file, a folder or the Hugging Face hub. Tasks call it.

    data.jsonl(.gz), data.json   ┐
    data.parquet                 ├─▶ rows: dicts of plain values, in the order of the file
    a folder, a saved dataset    │
    owner/name on the hub        ┘

Data that cannot be read is a `DataError` that names the file, the line and the remedy. Parquet needs pyarrow; saved
datasets and the hub need `datasets`. Both are imported when they are first needed.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

from freewheel.errors import DataError, format_value

Rows = list[dict[str, Any]]

JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = (".parquet",)
KNOWN = (*JSON_LINES, ".json", *PARQUET)
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files that `save_to_disk` leaves in a folder."""
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_rows(path: str | Path, *, split: str | None = None, name: str | None = None, limit: int | None = None) -> Rows:
    """Return the first `limit` rows. No rows at all is an error.

    `split` selects within a folder (files whose names begin with it), a saved dataset or a hub dataset; a single file
    is read whole. `name` is the configuration of a hub dataset.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        rows = _folder(place, split)
    elif place.is_file():
        rows = _file(place)
    elif is_on_hub(path):
        rows = _hub(str(path), split, name)
    else:
        raise DataError(f"there is no such file as {place.absolute()}: check the path, or give a hub id")
    found = list(islice(rows, limit))
    if not found:
        raise DataError(f"{str(path)!r} has no rows: give a file with at least one")
    return found


def is_on_hub(path: str | Path) -> bool:
    """Return whether `path` is not a local file but may be the name of a dataset on the hub."""
    here = Path(path).expanduser().exists()
    return not here and not str(path).endswith(KNOWN) and HUB_ID.fullmatch(str(path)) is not None


def require(row: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Raise `DataError` unless the row has all of these keys."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {format_value(row)}: give an object with {' and '.join(keys)}")
    if missing := [key for key in keys if row.get(key) is None]:
        what = f"no {' and no '.join(missing)}; its keys are {[*row]}"
        raise DataError(f"{where}: {what}: correct the row, or remove it")


def _file(path: Path) -> Iterator[dict[str, Any]]:
    if path.name.endswith(PARQUET):
        return _parquet(path)
    if path.name.endswith(JSON_LINES):
        return _json_lines(path)
    if path.suffix == ".json":
        return _json(path)
    raise DataError(f"{path}: its name has no known ending: use one of {', '.join(KNOWN)}")


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _object(line, f"{path}, line {number}")
        except (EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is cut short or not gzip after line {number} ({error}): fetch it again") from error


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        # A file that was cut off ends in such a line, and so does a file whose text has bare newlines.
        text = format_value(line.decode(errors="replace").strip())
        raise DataError(f"{where} is not JSON ({error}): {text}: write it again, or remove it") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is {format_value(row)}: give one JSON object per line")
    return row


def _json(path: Path) -> Iterator[dict[str, Any]]:
    """Read a list of objects, or JSON lines if the file holds those."""
    text = path.read_bytes()
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if not isinstance(whole, list):
        yield from _json_lines(path)
        return
    for number, row in enumerate(whole):
        if not isinstance(row, dict):
            raise DataError(f"{path}, entry {number} is {format_value(row)}: give a list of objects")
        yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    parquet = _optional("pyarrow.parquet", "Parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors about damaged files are ValueErrors
        raise DataError(f"{path} cannot be read as Parquet ({error}): fetch or write it again") from error


def _folder(path: Path, split: str | None) -> Iterator[dict[str, Any]]:
    if any((path / mark).is_file() for mark in SAVED_DATASET):
        return _saved_dataset(path, split)
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(KNOWN))
    if not files:
        raise DataError(f"{path} is a folder without data: no file in it ends in {', '.join(KNOWN)}")
    chosen = [file for file in files if split is None or re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", file.name)]
    if not chosen:
        names = [file.name for file in files]
        raise DataError(f"{path} has no file for the split {split!r}: it has {format_value(names)}")
    return chain.from_iterable(map(_file, chosen))


def _saved_dataset(path: Path, split: str | None) -> Iterator[dict[str, Any]]:
    loaded = _optional("datasets", "saved datasets").load_from_disk(str(path))
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError(f"{path} has no split {split!r}: it has {[*loaded]}")
        loaded = loaded[split]
    return map(dict, loaded)


def _hub(path: str, split: str | None, name: str | None) -> Iterator[dict[str, Any]]:
    module = _optional("datasets", f"{path!r}, which is not a local file and was taken for a dataset on the hub,")
    try:
        loaded = module.load_dataset(path, name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} is not a local file, and could not be loaded as a dataset on the hub "
            f"({type(error).__name__}: {error}): check its name, split and the network, or give a file"
        ) from error
    return map(dict, loaded)


def _optional(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} need {package}: pip install {package}, or give a JSONL file") from error
