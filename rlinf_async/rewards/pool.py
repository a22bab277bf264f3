"""Several answers at a time, each in a process with a time limit.

Invariant: an answer gets exactly one outcome, whatever its verifier does to the process; a process
that was killed or has died judges nothing more, and the next answer finds another in its place.

Not `concurrent.futures`, where one death breaks the pool, nor pebble 5.2, where the death of an
idle process does and exit code 0 passes for a hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Self

from rlinf_async.config import ConfigError
from rlinf_async.messages.language import Failed, Outcome
from rlinf_async.rewards.answer import Answer
from rlinf_async.rewards.scorer import Scorer, ScorerGone, inherited

ATTEMPTS: Final = 3
"""processes that are tried where one ends before it begins with an answer"""

MIB: Final = 1024 * 1024


class ScoringPool:
    """Judges answers in up to ``processes`` processes, which start when they are first needed."""

    def __init__(
        self,
        *,
        processes: int,
        time_limit: float,
        memory_limit_mib: int = 0,
        environment: Sequence[str] = (),
    ) -> None:
        """``time_limit`` is in seconds for each answer; a memory limit of 0 is none.
        ``environment`` names variables of this process that the others get, too."""
        self._environment = inherited(environment)
        self._time_limit = time_limit
        self._memory_bytes = memory_limit_mib * MIB
        self._free = asyncio.Semaphore(processes)
        self._size = processes
        self._idle: list[Scorer] = []
        self._all: set[Scorer] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def load(self, verifiers: Sequence[str]) -> None:
        """Start every process and import these verifiers in it.

        Raises:
            ConfigError: one of them cannot be loaded; the text says which and why.
        """
        async with asyncio.TaskGroup() as group:
            loading = [group.create_task(self._load(list(verifiers))) for _ in range(self._size)]
        for one in loading:
            if one.result():
                raise ConfigError(one.result(), path=("verifier",))

    async def judge(self, verifier: str, answer: Answer) -> Outcome:
        """Judge one answer, once a process is free. Cancelling it kills the process."""
        how = ""
        for _ in range(ATTEMPTS):
            try:
                async with self._scorer() as scorer:
                    return await scorer.judge(verifier, answer, self._time_limit)
            except ScorerGone as gone:
                how = str(gone)
        return Failed(
            error=f"verifier {verifier!r}: {ATTEMPTS} processes ended before it was called, the "
            f"last: {how}; what it imports may end them"
        )

    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        return sorted(scorer.pid for scorer in self._all if scorer.alive)

    async def close(self) -> None:
        """Kill every process, also those that judge; nothing is judged afterwards."""
        self._closed = True
        for scorer in list(self._all):
            await scorer.kill()
        self._all.clear()
        self._idle.clear()

    async def _load(self, verifiers: list[str]) -> str:
        try:
            async with self._scorer() as scorer:
                return await scorer.load(verifiers)
        except ScorerGone as gone:
            return f"verifiers {verifiers}: the process that imported them ended: {gone}"
        except TimeoutError:
            return f"verifiers {verifiers}: importing them took too long"

    @asynccontextmanager
    async def _scorer(self) -> AsyncIterator[Scorer]:
        """A process for one answer; it is kept if it still runs afterwards."""
        async with self._free:
            scorer = await self._take()
            reusable = False
            try:
                yield scorer
                reusable = scorer.alive
            finally:
                if reusable and not self._closed:
                    self._idle.append(scorer)
                else:
                    await self._drop(scorer)

    async def _take(self) -> Scorer:
        while self._idle:
            scorer = self._idle.pop()
            if scorer.alive:
                return scorer
            await self._drop(scorer)
        if self._closed:
            raise RuntimeError("the pool of scoring processes was closed")
        scorer = await Scorer.start(self._memory_bytes, self._environment)
        self._all.add(scorer)
        return scorer

    async def _drop(self, scorer: Scorer) -> None:
        await scorer.kill()
        self._all.discard(scorer)
