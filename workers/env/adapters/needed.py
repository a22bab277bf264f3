"""A simulator's package, or the command that installs it."""

from __future__ import annotations

import importlib
from typing import Any

from rlinf_async.config import MissingExtra


def needed(module: str, *, extra: str) -> Any:
    """Import a module; raise `MissingExtra` where its package is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise MissingExtra(missing, extra=extra, needed_for=f"the simulator {extra}") from None
