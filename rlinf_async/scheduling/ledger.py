"""`DeviceLedger`: who holds which device, and who lends it to whom until when.

Invariants: a device has one holder at most; a loan is of a device whose borrower holds it; what is
given back goes to the lender. A change is made whole or not at all.
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
        devices: number of each device -> its host.
    """

    def __init__(self, devices: Mapping[int, int]) -> None:
        self.hosts = dict(devices)
        self._holder: dict[int, str] = {}
        self._loans: dict[int, Loan] = {}
        self._lost: set[int] = set()
        self._held: dict[str, tuple[int, ...]] | None = None
        """devices of each holder; None: not known since the last change"""

    # -- looking ------------------------------------------------------------------------------

    def holder(self, device: int) -> str | None:
        """Return who holds it; None: it is free."""
        return self._holder.get(device)

    def held_by(self, holder: str) -> tuple[int, ...]:
        """Return the devices of a holder, by number."""
        return self._by_holder().get(holder, ())

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
        held = self._by_holder()
        return tuple(Holding(holder=name, devices=held[name]) for name in sorted(held))

    def loans(self) -> tuple[Loan, ...]:
        """Return the loans, by device."""
        return tuple(self._loans[one] for one in sorted(self._loans))

    def _by_holder(self) -> dict[str, tuple[int, ...]]:
        if self._held is None:
            found: dict[str, list[int]] = {}
            for device in sorted(self._holder):
                found.setdefault(self._holder[device], []).append(device)
            self._held = {name: tuple(devices) for name, devices in found.items()}
        return self._held

    # -- changing -----------------------------------------------------------------------------

    def take(self, holder: str, devices: Iterable[int]) -> None:
        """Give free devices to a holder. Raises `DeviceTaken`; then nothing has changed."""
        wanted = tuple(devices)
        self._check(holder, wanted)
        self._held = None
        for one in wanted:
            self._holder[one] = holder

    def release(self, holder: str, devices: Iterable[int] | None = None) -> tuple[int, ...]:
        """Free devices of a holder (None: all), and return them; loans of them end.

        Raises `DeviceTaken` where it does not hold one of them; then nothing has changed.
        """
        given = self.held_by(holder) if devices is None else tuple(dict.fromkeys(devices))
        for one in given:
            if self._holder.get(one) != holder:
                raise DeviceTaken(f"{holder} cannot release device {one}: {self._who(one)}")
        self._held = None
        for one in given:
            del self._holder[one]
            self._loans.pop(one, None)
        return given

    def lend(self, lender: str, borrower: str, devices: Iterable[int], *, until: str) -> None:
        """Hand devices of a lender, or free ones that are its own, to a borrower for a while.

        Raises `DeviceTaken`; then nothing has changed.
        """
        wanted = tuple(devices)
        self._check(borrower, wanted, may_hold=lender)
        self._held = None
        for one in wanted:
            self._holder[one] = borrower
            self._loans[one] = Loan(device=one, lender=lender, borrower=borrower, until=until)

    def give_back(self, borrower: str, devices: Iterable[int] | None = None) -> tuple[int, ...]:
        """Hand borrowed devices (None: all) back to their lenders, and return them.

        Raises `DeviceTaken` where one is not on loan to the borrower; then nothing has changed.
        """
        borrowed = tuple(one for one, loan in self._loans.items() if loan.borrower == borrower)
        given = borrowed if devices is None else tuple(dict.fromkeys(devices))
        for one in given:
            if one not in borrowed:
                raise DeviceTaken(f"device {one} is not on loan to {borrower}: {self._who(one)}")
        self._held = None
        for one in given:
            self._holder[one] = self._loans.pop(one).lender
        return given

    def assign(self, holdings: Mapping[str, Iterable[int]], *, until: str = "") -> None:
        """Make these the holdings of these holders, all at once; what they held before is free.

        A device that its last holder had is on loan from it where ``until`` is given. Raises
        `DeviceTaken`; then nothing has changed.
        """
        wanted = {name: tuple(devices) for name, devices in holdings.items()}
        kept = {one: who for one, who in self._holder.items() if who not in wanted}
        for name, devices in wanted.items():
            for one in devices:
                self._check_there(name, one)
                if one in kept:
                    raise DeviceTaken(f"{name} cannot hold device {one}: {kept[one]} holds it")
                kept[one] = name
        before = self._holder
        self._holder, self._held = kept, None
        self._loans = {
            one: loan for one, loan in self._loans.items() if kept.get(one) == loan.borrower
        }
        if until:
            self._note_loans(before, kept, until)

    def lose(self, device: int) -> str | None:
        """Note that a device is gone; return who held it."""
        self._lost.add(device)
        self._held = None
        self._loans.pop(device, None)
        return self._holder.pop(device, None)

    def found(self, device: int) -> None:
        """Note that a lost device is back, free."""
        self._lost.discard(device)

    def _note_loans(self, before: Mapping[int, str], now: Mapping[int, str], until: str) -> None:
        for one, holder in now.items():
            lender = before.get(one, holder)
            if lender != holder and one not in self._loans:
                self._loans[one] = Loan(device=one, lender=lender, borrower=holder, until=until)

    def _check(self, holder: str, wanted: tuple[int, ...], may_hold: str | None = None) -> None:
        if len(set(wanted)) < len(wanted):
            raise DeviceTaken(f"{holder} asks for a device twice: {list(wanted)}")
        for one in wanted:
            self._check_there(holder, one)
            if self._holder.get(one, may_hold) != may_hold:
                raise DeviceTaken(f"{holder} cannot hold device {one}: {self._who(one)}")

    def _check_there(self, holder: str, device: int) -> None:
        if device not in self.hosts:
            raise DeviceTaken(f"{holder} cannot hold device {device}: there is none of this number")
        if device in self._lost:
            raise DeviceTaken(f"{holder} cannot hold device {device}: it is lost")

    def _who(self, device: int) -> str:
        holder = self._holder.get(device)
        return "nobody holds it" if holder is None else f"{holder} holds it"
