"""Types and values in the words of an error message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from msgspec import inspect

_PLAIN: dict[type[inspect.Type], str] = {
    inspect.AnyType: "any value",
    inspect.BoolType: "true or false",
    inspect.DateTimeType: "a date and time",
    inspect.DictType: "a table",
    inspect.FloatType: "a number",
    inspect.IntType: "an integer",
    inspect.NoneType: '"none"',
    inspect.StrType: "a string",
    inspect.StructType: "a table",
}
_LIMITS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "a multiple of {}",
    "min_length": "of length >= {}",
    "max_length": "of length <= {}",
    "pattern": "matching {!r}",
}
_FOUND: dict[type, str] = {
    bool: "the boolean",
    dict: "the table",
    float: "the number",
    int: "the integer",
    list: "the list",
    str: "the string",
}


def expected(type_: Any) -> str:
    """What a field of this type takes: ``an integer >= 1``, ``one of 'adam', 'sgd'``."""
    return _describe(inspect.type_info(type_))


def found(value: object) -> str:
    """What was there instead: ``the string 'fast'``."""
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    if isinstance(value, bool):
        shown = shown.lower()
    return f"{_FOUND.get(type(value), type(value).__name__)} {shown}"


def choices(type_: Any) -> list[str]:
    """The strings that a Literal or an Enum allows; empty for any other type."""
    info = inspect.type_info(type_)
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    values: list[object] = []
    for member in members:
        if isinstance(member, inspect.LiteralType):
            values.extend(member.values)
        elif isinstance(member, inspect.EnumType):
            values.extend(each.value for each in member.cls)
    return [value for value in values if isinstance(value, str)]


def _describe(info: inspect.Type) -> str:
    special = _SPECIAL.get(type(info))
    if special is not None:
        return special(info)
    if isinstance(info, inspect.CustomType):
        return f"a {info.cls.__name__.lower()}"
    plain = _PLAIN.get(type(info), f"a {type(info).__name__.removesuffix('Type').lower()}")
    return " ".join([plain, *_limits(info)])


def _limits(info: inspect.Type) -> list[str]:
    limits = ((text, getattr(info, name, None)) for name, text in _LIMITS.items())
    return [text.format(limit) for text, limit in limits if limit is not None]


def _one_of(values: Iterable[object]) -> str:
    return "one of " + ", ".join(repr(value) for value in values)


def _enum(info: Any) -> str:
    members: type[Enum] = info.cls
    return _one_of(member.value for member in members)


def _list(info: Any) -> str:
    return " ".join(["a list", *_limits(info), f"({_describe(info.item_type)} each)"])


def _tuple(info: Any) -> str:
    return "a list of " + ", ".join(_describe(item) for item in info.item_types)


def _metadata(info: Any) -> str:
    return _describe(info.type)


_SPECIAL: dict[type[inspect.Type], Callable[[Any], str]] = {
    inspect.EnumType: _enum,
    inspect.ListType: _list,
    inspect.LiteralType: lambda info: _one_of(info.values),
    inspect.Metadata: _metadata,
    inspect.SetType: _list,
    inspect.TupleType: _tuple,
    inspect.UnionType: lambda info: " or ".join(_describe(item) for item in info.types),
    inspect.VarTupleType: _list,
}
