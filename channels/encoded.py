"""An item in the form in which it travels, and what its type and its parts are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import msgspec

ONE: Final = 1
"""weight of most items, to be compared by `is`: True and 1.0 are equal to it"""
MAX_WEIGHT: Final = 2**40
"""largest weight of one item: sums of weights must fit the 64 bits in which they travel"""


def members(item_type: Any) -> tuple[Any, ...]:
    """The types of a union; of any other type, it alone."""
    if get_origin(item_type) in (Union, UnionType):
        return tuple(one for part in get_args(item_type) for one in members(part))
    return (type(None) if item_type is None else item_type,)


def type_name(item_type: Any) -> str:
    return item_type.__name__ if isinstance(item_type, type) else str(item_type)


def runtime_classes(item_type: Any) -> tuple[type, ...]:
    """The classes of a type's values, as ``isinstance`` can check them.

    Raises:
        TypeError: it is no type.
    """
    origin = get_origin(item_type)
    if item_type is Any or isinstance(item_type, TypeVar):
        return (object,)
    if origin is Annotated:
        return runtime_classes(get_args(item_type)[0])
    if origin in (Union, UnionType):
        return tuple(kind for part in members(item_type) for kind in runtime_classes(part))
    if origin is Literal:
        return tuple({type(value) for value in get_args(item_type)})
    if isinstance(item_type, NewType):
        return runtime_classes(item_type.__supertype__)
    if is_typeddict(item_type):
        return (dict,)
    if item_type is float:
        return (float, int)
    kind = origin or item_type
    if isinstance(kind, type):
        return (kind,)
    raise TypeError(f"{item_type!r} is not a type that a channel can carry")


def dtypes_of(expected: Any) -> tuple[type, ...]:
    """Return the scalar types that ``NDArray[np.float32]`` (or of a union of them) allows."""
    arguments = get_args(expected)
    if len(arguments) != 2 or not get_args(arguments[1]):
        return ()
    scalar = get_args(arguments[1])[0]
    parts = get_args(scalar) or (scalar,)
    return tuple(part for part in parts if isinstance(part, type) and _concrete(part))


def _concrete(scalar: type) -> bool:
    # An abstract type, as in NDArray[np.floating], stands for many. Arrays with fields are np.void,
    # of which np.record is only another way to look at them.
    return not scalar.__subclasses__() or scalar.__name__ == "void"


def parts_of(value: object) -> list[tuple[str, object]]:
    """The values that a message or a container holds, each behind the step that leads to it; none
    of any other value."""
    if isinstance(value, msgspec.Struct):
        return _values(value, value.__struct_fields__)
    if isinstance(value, Mapping):
        return [(f"[{key!r:.40}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    return _values(value, tuple(getattr(type(value), "__dataclass_fields__", {})))


def _values(message: object, names: Sequence[str]) -> list[tuple[str, object]]:
    """The fields that have a value."""
    return [(f".{name}", getattr(message, name)) for name in names if hasattr(message, name)]


def check_key_and_weight(channel: str, key: object, weight: object) -> None:
    """Refuse a key or a weight that could not travel, or an item that weighs nothing.

    Raises:
        TypeError, ValueError: naming the channel.
    """
    if (key.__class__ is int or key.__class__ is str) and weight is ONE:  # as most
        return
    if not (key is None or isinstance(key, (str, int))) or isinstance(key, bool):
        raise TypeError(f"channel {channel!r}: a key is a str or an int, got {key!r}")
    if not isinstance(weight, int) or isinstance(weight, bool):
        raise TypeError(f"channel {channel!r}: a weight is an int, got {weight!r}")
    if weight < 1:
        raise ValueError(f"channel {channel!r}: an item weighs at least 1, got weight={weight}")
    if weight > MAX_WEIGHT:
        raise ValueError(
            f"channel {channel!r}: an item weighs at most {MAX_WEIGHT}, got weight={weight}"
        )


Buffer = memoryview | bytearray
PIECE_BYTES: Final = 8 * 1024**2
"""bytes that are copied at a time: some milliseconds, where the system has to find memory first"""


class Encoded(msgspec.Struct, eq=False, gc=False):
    """MessagePack bytes, and the large arrays that were left out of them.

    A queue carries an item that came from another process in this form until it is taken in this
    process, so an item that is only forwarded is never decoded. Not tracked by the garbage
    collector, which would visit every one that is queued. An item whose payload is still with its
    producer has a `RemotePayload` for buffers.
    """

    data: bytes
    buffers: Sequence[Buffer] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        apart = self.buffers
        return len(self.data) + sum(map(len, apart)) if apart else len(self.data)

    def __repr__(self) -> str:
        return f"<Encoded {self.nbytes} bytes, {len(self.buffers)} arrays apart>"


class Form(msgspec.Struct, array_like=True, frozen=True):
    """How the items of a channel travel. Sent by its owner with each end."""

    members: tuple[str, ...] = ()
    """names of its type, or of the types that it is a union of"""
    numbered: bool = False
    """each item is preceded by the number of its member, which nothing else would tell"""


class LookedAt(list[Any]):
    """Buffers of arrays that are decoded in place: nobody keeps what is made of them."""


EncodeList = Callable[[Iterable[Any], int, int], tuple[int, bytes] | None]
"""Several items as one MessagePack array: see `wire.codec.Encoder.encode_list`."""


def copy_of(item: object) -> object:
    """An item whose arrays are its own, if it is still encoded."""
    if isinstance(item, Encoded):
        return Encoded(item.data, [bytearray(buffer) for buffer in item.buffers])
    return item


async def copies_of(items: Sequence[object]) -> list[object]:
    """`copy_of` each of these. Others in this loop have a turn after each `PIECE_BYTES`."""
    encoded = [item for item in items if isinstance(item, Encoded)]
    copied = iter(await copy_buffers([buffer for item in encoded for buffer in item.buffers]))
    return [
        Encoded(item.data, [next(copied) for _ in item.buffers])
        if isinstance(item, Encoded)
        else item
        for item in items
    ]


async def copy_buffers(buffers: Iterable[Buffer | bytes]) -> list[bytearray]:
    """A copy of each of these. Others in this loop have a turn after each `PIECE_BYTES`; the
    buffers must not change meanwhile."""
    copies: list[bytearray] = []
    copied = 0
    for buffer in buffers:
        copies.append(grown := bytearray())
        for start in range(0, len(buffer), PIECE_BYTES):  # to grow takes no time, to clear would
            piece = memoryview(buffer)[start : start + PIECE_BYTES]
            grown += piece
            copied += len(piece)
            if copied >= PIECE_BYTES:
                copied = 0
                await asyncio.sleep(0)
    return copies
