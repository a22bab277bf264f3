"""What can be checked of an item at run time."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin


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
    if item_type is float:
        return (float, int)
    if isinstance(item_type, type):
        return item_type
    if isinstance(item_type, NewType):
        return runtime_class(item_type.__supertype__)
    raise TypeError(f"{item_type!r} is not a type that a channel can carry")


def type_name(item_type: Any) -> str:
    return item_type.__name__ if isinstance(item_type, type) else str(item_type)
