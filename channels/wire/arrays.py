"""numpy arrays and torch tensors as bytes, and back. Tensors arrive in the CPU's memory.

An array travels as a `Head` (its kind, dtype and shape) inside the MessagePack, and its elements
either there too (up to `INLINE_BYTES`) or as a buffer beside it. Elements are always in C order;
strides do not travel. Neither numpy nor torch is imported before an array is at hand.

What a large array is received into is reserved at once (`reserve`), or was an array's before
(`Recycled`).
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from rlinf_async.channels.wire.slab import is_private, view_of

if TYPE_CHECKING:
    import numpy as np
    import torch


INLINE_BYTES: Final = 4096
"""largest array that is copied into the message: a buffer of its own would cost more"""


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What the elements of an array mean."""

    kind: Literal["numpy", "torch"]
    dtype: Any
    """numpy: what `numpy.lib.format.dtype_to_descr` says; torch: ``"bfloat16"``"""
    shape: tuple[int, ...]
    elements: int | bytes
    """the buffer's index, or the elements themselves"""


class CannotTravel(Exception):
    """Why a value has no form in which it could travel. The codec adds where it stands."""


def is_array(value: object) -> bool:
    """Whether this is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_number(value: object) -> bool:
    """Whether this is a numpy scalar."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_tensor(value: object) -> bool:
    """Whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def array_elements(array: np.ndarray[Any, Any]) -> tuple[Any, memoryview]:
    """An array's dtype as plain data, and its elements in C order (a view where it can be).

    Raises:
        CannotTravel: it holds Python objects, or is a subclass that would lose its meaning.
    """
    import numpy as np

    if type(array) not in (np.ndarray, np.memmap):
        raise CannotTravel(
            f"a {type(array).__name__} cannot travel without losing what it adds to an array: "
            "send numpy.asarray of it, or its parts"
        )
    dtype = array.dtype
    if dtype.hasobject:
        raise CannotTravel(f"an array of dtype {dtype} holds Python objects: give it a plain dtype")
    if dtype.kind not in "biufcmMSUV" or (dtype.kind == "V" and dtype.type is not np.void):
        raise CannotTravel(f"an array of dtype {dtype}, which is not numpy's own: view it as bytes")
    if not dtype.itemsize:
        raise CannotTravel(f"an array of dtype {dtype}, whose elements take no bytes")
    flat = np.ascontiguousarray(array).reshape(-1)
    elements = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    npy: Any = np.lib.format  # some releases of numpy have no annotations here
    return npy.dtype_to_descr(dtype), _in_place(elements) or elements.data


def _in_place(elements: np.ndarray[Any, Any]) -> memoryview | None:
    """The buffer of shared memory that this process made and these are, whole, if they are one."""
    below: object = elements
    while type(below) is type(elements) and below.base is not None:
        below = below.base
    if not isinstance(below, memoryview) or below.nbytes != elements.nbytes:
        return None
    return below if view_of(below) is not None and not is_private(below) else None


def tensor_elements(tensor: torch.Tensor) -> tuple[str, memoryview]:
    """A tensor's dtype and its elements in C order (a view where it can be).

    Gradients do not travel: the tensor is detached. What lies in a GPU's memory is copied.

    Raises:
        CannotTravel: it is not a dense tensor in the memory of the CPU or of a CUDA device.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CannotTravel(
            f"a {type(tensor).__name__} cannot travel without losing what it adds to a tensor: "
            "send the plain tensor that you mean, or its parts"
        )
    if tensor.is_quantized:
        raise CannotTravel(
            "a quantized tensor cannot travel: send its int_repr(), scale and zero point"
        )
    if tensor.layout is not torch.strided:
        raise CannotTravel(f"a tensor of layout {tensor.layout} cannot travel: send its parts")
    if tensor.device.type == "meta":
        raise CannotTravel("a tensor on meta has no elements: send its shape and dtype")
    if tensor.device.type not in ("cpu", "cuda"):
        raise CannotTravel(f"a tensor on {tensor.device} cannot travel: send tensor.cpu()")
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a single element may have another stride
    if flat.device.type == "cuda":
        flat = _to_host(flat)
    elements = flat.view(torch.uint8).numpy()
    return str(tensor.dtype).removeprefix("torch."), elements.data


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a GPU's tensor in pinned memory, complete."""
    import torch

    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return copied


def restore(head: Head, elements: bytearray | memoryview) -> Any:
    """The array over these elements: writable, and without a copy.

    Raises:
        ValueError: the head does not fit the elements.
    """
    if any(size < 0 for size in head.shape) or len(head.shape) > 32:
        raise ValueError(f"an array of shape {head.shape}")
    return (
        _restore_numpy(head, elements) if head.kind == "numpy" else _restore_torch(head, elements)
    )


def _check_size(head: Head, item_bytes: int, elements: bytearray | memoryview) -> None:
    expected = math.prod(head.shape) * item_bytes
    if expected != len(elements):
        raise ValueError(
            f"an array of shape {list(head.shape)} and dtype {head.dtype} takes {expected} bytes, "
            f"{len(elements)} arrived"
        )


