"""Buckets -> state dict: the receiver's half. Half an update is never applied.

`load` checks everything before it writes anything: checksums, then names, shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_async.messages.weight_errors import WeightsDamaged, WeightsMismatch, checksum_error
from rlinf_async.messages.weights import TensorSlot, WeightBucket, WeightUpdate
from rlinf_async.weights.checksum import data_checksum, update_checksum
from rlinf_async.weights.pack import ALIGNMENT


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
