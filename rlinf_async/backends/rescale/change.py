"""`Change`: what a backend does at each stage of a change of strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from rlinf_async.backends.rescale.transfer import TransferGroup
from rlinf_async.backends.reshard import Report


class Change(ABC):
    """One rank's part in a change, as its backend does it. `Rescale` calls the stages in order.

    Invariant: until `commit`, the model that trains, its optimizer and its groups stay as they
    are, so that `roll_back` only drops what was made. `commit` does nothing that could fail.
    """

    @property
    @abstractmethod
    def transfer(self) -> TransferGroup:
        """The group in which state is moved; it lives as long as the model."""

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether this rank trains: under the old strategy, after `commit` under the new one."""

    @abstractmethod
    def propose(self) -> bytes:
        """Return what the other ranks have to know of this one; raises where it cannot change."""

    @abstractmethod
    def connect(self, proposals: Sequence[bytes], limit: timedelta) -> None:
        """Make the process groups of the new strategy; ``proposals`` are those of all ranks.

        If any rank comes here, all do. Each makes as many groups as the others, also when it
        raises: torch counts them.
        """

    @abstractmethod
    def drain(self) -> None:
        """Leave nothing in flight that the move would lose: gradients, a copy being made."""

    @abstractmethod
    def build(self) -> None:
        """Plan, and make what the state will be moved into."""

    @abstractmethod
    def move(self, bucket_bytes: int, limit: timedelta) -> Report:
        """Fill what was built. Collective in `transfer`."""

    @abstractmethod
    def verify(self) -> None:
        """Have the new model and optimizer ready to train; after this only `commit` is left."""

    @abstractmethod
    def commit(self) -> None:
        """Train with the new model from now on, and free the old one."""

    @abstractmethod
    def roll_back(self) -> None:
        """Drop what was made, and train on with the old model. May be called at any stage."""
