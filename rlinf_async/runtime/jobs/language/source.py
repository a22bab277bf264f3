"""Where requests come from: prompts of the next iteration, as soon as it may start.

::

                waits for                               unblocked by
    admitting   version ``iteration - max_staleness``   `Source.trained`, by this process
    putting     room in the requests                    rollout workers

The requests of one iteration are put in the order of their prompts; which rollout worker takes one
is decided by who has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from itertools import islice

from rlinf_async.channels import Sender
from rlinf_async.data import DataError, Prompts
from rlinf_async.messages.language import Prompt, Request
from rlinf_async.runtime.jobs.language.ledger import Ledger

NextPrompts = Callable[[int], Sequence[Prompt]]
"""The next so many prompts of the data."""


def next_prompts(prompts: Prompts, iterations: int, count: int) -> Sequence[Prompt]:
    """The prompts of the next one of so many iterations.

    Raises:
        DataError: the data ended before.
    """
    found = list(islice(prompts, count))
    if len(found) < count:
        raise DataError(
            f"{prompts.config.name}: the data ended after {prompts.position} records (epochs = "
            f"{prompts.config.epochs}), but {iterations} iterations of {count} prompts are to be "
            "trained: set epochs to 0, or fewer iterations"
        )
    return found


class Source:
    """Admits iterations.

    Args:
        ledger: the books of the run.
        prompts: gives the next ones.
        requests: where they go.
        version: trained so far.
        iterations: of the whole run.
        generated: names of samples of a resumed run that need no rollout any more.
    """

    def __init__(
        self,
        ledger: Ledger,
        prompts: NextPrompts,
        requests: Sender[Request],
        *,
        version: int,
        iterations: int,
        generated: Container[str] = (),
    ) -> None:
        self._ledger = ledger
        self._prompts = prompts
        self._requests = requests
        self._version = version
        self._iterations = iterations
        self._generated = generated
        self._news = asyncio.Event()

    def trained(self, version: int) -> None:
        """This version is trained: later iterations may start."""
        self._version = version
        self._news.set()

    async def run(self) -> None:
        """Ask again for what a resumed run had admitted, then admit one iteration after another."""
        for request in self._ledger.running:
            if request.name not in self._generated:
                await self._requests.put(request)
        while self._ledger.next_iteration < self._iterations:
            if not self._ledger.may_admit(self._version):
                self._news.clear()
                await self._news.wait()
                continue
            for request in self._ledger.admit(self._prompts(self._ledger.prompts)):
                await self._requests.put(request)
