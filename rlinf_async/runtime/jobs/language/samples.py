"""The samples of a language run in this process: admitted, collected into groups, accounted for.

::

    Source     prompts of the next iteration --admit--> Ledger --Request--> rollout workers
    Collector  reward workers --ScoredSample--> Ledger --SampleGroup--> actors, critics

              waits for                                  unblocked by
    Source    version ``iteration - max_staleness``;     the run; rollout workers
              room for a request
    Collector a scored sample; room for a group          reward workers; the actor of that rank

Invariant, **exactly once**: every sample that was admitted is either running or finished until its
iteration is trained; a group leaves the ledger once; a sample that comes a second time (a worker
died after it had sent it) is left out and counted.

Admission bounds staleness: iteration ``i`` is admitted once version ``i - max_staleness`` is
trained, and no token of it may come from older weights than that (``Request.min_version``), so no
token is trained more than ``max_staleness`` versions late. 0 is exactly on-policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice

import msgspec
import numpy as np

from rlinf_async.channels import Receiver, Sender
from rlinf_async.data import DataError, Prompts
from rlinf_async.messages.language import (
    Prompt,
    Request,
    SampleGroup,
    Sampling,
    Scored,
    ScoredSample,
    TrainingSample,
)
from rlinf_async.runtime.jobs.language.dispatch import Dispatcher
from rlinf_async.runtime.stall import WorkEvent, WorkFuture

NextPrompts = Callable[[int], Sequence[Prompt]]
"""The next prompts of the data, as many as are asked for."""


class LedgerState(msgspec.Struct, kw_only=True):
    """All that a ledger knows: plain data, part of every checkpoint.

    A run that was killed goes on with the samples that it had finished, and requests the others
    again.
    """

    next_group: int = 0
    next_iteration: int = 0
    running: list[Request] = []
    finished: list[ScoredSample] = []


class Ledger:
    """Knows what was admitted, what of it is finished, and what is trained.

    Args:
        prompts: of one iteration.
        group_size: samples of each prompt.
        max_staleness: versions that a token may be older than the weights it trains.
        sampling: how samples are drawn.
        seed: of the run; each sample gets a seed of its own from it.
        state: of a resumed run.
    """

    def __init__(
        self,
        *,
        prompts: int,
        group_size: int,
        max_staleness: int,
        sampling: Sampling,
        seed: int,
        state: LedgerState | None = None,
    ) -> None:
        self.prompts = prompts
        self.group_size = group_size
        self.max_staleness = max_staleness
        self._sampling = sampling
        self._seed = seed
        state = state or LedgerState()
        self._next_group = state.next_group
        self.next_iteration = state.next_iteration
        """first iteration that was not admitted yet"""
        self._running: dict[tuple[int, int], Request] = {
            (one.group, one.index): one for one in state.running
        }
        self._finished: dict[int, dict[int, ScoredSample]] = {}
        for one in state.finished:
            request = one.sample.request
            self._finished.setdefault(request.group, {})[request.index] = one
        self._duplicates = 0

    @property
    def running(self) -> list[Request]:
        """Requests that were admitted and have not come back, oldest first: after a resume, to be
        put again."""
        return [self._running[name] for name in sorted(self._running)]

    def continue_from(self, partial: Request) -> None:
        """Replace this request by one with the tokens generated so far, if it is still running."""
        name = (partial.group, partial.index)
        if name in self._running:
            self._running[name] = partial

    def may_admit(self, version: int) -> bool:
        """Whether the next iteration may start now that this version is trained."""
        return self.next_iteration <= version + self.max_staleness

    def admit(self, prompts: Sequence[Prompt]) -> list[Request]:
        """The requests of the next iteration.

        Raises:
            ValueError: not the number of prompts that an iteration has.
        """
        if len(prompts) != self.prompts:
            raise ValueError(f"{len(prompts)} prompts, but an iteration has {self.prompts}")
        requests = [
            self._request(prompt, self._next_group + position, index)
            for position, prompt in enumerate(prompts)
            for index in range(self.group_size)
        ]
        self._running.update(((one.group, one.index), one) for one in requests)
        self._next_group += len(prompts)
        self.next_iteration += 1
        return requests

    def _request(self, prompt: Prompt, group: int, index: int) -> Request:
        parts = (self._seed, group, index)
        return Request(
            group=group,
            index=index,
            group_size=self.group_size,
            iteration=self.next_iteration,
            min_version=max(0, self.next_iteration - self.max_staleness),
            prompt=prompt,
            sampling=self._sampling,
            seed=int(np.random.SeedSequence(parts).generate_state(1)[0]),
            priority=self.next_iteration,  # the actors wait for the oldest iteration first
        )

    def take(self, scored: ScoredSample) -> list[ScoredSample] | None:
        """Account for a finished sample; its group, in order, once every sample of it is here."""
        request = scored.sample.request
        if self._running.pop((request.group, request.index), None) is None:
            self._duplicates += 1
            return None
        group = self._finished.setdefault(request.group, {})
        group[request.index] = scored
        return self._in_order(group) if len(group) == self.group_size else None

    def complete(self) -> Iterable[list[ScoredSample]]:
        """The groups that are complete, oldest first: after a resume, to be put again."""
        for _, group in sorted(self._finished.items()):
            if len(group) == self.group_size:
                yield self._in_order(group)

    def trained(self, iteration: int) -> None:
        """Forget the samples of this iteration."""
        done = [
            group
            for group, samples in self._finished.items()
            if next(iter(samples.values())).sample.request.iteration <= iteration
        ]
        for group in done:
            del self._finished[group]

    def take_duplicates(self) -> int:
        """Samples that came a second time, and were left out, since the last call."""
        found, self._duplicates = self._duplicates, 0
        return found

    def state(self) -> LedgerState:
        """All that the ledger knows, for a checkpoint."""
        return LedgerState(
            next_group=self._next_group,
            next_iteration=self.next_iteration,
            running=self.running,
            finished=[
                one for _, group in sorted(self._finished.items()) for one in self._in_order(group)
            ],
        )

    @staticmethod
    def _in_order(group: dict[int, ScoredSample]) -> list[ScoredSample]:
        return [group[index] for index in sorted(group)]


def to_train(group: Sequence[ScoredSample]) -> SampleGroup:
    """The message to the actor about a whole group.

    A sample that was not scored stays in, so that sizes are as configured, but no token of it
    trains and no baseline sees it: a failure never becomes a reward of 0.
    """
    first = group[0].sample.request
    return SampleGroup(
        iteration=first.iteration,
        group=first.group,
        samples=[_training_sample(one) for one in group],
    )


def _training_sample(scored: ScoredSample) -> TrainingSample:
    sample, outcome = scored.sample, scored.outcome
    request, generated = sample.request, sample.generated
    judged = isinstance(outcome, Scored)
    temperature = request.sampling.temperature
    return TrainingSample(
        group=request.group,
        index=request.index,
        prompt_ids=request.prompt.token_ids,
        response_ids=generated.token_ids,
        loss_mask=np.full(len(generated.token_ids), judged),
        log_prob=generated.log_prob,
        version=generated.version,
        temperature=temperature if temperature > 0.0 else 1.0,
        reward=outcome.reward if isinstance(outcome, Scored) else float("nan"),
        scored=judged,
        prev_log_prob=sample.prev_log_prob,
        ref_log_prob=sample.ref_log_prob,
        value=sample.value,
        kept=generated.kept,
    )


def next_prompts(prompts: Prompts, iterations: int, count: int) -> Sequence[Prompt]:
    """The next ``count`` prompts.

    Args:
        prompts: of the run.
        iterations: of the whole run, for the error.
        count: prompts of one iteration.

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
    """Admits iterations, and puts their requests in the order of their prompts.

    Args:
        ledger: of the run.
        prompts: returns the next ones.
        requests: channel to the rollout workers; whichever has room takes a request.
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
        self._trained = WorkEvent()

    def trained(self, version: int) -> None:
        """Note that this version is trained: later iterations may start."""
        self._version = version
        self._trained.set()

    async def run(self) -> None:
        """Put the requests that a resumed run had admitted, then admit the next iterations."""
        for request in self._ledger.running:
            if request.name not in self._generated:
                await self._requests.put(request)
        while self._ledger.next_iteration < self._iterations:
            if not self._ledger.may_admit(self._version):
                self._trained.clear()
                await self._trained.wait()
                continue
            for request in self._ledger.admit(self._prompts(self._ledger.prompts)):
                await self._requests.put(request)


class Collector:
    """Takes every scored sample: into its group for the actors, or to the evaluation that waits.

    A group goes on as soon as its last sample is here, but not before every group of the iterations
    before its own has: an actor trains what comes, so what comes is sorted by iteration. It goes to
    DP rank ``group % ranks``: which rank trains what does not depend on the order in which samples
    finish.

    Args:
        ledger: of the run.
        scored: channel from the reward workers.
        groups: channel to the actors or critics, by key of the DP rank.
        ranks: number of DP ranks.
        version: trained so far: the first iteration to send on.
        dispatcher: gives groups to ranks instead, where the number of ranks changes.
    """

    def __init__(
        self,
        ledger: Ledger,
        scored: Receiver[ScoredSample],
        groups: Sender[SampleGroup],
        *,
        ranks: int,
        version: int,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self._ledger = ledger
        self._scored = scored
        self._groups = groups
        self._ranks = ranks
        self._dispatcher = dispatcher
        self._whole: dict[int, list[list[ScoredSample]]] = {}
        self._sending = version
        self._held: dict[int, list[list[ScoredSample]]] = {}
        self._complete = WorkEvent()
        self._expected: dict[str, asyncio.Future[ScoredSample]] = {}

    async def run(self) -> None:
        """Collect until the reward workers have ended."""
        for whole in self._ledger.complete():  # of a resumed run
            await self._take(whole)
        async for scored in self._scored:
            request = scored.sample.request
            if request.evaluation:
                self._answer(request, scored)
            elif (group := self._ledger.take(scored)) is not None:
                await self._take(group)

    async def whole(self, iteration: int) -> None:
        """Wait until every group of this iteration, and of those before, is complete."""
        while self._sending <= iteration:
            self._complete.clear()
            await self._complete.wait()

    def expect(self, requests: Sequence[Request]) -> list[asyncio.Future[ScoredSample]]:
        """Futures of the outcomes of an evaluation's requests, which are about to be put."""
        expected = {one.name: WorkFuture() for one in requests}
        self._expected.update(expected)
        return list(expected.values())

    def trained(self, iteration: int) -> list[list[ScoredSample]]:
        """Forget the groups of an iteration that was trained, and return them."""
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
        if self._dispatcher is not None:
            self._dispatcher.add(to_train(group))
            return
        number = group[0].sample.request.group
        await self._groups.put(to_train(group), key=number % self._ranks)

    def _answer(self, request: Request, scored: ScoredSample) -> None:
        waiting = self._expected.pop(request.name, None)
        if waiting is not None and not waiting.done():  # else: it came a second time
            waiting.set_result(scored)
