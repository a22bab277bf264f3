"""Verifiers by name. A name with a colon in it is the import path of a user's function.

An entry of `VERIFIERS` is a function that returns the verifier: importing sympy for ``math`` takes
a second, and is done only where ``math`` is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rlinf_async.config.registry import Registry, UnknownName
from rlinf_async.rewards.answer import Verifier

UnknownVerifier = UnknownName

VERIFIERS: Registry[Callable[[], Verifier]] = Registry(
    "built-in verifier",
    built_in=(
        "rlinf_async.rewards.matching",
        "rlinf_async.rewards.mathematics",
        "rlinf_async.rewards.reasoning",
    ),
)

verifiers: Registry[Verifier] = Registry(
    "verifier of your own", group="rlinf_async.verifiers", called_with=("answer",)
)
"""those that are registered as they are"""
register_verifier = verifiers.register

INLINE: Final = frozenset({"exact", "numeric"})
"""verifiers that take microseconds and cannot hang, so they run without a process of their own"""


def load_verifier(name: str, path: tuple[str, ...] = ("verifier",)) -> Verifier:
    """Return the verifier of this name, importing what it needs; ``path`` is the setting.

    Raises:
        UnknownVerifier: no such name; the message lists what there is.
        ConfigError: an import path that leads to no function of one argument, an `Answer`.
        MissingExtra: a library that it needs is not installed.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]()
    try:
        return verifiers.load(name, path)
    except UnknownName as error:
        raise UnknownName("verifier", name, sorted([*VERIFIERS.names(), *error.known])) from None
