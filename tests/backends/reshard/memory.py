"""Memory of this process, as the system counts it; and memory in which mistakes are seen."""

from __future__ import annotations

import mmap
from pathlib import Path

from rlinf_async.backends.reshard import Arena, address_space

MEGABYTE = 1 << 20


def own_bytes() -> int:
    """Memory of this process that is not of files or shared."""
    return _kilobytes(Path("/proc/self/status"), "RssAnon:") * 1024


def lazily_free() -> int:
    """What was given up, and the system has not taken."""
    return _kilobytes(Path("/proc/self/smaps_rollup"), "LazyFree:") * 1024


def show_mistakes() -> None:
    """Let small tensors come from arenas of this process, too, full of NaN; what they leave is gone
    at once."""
    address_space.MAPPED_BYTES = 1
    address_space.MARK_FREE = mmap.MADV_DONTNEED
    take = Arena._take

    def take_and_spoil(self: Arena, size: int) -> memoryview | None:
        given = take(self, size)
        if given is not None:
            given[:] = b"\xff" * len(given)
        return given

    Arena._take = take_and_spoil  # type: ignore[method-assign]


def _kilobytes(path: Path, name: str) -> int:
    [line] = [line for line in path.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])
