"""The language model in a checkpoint: its configuration, and its tensors by their names in memory.

Weights are stored as ``model.language.NAME``, moments as ``optimizer.language.NAME.exp_avg``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.metadata import MODEL_FOLDER, FileRecord
from rlinf_async.backends.checkpoint.reading import Saved, check_file
from rlinf_async.parallel import ModelMismatch
from rlinf_async.parallel.decoders import ARCHITECTURES, Decoder

WEIGHTS, MOMENTS = "model.", "optimizer."
LANGUAGE = "language."
CONFIG = "config.json"


class Kind(NamedTuple):
    """Weights, or one kind of moments: the prefix and suffix of a parameter's name."""

    prefix: str
    suffix: str = ""

    def inner(self, name: str) -> str | None:
        """Return the parameter's name, or None for a name of another kind."""
        if name.startswith(self.prefix) and name.endswith(self.suffix):
            return name[len(self.prefix) : len(name) - len(self.suffix)]
        return None

    def outer(self, name: str) -> str:
        """Return the name in the checkpoint."""
        return f"{self.prefix}{name}{self.suffix}"


OF_WEIGHTS = Kind(WEIGHTS + LANGUAGE)
KINDS = (
    OF_WEIGHTS,
    Kind(MOMENTS + LANGUAGE, ".exp_avg"),
    Kind(MOMENTS + LANGUAGE, ".exp_avg_sq"),
)


def model_files(saved: Saved) -> dict[str, Path]:
    """Return configuration and tokenizer of the checkpoint, by name. Raises `CheckpointError`."""
    found: dict[str, Path] = {}
    for record in _records(saved):
        check_file(saved.folder, record)
        found[record.name.removeprefix(f"{MODEL_FOLDER}/")] = saved.folder / record.name
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Return a Hugging Face configuration. Raises `CheckpointError`."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return config


def decoder_of(config: Mapping[str, Any]) -> Decoder | None:
    """Return the decoder of a configuration; None where there is no name map for it."""
    if config.get("model_type") not in ARCHITECTURES:
        return None
    try:
        return Decoder.from_config(config)
    except ModelMismatch:
        return None


def foreign(names: Iterable[str]) -> list[str]:
    """Return the weights that do not belong to a causal language model: a critic's, a policy's."""
    return [
        name.removeprefix(WEIGHTS)
        for name in names
        if name.startswith(WEIGHTS) and not name.startswith(WEIGHTS + LANGUAGE)
    ]


def _records(saved: Saved) -> tuple[FileRecord, ...]:
    return saved.metadata.model if saved.metadata is not None else ()
