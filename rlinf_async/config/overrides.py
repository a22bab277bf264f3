"""Settings from the command line: ``--actor.optimizer.lr 1e-5``.

The text is read by the type of the field it is for: ``64,64`` is two integers for a ``list[int]``
and a string for a ``str``; ``none`` is None where the field allows it. Numbers, tables and lists
are written as in TOML. A flag without a value is None here, and sets a switch to true.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from rlinf_async.config import describe, schema
from rlinf_async.config.convert import NONE, convert, unknown_name
from rlinf_async.config.errors import ConfigError, Path, dotted, nearest

Table = dict[str, Any]
Overrides = Mapping[str, str | None]
"""``{"actor.lr": "1e-5"}``; None for a flag that stands without a value."""


def apply_overrides(document: Table, overrides: Overrides, type_: Any) -> Table:
    """A copy of ``document`` with every ``dotted.path: text`` of ``overrides`` set.

    Raises `ConfigError` for a path that the type does not have or a text that does not fit it.
    """
    result: Table = _copy(document)
    for name, text in overrides.items():
        path = path_of(name)
        try:
            _set(result, path, text, type_)
        except ConfigError as error:
            raise error.at(command_line(path)) from error.__cause__
    return result


def path_of(name: str) -> Path:
    """``actor.mini-batch`` as the path ``("actor", "mini_batch")``."""
    return tuple(name.replace("-", "_").split("."))


def _set(table: Table, path: Path, text: str | None, type_: Any) -> None:
    for depth, name in enumerate(path[:-1]):
        type_ = _type_within(type_, table, name, path[:depth])
        table = _section(table, name)
    field_type = _type_within(type_, table, path[-1], path[:-1])
    table[path[-1]] = (
        _switched_on(field_type, path) if text is None else _value_of(text, field_type, path)
    )


def _section(table: Table, name: str) -> Table:
    """The table below, made where it is missing (or where the file says "none")."""
    inner = table.get(name)
    if not isinstance(inner, dict):
        inner = table[name] = {}
    return inner


def _type_within(type_: Any, table: Table, name: str, path: Path) -> Any:
    """The type of the setting ``name`` of a table of type ``type_``."""
    struct = schema.struct_for(type_, table)
    if struct is not None:
        return _field_type(struct, name, path)
    values = schema.value_type(type_)
    if values is None:
        wanted = describe.expected(type_)
        raise ConfigError(f"has no settings inside it (it takes {wanted})", path=path)
    return values


def _field_type(struct: Any, name: str, path: Path) -> Any:
    known = schema.fields_of(struct)
    if name in known:
        return known[name].type
    if name == schema.tag_field(struct):
        return str
    raise unknown_name(name, struct, path)


def _switched_on(type_: Any, path: Path) -> bool:
    try:
        convert(True, type_, path)
    except ConfigError:
        wanted = describe.expected(type_)
        raise ConfigError(f"no value is given: it takes {wanted}", path=path) from None
    return True


def _value_of(text: str, type_: Any, path: Path) -> object:
    if text.lower() == NONE and schema.allows_none(type_):
        return NONE
    problem: ConfigError | None = None
    for candidate in _readings(text):
        try:
            convert(candidate, type_, path)
        except ConfigError as error:
            # An error inside a table or list says more than "expected a table".
            if problem is None or len(error.path) > len(problem.path):
                problem = error
        else:
            return candidate
    if problem is not None and len(problem.path) > len(path):
        raise problem
    hint = nearest(text, describe.choices(type_))
    raise ConfigError(f"expected {describe.expected(type_)}, found {text!r}{hint}", path=path)


def _readings(text: str) -> Iterator[object]:
    """What a text may mean, the likeliest first."""
    literal = _toml(text)
    if literal is not None and not isinstance(literal, str):
        yield literal
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    yield text
    if (listed := _toml(f"[{text}]")) is not None:
        yield listed
    yield [part.strip() for part in text.split(",")]


def _toml(text: str) -> object | None:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return None
    return document["value"] if len(document) == 1 else None


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def command_line(*paths: Path) -> str:
    """Where a setting comes from that these flags have set."""
    return f"command line ({', '.join(map(flag, paths))})"


def flag(path: Path) -> str:
    """The flag a person types for a path."""
    return f"--{dotted(path)}"
