"""Records: tables of one prompt each, from files on disk or made by reasoning-gym tasks.

Files are JSON lines, a dataset saved by Hugging Face datasets, Parquet or Arrow. Nothing is copied
into a cache. A line is read again from its file whenever it is asked for; of tables, only the
columns that are used are read. Entries of tasks are made from a seed, with nothing to download.

Values are kept as they were written, by one rule for every type of JSON, Parquet and Arrow::

    text, and bytes that are UTF-8     the text
    integer, of any size               its digits
    floating, of 16, 32 or 64 bits     the shortest digits that are read back as the same number
    decimal; a number in JSON lines    the digits as they were written: 3.50
    boolean                            true, false
    date, time, timestamp, duration    ISO 8601
    list, struct, map                  JSON, with each value by this rule; a map as a list of pairs
    null, NaN, infinity, other bytes   refused, with file, record and column

Digests are xxh3 of 128 bits over all bytes of files: they tell changes, not forgeries. A second of
CPU time is enough for about 8 GB that are in memory; several files are read at a time.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec
import numpy as np
import xxhash

from rlinf_async.config import needed
from rlinf_async.config.registry import nearest, raised
from rlinf_async.data.config import DataConfig, DataError

PLAIN_DIGITS: Final = 100
"""zeros that a decimal may need to be written without an exponent"""

_json = msgspec.json.Encoder(decimal_format="number")


def from_arrow(scalar: Any) -> Any:
    """A scalar of Arrow as a plain value that loses nothing.

    Raises:
        ValueError: there is no plain value of it, such as of a time with nanoseconds.
    """
    arrow = importlib.import_module("pyarrow")
    kind, types = scalar.type, arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return from_arrow(scalar.value) if scalar.is_valid else None
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        return {field.name: from_arrow(scalar[at]) for at, field in enumerate(kind)}
    if types.is_map(kind):
        return [[from_arrow(pair[0]), from_arrow(pair[1])] for pair in scalar.values]
    if types.is_nested(kind) and hasattr(scalar, "values"):
        return [from_arrow(one) for one in scalar.values]
    if types.is_dictionary(kind):
        return from_arrow(scalar.value)
    try:
        value = scalar.as_py()
        same = not types.is_temporal(kind) or arrow.scalar(value, kind).equals(scalar)
    except OverflowError as error:
        raise ValueError(f"{kind}: {error}") from error
    if not same:  # Python's times have microseconds
        raise ValueError(f"{kind}: {scalar} has nanoseconds, which are not read")
    if types.is_floating(kind) and kind.bit_width < 64:
        return float(str(np.dtype(f"f{kind.bit_width // 8}").type(value)))
    return _decoded(value) if isinstance(value, bytes) else value


def as_text(value: Any) -> str:
    """The value as text.

    Raises:
        ValueError: it cannot be written faithfully; says why.
    """
    plain = _plain(value)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, Decimal):
        return f"{plain:f}" if abs(plain.adjusted()) < PLAIN_DIGITS else str(plain)
    if isinstance(plain, int) and not isinstance(plain, bool):
        return str(plain)
    return _json.encode(plain).decode()


def _plain(value: Any) -> Any:
    """What JSON has a form for: text, numbers, booleans, None, lists and dicts of these."""
    if isinstance(value, bytes):
        value = _decoded(value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):  # msgspec writes larger ones as decimals only
        return value if -(2**63) <= value < 2**64 else Decimal(value)
    if isinstance(value, float | Decimal):
        finite = value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)
        if not finite:
            raise ValueError(f"{value} is no number that an answer could be")
        return value
    if isinstance(value, date | time | datetime):
        return value.isoformat()
    if isinstance(value, timedelta):  # of pandas, too, where nanoseconds are counted
        if getattr(value, "nanoseconds", 0):
            raise ValueError(f"{value} has nanoseconds, which are not read")
        return msgspec.to_builtins(timedelta(value.days, value.seconds, value.microseconds))
    if isinstance(value, uuid.UUID):
        return msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        return {as_text(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    what = "bytes that are not UTF-8" if isinstance(value, bytes) else type(value).__name__
    raise ValueError(f"{what} cannot be compared with an answer: {value!r:.80}")


def _decoded(value: bytes) -> str | bytes:
    """The text that bytes are; these bytes where they are none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


_PIECE: Final = 1024 * 1024
"""bytes that are read at a time"""
_THREADS: Final = 8
"""most threads that compute digests"""


