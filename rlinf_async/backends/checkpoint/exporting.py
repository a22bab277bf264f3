"""A checkpoint as a Hugging Face folder, which transformers and vLLM load.

::

    model-00001-of-00003.safetensors, ...   weights, in the requested dtype
    model.safetensors.index.json            file of each tensor; a small model is one file without
                                            index, model.safetensors
    config.json, generation_config.json, tokenizer files

Tied weights are stored once. Weights get the names and shapes that checkpoints of their
architecture have: experts, which transformers keeps fused in memory, are stored one by one. One
tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.errors import CheckpointError
from rlinf_async.backends.checkpoint.folders import being_read, find_checkpoint, newest_of_run
from rlinf_async.backends.checkpoint.language_model import (
    CONFIG,
    OF_WEIGHTS,
    foreign,
    model_files,
    read_config,
)
from rlinf_async.backends.checkpoint.reading import Saved, read_checkpoint
from rlinf_async.backends.checkpoint.streaming import Advance, new_folder, write_tensors
from rlinf_async.backends.checkpoint.tensor_file import (
    DTYPES,
    Entry,
    header,
    in_file_order,
    write_file,
)
from rlinf_async.backends.transformers.tensors import ModelTensors, Slice

SHARD_BYTES = 5_000_000_000
NO_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "*.pt", "*.pth", "*.gguf")


class Exported(NamedTuple):
    """The result of an export."""

    folder: Path
    tensors: int
    bytes: int


class Export:
    """One export. `run` writes it; ``total_bytes`` is its size.

    Args:
        checkpoint: a checkpoint's folder, or that of a run: its newest.
        dtype: dtype of floating-point weights; unchanged when left out.
        model: folder with configuration and tokenizer; those of the checkpoint when left out.
        shard_bytes: largest size of one file, unless a single tensor is larger.

    Raises `CheckpointError` for a checkpoint that is damaged or of no language model.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: torch.dtype | None = None,
        model: Path | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._folder = find_checkpoint(newest_of_run(checkpoint))
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        with being_read(self._folder):
            self._saved = read_checkpoint(self._folder)
            self._files = _files(self._saved, model)
        self._config = read_config(self._files[CONFIG])
        self._slices = _slices(self._saved, self._config)
        self._shards = list(self._in_shards())
        self.total_bytes = sum(one.nbytes for shard in self._shards for one in shard)

    def run(self, out: Path, advance: Advance = lambda _: None) -> Exported:
        """Write the folder ``out``, which must not exist yet."""
        with being_read(self._folder), new_folder(out) as folder:
            places: dict[str, str] = {}
            for number, shard in enumerate(self._shards, start=1):
                name = self._shard_name(number)
                head = header(shard, about={"format": "pt"})
                write_tensors(folder, name, head, shard, self._make, advance)
                places |= {one.name: name for one in shard}
            if len(self._shards) > 1:
                self._write_index(folder, places)
            for name, source in self._files.items():
                if name != CONFIG:
                    write_file(folder, name, source.read_bytes())
            write_file(folder, CONFIG, _pretty(self._described()))
        return Exported(out, len(self._slices), self.total_bytes)

    def _make(self, entry: Entry) -> Tensor:
        one = self._slices[entry.name]
        return one.of(self._saved.tensors[one.tensor].whole().contiguous()).to(entry.dtype)

    def _in_shards(self) -> Iterator[list[Entry]]:
        shard: list[Entry] = []
        for name, one in self._slices.items():
            stored = self._saved.tensors[one.tensor].dtype
            dtype = self._dtype if self._dtype is not None and stored.is_floating_point else stored
            entry = Entry(name, dtype, one.shape)
            if shard and sum(one.nbytes for one in shard) + entry.nbytes > self._shard_bytes:
                yield in_file_order(shard)
                shard = []
            shard.append(entry)
        yield in_file_order(shard)

    def _shard_name(self, number: int) -> str:
        if len(self._shards) == 1:
            return "model.safetensors"
        return f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"

    def _write_index(self, folder: Path, places: dict[str, str]) -> None:
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        write_file(folder, "model.safetensors.index.json", _pretty(index))

    def _described(self) -> dict[str, Any]:
        """The configuration, with the dtype of the written weights."""
        dtypes = [one.dtype for shard in self._shards for one in shard if one.dtype in DTYPES]
        kept = {name: value for name, value in self._config.items() if name != "torch_dtype"}
        floating = [one for one in dtypes if one.is_floating_point]
        if floating:
            kept["dtype"] = str(max(floating, key=floating.count)).removeprefix("torch.")
        return kept


def _files(saved: Saved, model: Path | None) -> dict[str, Path]:
    """Configuration and tokenizer: from ``model``, else from the checkpoint."""
    if model is not None:
        weights = {path for pattern in NO_WEIGHTS for path in model.glob(pattern)}
        found = {one.name: one for one in sorted(model.glob("*")) if one.is_file()}
        found = {name: one for name, one in found.items() if one not in weights}
        if CONFIG not in found:
            raise CheckpointError(f"{model} holds no {CONFIG}: name the folder of the model")
        return found
    found = model_files(saved)
    if CONFIG not in found:
        raise CheckpointError(
            f"{saved.folder} does not say which language model it holds (no model/{CONFIG}): name "
            "the folder that the training began with by --model, if it is of one"
        )
    return found


def _slices(saved: Saved, config: dict[str, Any]) -> dict[str, Slice]:
    """Return where each tensor of the export lies in the tensors of the checkpoint.

    Raises `CheckpointError` for a checkpoint of something else than the configuration's model.
    """
    others = foreign(saved.tensors)
    if others:
        raise CheckpointError(
            f"{saved.folder} holds {others[0]!r}, which is no part of a causal language model: a "
            "critic or a policy for robots cannot be exported"
        )
    weights = {
        inner: name for name in saved.tensors if (inner := OF_WEIGHTS.inner(name)) is not None
    }
    if not weights:
        raise CheckpointError(f"{saved.folder} holds no language model")
    tensors = _tensors_of(saved, config)
    for name, expected in tensors.memory.items():
        if name not in weights and name not in tensors.tied:
            raise CheckpointError(
                f"{saved.folder} lacks {name!r}, which {CONFIG} asks for: they are of different "
                "models"
            )
        if name in weights and saved.tensors[weights[name]].shape != tuple(expected.shape):
            raise CheckpointError(
                f"{name!r} is {list(saved.tensors[weights[name]].shape)} in {saved.folder}, but "
                f"{list(expected.shape)} by {CONFIG}"
            )
        if name in weights and not saved.tensors[weights[name]].dtype.is_floating_point:
            raise CheckpointError(
                f"{name!r} is {saved.tensors[weights[name]].dtype} in {saved.folder}: no weight"
            )
    unknown = weights.keys() - tensors.memory.keys()
    if unknown:
        raise CheckpointError(
            f"{saved.folder} holds {min(unknown)!r}, which {CONFIG} does not know: they are of "
            "different models"
        )
    return {
        name: one._replace(tensor=weights[one.tensor]) for name, one in tensors.published().items()
    }


def _tensors_of(saved: Saved, config: dict[str, Any]) -> ModelTensors:
    try:
        return ModelTensors(config)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "exporting a language model needs the package 'transformers': "
            "pip install 'rlinf-async[llm]'"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{saved.folder} cannot be exported: transformers has no model for its {CONFIG} "
            f"({error})"
        ) from error


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
