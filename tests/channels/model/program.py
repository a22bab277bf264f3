"""A program over one channel, as plain data: what each task does, and what happens to it.

A program is printed as the expression that makes it, without what has its default: a program that
fails can be pasted into a test. It has no state and runs over every transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from rlinf_async.channels import Key

Do = Literal[
    "put", "put_nowait", "flush", "fail", "get", "get_nowait", "iterate", "batch", "lease",
    "lag", "clone", "close", "statistics", "turn",
]  # fmt: skip
Side = Literal["send", "take"]
Ending = Literal["ack", "fail", "cancel", "replace"]
Payload = Literal["int", "struct", "array", "tensor"]

KEYS: Final[tuple[Key | None, ...]] = (None, "env", 7)
SENDING: Final[tuple[Do, ...]] = ("put", "put_nowait")
TAKING: Final[tuple[Do, ...]] = (
    "get", "get_nowait", "iterate", "batch", "lease", "lag",
)  # fmt: skip
LEASING: Final[tuple[Do, ...]] = ("lease", "lag")
NOWAIT: Final[tuple[Do, ...]] = ("put_nowait", "get_nowait")


class Op(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """One operation, done ``times`` times."""

    do: Do
    times: int = 1
    key: Key | None = None
    weight: int = 1
    """of the item that is put; of the batch, or the lease, that is taken"""
    at_least: int | None = None
    size: int = 0
    """bytes of the payload of each item put"""
    ending: Ending = "ack"
    """how a lease ends; ``replace`` puts something else in the place of every second item, from the
    first on"""
    turns: int = 0
    """of the loop: for which a lease is held, or that are waited"""
    cancel: int | None = None
    """it is cancelled after so many turns of the loop"""
    cancel_after: int | None = None
    """it is cancelled after so many operations of others have finished"""
    inside: tuple[Op, ...] = ()
    """what is taken while the lease is held"""


class Task(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Operations on one end, one after the other."""

    side: Side
    ops: tuple[Op, ...]
    at: int = 0
    """which process has its end: 0 is the owner of the channel"""
    end: int = 0
    """tasks of the same process and side that have the same number here share one end"""


class Kill(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """This process is killed when it has begun or finished so many operations."""

    at: int
    after: int


class Program(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """Tasks over one channel."""

    tasks: tuple[Task, ...]
    capacity: int = 64
    max_weight: int | None = None
    max_deliveries: int = 5
    payload: Payload = "int"
    witness: bool = False
    """whether the owner has a receiver that is open from the beginning"""
    cuts: tuple[int, ...] = ()
    """all sockets are cut when so many operations have finished"""
    kills: tuple[Kill, ...] = ()
    seed: int | None = None
    """of the order of tasks, over a local channel; asyncio's own order without one"""

    @property
    def places(self) -> int:
        """How many processes there are beside the owner."""
        return max((task.at for task in self.tasks), default=0)


EndName = tuple[Side, int, int]
"""The side, process and number that tell the ends of a program apart."""


def end_of(task: Task) -> EndName:
    """The end that this task uses."""
    return task.side, task.at, task.end


def end_names(program: Program) -> list[EndName]:
    """Every end once."""
    return [*dict.fromkeys(map(end_of, program.tasks))]


def name_of(end: EndName) -> str:
    """What stands in reports for who holds this end."""
    side, at, number = end
    return f"{side}{number}@{at}"


def party_of(task: int) -> str:
    """What stands in reports for who runs this task."""
    return f"task{task}"


PER_TASK: Final = 1 << 20


def item_number(task: int, count: int) -> int:
    """The number of an item: unique in its program."""
    return task * PER_TASK + count


def operations(program: Program) -> Iterator[tuple[int, Op]]:
    """Every operation, with its task."""
    for index, task in enumerate(program.tasks):
        for op in task.ops:
            yield index, op


def as_test(program: Program, transport: str, found: str) -> str:
    """The program as a test that can be pasted."""
    tasks = "\n".join(_as_lines(task) for task in program.tasks)
    options = repr(msgspec.structs.replace(program, tasks=()))
    rest = options.removeprefix("Program(tasks=()").removeprefix(", ").removesuffix(")")
    said = "".join(f"    # {line}\n" for line in found.splitlines()[:12])
    return (
        "def test_found() -> None:\n"
        f"{said}    program = Program(\n        (\n{tasks}\n        ),\n"
        + (f"        {rest},\n" if rest else "")
        + f'    )\n    assert run(program, "{transport}").violations == []\n'
    )


def _as_lines(task: Task) -> str:
    options = repr(msgspec.structs.replace(task, ops=()))
    rest = options.removesuffix(")").partition("ops=()")[2]
    ops = "".join(f"                    {op!r},\n" for op in task.ops)
    return f"            Task({task.side!r}, (\n{ops}                ){rest}),"
