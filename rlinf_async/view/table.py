"""``metrics.csv`` of a run that may go on: read on from where it was read to.

The cells are kept as text, as they were written, and are numbers only where they are drawn: a large
integer stays what it is, and NaN and infinity are no special case on the way.

Invariant: what `Table.since` gives for a generation is never taken back. A file that was replaced
(by a new column, by a run that is resumed at an earlier step) is another generation.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Any, Final

from rlinf_async.observe.files import RunFolderError, explaining
from rlinf_async.observe.metrics import STEP

REMEMBERED: Final = 256
"""bytes before the place that was read to, by which the same file is known again"""


class Table:
    """The rows of a metrics file so far.

    Args:
        path: the file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.generation = 0
        """number of files that were read at this path"""
        self.columns: list[str] = []
        self.rows = 0
        self._cells: list[list[str]] = []  # by column
        self._inode = -1
        self._read_to = 0
        self._tail = b""

    def read(self) -> None:
        """Read what is new.

        Raises:
            RunFolderError: the file cannot be read, or is not a metrics file.
        """
        with explaining("read", self._path):
            try:
                with self._path.open("rb") as file:
                    content = self._read_on(file.fileno())
            except FileNotFoundError:
                if self._inode != -1:
                    self._begin(-1)
                return
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            return
        self._add(list(csv.reader(io.StringIO(whole.decode(errors="replace"), newline=""))))
        self._read_to += len(whole)
        self._tail = (self._tail + whole)[-REMEMBERED:]

    def _read_on(self, descriptor: int) -> bytes:
        found = os.fstat(descriptor)
        back = len(self._tail)
        same = found.st_ino == self._inode and found.st_size >= self._read_to
        if not same or os.pread(descriptor, back, self._read_to - back) != self._tail:
            self._begin(found.st_ino)
        size = found.st_size - self._read_to
        return os.pread(descriptor, size, self._read_to) if size else b""

    def _begin(self, inode: int) -> None:
        self.generation += 1
        self.columns, self._cells, self.rows = [], [], 0
        self._inode, self._read_to, self._tail = inode, 0, b""

    def _add(self, rows: list[list[str]]) -> None:
        if not self.columns:
            header = rows.pop(0)
            if header[:1] != [STEP]:
                self._inode = -1
                raise RunFolderError(
                    f"{self._path} does not start with a column {STEP!r}: it is not a metrics file "
                    "of a run; move it away"
                )
            self.columns = header
            self._cells = [[] for _ in header]
        whole = [row for row in rows if len(row) == len(self.columns)]
        for cells, new in zip(self._cells, zip(*whole, strict=True), strict=False):
            cells.extend(new)
        self.rows += len(whole)

    def since(self, names: list[str], after: int, generation: int) -> dict[str, Any]:
        """The cells of these columns from a row on, joined by commas; from 0 on where the file is
        another one than the asker knows. Cells are numbers: none holds a comma."""
        if generation != self.generation or after > self.rows:
            after = 0
        return {
            "generation": self.generation,
            "after": after,
            "rows": self.rows,
            "columns": {
                name: ",".join(_number(cell) for cell in self._cells[at][after:])
                for at, name in enumerate(self.columns)
                if name in names or name == STEP
            },
        }

    def newest(self) -> dict[str, str]:
        """The last cell of each column that is not empty."""
        return {
            name: next((cell for cell in reversed(cells[-1000:]) if cell), "")
            for name, cells in zip(self.columns, self._cells, strict=True)
        }


def _number(cell: str) -> str:
    """A cell as it is, unless it would be taken for several."""
    return cell if "," not in cell else "nan"
