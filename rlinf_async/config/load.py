"""Reading a configuration: a TOML file, then the command line over it, into one typed Struct.

The text of a flag (``--actor.optimizer.lr 1e-5``) is read by the type of the field it is for:
``64,64`` is two integers for a ``list[int]`` and a string for a ``str``; ``none`` is None where the
field allows it. Numbers, tables and lists are written as in TOML. A flag without a value is None
here, and sets a switch to true.
"""

from __future__ import annotations

import copy
import os
import pathlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from rlinf_async.config import convert as schema
from rlinf_async.config.convert import NONE, convert, convert_struct, unknown_name
from rlinf_async.config.registry import ConfigError, Path, dotted, nearest

Table = dict[str, Any]
Overrides = Mapping[str, str | None]
"""``{"actor.lr": "1e-5"}``; None for a flag that stands without a value."""


def apply_overrides(document: Table, overrides: Overrides, type_: Any) -> Table:
    """A copy of ``document`` with every ``dotted.path: text`` of ``overrides`` set.

    Raises `ConfigError` for a path that the type does not have or a text that does not fit it.
    """
    result = copy.deepcopy(document)
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
        wanted = schema.expected(type_)
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
        wanted = schema.expected(type_)
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
    hint = nearest(text, schema.choices(type_))
    raise ConfigError(f"expected {schema.expected(type_)}, found {text!r}{hint}", path=path)


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


def command_line(*paths: Path) -> str:
    """Return where a setting comes from that these flags have set."""
    return f"command line ({', '.join(map(flag, paths))})"


def flag(path: Path) -> str:
    """The flag a person types for a path."""
    return f"--{dotted(path)}"


S = TypeVar("S", bound=msgspec.Struct)

_HEADER = re.compile(r"^\s*(\[{1,2})\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_SETTING = re.compile(r"""^\s*((?:[\w.-]|"[^"]*"|'[^']*'|\s*\.\s*)+?)\s*=""")
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*\.?""")


class Document:
    """A TOML file as read: its tables, and where in it each setting stands."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text
        try:
            self.tables: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}", origin=name) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Document:
        """The file's content; `ConfigError` where it cannot be read or is not TOML."""
        name = os.fspath(path)
        try:
            return cls(name, pathlib.Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", origin=name) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"is not UTF-8 text: {error}", origin=name) from None

    def without(self, key: str) -> Document:
        """Return a copy of the document without one top-level setting."""
        other = Document(self.name, self._text)
        other.tables.pop(key, None)
        return other

    def origin(self, path: Path) -> str:
        """``file:line`` of a setting, or the file alone where it is not written there."""
        line = _find_line(self._text, path)
        return self.name if line is None else f"{self.name}:{line}"

    def to(self, type_: type[S], overrides: Overrides | None = None) -> S:
        """The document as a Struct, with ``dotted.path: text`` overrides over it."""
        changes = overrides or {}
        try:
            tables, changes = _moved(self.tables, changes, type_)
            tables = apply_overrides(tables, changes, type_)
            return convert_struct(tables, type_, (), None)
        except ConfigError as error:
            located = error if error.origin else self.located(error, changes)
            raise located from error.__cause__

    def located(self, error: ConfigError, overrides: Overrides | None = None) -> ConfigError:
        """Return the error with the line or the flag that its path came from."""
        return error.at(self._origin_of(error, overrides or {}))

    def _origin_of(self, error: ConfigError, overrides: Overrides) -> str:
        path, given = error.path, [path_of(name) for name in overrides]
        exact = [one for one in given if one == path[: len(one)]]
        if exact:
            return command_line(exact[0])
        # Of a section as a whole: those of its settings that the error speaks of are at fault.
        within = [one for one in given if path and one[: len(path)] == path]
        named = [one for one in within if _mentions(error.problem, one[len(path)])]
        if named:
            return command_line(*named)
        others = f" with {', '.join(map(flag, within))}" if within else ""
        return f"{self.origin(path)}{others}"


def _moved(tables: Table, overrides: Overrides, type_: Any) -> tuple[Table, Overrides]:
    """Read settings under the names that they had before: those that ``MOVED`` of the type names.

    Raises:
        ConfigError: the file has both names.
    """
    for old, new in getattr(type_, "MOVED", {}).items():
        before, now = path_of(old), path_of(new)
        overrides = {
            new if path_of(name) == before else name: text for name, text in overrides.items()
        }
        outer = tables.get(before[0])
        if not isinstance(outer, dict) or before[1] not in outer:
            continue
        tables = copy.deepcopy(tables)
        value = tables[before[0]].pop(before[1])
        section = _section(tables, now[0])
        if now[1] in section:
            raise ConfigError(
                f"this is called {new} now, which is set too: leave it out", path=before
            )
        section[now[1]] = value
    return tables, overrides


def _mentions(problem: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", problem) is not None


def load(path: str | os.PathLike[str], overrides: Overrides, type_: type[S]) -> S:
    """The configuration in the file ``path``, with ``{"actor.lr": "1e-5"}`` over it, as ``type_``.

    Raises `ConfigError` that names the file and line (or flag), the setting's full path, what was
    found, what was expected, and the nearest valid name.
    """
    return Document.read(path).to(type_, overrides)


def _find_line(text: str, path: Path) -> int | None:
    """The line (from 1) of the setting, else of the nearest table around it, else None."""
    best_length, best_line = 0, None
    for line, written in _written_paths(text):
        if written == path[: len(written)] and len(written) > best_length:
            best_length, best_line = len(written), line
    return best_line


def _written_paths(text: str) -> Iterator[tuple[int, Path]]:
    """Each table header and setting with its full path, in the order of the file."""
    table: Path = ()
    seen: Counter[Path] = Counter()
    for line, content in _lines_outside_strings(text):
        if header := _HEADER.match(content):
            table = _parts(header[2])
            if header[1] == "[[":
                seen[table] += 1
                table = (*table, str(seen[table] - 1))
            yield line, table
        elif setting := _SETTING.match(content):
            yield line, table + _parts(setting[1])


def _lines_outside_strings(text: str) -> Iterator[tuple[int, str]]:
    """The lines that do not begin inside a triple-quoted string."""
    closing = None
    for line, content in enumerate(text.splitlines(), start=1):
        if closing is None:
            yield line, content
        for quotes in ('"' * 3, "'" * 3):
            if content.count(quotes) % 2 and closing in (None, quotes):
                closing = None if closing else quotes


def _parts(key: str) -> Path:
    return tuple(a or b or c for a, b, c in _PART.findall(key))
