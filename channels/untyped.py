"""What may stand where an item's type does not say: in ``Any``, ``object``, a bare ``dict`` or
``list``.

MessagePack knows lists and maps. Where the type of a channel says ``tuple[int, ...]`` or names a
message, the reader makes one of them again; where it does not, a tuple would arrive as a list and a
message as a dict, while inside one process they stay what they are. So, at these positions:

* a `tuple`, `set` or `frozenset` is `Packed`: it travels with what it is;
* what would arrive as something else (a message, an enum, a date, a subclass of `list`) is refused
  by ``put``, wherever the channel lives.

Which positions those are is found once for each channel. A type that has none costs nothing.

What can be checked of an item at run time.

An item in the form in which it travels between processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NewType,
    Self,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import msgspec
from msgspec import inspect as types

from rlinf_async.channels.errors import WrongItemType

Walk = Callable[[Any], Any]
"""The value as it is encoded: itself, unless something in it had to be packed."""

TUPLE: Final = 3
SET: Final = 4
FROZENSET: Final = 5
KINDS: Final[dict[type, int]] = {tuple: TUPLE, set: SET, frozenset: FROZENSET}
"""What is packed, and the MessagePack extension that says so."""
UNPACKED: Final[dict[int, type]] = {code: kind for kind, code in KINDS.items()}

_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})
_all_plain: Final = _PLAIN.issuperset
_BASES: Final = (list, dict, tuple, set, frozenset)
_TEXTS: Final = (datetime.date, datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal)


class Packed:
    """A tuple or set on its way into the encoder."""

    __slots__ = ("code", "items")

    def __init__(self, code: int, items: list[Any]) -> None:
        self.code = code
        self.items = items


class Refused(Exception):
    """A part of an item would arrive as something else."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.path: list[str] = []
        """steps that lead to it, the last one first"""

    def __str__(self) -> str:
        return f"{''.join(reversed(self.path))}: {self.args[0]}"


class Untyped(tuple[type, ...]):
    """The classes of an item type that has untyped positions. As it is the class of no item, every
    item is checked."""

    pack: Walk

    @classmethod
    def of(cls, classes: type | tuple[type, ...], pack: Walk) -> Self:
        made = cls(classes if isinstance(classes, tuple) else (classes,))
        made.pack = pack
        return made


def packer(item_type: Any) -> Walk | None:
    """What packs the untyped positions of such an item; None where it has none.

    The walk raises `Refused`, and leaves the item as it is.
    """
    try:
        return _cached(item_type)
    except TypeError:  # it cannot be hashed
        return _packer(item_type)


def packed(value: Any, pack: Callable[[Any], Any]) -> Any:
    """The value with its untyped positions packed.

    Raises:
        WrongItemType: naming the place in it.
    """
    try:
        return pack(value)
    except Refused as refused:
        raise WrongItemType(f"{type(value).__name__}{refused}") from None
    except RecursionError:
        raise WrongItemType(
            f"{type(value).__name__} is nested too deeply to travel, or contains itself"
        ) from None


@lru_cache(maxsize=1024)
def _cached(item_type: Any) -> Walk | None:
    return _packer(item_type)


def _packer(item_type: Any) -> Walk | None:
    infos = []
    for part in (item_type,) if _is_readable(item_type) else get_args(item_type):
        with contextlib.suppress(TypeError, NameError):  # it cannot travel at all
            infos.append(types.type_info(part))
    found = [info for info in infos if _has_untyped(info)]
    if not found:
        return None
    walks = _Walks()
    if len(infos) == 1:
        return walks.walk_of(found[0])
    return _one_of([(_class_of(info), walks.walk_of(info)) for info in found])


def _is_readable(item_type: Any) -> bool:
    """Whether msgspec knows the type. Of a union of two messages without tags it does not."""
    try:
        types.type_info(item_type)
    except (TypeError, NameError):
        return get_origin(item_type) not in (Union, UnionType)
    return True


def decodes_alike(item_type: Any) -> bool:
    """Whether items of this type arrive as the same where the reader only knows ``Any``."""
    try:
        infos = _all_parts(types.type_info(item_type))
    except (TypeError, NameError):
        return False
    return all(isinstance(info, _ALIKE) for info in infos)


# ---- which positions are untyped

_ALIKE: Final = (
    types.AnyType, types.NoneType, types.BoolType, types.IntType, types.FloatType, types.StrType,
    types.BytesType, types.ListType, types.DictType, types.CustomType, types.UnionType,
    types.Metadata, types.TypedDictType,
)  # fmt: skip