def digest(file: Path) -> str:
    """Return the digest of a file's bytes, in hexadecimal."""
    found, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    with open(file, "rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            found.update(piece[:count])
    return found.hexdigest()


def digests(files: Sequence[Path]) -> list[str]:
    """Return the digests of files, in their order."""
    threads = min(_THREADS, os.cpu_count() or 1, max(1, len(files)))
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return list(pool.map(digest, files))


Record = Mapping[str, Any]

WHOLE: Final = "xxh3-128:"
"""begins the fingerprint of files of which every byte is in it"""

_EDGE: Final = 4 * 1024 * 1024
"""bytes at each end of a file that its fingerprint was once made of"""


class Records(Protocol):
    """Records in the order of their source; each can be read at any time."""

    fingerprint: str
    """digest of the records: another one when they change"""
    made_on_demand: bool
    """whether every read makes the record anew, which takes time"""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...

    def where(self, index: int) -> str:
        """The place of a record in its source, for errors: ``train.jsonl:7``."""
        ...


def column(record: Record, name: str, where: str) -> Any:
    """The value of a column; ``a.b`` is ``b`` of the table ``a``, unless a column has that name.

    Raises:
        DataError: there is no such column, or it is null; names the columns that there are.
    """
    value: Any = record.get(name)
    if name not in record and "." in name:
        value = record
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        state = "is null" if name in record else "is missing"
        raise DataError(
            f"{where}: column {name!r} {state} (columns here: {', '.join(map(str, record))})"
        )
    return value


def digest_of(files: Iterable[Path], folder: Path) -> str:
    """A digest of all bytes of these files, and of their paths below a folder, in their order."""
    ordered = sorted(files)
    names = (one.relative_to(folder).as_posix() for one in ordered)
    found = xxhash.xxh3_128()
    for name, one in zip(names, digests(ordered), strict=True):
        found.update(f"{len(name)}/{name}/{one}/".encode())
    return WHOLE + found.hexdigest()


def digest_of_ends(files: Iterable[Path]) -> str:
    """A digest of the names, sizes and both ends of these files, as earlier versions saved it."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_EDGE))
            if size > _EDGE:
                opened.seek(max(_EDGE, size - _EDGE))
                digest.update(opened.read(_EDGE))
    return digest.hexdigest()


_BOM = b"\xef\xbb\xbf"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def existing(name: str) -> Path:
    """The file or folder of this name.

    Raises:
        DataError: there is none.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise DataError(
            f"there is no file or folder {name!r} (seen from {os.getcwd()}): data are read "
            "from disk, not downloaded"
        )
    return path


def open_file(name: str, split: str, columns: Iterable[str]) -> Records:
    """The records of a file or folder.

    Args:
        name: its path.
        split: name of the split, in a folder that has several.
        columns: names of the columns that are used; empty ones are none.

    Raises:
        DataError: they are not there, or cannot be read.
        MissingExtra: the library datasets is needed and not installed.
    """
    path = existing(name)
    if not path.is_dir():
        _check_undivided(path, split)
    if not path.is_dir() and path.suffix not in (".parquet", ".arrow"):
        return JsonLines(path)
    tops = list(dict.fromkeys(column.partition(".")[0] for column in columns if column))
    return open_tables(path, split, tops)


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
        fingerprint: fingerprint of their content.
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
        """Fingerprint of earlier versions: most bytes of large files are not in it."""
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
    library = needed("datasets", extra="llm", needed_for=f"reading {path}")
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


REFERENCE_COLUMN: Final = "reasoning_gym"
"""column that the verifier of that name reads"""

_IN_FINGERPRINT: Final = 2
"""entries of each task that are part of the fingerprint"""


class TaskRecords:
    """Tasks in turn: record ``i`` is of task ``i % len(tasks)``.

    Its columns are ``prompt`` (the question), ``answer``, and the task's metadata of the entry
    (such as ``expression`` of ``chain_sum``).
    """

    made_on_demand = True

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, Mapping[str, Any]],
        seed: int,
        size: int,
    ) -> None:
        """Raises `ConfigError` for an unknown task, and for options that a task does not have."""
        from rlinf_async.rewards import reasoning  # needs reasoning-gym

        self._reference_of = reasoning.reference_of
        self._size = size
        self._seed = seed
        self._each = -(-size // len(names))
        self._options = {name: dict(options.get(name, {})) for name in names}
        self._names = list(names)
        self._tasks = [
            reasoning.open_task(name, self._options[name], seed, self._each) for name in names
        ]
        count = min(_IN_FINGERPRINT * len(names), size)
        about = [names, self._options, seed, size]
        about += [self[index]["prompt"] for index in range(count)]
        text = msgspec.json.encode(about, order="sorted")
        self.fingerprint = hashlib.blake2b(text, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Record:
        which, at = index % len(self._names), index // len(self._names)
        name = self._names[which]
        try:
            entry = self._tasks[which][at]
        except Exception as error:  # with some options a task finds no entry
            raise DataError(
                f"{self.where(index)} with {self._options[name]} cannot be made: {raised(error)}"
            ) from error
        options = self._options[name]
        return {
            **entry["metadata"],
            "prompt": entry["question"],
            "answer": entry["answer"],
            REFERENCE_COLUMN: self._reference_of(entry, name, options, self._seed, self._each, at),
        }

    def where(self, index: int) -> str:
        name = self._names[index % len(self._names)]
        return f"task {name}, entry {index // len(self._names)}"


class NumberRecords:
    """Tasks that an environment makes from their number: record ``i`` is ``i``."""

    made_on_demand = True

    def __init__(self, size: int, config: DataConfig) -> None:
        self._size = size
        self._columns = config.prompt_column, config.reference_column
        self.fingerprint = f"environment tasks: {size}"

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Record:
        return dict.fromkeys(self._columns, str(index))

    def where(self, index: int) -> str:
        """Return the record's name in errors."""
        return f"environment task {index}"
