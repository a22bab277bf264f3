"""Docstrings as the site reads them: ``::`` before an indented block is a colon."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Colons(griffe.Extension):
    """Written for readers of the code, a block begins with ``::``; Markdown needs no sign."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever has one."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
