"""From plain tables to typed Structs, strictly.

A table is walked beside its type, so every error knows its whole path. What the walk guarantees:
no name is ignored, no value is coerced (but an integer where a number is due), and a field that is
not named keeps the default of its *parent's* default where there is one (``actor = Actor(lr=1e-3)``
keeps its ``lr`` when a file sets only ``actor.eps``).
"""

from __future__ import annotations

import math
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Protocol, TypeGuard, TypeVar, Union, runtime_checkable

import msgspec
from msgspec import inspect
from msgspec.structs import FieldInfo, fields

from rlinf_async.config.registry import ConfigError, Path, nearest

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
    """Return what a field of this type takes: ``an integer >= 1``, ``one of 'adam', 'sgd'``."""
    return _describe(inspect.type_info(type_))


def found(value: object) -> str:
    """Return what was there instead: ``the string 'fast'``."""
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


def is_struct(type_: Any) -> TypeGuard[type[msgspec.Struct]]:
    """Whether the annotation is a Struct class itself (not an Optional of one)."""
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


def plain(type_: Any) -> Any:
    """The annotation without ``Annotated``."""
    return plain(typing.get_args(type_)[0]) if typing.get_origin(type_) is Annotated else type_


def members(type_: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself alone."""
    bare = plain(type_)
    if typing.get_origin(bare) in (Union, types.UnionType):
        return tuple(plain(member) for member in typing.get_args(bare))
    return (bare,)


def allows_none(type_: Any) -> bool:
    """Whether ``None`` (written ``"none"``) is a value of the type."""
    return types.NoneType in members(type_)


def struct_for(type_: Any, table: Mapping[str, object]) -> type[msgspec.Struct] | None:
    """The Struct that a table of this type is read as: by its tag where there are several.

    None where the type holds no Struct, or where the tag fits none of them.
    """
    structs = [member for member in members(type_) if is_struct(member)]
    if len(structs) == 1:
        return structs[0]
    return next((struct for struct in structs if _tag_fits(struct, table)), None)


def tag_field(struct: type[msgspec.Struct]) -> str | None:
    """The name of the field that tells the members of a union apart."""
    return struct.__struct_config__.tag_field


def fields_of(struct: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """The fields of a Struct by the name that stands in a file."""
    return {field.encode_name: field for field in fields(struct)}


def default_of(field: FieldInfo) -> Any:
    """The value a field has when nothing is said; `msgspec.NODEFAULT` where it must be given."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def item_type(type_: Any) -> Any | None:
    """The type of a list's, set's or open tuple's items; None for anything else."""
    for member in members(type_):
        arguments = typing.get_args(member)
        origin = typing.get_origin(member)
        if origin in (list, set, frozenset) and arguments:
            return arguments[0]
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return arguments[0]
    return None


def value_type(type_: Any) -> Any | None:
    """The type of a dict's values (``Any`` where it is not said); None for anything else."""
    for member in members(type_):
        if member is Any or member is dict:
            return Any
        if typing.get_origin(member) in (dict, Mapping):
            return typing.get_args(member)[1]
    return None


def _tag_fits(struct: type[msgspec.Struct], table: Mapping[str, object]) -> bool:
    name = tag_field(struct)
    return name is not None and table.get(name) == struct.__struct_config__.tag


S = TypeVar("S", bound=msgspec.Struct)

NONE = "none"
"""TOML has no null: this word stands for None in a field that allows it."""


@runtime_checkable
class HasPresets(Protocol):
    """A Struct that a table may fill in by the name of a preset."""

    @classmethod
    def base_of(cls, table: Mapping[str, object], base: object, /) -> object:
        """Return what gives the fields that the table leaves out; ``base`` where it names no
        preset."""
        ...


def convert(value: object, type_: Any, path: Path = (), base: object = None) -> Any:
    """The value as ``type_``; ``base`` gives the fields that a table leaves out.

    Raises `ConfigError` with the full path of the first thing that does not fit.
    """
    if allows_none(type_) and value in (NONE, None):
        return None
    if isinstance(value, Mapping):
        return _convert_table(value, type_, path, base)
    items = item_type(type_)
    if isinstance(value, list) and items is not None:
        value = [convert(item, items, (*path, str(at))) for at, item in enumerate(value)]
    return _convert_leaf(value, type_, path)


def convert_struct(table: Mapping[str, object], type_: type[S], path: Path, base: object) -> S:
    """A table as a Struct; an error of its ``__post_init__`` gets the path."""
    known = fields_of(type_)
    _check_names(table, type_, known, path)
    if issubclass(type_, HasPresets):
        try:
            base = type_.base_of(table, base)
        except ConfigError as error:
            raise ConfigError(error.problem, path=(*path, *error.path)) from error
    values = {
        field.name: _field_value(table, field, path, getattr(base, field.name, None))
        for field in known.values()
        if field.encode_name in table
    }
    if isinstance(base, type_):
        inherited = {field.name: getattr(base, field.name) for field in known.values()}
        values = {**inherited, **values}
    _check_complete(type_, values, path)
    for name, field in known.items():
        if field.name in values:
            _check_number(values[field.name], field.type, (*path, name))
    try:
        return type_(**values)
    except ConfigError as error:  # its path begins at this table
        raise ConfigError(error.problem, path=(*path, *error.path)) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error), path=path) from error