def _is_untyped(info: types.Type) -> bool:
    return isinstance(info, types.AnyType) or (
        isinstance(info, types.CustomType) and info.cls is object
    )


def _inside(info: Any) -> Sequence[types.Type]:
    """The types of a type's parts."""
    if isinstance(info, types.UnionType):
        return info.types
    if isinstance(info, types.TupleType):
        return info.item_types
    if isinstance(info, types.DictType | types.FrozenDictType):
        return (info.key_type, info.value_type)
    if isinstance(info, types.CollectionType):  # lists, sets, and tuples of any length
        return (info.item_type,)
    if isinstance(info, types.Metadata):
        return (info.type,)
    return [field.type for field in getattr(info, "fields", ())]


def _all_parts(info: types.Type) -> Iterable[types.Type]:
    """A type and all types inside it, each once: a type may contain itself."""
    seen = {id(info): info}
    waiting = [info]
    while waiting:
        for part in _inside(waiting.pop()):
            if id(part) not in seen:
                seen[id(part)] = part
                waiting.append(part)
    return seen.values()


def _has_untyped(info: types.Type) -> bool:
    return any(map(_is_untyped, _all_parts(info)))


class _Walks:
    """Makes the walk of a type, and of each type inside it once."""

    def __init__(self) -> None:
        self._made: dict[int, Walk] = {}

    def walk_of(self, info: Any) -> Walk:
        if _is_untyped(info):
            return _pack
        if id(info) not in self._made:
            # first, for a type that contains itself
            self._made[id(info)] = lambda value: self._made[id(info)](value)
            self._made[id(info)] = self._make(info)
        return self._made[id(info)]

    def _make(self, info: Any) -> Walk:
        if isinstance(info, types.Metadata):
            return self.walk_of(info.type)
        if isinstance(info, types.UnionType):
            return _one_of(
                [(_class_of(one), self.walk_of(one)) for one in info.types if _has_untyped(one)]
            )
        if isinstance(info, types.TupleType | types.NamedTupleType):
            walks = [self._walk_inside(one) for one in _inside(info)]
            return lambda value: _pack_each(value, walks) if isinstance(value, tuple) else value
        if isinstance(info, types.DictType | types.FrozenDictType):
            key, inner = map(self._walk_inside, (info.key_type, info.value_type))
            check_keys = _check_keys if key is not None else None
            return lambda value: _pack_values(value, inner, check_keys)
        if isinstance(info, types.TypedDictType):
            by_key = self._fields(info)
            return lambda value: _pack_keys(value, by_key)
        if isinstance(info, types.StructType | types.DataclassType):
            fields = self._fields(info)
            return lambda value: _pack_fields(value, info.cls, fields)
        inner = self.walk_of(info.item_type)
        return lambda value: _pack_all(value, inner) if isinstance(value, _BASES) else value

    def _walk_inside(self, info: types.Type) -> Walk | None:
        return self.walk_of(info) if _has_untyped(info) else None

    def _fields(self, info: Any) -> dict[str, Walk]:
        found = [field for field in info.fields if _has_untyped(field.type)]
        return {field.name: self.walk_of(field.type) for field in found}


def _class_of(info: Any) -> type:
    """Which values of a union a type is about."""
    if isinstance(info, types.DictType | types.FrozenDictType | types.TypedDictType):
        return dict
    if isinstance(info, types.TupleType | types.VarTupleType):
        return tuple
    if isinstance(info, types.ListType):
        return list
    found: type = getattr(info, "cls", object)
    return found


# ---- typed positions, on the way to untyped ones


def _one_of(choices: list[tuple[type, Walk]]) -> Walk:
    def walk(value: Any) -> Any:
        for cls, inner in choices:
            if isinstance(value, cls):
                return inner(value)
        return value

    return walk


def _pack_all(values: Iterable[Any], walk: Walk) -> Any:
    """The same values; or a list, as which any of these containers is encoded."""
    return _pack_parts(values, enumerate(values), list, walk)


def _pack_parts(
    whole: Any, parts: Iterable[tuple[Any, Any]], copied: Callable[[Any], Any], walk: Walk
) -> Any:
    """The same container, or a copy where a part, each behind its place, had to be packed."""
    packed: Any = None
    for at, value in parts:
        if walk is _pack and value.__class__ in _PLAIN:
            continue
        try:
            new = walk(value)
        except Refused as refused:
            refused.path.append(f"[{at!r:.40}]")
            raise
        if new is not value:
            if packed is None:
                packed = copied(whole)
            packed[at] = new
    return whole if packed is None else packed


