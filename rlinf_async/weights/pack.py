"""State dict -> buckets: the sender's half. `rlinf_async.weights.unpack` is the other.

Each tensor starts at a multiple of `ALIGNMENT` bytes, so that the receiver can look at it in place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlinf_async.messages.weights import (
    DEFAULT_BUCKET_BYTES,
    TensorSlot,
    WeightBucket,
    WeightUpdate,
)

ALIGNMENT = 16
"""bytes; the largest element (complex128) has as many"""


def pack(
    state_dict: Mapping[str, Tensor], version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> WeightUpdate:
    """Copy all tensors into buckets of at most ``bucket_bytes`` bytes, in the order given.

    A tensor larger than that gets a bucket of its own. The result shares no memory with the
    tensors, so training may go on at once. Raises `ValueError` for a size below 1 and `TypeError`
    for sharded or quantised tensors (ask the model manager for the full state dict).
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    for name, tensor in state_dict.items():
        _check_plain(name, tensor)
    buckets = tuple(_fill(group) for group in _grouped(state_dict, bucket_bytes))
    return WeightUpdate(version, buckets, update_checksum(version, buckets))


def update_checksum(version: int, buckets: Iterable[WeightBucket]) -> int:
    """Return crc32 over the version, the slots and the checksums of the buckets."""
    headers = [(bucket.slots, bucket.checksum) for bucket in buckets]
    return zlib.crc32(msgspec.msgpack.encode((version, headers)))


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


def _grouped(
    state_dict: Mapping[str, Tensor], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
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


def _fill(group: list[tuple[str, Tensor]]) -> WeightBucket:
    slots: list[TensorSlot] = []
    end = 0
    for name, tensor in group:
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(TensorSlot(name, dtype, tuple(tensor.shape), aligned(end)))
        end = aligned(end) + byte_count(tensor)
    data = np.zeros(end, np.uint8)
    whole = torch.from_numpy(data)
    for slot, (_, tensor) in zip(slots, group, strict=True):
        if tensor.numel():
            flat = tensor.detach().contiguous().reshape(-1)
            whole[slot.offset : slot.offset + byte_count(tensor)].copy_(flat.view(torch.uint8))
    return WeightBucket(tuple(slots), data, zlib.crc32(data.data))
