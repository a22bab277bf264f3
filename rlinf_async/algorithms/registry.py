"""A registry of named functions, with an error that suggests the nearest name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownName(LookupError):
    """Nothing is registered under this name; the message has the nearest one and all others."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        listed = ", ".join(repr(entry) for entry in known) or "none"
        super().__init__(f"no {kind} is called {name!r}{hint} (known: {listed})")
        self.kind = kind
        self.name = name
        self.known = known


class Registry(Generic[T]):
    """Names to functions of one kind.

    ``built_in`` are modules that register when they are imported, which the first look-up does.
    Raises `UnknownName` for an unregistered name and `ValueError` for one registered twice.
    """

    def __init__(self, kind: str, built_in: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self._built_in = built_in
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that enters its function under ``name``."""

        def enter(entry: T) -> T:
            if self._entries.get(name, entry) is not entry:
                raise ValueError(
                    f"a {self.kind} called {name!r} is registered already; choose another name"
                )
            self._entries[name] = entry
            return entry

        return enter

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise UnknownName(self.kind, name, self.names())
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._import_built_in()
        return name in self._entries

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        self._import_built_in()
        return sorted(self._entries)

    def _import_built_in(self) -> None:
        for module in self._built_in:
            importlib.import_module(module)
