"""Programs by seed: quickly, for runs of many.

Most are short and mix everything. Some are long: who gets one by one many times and quickly is
served in another way than who gets now and then, so what comes after such a run is a case of its
own.
"""

from __future__ import annotations

from random import Random
from typing import Final

from rlinf_async.channels import Key
from tests.channels.model.program import KEYS, Do, Ending, Kill, Op, Payload, Program, Side, Task

HOMES: Final = ("home", "home-tcp", "home-tls")
WIRES: Final = ("unix", "tcp", "tls", "process", "direct", "far", *HOMES)
PROCESSES: Final = ("process", "direct", "far", *HOMES)
SIZES: Final = (0, 0, 10, 5_000, 70_000, 1_000_000)
SENDS: Final[tuple[tuple[Do, int], ...]] = (
    ("put", 12), ("put_nowait", 3), ("flush", 2), ("clone", 1), ("close", 1), ("statistics", 1),
    ("turn", 3),
)  # fmt: skip
TAKES: Final[tuple[tuple[Do, int], ...]] = (
    ("get", 8), ("get_nowait", 2), ("iterate", 3), ("batch", 5), ("lease", 7),
    ("lag", 2), ("clone", 1), ("close", 1), ("statistics", 1), ("turn", 3),
)  # fmt: skip


def generate(seed: int, transport: str = "local") -> Program:
    """The program of this seed."""
    return _Maker(Random(f"{transport} {seed}"), transport).program(seed)


