"""What can be wrong with weights that arrived.

::

    WeightsError
    ├── WeightsDamaged      the bytes are not those that were sent
    └── WeightsMismatch     the bytes are right, but this model has other tensors
"""

from __future__ import annotations

from collections.abc import Iterable


class WeightsError(Exception):
    """Base of the errors about weights."""


class WeightsDamaged(WeightsError):
    """A checksum or a slot does not fit its bytes. Nothing was loaded: ask for the update again."""


class WeightsMismatch(WeightsError):
    """The names, shapes or dtypes differ from the model's. Nothing was loaded."""


def checksum_error(version: int, where: str, tensors: Iterable[str], want: int, got: int) -> str:
    """Return the text for a checksum that differs."""
    named = ", ".join(tensors) or "no tensors"
    return (
        f"weights version {version}, {where} ({named}): checksum {want:#010x} was sent, "
        f"{got:#010x} arrived; nothing was loaded, ask for this version again"
    )
