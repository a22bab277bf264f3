"""Runs a program over any transport, and judges it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from tests.channels.model.check import check
from tests.channels.model.differential import differences
from tests.channels.model.generate import PROCESSES, WIRES
from tests.channels.model.history import History
from tests.channels.model.program import Program, operations

TRANSPORTS: Final = ("local", "steps", *WIRES)
"""``steps`` is a local channel beside the reference, compared step by step; ``direct`` are
processes over TCP whose arrays go from one to the other, ``far`` processes over TCP that count as
far from the owner; ``home`` are processes whose channel was made by another than its owner, over a
Unix socket, TCP or TLS."""
PATIENCE: Final = 15.0
"""Seconds without anything going on, after which a program over a wire counts as hung."""


class Result(msgspec.Struct):
    """What came of one program."""

    operations: int
    items: int
    violations: list[str]
    hung: bool = False


def run(program: Program, transport: str, *, patience: float = PATIENCE) -> Result:
    """Run it once and look at everything that must hold."""
    if transport == "steps":
        found = differences(program)
        return Result(sum(op.times for _, op in operations(program)), 0, found)
    logging.disable()  # of every item that is given up, a line is logged
    try:
        history = _runner(transport, patience)(program)
    finally:
        logging.disable(logging.NOTSET)
    return Result(
        len(history.events),
        sum(len(event.items) for event in history.events if event.task >= 0),
        check(history),
        bool(history.hung),
    )


def _runner(transport: str, patience: float) -> Callable[[Program], History]:
    if transport == "local":
        from tests.channels.model.local import run_local

        return run_local
    name = "processes" if transport in PROCESSES else "sockets"
    module = importlib.import_module(f"tests.channels.model.{name}")

    def over_a_wire(program: Program) -> History:
        history: History = module.run_over(program, transport, patience)
        return history

    return over_a_wire


KINDS: Final = {
    "hang": "wait for ever", "lost": "lost:", "twice": "delivered twice", "order": "put later",
    "served": "are queued", "report": "the report", "left": "at the end the channel still",
    "raised": " raised ", "counts": "are counted",
}  # fmt: skip


def kind_of(violation: str) -> str:
    """Which invariant it is that does not hold."""
    return next((kind for kind, said in KINDS.items() if said in violation), "other")


def fails_so(
    transport: str, kind: str, *, patience: float, tries: int
) -> Callable[[Program], bool]:
    """Whether a program breaks this invariant. Over a wire it may do so now and then only."""

    def fails(program: Program) -> bool:
        for _ in range(tries if transport in ("unix", "tcp", *PROCESSES) else 1):
            found = run(program, transport, patience=patience).violations
            if any(kind_of(violation) == kind for violation in found):
                return True
        return False

    return fails
