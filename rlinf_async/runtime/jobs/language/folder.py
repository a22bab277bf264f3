"""The folder of a model."""

from __future__ import annotations

from pathlib import Path


def has_weights(folder: Path) -> bool:
    """Whether a model folder has weights."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
