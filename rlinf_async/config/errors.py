"""Wrong input: what ends a command with exit code 2 before any worker starts.

::

    UsageError            the user asked for something that cannot be done as asked
    +-- ConfigError       one setting is wrong: names its path, its place, and what would be right
    +-- MissingExtra      an optional dependency is not installed
    +-- MissingDevice     a device that the configuration names is not there
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self

Path = tuple[str, ...]
"""Where a setting is: ``("actor", "optimizer", "lr")``; list items go by their number."""


class UsageError(Exception):
    """The command was asked for something that cannot be done; the text says what and why."""


class ConfigError(UsageError):
    """One setting is wrong.

    The text reads ``origin: path: problem``: for example
    ``run.toml:7: actor.optimizer.lr: expected a number, found the string 'fast'``.
    """

    def __init__(self, problem: str, *, path: Path = (), origin: str = "") -> None:
        super().__init__(": ".join(part for part in (origin, dotted(path), problem) if part))
        self.problem = problem
        self.path = path
        self.origin = origin

    def at(self, origin: str) -> Self:
        """The same error, said to come from ``origin`` (a file and line, or a flag)."""
        return type(self)(self.problem, path=self.path, origin=origin)


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, module: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the module {module!r}, which is not installed: "
            f"pip install 'rlinf-async[{extra}]'"
        )
        self.module = module
        self.extra = extra


class MissingDevice(UsageError):
    """A device that the configuration names is not there."""


def raised(error: BaseException) -> str:
    """Type and text of what somebody else's code raised, whose text may be impossible to make."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its text cannot be made)"


def dotted(path: Path) -> str:
    """``("envs", "0", "id")`` as a person writes it: ``envs[0].id``."""
    text = ""
    for part in path:
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def nearest(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing where no candidate is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
