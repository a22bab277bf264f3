"""What a teacher holds of the examples of a step, asked for while the step before is learnt.

::

    examples of step n + 1 --> inference workers, each its share --> log-probs of each, in order
                               (actors learn step n meanwhile)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rlinf_async.messages.language import Example, TeacherLogProbs
from rlinf_async.runtime.calls import WorkerGroup
from rlinf_async.workers.inference import InferenceWorker

Answer = Sequence[TeacherLogProbs]


class Teaching:
    """Asks a teacher about step after step. Leaving the block drops what was asked ahead.

    Args:
        workers: workers that hold the teacher.
        examples_of: returns the examples of a step.
        steps: number of steps of the run.
    """

    def __init__(
        self,
        workers: WorkerGroup[InferenceWorker],
        examples_of: Callable[[int], list[Example]],
        steps: int,
    ) -> None:
        self._workers = workers
        self._examples_of = examples_of
        self._steps = steps
        self._asked: dict[int, asyncio.Task[Answer]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._asked.values():
            if one.done() and not one.cancelled():
                one.exception()  # seen: what ends the run is raised where it was noticed
            one.cancel()

    async def of_step(self, step: int) -> Answer:
        """Return what the teacher holds of each example of a step, in order, and ask about the next
        step."""
        self._ask(step)
        found = await self._asked.pop(step)
        if step + 1 < self._steps:
            self._ask(step + 1)
        return found

    def _ask(self, step: int) -> None:
        if step not in self._asked:
            self._asked[step] = asyncio.create_task(self._answers(self._examples_of(step)))

    async def _answers(self, examples: list[Example]) -> Answer:
        shares = await self._workers.call(InferenceWorker.ask_about, examples)
        ranks = len(shares)
        return [shares[at % ranks][at // ranks] for at in range(len(examples))]
