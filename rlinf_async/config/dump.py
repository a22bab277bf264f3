"""Writing a configuration back as TOML, so that a run folder holds what a run was really given."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec

from rlinf_async.config import convert as schema
from rlinf_async.config.convert import NONE
from rlinf_async.config.registry import Path

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(config: msgspec.Struct) -> str:
    """The configuration as TOML text, defaults included; reading it gives an equal configuration.

    Raises TypeError for a value that TOML cannot hold.
    """
    return "\n".join(_table(_entries(config), ())).lstrip("\n") + "\n"


def _entries(value: msgspec.Struct | Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one table by their names in the file, tag included."""
    if isinstance(value, Mapping):
        return dict(value)
    entries: dict[str, Any] = {}
    if (tag := schema.tag_field(type(value))) is not None:
        entries[tag] = value.__struct_config__.tag
    for name, field in schema.fields_of(type(value)).items():
        item = getattr(value, field.name)
        if item is not None or schema.default_of(field) is not None:
            entries[name] = item
    return entries


def _table(entries: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Plain settings first, then the tables below: TOML would else put them in the wrong one."""
    for name, value in entries.items():
        if not _is_table(value):
            yield f"{_key(name)} = {_value(value, (*path, name))}"
    for name, value in entries.items():
        if _is_table(value):
            inner = (*path, name)
            yield ""
            yield f"[{'.'.join(_key(part) for part in inner)}]"
            yield from _table(_entries(value), inner)


def _is_table(value: object) -> bool:
    return isinstance(value, (msgspec.Struct, Mapping))


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _value(value: object, path: Path) -> str:
    if value is None:
        return _string(NONE)
    if isinstance(value, Enum):
        return _value(value.value, path)
    if isinstance(value, (str, pathlib.PurePath)):
        return _string(str(value))
    if isinstance(value, (bool, int, float)):
        return _number(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(_value(item, path) for item in value)}]"
    if isinstance(value, (msgspec.Struct, Mapping)):
        return _inline(_entries(value), path)
    raise TypeError(f"{'.'.join(path)}: TOML cannot hold a {type(value).__name__}: {value!r}")


def _inline(entries: Mapping[str, Any], path: Path) -> str:
    pairs = [f"{_key(name)} = {_value(item, (*path, name))}" for name, item in entries.items()]
    return f"{{{', '.join(pairs)}}}"


def _number(value: float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
