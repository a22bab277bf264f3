"""Checkpoints of Megatron's ranks, in the format and under the names of the FSDP backend's.

::

    what this rank has --boxes of Hugging Face tensors--> rank_R_of_N.safetensors
    any rank's files --boxes--> this rank's slices, under whatever strategy

So any strategy loads any other's, and either backend the other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.collectives import (
    Counters,
    Own,
    encode_own,
    fail_together,
    prepare_writing,
    reading_together,
)
from rlinf_async.backends.checkpoint.folders import CheckpointError, staging_folder
from rlinf_async.backends.checkpoint.reading import Saved
from rlinf_async.backends.checkpoint.tensor_file import Box, RankPart, TensorEntry, in_file_order
from rlinf_async.backends.checkpoint.writing import CheckpointWriter, Content
from rlinf_async.backends.megatron.config import OUTPUT_LAYER, VALUE_HEAD
from rlinf_async.backends.megatron.manager import MegatronModelManager
from rlinf_async.backends.megatron.weights import (
    MOMENTS,
    HeldParameter,
    kept_of,
    pieces_of_range,
    set_state,
    torch_optimizers,
)

MODEL, OPTIMIZER = "model.", "optimizer."
KINDS = {"param": (MODEL, "")} | {kind: (OPTIMIZER, f".{kind}") for kind in MOMENTS}
"""prefix and suffix of the names in the files, by what a rank has of a parameter"""


def begin(
    manager: MegatronModelManager, writer: CheckpointWriter, path: Path, extra: Mapping[str, object]
) -> Future[Path]:
    """Start writing a checkpoint folder, also while offloaded. Collective. Everything is copied
    before this returns.

    An idle rank has no part in it. What fails on one active rank is an error on all of them.
    """
    if not manager.active:
        return writer.idle(path)
    prepare_writing(manager, writer, path)
    with fail_together(manager, f"copying what goes to {path}"), manager.awake():
        if not staging_folder(path).is_dir():
            raise CheckpointError(
                f"{path} cannot be written: not all ranks write to the same disk; give a path that "
                "they share"
            )
        stepped = next(torch_optimizers(manager.optimizer))
        content = _content(manager, _part(manager), extra)
        return writer.begin(path, content, manager.rank, manager.world_size, stepped)


def finish(manager: MegatronModelManager, writer: CheckpointWriter, path: Path) -> None:
    """Wait until the checkpoint that was begun is complete. Collective; idle ranks do not wait."""
    if manager.active:
        with fail_together(manager, f"writing {path}"):
            writer.wait()


def load(manager: MegatronModelManager, writer: CheckpointWriter, path: Path) -> list[Own]:
    """Load model and optimizer; return what every rank saved besides. Collective.

    What was offloaded stays offloaded. Where a rank cannot read its part, or it does not fit, every
    rank raises, and nothing was changed on any.
    """
    manager.active_part()
    # Not assembled before: that would take the memory of a second float32 model with moments. All
    # that the files can lack was checked.
    with (
        reading_together(manager, writer, path, partial(_check, manager)) as (saved, own),
        fail_together(manager, f"loading {saved.folder}"),
        manager.awake(),
    ):
        for held in manager.held:
            found = _assembled(held, saved)
            set_state(manager.optimizer, held.parameter, found, own[0].counters.steps)
    counters = own[0].counters
    manager.steps, manager.skipped_steps = counters.steps, counters.skipped_steps
    return own


def saved_name(tensor: str) -> str:
    """Return the name of a tensor in the FSDP backend's networks: the model of transformers is a
    part of them, as the head of a critic is."""
    return tensor if tensor.startswith(VALUE_HEAD) else f"language.{tensor}"


def _content(manager: MegatronModelManager, part: RankPart, extra: Mapping[str, object]) -> Content:
    return Content(
        part=part,
        at_once=part.live.keys(),
        own=encode_own(Counters(manager.steps, manager.skipped_steps), extra),
        model=manager.model_files if manager.rank == 0 else {},
        aliases={},
    )


def _part(manager: MegatronModelManager) -> RankPart:
    """Return what this rank has of weights and moments: no rank needs memory for another's.

    Where data ranks have copies of the optimizer, the first writes; where tensor ranks or two
    stages have copies of a parameter, so does the first of them.
    """
    place = manager.place
    first = place.dp == 0
    layout = {one.name: tuple(one.shape) for one in manager.tensors}
    entries: list[TensorEntry] = []
    shapes: dict[str, tuple[int, ...]] = {}
    live: dict[str, Tensor] = {}
    steps = torch.tensor(float(manager.steps))
    for held in filter(partial(_is_first_copy, manager), manager.held):
        kept = kept_of(manager.optimizer, held.parameter)
        if kept is not None and (first or manager.sharding.distributed):
            kinds = {"param": kept.main.detach()} | {one: kept.state[one] for one in kept.state}
            for kind, (prefix, suffix) in KINDS.items():
                if kind not in kinds:
                    continue
                name = f"{prefix}{held.name}{suffix}"
                data = kinds[kind].view(-1)
                boxes = tuple(_boxes(held, kept.start, len(data), prefix, suffix))
                if not boxes:  # of the padded vocabulary
                    continue
                shapes.update(
                    (prefix + saved_name(one.tensor) + suffix, layout[one.tensor])
                    for one in held.pieces
                )
                entries.append(TensorEntry(name, data.dtype, tuple(data.shape), boxes))
                live[name] = data
        for one in held.pieces if first and place.tp == 0 and manager.steps else ():
            name = f"{OPTIMIZER}{saved_name(one.tensor)}.step"
            if name not in shapes:
                shapes[name] = ()
                entries.append(TensorEntry(name, torch.float32, (), (Box(name, (), (), 0),)))
                live[name] = steps
    return RankPart(in_file_order(entries), shapes, live)


def _is_first_copy(manager: MegatronModelManager, held: HeldParameter) -> bool:
    """Whether no other tensor rank or stage before this one holds the same of a parameter."""
    place, architecture = manager.place, manager.architecture
    tied = architecture.decoder.tied and not architecture.values
    if tied and place.stage > 0 and held.name.startswith(OUTPUT_LAYER):
        return False
    return place.tp == 0 or bool(getattr(held.parameter, "tensor_model_parallel", False))


def _boxes(held: HeldParameter, start: int, count: int, prefix: str, suffix: str) -> Iterator[Box]:
    """Yield the boxes of ``count`` elements of a flat parameter."""
    for one in pieces_of_range(held, start, count):
        name = prefix + saved_name(one.tensor) + suffix
        yield Box(name, one.start, one.size, one.offset)


def _kinds(held: HeldParameter, saved: Saved) -> dict[str, tuple[str, str]]:
    """Return what was saved of a parameter, with prefix and suffix of its names in the files."""
    if any(f"{OPTIMIZER}{saved_name(one.tensor)}.step" in saved.tensors for one in held.pieces):
        return KINDS
    return {"param": KINDS["param"]}


def _assembled(held: HeldParameter, saved: Saved) -> dict[str, Tensor]:
    """Return a parameter, and its moments if they were saved, flat."""
    found = {}
    for kind, (prefix, suffix) in _kinds(held, saved).items():
        whole = torch.zeros(held.parameter.numel(), dtype=torch.float32)
        for one in held.pieces:
            size = torch.Size(one.size).numel()
            box = whole[one.offset : one.offset + size].view(one.size)
            saved.tensors[prefix + saved_name(one.tensor) + suffix].fill(box, one.start)
        found[kind] = whole.to(held.parameter.device)
    return found


def _check(manager: MegatronModelManager, saved: Saved) -> None:
    """Raise `CheckpointError` unless names and shapes are those of the model, and of its moments
    where there are any."""
    shapes = {one.name: tuple(one.shape) for one in manager.tensors}
    wanted = {MODEL + saved_name(name): shape for name, shape in shapes.items()}
    there = {name: one.shape for name, one in saved.tensors.items() if name.startswith(MODEL)}
    for held in manager.held:
        for prefix, suffix in _kinds(held, saved).values():
            names = {prefix + saved_name(one.tensor) + suffix: one.tensor for one in held.pieces}
            wanted |= {name: shapes[tensor] for name, tensor in names.items()}
            there |= {name: saved.tensors[name].shape for name in names if name in saved.tensors}
    faults = [f"missing {name!r}" for name in wanted if name not in there]
    faults += [f"unexpected {name!r}" for name in there if name not in wanted]
    faults += [
        f"{name!r} is {one.dtype}, no floating-point number"
        for name in wanted
        if (one := saved.tensors.get(name)) is not None and not one.dtype.is_floating_point
    ]
    faults += [
        f"{name!r} is {list(there[name])}, {list(shape)} in the model"
        for name, shape in wanted.items()
        if name in there and there[name] != shape
    ]
    if faults:
        raise CheckpointError(
            f"{saved.folder} is of another model: {'; '.join(faults[:8])}. Use the configuration "
            "it was written with"
        )
