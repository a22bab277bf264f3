"""`DeviceLedger`: who holds which device, and who lends it to whom until when.

Invariants: a device has one holder at most; a loan is of a device that somebody else holds than its
owner. A change is made whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A holder and its devices."""

    holder: str
    devices: tuple[int, ...]


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """A device that somebody holds for a while."""

    device: int
    lender: str
    borrower: str
    until: str
    """the event that ends it, such as ``end of iteration 7``"""


class DeviceTaken(RuntimeError):
    """A device was asked for that somebody else holds, or that there is not."""


class DeviceLedger:
    """Knows the holder of every device of a run.

    Args:
        hosts: number of each device -> its host.
        owners: number of each device -> who has it between two iterations; who holds another's
            device has borrowed it.
    """

    def __init__(self, hosts: Mapping[int, int], owners: Mapping[int, str] | None = None) -> None:
        self.hosts = dict(hosts)
        self._owners = dict(owners or {})
        self._holder: dict[int, str] = {}
        self._until: dict[int, str] = {}
        self._lost: set[int] = set()
        self._held: dict[str, set[int]] = {}
        """devices of each holder"""

    # -- looking ------------------------------------------------------------------------------

    def holder(self, device: int) -> str | None:
        """Return who holds it; None: it is free."""
        return self._holder.get(device)

    def held_by(self, holder: str) -> tuple[int, ...]:
        """Return the devices of a holder, by number."""
        return tuple(sorted(self._held.get(holder, ())))

    def can_take(self, holder: str, devices: Iterable[int]) -> bool:
        """Whether each of these devices is free, or this holder's already."""
        return all(
            one in self.hosts and one not in self._lost and self._holder.get(one, holder) == holder
            for one in devices
        )

    @property
    def free(self) -> tuple[int, ...]:
        """Devices that nobody holds, lost ones left out."""
        taken = self._lost.union(self._holder)
        return tuple(one for one in self.hosts if one not in taken)

    @property
    def lost(self) -> tuple[int, ...]:
        """Devices that nobody can hold any more."""
        return tuple(sorted(self._lost))

    def holdings(self) -> tuple[Holding, ...]:
        """Return every holder with its devices, by name."""
        return tuple(
            Holding(holder=name, devices=self.held_by(name))
            for name in sorted(self._held)
            if self._held[name]
        )

    def loans(self) -> tuple[Loan, ...]:
        """Return the loans, by device."""
        return tuple(
            Loan(device=one, lender=owner, borrower=holder, until=self._until.get(one, ""))
            for one, holder in sorted(self._holder.items())
            if (owner := self._owners.get(one, holder)) != holder
        )

    # -- changing -----------------------------------------------------------------------------

    def take(self, holder: str, devices: Iterable[int], *, until: str = "") -> None:
        """Give devices that are free, or the holder's already, to a holder.

        ``until``: the event after which those that are another's go back. Raises `DeviceTaken`;
        then nothing has changed.
        """
        wanted = tuple(devices)
        self._check(holder, wanted)
        for one in wanted:
            self._holder[one] = holder
            self._until[one] = until
        self._held.setdefault(holder, set()).update(wanted)

    def release(self, holder: str, devices: Iterable[int] | None = None) -> tuple[int, ...]:
        """Free devices of a holder (None: all), and return them.

        Raises `DeviceTaken` where it does not hold one of them; then nothing has changed.
        """
        given = self.held_by(holder) if devices is None else tuple(dict.fromkeys(devices))
        for one in given:
            if self._holder.get(one) != holder:
                raise DeviceTaken(f"{holder} cannot release device {one}: {self._who(one)}")
        for one in given:
            del self._holder[one]
            self._held[holder].discard(one)
        return given

    def keep(self, holder: str, devices: Iterable[int]) -> tuple[int, ...]:
        """Free all devices of a holder but these, and return them."""
        kept = set(devices)
        return self.release(holder, [one for one in self.held_by(holder) if one not in kept])

    def lose(self, device: int) -> str | None:
        """Note that nobody can take a device any more; return who holds it: whoever does may not
        know, and holds it until it is released."""
        self._lost.add(device)
        return self._holder.get(device)

    def found(self, device: int) -> None:
        """Note that a lost device is back."""
        self._lost.discard(device)

    def _check(self, holder: str, wanted: tuple[int, ...]) -> None:
        if len(set(wanted)) < len(wanted):
            raise DeviceTaken(f"{holder} asks for a device twice: {list(wanted)}")
        for one in wanted:
            if one not in self.hosts:
                raise DeviceTaken(
                    f"{holder} cannot hold device {one}: there is none of this number"
                )
            if one in self._lost:
                raise DeviceTaken(f"{holder} cannot hold device {one}: it is lost")
            if self._holder.get(one, holder) != holder:
                raise DeviceTaken(f"{holder} cannot hold device {one}: {self._who(one)}")

    def _who(self, device: int) -> str:
        holder = self._holder.get(device)
        return "nobody holds it" if holder is None else f"{holder} holds it"
