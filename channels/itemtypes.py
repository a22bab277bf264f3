"""What can be checked of an item at run time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NewType,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import msgspec

from rlinf_async.channels.errors import WrongItemType
from rlinf_async.channels.untyped import Packed, Refused, Untyped, packer

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
