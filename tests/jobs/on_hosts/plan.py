"""What a seed means: which job runs, where its workers are, and who is killed when."""

from __future__ import annotations

from random import Random
from typing import Final, Literal

import msgspec

from tests.jobs.on_hosts.hosts import HEAD
from tests.jobs.on_hosts.runs import KINDS, Kind

ITERATIONS: Final = 60
LAST: Final = 25
"""iteration before which everything is killed: what is left takes longer than a restart"""
WORKERS: Final[dict[Kind, tuple[str, ...]]] = {
    "embodied": ("Env[0]", "Env[1]", "Rollout[0]"),
    "language": ("Rollout[0]", "Rollout[1]", "Reward[0]"),
}
"""workers whose death a run survives"""


class Kill(msgspec.Struct, frozen=True):
    """Once so many iterations are booked, and a moment later, a worker or a host is killed."""

    after: int
    moment: float
    """seconds"""
    what: Literal["worker", "host"]
    name: str

    def __str__(self) -> str:
        return f"{self.name}@{self.after}"


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    kind: Kind
    trainer: str
    """host of the actor"""
    placed: bool
    """whether the others have devices of their own, which a restart elsewhere has to reserve"""
    kills: tuple[Kill, ...]

    @property
    def other(self) -> str:
        """The host with most of the others."""
        return "gamma" if self.trainer == "beta" else "beta"

    @property
    def fatal(self) -> bool:
        """Whether the actor is among those killed: the run ends, and is resumed."""
        return any(kill.name in ("Actor[0]", self.trainer) for kill in self.kills)

    @property
    def placement(self) -> tuple[object, ...]:
        """Settings of ``[cluster.placement]``."""
        first, second = f"{self.other}:0", f"{self.other}:1"
        where = {"actor": f"{self.trainer}:0"}
        if self.placed and self.kind == "embodied":
            where |= {"rollout": first, "env": f"{second},{HEAD}:0"}
        elif self.placed:
            where |= {"rollout": f"{first},{second}", "reward": f"{HEAD}:0"}
        return settings(where)

    def expected(self) -> dict[str, str]:
        """Host of each worker that the placement names."""
        found = {"Actor[0]": self.trainer}
        if self.placed and self.kind == "embodied":
            found |= {"Rollout[0]": self.other, "Env[0]": self.other, "Env[1]": HEAD}
        elif self.placed:
            found |= {"Rollout[0]": self.other, "Rollout[1]": self.other, "Reward[0]": HEAD}
        return found


def settings(placement: dict[str, str]) -> tuple[object, ...]:
    """``[cluster.placement]`` on the command line."""
    pairs = ((f"--cluster.placement.{role}", where) for role, where in placement.items())
    return tuple(word for pair in pairs for word in pair)


def plan(seed: int) -> Plan:
    """The run of this seed."""
    rng = Random(seed)
    kind = KINDS[seed % len(KINDS)]
    trainer = rng.choice(("beta", "gamma"))
    made = Plan(seed=seed, kind=kind, trainer=trainer, placed=rng.random() < 0.7, kills=())
    kills = [_kill(rng, made) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        name = rng.choice(("Actor[0]", trainer))
        kills.append(_at_random(rng, "worker" if name == "Actor[0]" else "host", name))
    elif not any(kill.what == "host" for kill in kills):
        kills.append(_at_random(rng, "host", made.other))
    kills.sort(key=lambda kill: kill.after)
    names = [kill.name for kill in kills]
    once = (kill for at, kill in enumerate(kills) if kill.name not in names[:at])
    return msgspec.structs.replace(made, kills=tuple(once))


def _kill(rng: Random, made: Plan) -> Kill:
    if rng.random() < 0.4:
        return _at_random(rng, "host", made.other)
    return _at_random(rng, "worker", rng.choice(WORKERS[made.kind]))


def _at_random(rng: Random, what: Literal["worker", "host"], name: str) -> Kill:
    return Kill(rng.randint(1, LAST), rng.random() * 0.3, what, name)
