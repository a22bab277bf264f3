"""From plain tables to typed Structs, strictly.

A table is walked beside its type, so every error knows its whole path. What the walk guarantees:
no name is ignored, no value is coerced (but an integer where a number is due), and a field that is
not named keeps the default of its *parent's* default where there is one (``actor = Actor(lr=1e-3)``
keeps its ``lr`` when a file sets only ``actor.eps``).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import FieldInfo

from rlinf_async.config import describe, schema
from rlinf_async.config.errors import ConfigError, Path, nearest

S = TypeVar("S", bound=msgspec.Struct)

NONE = "none"
"""TOML has no null: this word stands for None in a field that allows it."""


def convert(value: object, type_: Any, path: Path = (), base: object = None) -> Any:
    """The value as ``type_``; ``base`` gives the fields that a table leaves out.

    Raises `ConfigError` with the full path of the first thing that does not fit.
    """
    if schema.allows_none(type_) and value in (NONE, None):
        return None
    if isinstance(value, Mapping):
        return _convert_table(value, type_, path, base)
    items = schema.item_type(type_)
    if isinstance(value, list) and items is not None:
        value = [convert(item, items, (*path, str(at))) for at, item in enumerate(value)]
    return _convert_leaf(value, type_, path)


def convert_struct(table: Mapping[str, object], type_: type[S], path: Path, base: object) -> S:
    """A table as a Struct; an error of its ``__post_init__`` gets the path."""
    known = schema.fields_of(type_)
    _check_names(table, type_, known, path)
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
    valid = sorted(schema.fields_of(struct))
    return ConfigError(
        f"unknown name{nearest(name, valid)}; valid names here: {', '.join(valid) or 'none'}",
        path=(*path, name),
    )


def _field_value(
    table: Mapping[str, object], field: FieldInfo, path: Path, inherited: object
) -> Any:
    base = schema.default_of(field) if inherited is None else inherited
    return convert(table[field.encode_name], field.type, (*path, field.encode_name), base)


def _convert_table(value: Mapping[str, object], type_: Any, path: Path, base: object) -> Any:
    struct = schema.struct_for(type_, value)
    if struct is not None:
        return convert_struct(value, struct, path, base)
    values = schema.value_type(type_)
    if values is None:
        return _convert_leaf(value, type_, path)
    inner = {key: convert(item, values, (*path, key)) for key, item in value.items()}
    return _convert_leaf(inner, type_, path)


def _convert_leaf(value: object, type_: Any, path: Path) -> Any:
    try:
        return msgspec.convert(value, type_, dec_hook=_decode_special)
    except msgspec.ValidationError:
        hint = nearest(value, describe.choices(type_)) if isinstance(value, str) else ""
        problem = f"expected {describe.expected(type_)}, found {describe.found(value)}{hint}"
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
            _check_number(item, schema.item_type(type_), (*path, str(at)))
    if isinstance(value, dict):
        for key, item in value.items():
            _check_number(item, schema.value_type(type_), (*path, str(key)))


def _check_names(
    table: Mapping[str, object],
    struct: type[msgspec.Struct],
    known: Mapping[str, FieldInfo],
    path: Path,
) -> None:
    for name in table:
        if name not in known and name != schema.tag_field(struct):
            raise unknown_name(name, struct, path)


def _check_complete(struct: type[msgspec.Struct], values: Mapping[str, Any], path: Path) -> None:
    for field in schema.fields_of(struct).values():
        if field.required and field.name not in values:
            raise ConfigError(
                f"must be given: {describe.expected(field.type)}", path=(*path, field.encode_name)
            )
