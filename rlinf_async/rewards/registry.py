"""Verifiers by name. A name with a colon in it is the import path of a user's function.

An entry of `VERIFIERS` is a function that returns the verifier: importing sympy for ``math`` takes
a second, and is done only where ``math`` is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Final

from rlinf_async.algorithms.registry import Registry, UnknownName
from rlinf_async.config import ConfigError
from rlinf_async.config.entry_point import load_entry_point
from rlinf_async.rewards.answer import Verifier

UnknownVerifier = UnknownName

VERIFIERS: Registry[Callable[[], Verifier]] = Registry(
    "verifier",
    built_in=(
        "rlinf_async.rewards.matching",
        "rlinf_async.rewards.mathematics",
        "rlinf_async.rewards.reasoning",
    ),
)

INLINE: Final = frozenset({"exact", "numeric"})
"""verifiers that take microseconds and cannot hang, so they run without a process of their own"""


def load_verifier(name: str) -> Verifier:
    """Return the verifier of this name, importing what it needs.

    Raises:
        UnknownVerifier: no such name; the message lists what there is.
        ConfigError: an import path that leads to no function of one argument.
        MissingExtra: a library that it needs is not installed.
    """
    if ":" not in name and not name.endswith(".py"):
        return VERIFIERS[name]()
    function = load_entry_point(name, path=("verifier",))
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{name!r} is not a function of one argument ({error}): it is called with an Answer, "
            "whose fields are prompt, text, reference, finish and tokens",
            path=("verifier",),
        ) from error
    except ValueError:  # a function written in C may have no signature
        pass
    return function
