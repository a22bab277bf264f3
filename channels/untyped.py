"""What may stand where an item's type does not say: in ``Any``, ``object``, a bare ``dict`` or
``list``.

MessagePack knows lists and maps. Where the type of a channel says ``tuple[int, ...]`` or names a
message, the reader makes one of them again; where it does not, a tuple would arrive as a list and a
message as a dict, while inside one process they stay what they are. So, at these positions:

* a `tuple`, `set` or `frozenset` is `Packed`: it travels with what it is;
* what would arrive as something else (a message, an enum, a date, a subclass of `list`) is refused
  by ``put``, wherever the channel lives.

Which positions those are is found once for each channel. A type that has none costs nothing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, Final, Self, Union, get_args, get_origin

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
