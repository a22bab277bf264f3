"""State dict -> buckets: the sender's side. `rlinf_async.weights.unpack` is the receiver's.

Each tensor starts at a multiple of `ALIGNMENT` bytes, so that the receiver can look at it in place.
It is copied once, from where it is to where it travels from, and its checksum is taken piece by
piece while that lies in the processor's cache. A bucket that is as it was is not copied again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.messages.weights import (
    DEFAULT_BUCKET_BYTES,
    Allocate,
    TensorSlot,
    WeightBucket,
    WeightUpdate,
)
from rlinf_async.weights.checksum import update_checksum

ALIGNMENT: Final = 16
"""bytes; the size of the largest element (complex128)"""
PIECE_BYTES: Final = 1 << 20
"""bytes copied at a time"""
GLANCE: Final = 256
"""bytes of a tensor that are compared first, to see whether it may be unchanged"""


def pack(
    state_dict: Mapping[str, Tensor],
    version: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    *,
    allocate: Allocate | None = None,
    previous: WeightUpdate | None = None,
) -> WeightUpdate:
    """Copy all tensors into buckets of at most ``bucket_bytes`` bytes, in the order given.

    A tensor larger than that gets a bucket of its own. The result shares no memory with the
    tensors, so training may go on at once. ``allocate`` gives memory for a bucket; ``previous`` is
    an earlier update, whose buckets are taken over where nothing in them has changed. Raises
    `ValueError` for a size below 1 and `TypeError` for sharded or quantised tensors (ask the model
    manager for the full state dict).
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    for name, tensor in state_dict.items():
        _check_plain(name, tensor)
    before = buckets_by_slots(previous)
    buckets = []
    for group in grouped(state_dict, bucket_bytes):
        slots, size = slots_of(group)
        tensors = [elements_of(tensor) for _, tensor in group]
        old = before.get(slots)
        if old is None or not _unchanged(old, tensors):
            old = _fill(slots, size, tensors, allocate)
        buckets.append(old)
    return WeightUpdate(version, tuple(buckets), update_checksum(version, buckets))


def buckets_by_slots(update: WeightUpdate | None) -> dict[tuple[TensorSlot, ...], WeightBucket]:
    """Return the buckets of an update by their slots."""
    return {bucket.slots: bucket for bucket in (update.buckets if update else ())}


def byte_count(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return tensor.numel() * tensor.element_size()


def aligned(offset: int) -> int:
    """Return the next offset a tensor may start at."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _check_plain(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or hasattr(tensor, "placements"):
        raise TypeError(
            f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}; only full, dense "
            "tensors can be packed: take them from get_model_state_dict()"
        )


def grouped(
    state_dict: Mapping[str, Tensor], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut into what goes into each bucket; only shapes and dtypes are looked at."""
    group: list[tuple[str, Tensor]] = []
    end = 0
    for name, tensor in state_dict.items():
        start = aligned(end)
        if group and start + byte_count(tensor) > bucket_bytes:
            yield group
            group, start = [], 0
        group.append((name, tensor))
        end = start + byte_count(tensor)
    if group:
        yield group


def slots_of(group: Iterable[tuple[str, Tensor]]) -> tuple[tuple[TensorSlot, ...], int]:
    """Return where each tensor of a bucket goes, and the bucket's size in bytes."""
    slots: list[TensorSlot] = []
    end = 0
    for name, tensor in group:
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(TensorSlot(name, dtype, tuple(tensor.shape), aligned(end)))
        end = aligned(end) + byte_count(tensor)
    return tuple(slots), end


def empty_bucket(size: int, allocate: Allocate | None) -> NDArray[np.uint8]:
    """Return uninitialised memory for a bucket: from ``allocate``, or else ordinary memory."""
    given = allocate(size) if allocate is not None and size else None
    return np.empty(size, np.uint8) if given is None else given


def elements_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in row-major order, on the CPU."""
    whole = tensor.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a single element may have another stride
    return flat.cpu().view(torch.uint8)


def _unchanged(old: WeightBucket, tensors: Sequence[Tensor]) -> bool:
    """Tell whether a bucket holds these bytes: by the first of each tensor, then by checksum."""
    there = torch.from_numpy(old.data)
    for slot, elements in zip(old.slots, tensors, strict=True):
        first = elements[:GLANCE]
        if not torch.equal(first, there[slot.offset : slot.offset + len(first)]):
            return False
    digest, end = xxhash.xxh3_64(), 0
    for slot, elements in zip(old.slots, tensors, strict=True):
        digest.update(bytes(slot.offset - end))
        digest.update(elements.numpy().data)
        end = slot.offset + len(elements)
    return digest.intdigest() == old.checksum


def _fill(
    slots: tuple[TensorSlot, ...],
    size: int,
    tensors: Sequence[Tensor],
    allocate: Allocate | None,
) -> WeightBucket:
    data = empty_bucket(size, allocate)
    whole, digest, end = torch.from_numpy(data), xxhash.xxh3_64(), 0
    for slot, elements in zip(slots, tensors, strict=True):
        data[end : slot.offset] = 0
        digest.update(data[end : slot.offset].data)
        end = slot.offset + len(elements)
        for start in range(slot.offset, end, PIECE_BYTES):
            stop = min(end, start + PIECE_BYTES)
            whole[start:stop].copy_(elements[start - slot.offset : stop - slot.offset])
            digest.update(data[start:stop].data)
    return WeightBucket(slots, data, digest.intdigest())
