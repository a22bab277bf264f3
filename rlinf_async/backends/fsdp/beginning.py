"""The weights of another run, or of an exported policy, with which a run begins.

::

    folder --read--> tensors by name --compare--> what fits, and what does not --take--> the model
                                       (driver)                              (each rank, its shards)
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import nn

from rlinf_async.backends.base import FirstWeights
from rlinf_async.backends.checkpoint.folders import (
    METADATA,
    CheckpointError,
    SavedStrategy,
    being_read,
)
from rlinf_async.backends.checkpoint.reading import (
    Saved,
    SavedBox,
    SavedTensor,
    read_checkpoint,
)
from rlinf_async.backends.fsdp.state import MODEL, model_state, saved_weights, take_weights
from rlinf_async.backends.policies.left import FILES, NOTE
from rlinf_async.backends.policies.moments import RunningMoments


class Comparison(NamedTuple):
    """Tensors of a folder beside those of a model."""

    tensors: dict[str, str]
    """those that fit: name in the model -> name in the folder"""
    misfits: list[str]
    """the others of the model, each with why"""
    unused: list[str]
    """the others of the folder, each with why"""


def compare(
    model: nn.Module, folder: Path, *, prefix: str = "", anew: Collection[str] = ()
) -> Comparison:
    """Compare the tensors of a folder with those of a model.

    Args:
        model: not sharded.
        folder: a checkpoint, or an exported policy.
        prefix: what the names of an exported policy have before them in the model.
        anew: names of parameters that begin anew, whatever their shape.

    Raises:
        CheckpointError: the folder is damaged.
    """
    found = saved_weights(model, _read(folder))
    before = prefix if (folder / NOTE).is_file() else ""
    named = {before + stored: stored for stored in found}
    tensors, misfits = dict[str, str](), list[str]()
    present = model_state(model)
    for name, one in present.items():
        stored = found.get(named.get(name, ""))
        if stored is None:
            misfits.append(f"{name!r} is not there")
        elif stored.shape != tuple(one.shape):
            misfits.append(f"{name!r} is {list(one.shape)}, there {list(stored.shape)}")
        elif stored.dtype != one.dtype:
            misfits.append(f"{name!r} is {one.dtype}, there {stored.dtype}")
        elif name in anew:
            misfits.append(f"{name!r} is of other actions")
        else:
            tensors[name] = named[name]
    for name in _torn_statistics(model, tensors):
        del tensors[name]
        misfits.append(f"{name!r} is of statistics that begin anew")
    unused = [f"{name!r} has no place here" for name in named if name not in present]
    return Comparison(tensors, misfits, unused)


def _torn_statistics(model: nn.Module, fitting: Collection[str]) -> list[str]:
    """Those of running moments of which another one does not fit: they go together."""
    torn: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, RunningMoments):
            mine = [f"{name}.{one}" for one, _ in module.named_buffers()]
            found = [one for one in mine if one in fitting]
            torn += found if len(found) < len(mine) else []
    return torn


def take(model: nn.Module, first: FirstWeights) -> None:
    """Make the tensors those of the model, under the sharding there is. Collective for FSDP1."""
    folder = Path(first.folder)
    found = saved_weights(model, _read(folder))
    missing = [stored for stored in first.tensors.values() if stored not in found]
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]!r}: it is another one now")
    take_weights(model, {name: found[stored] for name, stored in first.tensors.items()})


def _read(folder: Path) -> Saved:
    """Map the tensors of a checkpoint, or of an exported policy, into memory."""
    if not (folder / NOTE).is_file():
        with being_read(folder):  # a run that goes on may be about to remove it
            return read_checkpoint(folder)
    file, found = folder / FILES["folder"], dict[str, SavedTensor]()
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.offset_keys():
                data = tensors.get_tensor(name)
                one = SavedTensor(MODEL + name, tuple(data.shape), data.dtype, file)
                one.add(one.shape, SavedBox((0,) * data.ndim, data, file))
                found[one.name] = one
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return Saved(folder, SavedStrategy(), found, [], {}, None)


def number_in(folder: Path, name: str) -> float:
    """Return a tensor of a folder that is one number."""
    return float(_read(folder).tensors[MODEL + name].whole())


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold its weights, and say what they are."""
    note = folder / NOTE
    if note.is_file():
        return [note, folder / FILES["folder"]]
    return [folder / METADATA, *folder.glob("*.safetensors")]