class _Maker:
    def __init__(self, rng: Random, transport: str) -> None:
        self.rng = rng
        self.wire = transport in WIRES
        self.transport = transport
        self.long = rng.random() < 0.2
        self.payload: Payload = rng.choices(
            ("int", "struct", "array", "tensor"), (70, 14, 12, 4) if self.wire else (80, 10, 8, 2)
        )[0]
        self.max_weight = rng.choice((None, None, None, 3, 8)) if not self.long else None
        self.keys: list[Key | None] = list(KEYS[: rng.choice((1, 1, 1, 2, 3))])
        if transport == "direct":
            self.payload = rng.choices(("array", "tensor"), (9, 1))[0]
        if self.long:
            self.payload = "array" if transport == "direct" else "int"
            if rng.random() < 0.7:
                self.keys = [rng.choice(KEYS)]
        self.ending = rng.random() < 0.15

    def program(self, seed: int) -> Program:
        rng = self.rng
        tasks = [self._task("send") for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
        tasks += [self._task("take") for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
        if rng.random() < 0.3:  # a second task at the end of another
            like = rng.choice(tasks)
            tasks.append(Task(like.side, self._task(like.side).ops, like.at, like.end))
        capacity = rng.choice((64, 256, 512)) if self.long else rng.choice((1, 2, 3, 5, 16, 64))
        return Program(
            tasks=tuple(tasks),
            capacity=capacity,
            max_weight=self.max_weight,
            max_deliveries=rng.choice((1, 2, 3, 5)),
            payload=self.payload,
            witness=rng.random() < 0.5,
            cuts=self._cuts(),
            kills=self._kills(tasks),
            seed=seed if rng.random() < 0.6 and not self.wire else None,
        )

    def _task(self, side: Side) -> Task:
        rng = self.rng
        ops = self._long_ops(side) if self.long else self._ops(side, rng.randint(2, 10))
        at = rng.choice((0, 1, 1, 1, 2, 2, 3)) if self.wire else 0
        return Task(side, tuple(ops), at, rng.choice((0, 0, 0, 1, 2)))

    def _long_ops(self, side: Side) -> list[Op]:
        rng, key = self.rng, self._key()
        if side == "send":
            size = rng.choice((0, 5_000)) if self.transport == "direct" else 0
            before = [Op("put", rng.choice((20, 60, 150, 300, 500)), key, size=size)]
            return before + self._ops(side, rng.choice((0, 0, 2)))
        gets: Do = rng.choice(("get", "get", "get", "iterate"))
        ops = [Op(gets, rng.choice((rng.randint(1, 20), rng.randint(5, 120))), key)]
        if rng.random() < 0.7:
            weight = rng.choice((1, 3, 30, 100, 400))
            least = rng.choice((None, None, 1, weight))
            ops.append(Op(rng.choice(("batch", "batch", "lease", "lease")),
                          rng.choice((1, 2, 9)), key, weight, least))  # fmt: skip
        if rng.random() < 0.5:
            ops += self._long_ops(side) if rng.random() < 0.5 else self._ops(side, 3)
        return ops

    def _ops(self, side: Side, count: int) -> list[Op]:
        return [self._op(side) for _ in range(count)]

    def _op(self, side: Side) -> Op:
        rng = self.rng
        table = SENDS if side == "send" else TAKES
        names: list[Do] = [one for one, _ in table]
        do = rng.choices(names, [weight for _, weight in table])[0]
        if do == "close" and rng.random() < 0.7:
            do = "turn"
        if do == "turn":
            return Op("turn", turns=rng.randint(1, 8))
        if do == "flush" and self.ending and rng.random() < 0.3:
            return Op("fail")
        if do in ("flush", "clone", "close", "statistics"):
            return Op(do)
        if do in ("put", "put_nowait"):
            return self._put(do)
        return self._take(do)

    def _put(self, do: Do) -> Op:
        rng = self.rng
        size = 0 if self.payload == "int" else rng.choice(SIZES[: None if self.wire else 5])
        times = rng.choice((1, 1, 1, 2, 3, 8)) if size < 100_000 else 1
        weight = rng.choice((1, 1, 1, 2, 4)) if self.max_weight or rng.random() < 0.3 else 1
        cancel, after = self._cancel()
        return Op(do, times, self._key(), weight, size=size, cancel=cancel, cancel_after=after)

    def _take(self, do: Do) -> Op:
        rng = self.rng
        if do == "lag" and self.payload == "int":
            do = "get"
        cancel, after = self._cancel()
        times, key = rng.choice((1, 1, 1, 2, 4, 9)), self._key()
        if do in ("get", "get_nowait", "iterate"):
            return Op(do, times, key, cancel=cancel, cancel_after=after)
        if do == "lag":
            return Op(do, times, key, rng.randint(1, 12), cancel=cancel, cancel_after=after)
        weight = rng.choice((1, 2, 3, 5, 12))
        at_least = rng.choice((None, None, 1, rng.randint(1, weight)))
        if do == "batch":
            return Op(do, times, key, weight, at_least, cancel=cancel, cancel_after=after)
        return Op(
            do, times, key, weight, at_least,
            ending=self._ending(), turns=rng.choice((0, 0, 1, 3, 8)),
            cancel=cancel, cancel_after=after,
            inside=(self._inside(),) if rng.random() < 0.1 else (),
        )  # fmt: skip

    def _inside(self) -> Op:
        return Op(self.rng.choice(("get", "batch", "lease")), 1, self._key())

    def _ending(self) -> Ending:
        ending: Ending = self.rng.choices(("ack", "fail", "cancel", "replace"), (6, 3, 1, 2))[0]
        return ending

    def _cancel(self) -> tuple[int | None, int | None]:
        chance = self.rng.random()
        if chance < 0.12:
            return self.rng.choice((0, 1, 2, 3, 5, 9, 20)), None
        return None, self.rng.choice((1, 2, 5)) if chance < 0.16 else None

    def _key(self) -> Key | None:
        return self.rng.choice(self.keys)

    def _cuts(self) -> tuple[int, ...]:
        if not self.wire or self.rng.random() > 0.15:
            return ()
        return tuple(sorted(self.rng.randint(1, 60) for _ in range(self.rng.randint(1, 2))))

    def _kills(self, tasks: list[Task]) -> tuple[Kill, ...]:
        places = sorted({task.at for task in tasks} - {0})
        if self.transport not in PROCESSES or not places or self.rng.random() > 0.3:
            return ()
        return (Kill(self.rng.choice(places), self.rng.randint(1, 60)),)
