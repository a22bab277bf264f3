"""Spans of work that begins and ends in several places: see `Worker.span` for one in one block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from rlinf_async.workers.context import OpenSpan


class Turns:
    """Work with waits in it: a span of the work up to each wait, one of the wait, and so on.

    A wait inside a span of work would count as work. ::

        with Turns(self.span, "train") as turns:
            ...
            with turns.waiting("wait samples"):
                ...
    """

    def __init__(self, span: OpenSpan, name: str, **args: Any) -> None:
        self._span = span
        self._name, self._args = name, args
        self._working: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Nothing is done in the block but to wait."""
        self._end()
        try:
            with self._span(name, **self._args):
                yield
        finally:
            self._begin()

    def _begin(self) -> None:
        self._working = self._span(self._name, **self._args)
        self._working.__enter__()

    def _end(self) -> None:
        working, self._working = self._working, None
        if working is not None:
            working.__exit__(None, None, None)


class Together:
    """Pieces of work that run beside each other: one span from the first to the last of them.

    Cut by `cut`, so that one which goes on for ever is seen.
    """

    def __init__(self, span: OpenSpan, name: str) -> None:
        self._span, self._name = span, name
        self._pieces = self._cuts = 0
        self._open: AbstractContextManager[Any] | None = None

    @contextmanager
    def piece(self) -> Iterator[None]:
        """One piece of the work."""
        self._pieces += 1
        self._show()
        try:
            yield
        finally:
            self._pieces -= 1
            self._show()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """End the span; what goes on after the block is another one."""
        self._cuts += 1
        self._show()
        try:
            yield
        finally:
            self._cuts -= 1
            self._show()

    def _show(self) -> None:
        wanted = self._pieces > 0 and not self._cuts
        if wanted and self._open is None:
            self._open = self._span(self._name)
            self._open.__enter__()
        elif not wanted and self._open is not None:
            done, self._open = self._open, None
            done.__exit__(None, None, None)
