"""Records on disk: JSON lines, a dataset saved by Hugging Face datasets, Parquet or Arrow files.

Nothing is copied into a cache. A line is read again from its file whenever it is asked for; of
tables, only the columns that are used are read.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rlinf_async.config import MissingExtra
from rlinf_async.config.errors import nearest
from rlinf_async.data.config import DataConfig
from rlinf_async.data.errors import DataError
from rlinf_async.data.records import Record, Records, digest_of, digest_of_ends
from rlinf_async.data.values import from_arrow

_BOM = b"\xef\xbb\xbf"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def existing(config: DataConfig) -> Path:
    """The file or folder that ``path`` names.

    Raises:
        DataError: there is none.
    """
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError(
            f"there is no file or folder {config.path!r} (seen from {os.getcwd()}): data are read "
            "from disk, not downloaded"
        )
    return path


def open_file(config: DataConfig) -> Records:
    """The records of the file or folder that ``path`` names.

    Raises:
        DataError: they are not there, or cannot be read.
        MissingExtra: the library datasets is needed and not installed.
    """
    path = existing(config)
    if not path.is_dir():
        _check_undivided(path, config.split)
    if not path.is_dir() and path.suffix not in (".parquet", ".arrow"):
        return JsonLines(path)
    columns = [config.prompt_column, config.reference_column, config.verifier_column]
    tops = list(dict.fromkeys(column.partition(".")[0] for column in columns if column))
    return open_tables(path, config.split, tops)


def _check_undivided(path: Path, split: str) -> None:
    """Refuse a split of what has none: all of it would be read."""
    if split != "train":
        raise DataError(
            f"split is {split!r}, but {path} is not divided into splits: name that split's own "
            "file or folder by path, and leave split out"
        )


class JsonLines:
    """The objects of a file. Every line is checked when the file is opened; blank ones do not
    count."""

    made_on_demand = False

    def __init__(self, path: Path) -> None:
        """Raises `DataError`, naming the line, where one is not a JSON object."""
        self._name = str(path)
        digest = hashlib.blake2b(digest_size=16)
        places: list[tuple[int, int, int]] = []
        self._decode = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode
        start = 0
        with self._open() as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                skipped = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                text = line[skipped:]
                if text.strip():
                    self._check(text, number)
                    places.append((start + skipped, len(text), number))
                start += len(line)
        self._places = np.array(places, np.int64).reshape(-1, 3)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Record:
        start, size, number = (int(one) for one in self._places[index])
        with self._open() as file:
            file.seek(start)
            return self._check(file.read(size), number)

    def where(self, index: int) -> str:
        return f"{self._name}:{self._places[index][2]}"

    def _open(self) -> BinaryIO:
        try:
            return open(self._name, "rb")
        except OSError as error:
            raise DataError(f"{self._name} cannot be read: {error.strerror}") from None

    def _check(self, text: bytes, number: int) -> Record:
        try:
            return self._decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self._name}:{number}: each line must be one JSON object: {error}"
            ) from None


class TableRecords:
    """Rows of a `datasets.Dataset`.

    Args:
        dataset: the tables of all files, one after the other.
        files: names and numbers of rows, in this order.
        fingerprint: of their content.
    """

    made_on_demand = False

    def __init__(
        self, dataset: Any, counts: Sequence[tuple[str, int]], files: Sequence[Path], folder: Path
    ) -> None:
        self._dataset = dataset.with_format("arrow")
        self._names = [name for name, _ in counts]
        self._ends = np.cumsum([rows for _, rows in counts])
        self._files = files
        self.fingerprint = digest_of(files, folder)

    def earlier_fingerprint(self) -> str:
        """What earlier versions called the fingerprint: most bytes of large files are not in it."""
        return digest_of_ends(self._files)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Record:
        row = self._dataset[int(index)]
        record = {}
        for name in row.column_names:
            try:
                record[name] = from_arrow(row.column(name)[0])
            except ValueError as error:
                raise DataError(f"{self.where(index)}: column {name!r}: {error}") from error
        return record

    def where(self, index: int) -> str:
        at = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[at - 1]) if at else 0
        return f"{self._names[at]}, record {index - before}"


def open_tables(path: Path, split: str, columns: Sequence[str]) -> Records:
    """The rows of a file or folder.

    Raises:
        DataError: it holds no tables, no such split, or not these columns.
        MissingExtra: the library datasets is not installed.
    """
    library = _library(path)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        dataset, path, files = _saved(library, path, split)
        counts = [(str(path), len(dataset))]
    else:
        files = _files(path, split)
        dataset, counts = _tables(library, files)
    name = str(path)
    known = dataset.column_names
    for column in columns:
        if column not in known:
            raise DataError(
                f"{name} has no column {column!r}{nearest(column, known)}; it has "
                f"{', '.join(known)}"
            )
    folder = path if path.is_dir() else path.parent
    return TableRecords(dataset.select_columns(list(columns)), counts, files, folder)


def _saved(library: Any, path: Path, split: str) -> tuple[Any, Path, list[Path]]:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(one.parent.name for one in path.glob("*/state.json"))
        if split not in splits:
            raise DataError(
                f"{path} has no split {split!r}{nearest(split, splits)}; it has "
                f"{', '.join(splits) or 'none'}"
            )
        path = path / split
    else:
        _check_undivided(path, split)
    try:
        dataset = library.load_from_disk(str(path))
    except Exception as error:  # datasets and pyarrow raise errors of many types
        raise DataError(f"{path} cannot be read as a saved dataset: {error}") from error
    return dataset, path, [one for one in path.rglob("*") if one.is_file()]


def _files(path: Path, split: str) -> list[Path]:
    """The Parquet or else the Arrow files of a folder that belong to the split."""
    if path.is_file():
        return [path]
    for suffix in ("parquet", "arrow"):
        every = sorted(one for one in path.rglob(f"*.{suffix}") if one.is_file())
        marked = {one: _split_of(one.relative_to(path)) for one in every}
        if every and not any(marked.values()):
            _check_undivided(path, split)
            chosen = every
        else:
            chosen = [one for one in every if marked[one] == split]
        if chosen:
            return chosen
        if every:
            there = sorted({one for one in marked.values() if one})
            raise DataError(
                f"{path} has no {suffix} files of split {split!r}{nearest(split, there)}; it has "
                f"those of {', '.join(there)}"
            )
    raise DataError(
        f"{path} holds no data: neither a dataset that was saved with save_to_disk nor .parquet or "
        ".arrow files (for JSON lines, give the path of the file)"
    )


def _split_of(file: Path) -> str:
    """The split: ``train`` of ``data/train-00000-of-00001.parquet`` or ``train/0000.parquet``."""
    for part in reversed(file.parts):
        word = re.match(r"[A-Za-z]+", part)
        if word is not None and word[0] in _SPLITS:
            return word[0]
    return ""


def _tables(library: Any, files: Sequence[Path]) -> tuple[Any, list[tuple[str, int]]]:
    tables = []
    for file in files:
        try:
            if file.suffix == ".parquet":
                read = importlib.import_module("pyarrow.parquet").read_table
                tables.append(library.Dataset(read(file, memory_map=True)))
            else:
                tables.append(library.Dataset.from_file(str(file)))
        except Exception as error:  # pyarrow raises errors of many types
            raise DataError(f"{file} cannot be read: {error}") from error
    try:
        counts = [(str(file), len(table)) for file, table in zip(files, tables, strict=True)]
        return library.concatenate_datasets(tables), counts
    except (ValueError, TypeError) as error:
        raise DataError(f"the files beside {files[0]} do not fit together: {error}") from error


def _library(path: Path) -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        missing = error.name or "datasets"
        raise MissingExtra(missing, extra="llm", needed_for=f"reading {path}") from error
