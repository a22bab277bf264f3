"""What the ranks of one model tell each other that is no tensor, as MessagePack.

numpy arrays travel as an extension: dtype, shape and bytes. Nothing is unpickled.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

ARRAY: Final = 1


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    elements: bytes


def encode(value: object) -> bytes:
    """Return a value of plain types, structs and numpy arrays as bytes.

    Raises `TypeError` for anything else, and for arrays of objects.
    """
    return msgspec.msgpack.encode(value, enc_hook=_extension)


def decode(data: bytes, kind: Any) -> Any:
    """Return the value, checked to be of this type; its arrays are its own, and writable.

    Raises `msgspec.DecodeError` for bytes of another type.
    """
    return _decoder(kind).decode(data)


@lru_cache(maxsize=16)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_array, dec_hook=_as_it_is)


def _extension(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"{type(value).__name__} does not travel between the ranks of a model")
    array = _Array(value.dtype.str, value.shape, value.tobytes())
    return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(array))


def _array(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown extension {code}")
    found = msgspec.msgpack.decode(data, type=_Array)
    return np.frombuffer(bytearray(found.elements), found.dtype).reshape(found.shape)


def _as_it_is(_: Any, value: Any) -> Any:
    """Arrays are made by `_array`; of their types msgspec only knows that they are not its own."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return value
