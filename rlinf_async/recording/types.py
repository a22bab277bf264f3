"""Types of items: how a recording names one, finds it again, and sees that it has changed."""

from __future__ import annotations

import importlib
import json
import re
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from rlinf_async.channels.encoded import members, type_name
from rlinf_async.recording.errors import TypeChanged, TypeGone
from rlinf_async.recording.events import TypePath

UNION = "union"
LITERAL = "literal:"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def path_of(item_type: Any) -> TypePath:
    """The path of a type, by which `type_at` finds it.

    A type that has none (made in a function, or a form of typing that is not known here) is named
    as it is, and cannot be found again.
    """
    if item_type is None or item_type is type(None):
        return "builtins:None"
    origin, arguments = get_origin(item_type), get_args(item_type)
    if origin in (Union, UnionType):
        return [UNION, *map(path_of, arguments)]
    if origin is Annotated:
        return path_of(arguments[0])
    if origin is not None and arguments:
        return [path_of(origin), *map(path_of, arguments)]
    if item_type is Ellipsis:
        return "builtins:Ellipsis"
    name = getattr(item_type, "__qualname__", None) or getattr(item_type, "__name__", None)
    if isinstance(item_type, (str, int)):  # an argument of Literal
        return LITERAL + json.dumps(item_type)
    if name is None:
        return _ADDRESS.sub("", str(item_type))
    return f"{item_type.__module__}:{name}"


def type_at(path: TypePath) -> Any:
    """The type at a path.

    Raises:
        TypeGone: there is none any more.
    """
    if isinstance(path, str):
        return _named(path)
    head, *rest = path
    arguments = [type_at(one) for one in rest]
    if head == UNION:
        return reduce(lambda one, other: one | other, arguments)
    made: Any = type_at(head)
    try:
        return made[tuple(arguments) if len(arguments) > 1 else arguments[0]]
    except TypeError as error:
        raise TypeGone(f"{text_of(path)}: {error}") from error


def _named(path: str) -> Any:
    if path.startswith(LITERAL):
        return json.loads(path.removeprefix(LITERAL))
    module, _, name = path.partition(":")
    try:
        if path in ("builtins:None", "builtins:Ellipsis"):
            return None if path.endswith("None") else ...
        return reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        why = (
            "it was made inside a function: define it at the top of its module"
            if "<locals>" in path
            else f"{error}: go back to the code that recorded it, or name the old path again"
        )
        raise TypeGone(f"the type {path} cannot be imported: {why}") from error


def text_of(path: TypePath) -> str:
    """A type for people: ``list[Sample] | None``."""
    if isinstance(path, str):
        if path.startswith(LITERAL):
            return path.removeprefix(LITERAL)
        name = path.partition(":")[2] or path
        return {"Ellipsis": "..."}.get(name, name)
    head, *rest = path
    if head == UNION:
        return " | ".join(map(text_of, rest))
    return f"{text_of(head)}[{', '.join(map(text_of, rest))}]"


def schema_of(item_type: Any) -> str:
    """Everything that the items of a type are made of, as a JSON schema; without what is only said
    for people."""
    parts = [_schema(part) for part in members(item_type)]
    return json.dumps(_without_texts(parts), sort_keys=True, separators=(",", ":"))


def _schema(part: Any) -> Any:
    try:
        return msgspec.json.schema(part, schema_hook=_unknown)
    except (TypeError, NameError, NotImplementedError, msgspec.ValidationError):
        return {"title": type_name(part)}


def _unknown(cls: Any) -> dict[str, Any]:
    """Arrays, tensors, ends of channels: what msgspec does not know is named."""
    return {"title": str(cls)}


def _without_texts(schema: Any) -> Any:
    if isinstance(schema, dict):
        kept = {name: part for name, part in schema.items() if name != "description"}
        return {name: _without_texts(part) for name, part in kept.items()}
    if isinstance(schema, list):
        return [_without_texts(part) for part in schema]
    return schema


def check_schema(channel: str, item_type: Any, recorded: str) -> None:
    """Raise `TypeChanged` where a type has another schema than it had."""
    now = schema_of(item_type)
    if not recorded or now == recorded:
        return
    where, was, became = _difference(json.loads(recorded), json.loads(now), "")
    raise TypeChanged(
        f"channel {channel!r}: {type_name(item_type)} is not the type that was recorded: at "
        f"{where or 'its top'} it was {was}, and is {became}: read it with the code that recorded "
        "it"
    )


def _difference(was: Any, now: Any, path: str) -> tuple[str, str, str]:
    """The first place where two schemas differ, and what is there."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted(was.keys() | now.keys()):
            if was.get(name, _ABSENT) != now.get(name, _ABSENT):
                return _difference(was.get(name, _ABSENT), now.get(name, _ABSENT), _in(path, name))
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{index}]")
    return path, _short(was), _short(now)


_ABSENT = "absent"
_SILENT = ("$defs", "properties")


def _in(path: str, name: str) -> str:
    return path if name in _SILENT else f"{path}.{name}".removeprefix(".")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
