"""Records: plain tables of one prompt each, wherever they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import xxhash

from rlinf_async.data.digests import digests
from rlinf_async.data.errors import DataError

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
