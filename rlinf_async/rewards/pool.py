"""Many answers at a time, each judged in a process with a time limit.

Invariant: an answer gets exactly one outcome, whatever its verifier does to the process; a process
that was killed or has died judges nothing more, and the next answer finds another in its place.

::

    call  --(first in line)-->  a process with others that wait as it does, the fullest first
                                else an idle one, else a new one, else: wait until one has room
          <--- outcome ---
          <--- `ScorerGone` ---  again, in smaller company: with the square root of ``calls``; alone

Where a process ends with many open calls, nobody knows whose fault it was: all of them are judged
again in smaller company, so that at last only the guilty one fails. How one process judges, and how
a call ends there: `rewards.scorer`.

Not `concurrent.futures`, where one death breaks the pool, nor pebble 5.2, where the death of an
idle process does and exit code 0 passes for a hang.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Final, Self

from rlinf_async.config import ConfigError
from rlinf_async.config.registry import FOLDER, names_for_workers
from rlinf_async.messages.language import Failed, Outcome
from rlinf_async.rewards.judging import Answer, Attempt
from rlinf_async.rewards.scorer import OpenCall, Scorer, ScorerGone

MINIMAL: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
        *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        FOLDER,  # where verifiers of a user's own are found
    }
)
MINIMAL_PREFIXES: Final = ("LC_", "PYTHON")
"""environment variables that every scoring process gets"""


def inherited(names: Iterable[str]) -> dict[str, str]:
    """The environment of a scoring process: a minimal set, and the variables of these names.

    The cluster's secret may be in a variable of this process, as may keys of the user's.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in MINIMAL or name.startswith(MINIMAL_PREFIXES) or name in set(names)
    }
    return {"OMP_NUM_THREADS": "1", **kept, **names_for_workers()}


ATTEMPTS: Final = 3
"""processes that are tried for one answer, where they end"""

CALLS: Final = 256
"""calls of asynchronous verifiers that are open in one process at a time, unless told otherwise"""
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
        calls: int = CALLS,
    ) -> None:
        """``time_limit`` is in seconds for each answer; a memory limit of 0 is none.
        ``environment`` names variables of this process that the others get, too. ``calls``: most
        calls of asynchronous verifiers that are open in a process at a time."""
        self._environment = inherited(environment)
        self._time_limit = time_limit
        self._memory_bytes = memory_limit_mib * MIB
        self._size = processes
        self._companies = (calls, math.isqrt(calls), *[1] * (ATTEMPTS - 2))
        self._turn = asyncio.Lock()
        """held by the first call in line"""
        self._change = asyncio.Event()
        self._all: set[Scorer] = set()
        self.asynchronous = set[str]()
        """verifiers of which many calls may be open in a process: known once they are loaded"""
        self.of_groups = set[str]()
        """verifiers that judge all answers to a prompt at once: known once they were preloaded"""
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
        names, taken = list(verifiers), set[Scorer]()
        async with asyncio.TaskGroup() as group:
            loading = [group.create_task(self._load(names, taken)) for _ in range(self._size)]
        for one in loading:
            if one.result():
                raise ConfigError(one.result(), path=("verifier",))

    async def judge(self, verifier: str, answer: Answer) -> Outcome:
        """Judge one answer, once a process has room for it. Cancelling it ends the call; that of a
        verifier that is not asynchronous, with its process."""
        return (await self.attempt(verifier, [answer])).outcome

    async def judge_group(self, verifier: str, answers: Sequence[Answer]) -> list[Outcome]:
        """Judge all answers to a prompt in one call of a group verifier, as `judge` does one."""
        return (await self.attempt(verifier, answers)).of_each(len(answers))

    async def attempt(self, verifier: str, answers: Sequence[Answer]) -> Attempt:
        """Judge one answer, or all answers to a prompt at once, and say whether another call may do
        better."""
        how = ""
        for company in self._companies:
            try:
                async with self._scorer(verifier, company) as (scorer, call):
                    return await scorer.judge(call, answers, self._time_limit)
            except ScorerGone as gone:
                how = str(gone)
        return Attempt(
            Failed(
                error=f"verifier {verifier!r}: {ATTEMPTS} processes ended before it had judged, "
                f"the last: {how}; it, or what it imports, may end them"
            )
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
        self._changed()

    async def _load(self, verifiers: list[str], taken: set[Scorer]) -> str:
        """Import them in a process that is not among those that were ``taken`` for this."""
        try:
            async with self._scorer("", 1, taken) as (scorer, call):
                taken.add(scorer)
                return await scorer.load(call, verifiers)
        except ScorerGone as gone:
            return f"verifiers {verifiers}: the process that imported them ended: {gone}"
        except TimeoutError:
            return f"verifiers {verifiers}: importing them took too long"

    @asynccontextmanager
    async def _scorer(
        self, verifier: str, company: int, but: AbstractSet[Scorer] = frozenset()
    ) -> AsyncIterator[tuple[Scorer, OpenCall]]:
        """A process with a call that was opened in it; it is kept if it still runs afterwards."""
        scorer, call = await self._take(verifier, company, but)
        try:
            yield scorer, call
        finally:
            self.asynchronous |= scorer.asynchronous
            self.of_groups |= scorer.of_groups
            if self._closed or not scorer.alive:
                await self._drop(scorer)

    async def _take(
        self, verifier: str, company: int, but: AbstractSet[Scorer]
    ) -> tuple[Scorer, OpenCall]:
        """Wait for a process with room, none of ``but``, first come, first served: nobody is
        overtaken for ever."""
        async with self._turn:
            while True:
                if self._closed:
                    raise RuntimeError("the pool of scoring processes was closed")
                for dead in [one for one in self._all if not one.alive]:
                    await self._drop(dead)
                room = [one for one in self._all - but if one.takes(verifier, company)]
                if room:
                    scorer = max(room, key=lambda one: one.calls)
                    return scorer, scorer.open(verifier, company)
                if len(self._all) < self._size:
                    self._all.add(
                        await Scorer.start(self._memory_bytes, self._environment, self._changed)
                    )
                else:
                    await self._change.wait()

    async def _drop(self, scorer: Scorer) -> None:
        await scorer.kill()
        self._all.discard(scorer)
        self._changed()

    def _changed(self) -> None:
        """Let the first call in line look again."""
        self._change.set()
        self._change.clear()
