"""Reading a configuration: a TOML file, then the command line over it, into one typed Struct."""

from __future__ import annotations

import os
import pathlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from rlinf_async.config.convert import convert_struct
from rlinf_async.config.errors import ConfigError, Path
from rlinf_async.config.overrides import Overrides, apply_overrides, command_line, flag, path_of

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
        """The same file, one top-level setting left out."""
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
            tables = apply_overrides(self.tables, changes, type_)
            return convert_struct(tables, type_, (), None)
        except ConfigError as error:
            located = error if error.origin else self.located(error, changes)
            raise located from error.__cause__

    def located(self, error: ConfigError, overrides: Overrides | None = None) -> ConfigError:
        """The same error with the line or the flag that its path came from."""
        return error.at(self._origin_of(error, overrides or {}))

    def _origin_of(self, error: ConfigError, overrides: Overrides) -> str:
        path, given = error.path, [path_of(name) for name in overrides]
        exact = [one for one in given if one == path[: len(one)]]
        if exact:
            return command_line(exact[0])
        # Of a section as a whole: those of its settings that the error speaks of are at fault.
        within = [one for one in given if path and one[: len(path)] == path]
        named = [one for one in within if _speaks_of(error.problem, one[len(path)])]
        if named:
            return command_line(*named)
        others = f" with {', '.join(map(flag, within))}" if within else ""
        return f"{self.origin(path)}{others}"


def _speaks_of(problem: str, name: str) -> bool:
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
