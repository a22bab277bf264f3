"""What a seed means: which processes there are, and what happens to them, and when."""

from __future__ import annotations

from random import Random
from typing import Final, Literal

import msgspec

FaultKind = Literal["kill", "stop", "pause", "cut"]

HEARTBEAT: Final = 0.4
"""Seconds after which the owner gives a silent process up."""
OWNER: Final = "owner"
LEAST: Final = 5_000
"""Bytes of arrays that stay with their producer, where `Plan.direct` says so."""
PATIENCE: Final = 0.5
"""Seconds after which the owner gives a process up that is cut off, or died at the end of TCP."""


class Fault(msgspec.Struct, frozen=True):
    """Once so many records were journaled, and a moment later, this happens to a process.

    ``kill`` is SIGKILL; ``stop`` and ``pause`` are SIGSTOP, for longer and for shorter than the
    heartbeat's limit, and SIGCONT; ``cut`` shuts its socket down.
    """

    after: int
    moment: float
    kind: FaultKind
    victim: str


class Role(msgspec.Struct, frozen=True):
    """What a process does: puts the items from ``first`` up to ``stop``, or takes them."""

    name: str
    kind: Literal["sender", "receiver"]
    first: int = 0
    stop: int = 0
    lease: int = 0
    """items of a lease at most; 0 for plain gets"""
    slow: bool = False
    """takes its time between plain gets"""


class Plan(msgspec.Struct, frozen=True):
    """One schedule."""

    seed: int
    capacity: int
    array_bytes: int
    uvloop: bool
    roles: tuple[Role, ...]
    faults: tuple[Fault, ...]
    direct: bool = False
    """over TCP, where large arrays go from producer to consumer past the owner"""

    @property
    def items(self) -> int:
        return sum(role.stop - role.first for role in self.roles)


def plan(seed: int) -> Plan:
    """The schedule of this seed."""
    rng = Random(seed)
    roles: list[Role] = []
    first = 0
    for number in range(rng.randint(1, 2)):
        stop = first + rng.randint(20, 60)
        roles.append(Role(f"producer{number}", "sender", first, stop))
        first = stop
    roles += [
        Role(
            f"consumer{number}", "receiver", lease=rng.choice([0, 0, 1, 3]), slow=rng.random() < 0.5
        )
        for number in range(rng.randint(1, 3))
    ]
    faults = [_fault(rng, roles, 3 * first) for _ in range(rng.randint(1, 3))]
    faults.sort(key=lambda fault: fault.after)
    made = Plan(
        seed=seed,
        capacity=rng.choice([1, 2, 4, 8, 32]),
        array_bytes=rng.choice([0, 0, 0, 1000, 100_000]),
        uvloop=rng.random() < 0.5,
        roles=tuple(roles),
        faults=tuple(faults),
    )
    if rng.random() < 0.3:
        size = rng.choice([8_000, 100_000, 1_000_000])
        return msgspec.structs.replace(made, direct=True, array_bytes=size)
    return made


def _fault(rng: Random, roles: list[Role], records: int) -> Fault:
    kind: FaultKind = rng.choices(("kill", "stop", "pause", "cut"), (8, 2, 3, 6))[0]
    victims = [role.name for role in roles]
    if kind in ("kill", "pause") and rng.random() < 0.15:
        victims = [OWNER]
    return Fault(rng.randrange(records), rng.random() * 0.002, kind, rng.choice(victims))
