"""Finding the line of a TOML file on which a setting stands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rlinf_async.config.errors import Path

_HEADER = re.compile(r"^\s*(\[{1,2})\s*([^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_SETTING = re.compile(r"""^\s*((?:[\w.-]|"[^"]*"|'[^']*'|\s*\.\s*)+?)\s*=""")
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*\.?""")


def find_line(text: str, path: Path) -> int | None:
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