def _restore_numpy(head: Head, elements: bytearray | memoryview) -> np.ndarray[Any, Any]:
    import numpy as np

    npy: Any = np.lib.format  # some releases of numpy have no annotations here
    dtype = npy.descr_to_dtype(_as_descr(head.dtype))
    if dtype.hasobject:
        raise ValueError(f"an array of dtype {dtype} holds Python objects")
    if not dtype.itemsize:  # no bytes could announce any number of elements
        raise ValueError(f"an array of dtype {dtype}, whose elements take no bytes")
    _check_size(head, dtype.itemsize, elements)
    if not elements:
        return np.empty(head.shape, dtype)
    return np.frombuffer(elements, dtype).reshape(head.shape)


def _as_descr(descr: Any) -> Any:
    """A numpy dtype's description: its fields are tuples again."""
    if not isinstance(descr, list):
        return descr
    return [tuple(_as_field_part(part) for part in field) for field in descr]


def _as_field_part(part: Any) -> Any:
    """A field's name, its titles, its dtype (again a list of fields), or its shape."""
    if isinstance(part, list) and not any(isinstance(inner, list) for inner in part):
        return tuple(part)
    return _as_descr(part)


def _restore_torch(head: Head, elements: bytearray | memoryview) -> torch.Tensor:
    import torch

    # not getattr: that imports whatever part of torch is named
    dtype = vars(torch).get(head.dtype) if isinstance(head.dtype, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {head.dtype!r}")
    _check_size(head, dtype.itemsize, elements)
    if not elements:
        return torch.empty(head.shape, dtype=dtype)
    return torch.frombuffer(elements, dtype=dtype).reshape(head.shape)


RECYCLED_BYTES: Final = 64 * 1024
"""Smaller arrays are not kept: the heap has memory for them."""
KEPT_BYTES: Final = 64 * 1024**2
"""most bytes that one thread keeps for reuse, in arrays that nothing else refers to"""
_ALONE: Final = 2
"""What `sys.getrefcount` says of an object that one name refers to."""


class Recycled:
    """Memory of arrays that arrived before, for the next that arrive in the same thread's loop.

    Memory that goes back to the system costs more to get again than an array's bytes cost to
    receive: each page is cleared, and mapped at its first write. So some of the last arrays' memory
    is kept, and used again for an array of the same size once nothing else refers to it.

    Invariant: a buffer is taken only while this is all that refers to it. Views, slices, numpy
    arrays and torch tensors over it refer to it, in any thread, for as long as they live.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._by_size: OrderedDict[int, deque[bytearray]] = OrderedDict()
        self.kept_bytes = 0

    def take(self, size: int) -> bytearray | None:
        """A buffer of this size with any contents, which is kept no more; None if none is free."""
        kept = self._by_size.get(size)
        for _ in range(0 if kept is None else len(kept)):
            assert kept is not None
            buffer = kept.popleft()
            if sys.getrefcount(buffer) == _ALONE:
                self._by_size.move_to_end(size)
                self._forget(size, kept)
                return buffer
            kept.append(buffer)
        return None

    def keep(self, buffer: bytearray) -> None:
        """Use this again when nobody else does. The sizes that were not asked for longest, and the
        oldest of a size, make room for it."""
        size = len(buffer)
        if not RECYCLED_BYTES <= size <= self._limit:
            return
        self._by_size.setdefault(size, deque()).append(buffer)
        self._by_size.move_to_end(size)
        self.kept_bytes += size
        while self.kept_bytes > self._limit:
            oldest, kept = next(iter(self._by_size.items()))
            kept.popleft()
            self._forget(oldest, kept)

    def _forget(self, size: int, kept: deque[bytearray]) -> None:
        """One buffer of this size is kept no more."""
        self.kept_bytes -= size
        if not kept:
            del self._by_size[size]


_of_thread: Final = threading.local()


def thread_recycled() -> Recycled:
    """Return the recycled memory of this thread, and so of its event loop."""
    found: Recycled | None = getattr(_of_thread, "recycled", None)
    if found is None:
        found = _of_thread.recycled = Recycled()
    return found


MAPPED_BYTES: Final = 32 * 1024**2
"""Smaller arrays lie in the heap, whose pages are used again and again."""
_FLAGS: Final = (
    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    if hasattr(mmap, "MAP_ANONYMOUS")
    else 0
)


def reserve(size: int) -> memoryview | bytearray:
    """A buffer of ``size`` bytes to be filled from its beginning; an empty `bytearray`, which grows
    as it is filled, where the system does not give addresses without memory behind them.

    The array is filled in place, piece by piece, and never copied or moved, as a `bytearray` that
    grows may be. The system gives memory for its addresses as they are written: a peer that
    announces much and sends little makes this process hold little.

    Large pages are not asked for. Where memory is warm they take a quarter of the time; in a
    virtual machine whose free memory went back to its host they took five times as long.
    """
    if not _FLAGS:
        return bytearray()
    try:
        return memoryview(mmap.mmap(-1, size, flags=_FLAGS))
    except (OSError, ValueError, OverflowError):
        return bytearray()


def is_reserved(buffer: object) -> bool:
    """Whether a buffer is what `reserve` gave: nobody else has it."""
    return isinstance(buffer, memoryview) and isinstance(buffer.obj, mmap.mmap)
