"""JSON lines: one object on each line, read again from the file when it is asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rlinf_async.data.errors import DataError
from rlinf_async.data.records import Record

_BOM = b"\xef\xbb\xbf"


class JsonLines:
    """The objects of a file. Every line is looked at once when it is opened; blank ones do not
    count."""

    made_on_demand = False

    def __init__(self, path: Path) -> None:
        """Raises `DataError` for a line that is no JSON object, naming it."""
        self._name = str(path)
        digest = hashlib.blake2b(digest_size=16)
        places: list[tuple[int, int, int]] = []
        self._decode = msgspec.json.Decoder(dict[str, Any]).decode
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