def _pack_each(values: tuple[Any, ...], walks: list[Walk | None]) -> Any:
    packed = list(values)
    for index, walk in enumerate(walks[: len(values)]):
        if walk is None:
            continue
        try:
            packed[index] = walk(values[index])
        except Refused as refused:
            refused.path.append(f"[{index}]")
            raise
    return packed


def _pack_values(
    values: Any, walk: Walk | None, check_keys: Callable[[dict[Any, Any]], None] | None = None
) -> Any:
    if not isinstance(values, dict):
        return values
    if check_keys is not None and not _all_plain(map(type, values)):
        check_keys(values)
    if walk is None or (walk is _pack and _all_plain(map(type, values.values()))):
        return values
    return _pack_parts(values, values.items(), dict, walk)


def _pack_keys(values: Any, walks: dict[str, Walk]) -> Any:
    packed = dict(values)
    for key, walk in walks.items():
        if key in packed:
            packed |= _pack_values({key: packed[key]}, walk)
    return packed


def _pack_fields(message: Any, cls: type, walks: dict[str, Walk]) -> Any:
    if not isinstance(message, cls):
        return message
    packed = message
    for name, walk in walks.items():
        value = getattr(message, name, None)
        try:
            new = walk(value)
        except Refused as refused:
            refused.path.append(f".{name}")
            raise
        if new is not value:
            if packed is message:
                packed = copy.copy(message)
            if isinstance(packed, msgspec.Struct):
                msgspec.structs.force_setattr(packed, name, new)
            else:
                object.__setattr__(packed, name, new)
    return packed


# ---- untyped positions


def _pack(value: Any) -> Any:
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if kind is dict:
        if not _all_plain(map(type, value)):
            _check_keys(value)
        return value if _all_plain(map(type, value.values())) else _pack_values(value, _pack)
    if kind is list:
        return value if _all_plain(map(type, value)) else _pack_all(value, _pack)
    code = KINDS.get(kind)
    if code is not None:
        return Packed(code, list(_pack_all(value, _pack)))
    changed = _as_what(value)
    if changed:
        raise Refused(f"a {kind.__name__} would arrive as {changed}")
    return value


def _check_keys(values: dict[Any, Any]) -> None:
    for key in values:
        try:
            _check_key(key)
        except Refused as refused:
            refused.path.append(f"[{key!r:.40}]")
            raise


def _check_key(key: Any) -> None:
    kind = key.__class__
    if kind is tuple:  # arrives as one
        for part in key:
            _check_key(part)
    elif kind not in _PLAIN:
        changed = "a tuple: no set can be a key" if kind is frozenset else _as_what(key)
        if changed:
            raise Refused(f"the key is a {kind.__name__}, which would arrive as {changed}")


def _as_what(value: Any) -> str:
    """As what this would arrive, and what to do; empty if as it is, or not at all."""
    if isinstance(value, enum.Enum):
        return "its value: send the value, or let the channel's type name the enum"
    if isinstance(value, msgspec.Struct) or _has_fields(value):
        return "a dict: let the channel's type name it there, or send msgspec.to_builtins of it"
    if isinstance(value, _TEXTS) and getattr(value, "tzinfo", None) is None:
        return "a str: send the text, or let the channel's type name it there"
    if isinstance(value, bytearray | memoryview):
        return "bytes: send bytes of it"
    if isinstance(value, msgspec.Raw):
        return "what is in it: send that, decoded"
    if type(value).__name__ in ("datetime64", "timedelta64"):
        return "a str or a number: send an array of it, or its item()"
    for base in _BASES:
        if isinstance(value, base):
            return f"a {'list' if base is tuple else base.__name__}: send {base.__name__} of it"
    return ""


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")


ONE: Final = 1
"""The weight of most items, to be compared by `is`: True and 1.0 are equal to it."""
MAX_WEIGHT: Final = 2**40
"""Of one item: sums of weights must fit the 64 bits that they travel in."""


def runtime_class(item_type: Any) -> type | tuple[type, ...]:
    """What ``isinstance`` can check of a type: its class, or the classes of a union."""
    if item_type is Any:
        return object
    origin = get_origin(item_type)
    if origin is Annotated:
        return runtime_class(get_args(item_type)[0])
    if origin in (Union, UnionType):
        found: list[type] = []
        for part in get_args(item_type):
            kind = runtime_class(type(None) if part is None else part)
            found.extend(kind if isinstance(kind, tuple) else (kind,))
        return tuple(found)
    if origin is Literal:
        return tuple({type(value) for value in get_args(item_type)})
    if isinstance(origin, type):
        return origin
    if is_typeddict(item_type):
        return dict
    if item_type is float:
        return (float, int)
    if isinstance(item_type, type):
        return item_type
    if isinstance(item_type, NewType):
        return runtime_class(item_type.__supertype__)
    raise TypeError(f"{item_type!r} is not a type that a channel can carry")


