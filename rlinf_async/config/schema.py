"""Looking into types: which Struct stands behind an annotation, and what its fields are."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard, Union

import msgspec
from msgspec.structs import FieldInfo, fields


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
