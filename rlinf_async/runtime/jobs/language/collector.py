"""Where scored samples go: into groups for the actors, or to the evaluation that asked for them.

::

                 waits for                          unblocked by
    collecting   a scored sample                    reward workers
    sending on   room for the rank's group          the actor of that rank

A group goes on as soon as its last sample is here, but not before every group of the iterations
before its own has: an actor trains what comes, so what comes is sorted by iteration. It goes to DP
rank ``group % ranks``: which rank trains what does not depend on the order in which samples finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.language import Request, SampleGroup, ScoredSample
from rlinf_async.runtime.jobs.language.ledger import Ledger, to_train


class Collector:
    """Takes every scored sample of the run.

    Args:
        ledger: the books of the run.
        scored: where the samples come from.
        groups: where whole groups go, by key of the DP rank.
        ranks: how many there are.
        version: trained so far: the first iteration to send on.
    """

    def __init__(
        self,
        ledger: Ledger,
        scored: Receiver[ScoredSample],
        groups: Sender[SampleGroup],
        *,
        ranks: int,
        version: int,
    ) -> None:
        self._ledger = ledger
        self._scored = scored
        self._groups = groups
        self._ranks = ranks
        self._whole: dict[int, list[list[ScoredSample]]] = {}
        self._sending = version
        self._held: dict[int, list[list[ScoredSample]]] = {}
        self._complete = asyncio.Event()
        self._expected: dict[str, asyncio.Future[ScoredSample]] = {}

    async def run(self) -> None:
        """Collect until no more will come."""
        for whole in self._ledger.complete():  # of a resumed run
            await self._take(whole)
        async for scored in self._scored:
            request = scored.sample.request
            if request.evaluation:
                self._answer(request, scored)
            elif (group := self._ledger.take(scored)) is not None:
                await self._take(group)

    async def whole(self, iteration: int) -> None:
        """Wait until every group of this iteration, and of those before, is here."""
        while self._sending <= iteration:
            self._complete.clear()
            await self._complete.wait()

    def expect(self, requests: Sequence[Request]) -> list[asyncio.Future[ScoredSample]]:
        """The outcomes of requests of an evaluation, which are about to be put."""
        loop = asyncio.get_running_loop()
        expected = {one.name: loop.create_future() for one in requests}
        self._expected.update(expected)
        return list(expected.values())

    def trained(self, iteration: int) -> list[list[ScoredSample]]:
        """The groups of an iteration that was trained; they are forgotten here."""
        self._ledger.trained(iteration)
        groups = self._whole.pop(iteration)
        return sorted(groups, key=lambda group: group[0].sample.request.group)

    async def _take(self, group: list[ScoredSample]) -> None:
        iteration = group[0].sample.request.iteration
        self._whole.setdefault(iteration, []).append(group)
        self._held.setdefault(iteration, []).append(group)
        while ready := self._held.pop(self._sending, None):
            for one in ready:
                await self._send_on(one)
            if len(self._whole[self._sending]) < self._ledger.prompts:
                return
            self._sending += 1
            self._complete.set()

    async def _send_on(self, group: list[ScoredSample]) -> None:
        number = group[0].sample.request.group
        await self._groups.put(to_train(group), key=number % self._ranks)

    def _answer(self, request: Request, scored: ScoredSample) -> None:
        waiting = self._expected.pop(request.name, None)
        if waiting is not None and not waiting.done():  # else: it came a second time
            waiting.set_result(scored)