def item_class(item_type: Any) -> type | tuple[type, ...]:
    """As `runtime_class`; an `Untyped` where parts of an item have no type."""
    classes, pack = runtime_class(item_type), packer(item_type)
    return classes if pack is None else Untyped.of(classes, pack)


def members(item_type: Any) -> tuple[Any, ...]:
    """The types of a union; of any other type, it alone."""
    if get_origin(item_type) in (Union, UnionType):
        return tuple(one for part in get_args(item_type) for one in members(part))
    return (type(None) if item_type is None else item_type,)


def type_name(item_type: Any) -> str:
    return item_type.__name__ if isinstance(item_type, type) else str(item_type)


def check_item(
    item: Any, item_type: Any, item_class: type | tuple[type, ...], channel: str
) -> None:
    """Refuse an item that is not of the channel's type, or would not arrive as what it is.

    A message of a subclass would arrive as its base class, without the fields that it added; a
    message where its type says ``Any``, as a dict (see `untyped`).

    Raises:
        WrongItemType: naming the channel and both types.
    """
    if not isinstance(item, item_class) or (item.__class__ is bool and not _takes_bool(item_class)):
        raise WrongItemType(
            f"channel {channel!r} carries {type_name(item_type)}, "
            f"not {type(item).__name__} (got {_short(item)})"
        )
    if item_class.__class__ is Untyped:
        _pack_item(item, item_type, item_class, channel)
    base = _message_base(type(item), item_class)
    if base is not None:
        raise WrongItemType(
            f"channel {channel!r} carries {type_name(item_type)}: a {type(item).__name__} would "
            f"arrive as {base.__name__}, without what it adds; let the channel carry "
            f"{type(item).__name__}, or a union of both"
        )


def _takes_bool(item_class: type | tuple[type, ...]) -> bool:
    """To Python a bool is an int, to MessagePack it is not."""
    classes = item_class if isinstance(item_class, tuple) else (item_class,)
    return bool in classes or object in classes


def _pack_item(item: Any, item_type: Any, item_class: Any, channel: str) -> Any:
    """The item with its untyped positions packed.

    Raises:
        WrongItemType: naming the channel, the place in the item, and what to do.
    """
    try:
        return item_class.pack(item)
    except Refused as refused:
        raise WrongItemType(
            f"channel {channel!r} carries {type_name(item_type)}: at {type(item).__name__}{refused}"
        ) from None
    except RecursionError:
        raise WrongItemType(
            f"channel {channel!r} carries {type_name(item_type)}: this {type(item).__name__} is "
            "nested too deeply, or contains itself"
        ) from None


def _message_base(found: type, item_class: type | tuple[type, ...]) -> type | None:
    """The message class that ``found`` only inherits from; None where it is the channel's own."""
    classes = item_class if isinstance(item_class, tuple) else (item_class,)
    if found in classes or not _fields(found):
        return None
    for one in classes:
        if issubclass(found, one) and _fields(found) != _fields(one):
            return one
    return None


def _fields(message: type) -> tuple[str, ...]:
    """The names of a message's fields; none where it is no message."""
    if issubclass(message, msgspec.Struct):
        return message.__struct_fields__
    if dataclasses.is_dataclass(message):
        return tuple(field.name for field in dataclasses.fields(message))
    return ()


def dtypes_of(expected: Any) -> tuple[type, ...]:
    """The scalar types that ``NDArray[np.float32]`` (or of a union of them) allows."""
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


def is_message(kind: type) -> bool:
    """Whether instances of a class are made of fields."""
    return bool(_fields(kind))


def parts_of(value: object) -> list[tuple[str, object]]:
    """The values that a message or a container holds, each behind the step that leads to it; none
    of any other value."""
    if isinstance(value, msgspec.Struct):
        return _values(value, value.__struct_fields__)
    if isinstance(value, Mapping):
        return [(f"[{key!r:.40}]", part) for key, part in value.items()]
    if isinstance(value, Packed):
        value = value.items
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


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= 80 else text[:77] + "..."


Buffer = memoryview | bytearray
PIECE_BYTES: Final = 8 * 1024**2
"""So much is copied at a time: some milliseconds, where the system has to find memory first."""


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
"""Several items as one MessagePack array: see `wire.items.codec.Encoder.encode_list`."""


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
