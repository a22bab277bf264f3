"""The turns of one episode: each a request to the rollout workers, and its sample.

::

    draw ---Request, turn n---> rollout workers
      ^                               |
      +-----Sample, key g/i.n---------+     leased until the episode is sent on

The leases are the record of the episode: where its worker dies they go back under their keys, and
the next one, which runs the coroutine again, finds there what was drawn already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec
import numpy as np

from rlinf_async.channels import Receiver, Sender
from rlinf_async.messages.language import EngineUse, Generated, Request, Sample, Tokens
from rlinf_async.workers.episode.clock import AgentClock


class EpisodeReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `EpisodeWorker.run`."""

    episodes: int = 0
    """episodes that were sent on"""
    turns: int = 0
    """answers that were asked for"""
    replayed: int = 0
    """answers of an earlier life of an episode that were taken up again"""
    dropped: int = 0
    """answers of an earlier life to another context than the agent then gave: it is not
    deterministic"""
    failed: int = 0
    """episodes that failed, for whatever reason"""
    last_failure: str = ""


GAP: Final = 64
"""most numbers of turns in a row without an answer, after which no further one is looked for: where
several branches ask at once, a later answer may be there before an earlier one"""


class TurnEnds(NamedTuple):
    """The channel ends by which turns are made."""

    requests: Sender[Request]
    answers: Receiver[Sample]
    """by key of the turn's name"""
    sticky: bool = False
    """whether a turn goes under the key of the rollout worker that drew the one before"""


class Turns:
    """Draws the answers of one episode: the `Model` of its `Episode`.

    Args:
        task: task of the episode.
        ends: where turns go, and come back from.
        held: holds the leases of all answers; whoever closes it has sent the episode on.
        clock: stands still while an answer is drawn.
        report: counts.
    """

    def __init__(
        self,
        task: Request,
        ends: TurnEnds,
        held: AsyncExitStack,
        clock: AgentClock,
        report: EpisodeReport,
    ) -> None:
        self._task = task
        self._ends = ends
        self._held = held
        self._clock = clock
        self._report = report
        self._number = 0
        """number of the newest turn"""
        self.recorded: list[Sample] = []
        """answers of an earlier life that were not asked for yet"""
        self._recalled = 0
        """number of those that there were"""
        self._drawing: set[asyncio.Task[Sample]] = set()
        self._given_up: dict[tuple[bytes, int, int | None, bytes], asyncio.Task[Sample]] = {}
        """those of them that nobody waits for, by what was asked: the engine draws them to their
        end, and whoever asks the same again gets them"""
        self.saved: Callable[[], bytes] = bytes
        """gives what can be restored of the episode, which each request carries"""
        self.rollout_rank = -1
        """rank of the rollout worker that drew the newest answer"""
        self.engines = EngineUse()
        """what engines did for this life of the episode"""
        self.broken: BaseException | None = None
        """error of a channel, which is not the agent's even where that has caught it"""

    async def recall(self, most: int) -> None:
        """Take the answers that an earlier life of this episode has had; ``most``: turns that a
        life has at most."""
        number = 0
        while number < self._number + min(most, GAP):
            number += 1
            name = msgspec.structs.replace(self._task, turn=number).name
            if (await self._ends.answers.state(key=name)).depth:
                self.recorded.append(sample := await self._leased(name))
                self._number, self.rollout_rank = number, sample.rollout_rank
        self._recalled = len(self.recorded)

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Draw up to ``most`` tokens after ``context`` ``[P]``; ``seed``: see `Model.draw`."""
        # By what was read, not by the number of the turn: where two branches wait for their tools,
        # which of them goes on first may be another one this time.
        for at, sample in enumerate(self.recorded):
            if _answers(sample, context, most):
                return self._told(self.recorded.pop(at))
        state = self.saved()  # part of the question: it is what its answer restores
        question = context.tobytes(), most, seed, state
        drawing = self._given_up.pop(question, None) or self._begun(context, most, seed, state)
        with self._clock.stopped():
            try:
                sample = await asyncio.shield(drawing)
            except asyncio.CancelledError:
                self._given_up[question] = drawing
                raise
            except Exception as error:
                self.broken = error
                raise
        self._drawing.discard(drawing)
        return self._told(sample)

    def _begun(
        self, context: Tokens, most: int, seed: int | None, state: bytes
    ) -> asyncio.Task[Sample]:
        self._number += 1
        request = self._request(self._number, context, most, seed, state)
        # A task of its own, so that whatever is left running can be ended with the episode.
        drawing = asyncio.create_task(self._answer(request), name=f"turn {request.name}")
        self._drawing.add(drawing)
        return drawing

    async def close(self) -> None:
        """End what is still being drawn: nobody waits for it any more."""
        self._report.replayed += self._recalled - len(self.recorded)
        self._report.dropped += len(self.recorded)
        self.recorded.clear()
        drawing = list(self._drawing)
        for one in drawing:
            one.cancel()
        if drawing:
            await asyncio.wait(drawing)
        for one in drawing:
            if not one.cancelled():
                one.exception()  # nobody waits for it any more

    def _told(self, sample: Sample) -> Generated:
        self.engines.add(sample, self.rollout_rank)
        self.rollout_rank = sample.rollout_rank
        return sample.generated

    def _request(
        self, number: int, context: Tokens, most: int, seed: int | None, state: bytes
    ) -> Request:
        task = self._task
        seeds = (task.seed, number) if seed is None else (task.seed, number, 1 + seed % 2**64)
        replace = msgspec.structs.replace
        return replace(
            task,
            turn=number,
            replay=False,
            state=state,
            prompt=replace(task.prompt, token_ids=context, text="", messages=()),
            sampling=replace(task.sampling, max_tokens=most),
            seed=int(np.random.SeedSequence(seeds).generate_state(1)[0]),
        )

    async def _answer(self, request: Request) -> Sample:
        near = self._ends.sticky and self.rollout_rank >= 0  # it has the beginning of the context
        await self._ends.requests.put(request, key=self.rollout_rank if near else None)
        self._report.turns += 1
        context, most = request.prompt.token_ids, request.sampling.max_tokens
        while not _answers(found := await self._leased(request.name), context, most):
            self._report.dropped += 1  # of an earlier life, whose agent asked something else
        return found

    async def _leased(self, name: str) -> Sample:
        lease = await self._held.enter_async_context(self._ends.answers.lease(key=name))
        return lease[0]


def _answers(sample: Sample, context: Tokens, most: int) -> bool:
    """Whether a sample could be the answer to a turn: it has read the same, and would not have been
    longer."""
    made, asked = sample.generated, sample.request
    cut_elsewhere = made.finish == "length" and asked.sampling.max_tokens != most
    fits = len(made.token_ids) <= most and not cut_elsewhere
    return fits and np.array_equal(asked.prompt.token_ids, context)
