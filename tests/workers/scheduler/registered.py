"""Another trainer under a registered name, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_async.backends import base as registry


@contextmanager
def registered(name: str, trainer: type) -> Iterator[None]:
    """Have the name stand for this class."""
    known = registry.LANGUAGE_TRAINERS[name]
    registry.LANGUAGE_TRAINERS[name] = f"{trainer.__module__}:{trainer.__qualname__}"
    try:
        yield
    finally:
        registry.LANGUAGE_TRAINERS[name] = known
