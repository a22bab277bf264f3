"""Errors about weights that arrived.

::

    WeightsError
    ├── WeightsDamaged      the bytes are not those that were sent
    ├── WeightsMismatch     the bytes are right, but this model has other tensors
    └── WeightsOutdated     the engine serves a newer version already
"""

from __future__ import annotations

from collections.abc import Iterable


class WeightsError(Exception):
    """Base of the errors about weights."""


class WeightsDamaged(WeightsError):
    """A checksum or a slot does not fit its bytes. Nothing was loaded: ask for the update again."""


class WeightsMismatch(WeightsError):
    """The names, shapes or dtypes differ from the model's. Nothing was loaded."""


class WeightsOutdated(WeightsError):
    """The version is older than the one that is served. Nothing was loaded."""

    def __init__(self, version: int, served: int) -> None:
        super().__init__(
            f"weights version {version} came while version {served} is served; nothing was loaded. "
            "Is there more than one publisher, or an actor that went back to an older checkpoint? "
            "Then start the rollout workers anew"
        )


def refuse_older(version: int, served: int) -> None:
    """Raise `WeightsOutdated` if this version is older than the one that is served."""
    if version < served:
        raise WeightsOutdated(version, served)


def checksum_error(version: int, where: str, tensors: Iterable[str], want: int, got: int) -> str:
    """Return the text for a checksum that differs."""
    named = ", ".join(tensors) or "no tensors"
    return (
        f"weights version {version}, {where} ({named}): checksum {want:#018x} was sent, "
        f"{got:#018x} arrived; nothing was loaded, ask for this version again"
    )
