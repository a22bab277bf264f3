"""Digests of all bytes of files: xxh3 of 128 bits. They tell changes, not forgeries.

A second of CPU time is enough for about 8 GB that are in memory; several files are read at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

_PIECE: Final = 1024 * 1024
"""bytes that are read at a time"""
_THREADS: Final = 8


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
