"""State dict -> buckets, and buckets -> state dict.

Each tensor starts at a multiple of `ALIGNMENT` bytes, so that the receiver can look at it in place.
The sender copies it once, from where it is to where it travels from, and takes its checksum piece
by piece while that lies in the processor's cache. A bucket that is as it was is not copied again.

Half an update is never applied: `load` checks everything before it writes anything: checksums, then
names, shapes and dtypes. Checksums are xxh3, 64 bits, at about the speed of memory: they find
accidental damage (a chance of 2^-64 to miss it), not a deliberate change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_async.messages.weights import (
    DEFAULT_BUCKET_BYTES,
    Allocate,
    TensorSlot,
    WeightBucket,
    WeightsDamaged,
    WeightsMismatch,
    WeightUpdate,
    checksum_error,
)

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


def data_checksum(data: NDArray[np.uint8]) -> int:
    """Return xxh3 of these bytes. Other threads may run meanwhile."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(data).data)


def update_checksum(version: int, buckets: Iterable[WeightBucket]) -> int:
    """Return xxh3 over the version, the slots and the checksums of the buckets."""
    headers = [(bucket.slots, bucket.checksum) for bucket in buckets]
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((version, headers)))


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
    given = allocate(size) if allocate is not None and size else None
    data = np.empty(size, np.uint8) if given is None else given
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


def verify(update: WeightUpdate, but: Collection[int] = ()) -> None:
    """Raise `WeightsDamaged`, naming bucket and tensors, unless every byte is as it was sent.

    The bytes of the buckets in ``but`` are not looked at.
    """
    for index, bucket in enumerate(update.buckets):
        if index in but:
            continue
        found = data_checksum(bucket.data)
        if found != bucket.checksum:
            where = f"bucket {index} of {len(update.buckets)}"
            names = [slot.name for slot in bucket.slots]
            raise WeightsDamaged(
                checksum_error(update.version, where, names, bucket.checksum, found)
            )
    found = update_checksum(update.version, update.buckets)
    if found != update.checksum:
        raise WeightsDamaged(
            checksum_error(update.version, "the list of buckets", (), update.checksum, found)
        )


def unpack(update: WeightUpdate) -> dict[str, Tensor]:
    """Return the tensors by name, as views of the buckets wherever torch can look at them in place.

    The views must not be written to: other receivers of the process may hold the same update.
    Raises `WeightsDamaged` for a slot that does not fit its bucket or has an unknown dtype, and
    for a name that comes twice.
    """
    tensors: dict[str, Tensor] = {}
    for index, bucket in enumerate(update.buckets):
        whole = torch.from_numpy(_readable(bucket.data))
        for slot in bucket.slots:
            where = f"weights version {update.version}, bucket {index}, tensor {slot.name!r}"
            if slot.name in tensors:
                raise WeightsDamaged(f"{where}: the name comes twice")
            tensors[slot.name] = _view(whole, slot, bucket, where)
    return tensors


def load(update: WeightUpdate, module: nn.Module) -> None:
    """Copy the update into the parameters and buffers of ``module``, in place.

    Raises `WeightsDamaged` or `WeightsMismatch` before anything was written.
    """
    verify(update)
    arrived = unpack(update)
    present: dict[str, Tensor] = module.state_dict()
    check_fit(arrived, present, f"weights version {update.version}")
    with torch.no_grad():
        for name, tensor in arrived.items():
            present[name].copy_(tensor)


def check_fit(arrived: Mapping[str, Tensor], present: Mapping[str, Tensor], what: str) -> None:
    """Raise `WeightsMismatch`, naming all differences, unless names, shapes and dtypes agree."""
    faults = [f"missing {name!r}" for name in present if name not in arrived]
    faults += [f"unexpected {name!r}" for name in arrived if name not in present]
    for name in arrived.keys() & present.keys():
        new, old = arrived[name], present[name]
        if new.shape != old.shape:
            faults.append(f"{name!r} is {list(new.shape)}, the model has {list(old.shape)}")
        elif new.dtype != old.dtype:
            faults.append(f"{name!r} is {new.dtype}, the model has {old.dtype}")
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if faults[8:] else "")
        raise WeightsMismatch(
            f"{what} does not fit the model: {shown}. Nothing was loaded; sender and receiver must "
            "be built from the same model configuration"
        )


def _readable(
    data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    # torch wants memory it may write to, and elements where the processor expects them.
    if data.flags.writeable and data.flags.c_contiguous and data.ctypes.data % ALIGNMENT == 0:
        return data
    return data.copy()


def _view(whole: Tensor, slot: TensorSlot, bucket: WeightBucket, where: str) -> Tensor:
    dtype = getattr(torch, slot.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsDamaged(f"{where}: torch has no dtype {slot.dtype!r}")
    size = math.prod(slot.shape) * dtype.itemsize
    fits = min(slot.shape, default=0) >= 0 and 0 <= slot.offset <= len(bucket.data) - size
    if not fits or slot.offset % ALIGNMENT:
        raise WeightsDamaged(
            f"{where}: {size} bytes at offset {slot.offset} do not fit a bucket of "
            f"{len(bucket.data)} bytes with alignment {ALIGNMENT}"
        )
    if size == 0:
        return torch.empty(slot.shape, dtype=dtype)
    return whole[slot.offset : slot.offset + size].view(dtype).view(slot.shape)
