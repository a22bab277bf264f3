"""The smallest program that still fails: parts are left out, numbers halved, options reset."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from tests.channels.model.program import Op, Program, Task

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, *, seconds: float = 60.0) -> Program:
    """Take what still fails, until nothing smaller does, or the time is over."""
    deadline = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for smaller in smaller_than(program):
            if time.monotonic() > deadline:
                break
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def smaller_than(program: Program) -> Iterator[Program]:
    """Programs that are simpler in one way, those that are much simpler first."""
    tasks = program.tasks
    if len(tasks) > 1:
        for index in range(len(tasks)):
            yield _with(program, tasks=tasks[:index] + tasks[index + 1 :])
    yield from _plainer(program)
    for index, task in enumerate(tasks):
        for smaller in _smaller_task(task):
            yield _with(program, tasks=(*tasks[:index], smaller, *tasks[index + 1 :]))


def _with(program: Program, **fields: object) -> Program:
    return msgspec.structs.replace(program, **fields)


def _plainer(program: Program) -> Iterator[Program]:
    for name, plain in (
        ("kills", ()), ("cuts", ()), ("payload", "int"), ("max_weight", None), ("witness", False),
        ("seed", None), ("max_deliveries", 5), ("capacity", 64),
    ):  # fmt: skip
        if getattr(program, name) != plain:
            yield _with(program, **{name: plain})


def _smaller_task(task: Task) -> Iterator[Task]:
    ops = task.ops
    size = len(ops)
    while size:
        for at in range(0, len(ops), size):
            if size < len(ops) or len(ops) == 1:
                yield msgspec.structs.replace(task, ops=ops[:at] + ops[at + size :])
        size //= 2
    if task.at > 1:
        yield msgspec.structs.replace(task, at=1)
    if task.end:
        yield msgspec.structs.replace(task, end=0)
    for index, op in enumerate(ops):
        for smaller in _smaller_op(op):
            yield msgspec.structs.replace(task, ops=(*ops[:index], smaller, *ops[index + 1 :]))


def _smaller_op(op: Op) -> Iterator[Op]:
    plain = Op(op.do)
    for name in (
        "inside", "cancel", "cancel_after", "size", "turns", "at_least", "weight", "ending", "key",
    ):  # fmt: skip
        if getattr(op, name) != getattr(plain, name):
            yield _fitting(msgspec.structs.replace(op, **{name: getattr(plain, name)}))
    for name in ("times", "weight", "size", "turns", "cancel"):
        value = getattr(op, name)
        for smaller in _smaller_number(value, getattr(plain, name) or 0):
            yield _fitting(msgspec.structs.replace(op, **{name: smaller}))


def _fitting(op: Op) -> Op:
    """A batch whose weight shrank cannot want more than that."""
    if op.at_least is not None and op.at_least > op.weight:
        return msgspec.structs.replace(op, at_least=op.weight)
    return op


def _smaller_number(value: int | None, least: int) -> Iterator[int]:
    if value is None or value <= least:
        return
    for smaller in dict.fromkeys((least, (value + least) // 2, value - value // 8 - 1)):
        if least <= smaller < value:
            yield smaller
