"""Run steps of several tasks in a written order, without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlinf_async.testing.errors import SequenceBroken


class Sequencer:
    """Steps in numeric order, whichever tasks they are in.

    ``async with sequence(2):`` waits until the block of step 1 has been left, normally or by an
    exception. Step 0 does not wait. Raises `SequenceBroken` when a step is entered twice, and in
    every step that waits, or comes later, once a step has been cancelled while it waited.
    """

    def __init__(self) -> None:
        self._left: dict[int, asyncio.Event] = {}
        self._entered: set[int] = set()
        self._abandoned: int | None = None

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[None]:
        """Wait for the turn of ``step``; the next step may go on when the block is left."""
        self._enter(step)
        await self._turn_of(step)
        try:
            yield
        finally:
            self._event(step).set()

    def _enter(self, step: int) -> None:
        if step < 0:
            raise SequenceBroken(f"step {step}: steps are numbered from 0")
        if step in self._entered:
            raise SequenceBroken(f"step {step} was entered twice: give each step its own number")
        self._entered.add(step)

    async def _turn_of(self, step: int) -> None:
        self._refuse_if_abandoned(step)
        if step == 0:
            return
        try:
            await self._event(step - 1).wait()
        except asyncio.CancelledError:
            self._abandon(step)
            raise
        self._refuse_if_abandoned(step)

    def _event(self, step: int) -> asyncio.Event:
        return self._left.setdefault(step, asyncio.Event())

    def _abandon(self, step: int) -> None:
        if self._abandoned is None:
            self._abandoned = step
        for event in self._left.values():
            event.set()

    def _refuse_if_abandoned(self, step: int) -> None:
        if self._abandoned is not None:
            raise SequenceBroken(
                f"step {step} cannot run: step {self._abandoned} was cancelled while it waited"
            )
