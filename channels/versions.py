"""Which weights had a part in an item, and whether they are recent enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Fresh(msgspec.Struct, Generic[T], frozen=True):
    """An item whose weights are at most ``max_lag`` versions old."""

    item: T
    lag: int


class TooStale(msgspec.Struct, Generic[T], frozen=True):
    """An item whose weights are more than ``max_lag`` versions old: counted, and yours to
    handle."""

    item: T
    lag: int


def oldest_version(item: object) -> int:
    """The oldest weight version that had a part in this item.

    Raises:
        TypeError: the item carries no ``version``.
    """
    version: Any = getattr(item, "version", None)
    if version is None:
        raise TypeError(
            f"{type(item).__name__} carries no 'version', so its staleness cannot be known: "
            "give it a field 'version' (an int, or one for each part)"
        )
    if not _has_parts(version):
        return int(version)
    if len(version) == 0:
        raise TypeError(f"the 'version' of this {type(item).__name__} is empty: who made it?")
    return int(min(version))


def _has_parts(version: Any) -> bool:
    return getattr(version, "ndim", 0) > 0 or isinstance(version, Sequence)
