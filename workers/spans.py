"""A span of work that is done in several places; `Worker.span` is one in a single block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rlinf_async.workers.context import OpenSpan


class MergedSpan:
    """Concurrent pieces of work as one span, from the begin of the first to the end of the last.

    A cut ends the span, and work after it is another one: a wait inside a span would count as work,
    and a span that never ends is never recorded. ::

        training = MergedSpan(self.span, "train")
        with training.piece():
            ...
            with training.cut(), self.span("wait samples"):
                ...
    """

    def __init__(self, span: OpenSpan, name: str, **args: Any) -> None:
        self._span = span
        self._name, self._args = name, args
        self._pieces = self._cuts = 0
        self._open: AbstractContextManager[Any] | None = None

    def piece(self) -> AbstractContextManager[None]:
        """Return the context of one piece of the work."""
        return self._while(pieces=1)

    def cut(self) -> AbstractContextManager[None]:
        """Return a context in which no work is done."""
        return self._while(cuts=1)

    @contextmanager
    def _while(self, pieces: int = 0, cuts: int = 0) -> Iterator[None]:
        self._count(pieces, cuts)
        try:
            yield
        finally:
            self._count(-pieces, -cuts)

    def _count(self, pieces: int, cuts: int) -> None:
        self._pieces += pieces
        self._cuts += cuts
        wanted = self._pieces > 0 and not self._cuts
        if wanted and self._open is None:
            self._open = self._span(self._name, **self._args)
            self._open.__enter__()
        elif not wanted and self._open is not None:
            done, self._open = self._open, None
            done.__exit__(None, None, None)
