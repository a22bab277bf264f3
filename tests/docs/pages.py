"""The documentation as data: its pages, their links, headings, code blocks and tables.

A comment on the line before a code block says what a test does with it::

    <!-- runs -->      the block is a script that ends well
    <!-- prints -->    the block is what the script before it prints
    <!-- steps -->     the block is the commands of a tutorial
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md")])

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>runs|prints|steps) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>.+?) \|", re.MULTILINE)


class Block(NamedTuple):
    """A fenced code block."""

    page: Path
    line: int
    mark: str
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Script(NamedTuple):
    """A block that runs, and what the page says that it prints (None: nothing is said)."""

    block: Block
    prints: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["mark"] or "",
            found["language"],
            found["text"],
        )
        for found in _FENCE.finditer(text)
    ]


def scripts() -> Iterator[Script]:
    """Every block of every page that runs."""
    for page in PAGES:
        every = blocks(page)
        for index, block in enumerate(every):
            if block.mark == "runs":
                after = every[index + 1 : index + 2]
                shown = [one.text for one in after if one.mark == "prints"]
                yield Script(block, shown[0] if shown else None)


def links(page: Path) -> list[str]:
    """Targets of the page's links and images, code left out."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [found["target"] for found in _LINK.finditer(prose)]


def anchors(page: Path) -> set[str]:
    """What ``#...`` can name: the headings, as GitHub writes them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


def settings(page: Path) -> dict[str, str]:
    """``{"section.field": default}`` of the tables under headings like ``### `[section]` ``."""
    text = page.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for part in re.split(r"^#{2,3} ", text, flags=re.MULTILINE):
        title = part.partition("\n")[0]
        section = re.fullmatch(r"`\[([\w.]+)\]`", title)
        if section is None and title != "The top of the file":
            continue
        prefix = f"{section[1]}." if section else ""
        found |= {prefix + row["name"]: row["default"].strip("`") for row in _ROW.finditer(part)}
    return found
