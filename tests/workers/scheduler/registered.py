"""Another trainer under a registered name, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_async.backends import parts


@contextmanager
def registered(name: str, trainer: type) -> Iterator[None]:
    """Have the name stand for this class."""
    known = parts.language_trainers.paths[name]
    parts.language_trainers.paths[name] = f"{trainer.__module__}:{trainer.__qualname__}"
    try:
        yield
    finally:
        parts.language_trainers.paths[name] = known
