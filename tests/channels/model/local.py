"""Runs programs over a channel of this process, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_async.testing import VirtualLoop, wait_all_blocked
from tests.channels.model.history import History, Journal
from tests.channels.model.party import Party, SharedEnd
from tests.channels.model.program import Program, end_names, end_of, name_of
from tests.channels.model.stage import Stage

MAX_STEPS = 200_000


class AtOnce:
    """In virtual time it is known when nothing goes on."""

    async def quiet(self, tasks: Sequence[asyncio.Future[Any]], journal: Journal) -> None:
        await wait_all_blocked()

    async def holds(self, condition: Callable[[], object]) -> bool:
        await wait_all_blocked()
        return bool(condition())

    async def ended(self, tasks: Sequence[asyncio.Future[Any]], journal: Journal) -> bool:
        await wait_all_blocked()
        return all(task.done() for task in tasks)


def run_local(program: Program) -> History:
    """Run it; ``program.seed`` chooses the order of tasks."""
    loop = VirtualLoop(program.seed, max_steps=MAX_STEPS, trace_lines=0)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_run(program))


async def _run(program: Program) -> History:
    stage = Stage(program, AtOnce(), local=True)
    channel = stage.channel
    shared: dict[Any, SharedEnd] = {}
    for end in end_names(program):
        own = channel.sender if end[0] == "send" else channel.receiver
        shared[end] = SharedEnd(own.clone(name_of(end)))
    parties = [
        Party(
            program, index, shared[end_of(task)], stage.journal, here=True,
            count_depth=stage.note_depth,
        )
        for index, task in enumerate(program.tasks)
    ]  # fmt: skip
    history = await stage.conduct([party.run() for party in parties])
    await stage.close()
    return history