def unknown_name(name: str, struct: type[msgspec.Struct], path: Path) -> ConfigError:
    """The error for a name that the Struct does not have, with the nearest that it has."""
    valid = sorted(fields_of(struct))
    return ConfigError(
        f"unknown name{nearest(name, valid)}; valid names here: {', '.join(valid) or 'none'}",
        path=(*path, name),
    )


def _field_value(
    table: Mapping[str, object], field: FieldInfo, path: Path, inherited: object
) -> Any:
    base = default_of(field) if inherited is None else inherited
    return convert(table[field.encode_name], field.type, (*path, field.encode_name), base)


def _convert_table(value: Mapping[str, object], type_: Any, path: Path, base: object) -> Any:
    struct = struct_for(type_, value)
    if struct is not None:
        return convert_struct(value, struct, path, base)
    values = value_type(type_)
    if values is None:
        return _convert_leaf(value, type_, path)
    inner = {key: convert(item, values, (*path, key)) for key, item in value.items()}
    return _convert_leaf(inner, type_, path)


def _convert_leaf(value: object, type_: Any, path: Path) -> Any:
    try:
        return msgspec.convert(value, type_, dec_hook=_decode_special)
    except msgspec.ValidationError:
        hint = nearest(value, choices(type_)) if isinstance(value, str) else ""
        problem = f"expected {expected(type_)}, found {found(value)}{hint}"
        raise ConfigError(problem, path=path) from None


def _decode_special(type_: type, value: object) -> object:
    """What msgspec does not read by itself: file paths."""
    if issubclass(type_, pathlib.PurePath) and isinstance(value, str):
        return type_(value)
    raise ValueError(f"{type_.__name__} cannot be read from {value!r}")


def _check_number(value: object, type_: Any, path: Path) -> None:
    """Refuse NaN and infinity, which comparisons with limits let pass in some direction, and whole
    numbers beyond 64 bits, which neither TOML nor torch nor MessagePack has.

    What is of any type goes to somebody else's code, and may be any of them.
    """
    if type_ is Any:
        return
    name = next((part for part in reversed(path) if not part.isdigit()), "")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be a finite number", path=path)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{name} is a whole number of more than 64 bits", path=path)
    if isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            _check_number(item, item_type(type_), (*path, str(at)))
    if isinstance(value, dict):
        for key, item in value.items():
            _check_number(item, value_type(type_), (*path, str(key)))


def _check_names(
    table: Mapping[str, object],
    struct: type[msgspec.Struct],
    known: Mapping[str, FieldInfo],
    path: Path,
) -> None:
    for name in table:
        if name not in known and name != tag_field(struct):
            raise unknown_name(name, struct, path)


def _check_complete(struct: type[msgspec.Struct], values: Mapping[str, Any], path: Path) -> None:
    for field in fields_of(struct).values():
        if field.required and field.name not in values:
            raise ConfigError(
                f"must be given: {expected(field.type)}", path=(*path, field.encode_name)
            )
