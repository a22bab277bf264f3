"""Memory of this process, as the system counts it; and memory in which mistakes are seen."""

from __future__ import annotations

from pathlib import Path

import torch

MEGABYTE = 1 << 20


def own_bytes() -> int:
    """Memory of this process that is not of files or shared."""
    return _kilobytes(Path("/proc/self/status"), "RssAnon:") * 1024


def lazily_free() -> int:
    """What was given up, and the system has not taken."""
    return _kilobytes(Path("/proc/self/smaps_rollup"), "LazyFree:") * 1024


def show_mistakes() -> None:
    """Let torch fill the memory of new tensors of this process with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def _kilobytes(path: Path, name: str) -> int:
    [line] = [line for line in path.read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])
