"""An input of a fuzzer, cut into what a target needs. An input that is too short gives zeros."""

from __future__ import annotations


class Pieces:
    """Takes an input apart from its front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return self._at < len(self._data)

    def byte(self) -> int:
        return self._next(1)[0]

    def number(self, size: int) -> int:
        return int.from_bytes(self._next(size), "little")

    def some(self) -> bytes:
        """A piece that says its own length, up to 64 KiB."""
        return self._next(self.number(2), padded=False)

    def rest(self) -> bytes:
        return self._next(len(self._data), padded=False)

    def _next(self, size: int, *, padded: bool = True) -> bytes:
        found = self._data[self._at : self._at + size]
        self._at += len(found)
        return found.ljust(size, b"\0") if padded else found


def piece(data: bytes) -> bytes:
    """What `Pieces.some` takes apart."""
    return len(data).to_bytes(2, "little") + data
