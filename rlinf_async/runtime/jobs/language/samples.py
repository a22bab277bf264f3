"""The samples of a language run in this process: admitted, collected, accounted for, saved.

::

    Source     prompts of the next iteration --admit--> Ledger --Request--> rollout workers
    Collector  reward workers --ScoredSample--> Ledger --SampleGroup--> actors, critics

    Gatherer   samples of a prompt that a verifier judges at once --whole--> reward workers

              waits for                                  unblocked by
    Source    version ``iteration - max_staleness``;     the run; rollout workers
              room for a request
    Gatherer  a sample; room for all of a prompt         rollout or inference, reward workers
    Collector a scored sample; room for a group          reward workers; the actor of that rank

Invariant, **exactly once**: every sample that was admitted is either running or finished until its
iteration is trained; a group leaves the ledger once; a sample that comes a second time (a worker
died after it had sent it) is left out and counted.

Admission bounds staleness: iteration ``i`` is admitted once version ``i - max_staleness`` is
trained, and no token of it may come from older weights than that (``Request.min_version``), so no
token is trained more than ``max_staleness`` versions late. 0 is exactly on-policy.

A checkpoint of a run holds beside the actors' shards what was not trained yet::

    checkpoints/
      latest.json           `LanguageProgress`: written last, in one atomic step; names the rest
      version-000010/       the actors' shards; critic/ for those of the critics
        run.msgpack         `Unfinished`: the ledger, the position in the data, samples in flight

With `Acceptance`, a group that is not to be trained is replaced: `acceptance`. Then the number of a
group is not its place any more: which rank trains it follows from the place.

Where actors change between mini-batches, the groups go through a `Dispatcher`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from rlinf_async.channels import Channel, ChannelEmpty, EndOfChannel, Receiver, Sender
from rlinf_async.channels.encoded import Encoded, copy_of
from rlinf_async.channels.remote_payload import remote_payload_of
from rlinf_async.channels.wire.codec import Decoder, encode
from rlinf_async.config import UsageError
from rlinf_async.data import DataError, Prompts
from rlinf_async.messages.language import (
    DataShare,
    Prompt,
    Request,
    Sample,
    SampleGroup,
    Sampling,
    Scored,
    ScoredSample,
    TrainingSample,
)
from rlinf_async.observe.files import RunFolderError, explaining
from rlinf_async.runtime.jobs.checkpoints import RunProgress, load_progress
from rlinf_async.runtime.jobs.language.acceptance import Acceptance
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.roles import CRITIC, LanguageChannels
from rlinf_async.runtime.wakers import WorkEvent, WorkFuture

SHUFFLED = -1
"""the group number of samples of several groups"""


class Dispatcher:
    """Gives the groups of each global batch to the ranks that train it.

    ::

        actor rank 0 --DataShare: who trains the next batch----->
        Collector, critics --whole groups, by iteration---------> Dispatcher --SampleGroup--> actors
        actors --samples of the first of several epochs--------->

        waits for                                    unblocked by
        who trains the next global batch; a group    actor rank 0; the Collector, the critics
        in further epochs: all samples of the first  the actors

    A group is given to a rank when it is known which ranks there are, so none is in the queue of a
    rank that does not train any more; its global batch is that of its turn, whatever number of
    ranks shares it. Further epochs go through the same samples, shuffled, as one actor alone would:
    the order depends on iteration and epoch.

    Args:
        groups: channel to the actors, by key of the data rank.
        shares: messages from rank 0 on who trains the next global batch.
        batch: groups of a global batch, over all ranks.
        batches: global batches of an epoch; needed where there are several epochs.
        samples: samples of an iteration; needed where there are several epochs.
        again: samples of the first epoch, which further ones give out too; needed where there are
            several.
        first: number of the first group, where groups are to go in the order of their numbers, so
            that the same samples make the same global batches; None: as they come.
    """

    def __init__(
        self,
        groups: Sender[SampleGroup],
        shares: Receiver[DataShare],
        *,
        batch: int,
        batches: int = 1,
        samples: int = 0,
        again: Receiver[SampleGroup] | None = None,
        first: int | None = None,
    ) -> None:
        self._groups, self._shares, self._again = groups, shares, again
        self._batch, self._batches, self._samples = batch, batches, samples
        self._number = first
        self._early: dict[int, SampleGroup] = {}
        """groups before which another one has to come"""
        self._ready: deque[SampleGroup] = deque()
        self._added = WorkEvent()
        self._trained: dict[int, list[TrainingSample]] = {}
        """samples of the first epoch, by iteration"""
        self._returned = WorkEvent()

    def add(self, group: SampleGroup) -> None:
        """Take a whole group; those of an iteration come before those of the next."""
        if self._number is None:
            self._ready.append(group)
        else:
            self._early[group.group] = group
            while (one := self._early.pop(self._number, None)) is not None:
                self._ready.append(one)
                self._number += 1
        self._added.set()

    async def receive(self, valued: Receiver[SampleGroup], ranks: int) -> None:
        """Take the groups of ``ranks`` critics, by key of each, until no more come."""

        async def of(rank: int) -> None:
            try:
                while True:
                    self.add(await valued.get(key=rank))
            except EndOfChannel:
                return

        async with asyncio.TaskGroup() as receiving:
            for rank in range(ranks):
                receiving.create_task(of(rank))

    async def run(self) -> None:
        """Hand out global batch after global batch, until no more shares come."""
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._keep())
            async for share in self._shares:
                epoch, batch = divmod(share.boundary.done, self._batches)
                if self._again is not None and epoch:
                    await self._hand_out_again(share, epoch, batch)
                else:
                    await self._hand_out(share)
            keeping.cancel()

    async def _hand_out(self, share: DataShare) -> None:
        """Give every rank equally many groups, and as nearly as many tokens as can be: of the
        groups that are here, the longest goes first, to the rank that has least."""
        room = [self._batch // share.ranks] * share.ranks
        tokens = [0] * share.ranks
        while any(room):
            for group in sorted(await self._next(sum(room)), key=_tokens, reverse=True):
                rank = min((one for one, left in enumerate(room) if left), key=tokens.__getitem__)
                room[rank] -= 1
                tokens[rank] += _tokens(group)
                await self._groups.put(group, key=rank)

    async def _next(self, most: int) -> list[SampleGroup]:
        """Return the groups that are here, in their order; wait for one if there are none."""
        while not self._ready:
            self._added.clear()
            await self._added.wait()
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    # -- further epochs -----------------------------------------------------------------------

    async def _keep(self) -> None:
        if self._again is None:
            return
        async for group in self._again:
            self._trained.setdefault(group.iteration, []).extend(group.samples)
            self._returned.set()

    async def _hand_out_again(self, share: DataShare, epoch: int, batch: int) -> None:
        iteration = share.boundary.iteration
        samples = await self._all_of(iteration)
        order = np.random.default_rng((iteration, epoch, 0)).permutation(len(samples))
        size = len(samples) // self._batches
        there = [samples[at] for at in order[batch * size : (batch + 1) * size]]
        for rank, part in enumerate(_parts(there, share.ranks)):
            group = SampleGroup(iteration=iteration, group=SHUFFLED, samples=part)
            await self._groups.put(group, key=rank)

    async def _all_of(self, iteration: int) -> Sequence[TrainingSample]:
        """Wait for all samples of the first epoch; they are ordered by their groups."""
        for older in [one for one in self._trained if one < iteration]:
            del self._trained[older]
        while len(self._trained.get(iteration, ())) < self._samples:
            self._returned.clear()
            await self._returned.wait()
        return sorted(self._trained[iteration], key=lambda one: (one.group, one.index))


def _tokens(group: SampleGroup) -> int:
    return sum(one.tokens for one in group.samples)


def _parts(samples: list[TrainingSample], ranks: int) -> list[list[TrainingSample]]:
    size = len(samples) // ranks
    return [samples[rank * size : (rank + 1) * size] for rank in range(ranks)]


NextPrompts = Callable[[int], Sequence[Prompt]]
"""The next prompts of the data, as many as are asked for."""

JudgedAtOnce = Callable[[Request], bool]
"""Whether the sample of a request is judged at once with the other samples of its prompt."""


def judged_at_once(of_groups: Container[str], swapped: str = "") -> JudgedAtOnce:
    """Return which samples these group verifiers judge.

    Args:
        of_groups: their names.
        swapped: name of the verifier of all samples but those of evaluation sets, whatever their
            records say; empty: that of the record.
    """

    def at_once(request: Request) -> bool:
        own = "" if request.evaluation_set else swapped
        return (own or request.prompt.verifier) in of_groups

    return at_once


class Gatherer:
    """Holds samples until all of their prompt are here, where a verifier judges them at once.

    A whole group goes on as one item, so that a reward worker has all of it or nothing; other
    samples go on as they come. What is held here is part of a checkpoint, as what waits in the
    channels is.

    Args:
        samples: channel from the rollout or inference workers.
        gathered: channel to the reward workers.
        at_once: which samples are judged at once.
        waited_for: whether a sample has not come back yet.
        leave_out: is called for one that came a second time.
    """

    def __init__(
        self,
        samples: Receiver[Sample],
        gathered: Sender[Sample],
        *,
        at_once: JudgedAtOnce,
        waited_for: Callable[[Request], bool],
        leave_out: Callable[[], None],
    ) -> None:
        self._samples, self._gathered = samples, gathered
        self._at_once, self._waited_for, self._leave_out = at_once, waited_for, leave_out
        self._held: dict[tuple[int, int], dict[int, Sample]] = {}
        """by group and iteration, and by index"""
        self._sent: dict[tuple[int, int], Request] = {}
        """groups that are being judged, with a request of each"""

    @property
    def held(self) -> list[Sample]:
        """The samples that wait for others."""
        return [one for group in self._held.values() for one in group.values()]

    async def run(self) -> None:
        """Gather until no more samples come."""
        async for sample in self._samples:
            if not self._at_once(sample.request):
                await self._gathered.put(sample)
            elif (group := self._add(sample)) is not None:
                first, *others = (group[index] for index in sorted(group))
                await self._gathered.put(msgspec.structs.replace(first, others=tuple(others)))
                self._sent_on(first.request)

    def _add(self, sample: Sample) -> dict[int, Sample] | None:
        """Hold a sample; its group once that is whole."""
        request = sample.request
        key = request.group, request.iteration
        group = self._held.setdefault(key, {})
        second = key in self._sent or request.index in group
        if second or not self._waited_for(request):
            self._leave_out()
            if not group:
                del self._held[key]
            return None
        group[request.index] = sample
        return group if len(group) == request.group_size else None

    def _sent_on(self, request: Request) -> None:
        self._sent = {key: one for key, one in self._sent.items() if self._waited_for(one)}
        key = request.group, request.iteration
        self._sent[key] = request
        del self._held[key]


class Replaced(msgspec.Struct):
    """The groups of an iteration that were refused, and replaced."""

    groups: int = 0
    scored: int = 0
    reward: float = 0.0
    """sum over their scored samples"""


class LedgerState(msgspec.Struct, kw_only=True):
    """All that a ledger knows: plain data, part of every checkpoint.

    A run that was killed goes on with the samples that it had finished, and requests the others
    again.
    """

    next_group: int = 0
    next_iteration: int = 0
    running: list[Request] = []
    finished: list[ScoredSample] = []
    places: dict[int, int] = {}
    """place of each group that has not the number of its place: see `Ledger.replace`"""
    replaced: dict[int, Replaced] = {}
    """by iteration"""
    refused: list[ScoredSample] = []
    """samples of the groups that were replaced, of iterations that are not trained yet"""


class Ledger:
    """Knows what was admitted, what of it is finished, and what is trained.

    Args:
        prompts: prompts of one iteration.
        group_size: samples of each prompt.
        max_staleness: versions that a token may be older than the weights it trains.
        sampling: how samples are drawn.
        seed: seed of the run; each sample gets a seed of its own from it.
        state: ledger of a resumed run.
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
        self._places = dict(state.places)
        self._replaced = {
            number: msgspec.structs.replace(one) for number, one in state.replaced.items()
        }
        self._refused = list(state.refused)

    @property
    def running(self) -> list[Request]:
        """Requests that were admitted and have not come back, oldest first: after a resume, to be
        put again."""
        return [self._running[name] for name in sorted(self._running)]

    def waits_for(self, request: Request) -> bool:
        """Whether this sample was admitted and has not come back."""
        return (request.group, request.index) in self._running

    def leave_out(self) -> None:
        """Count a sample that came a second time."""
        self._duplicates += 1

    def take_back(self, anew: Callable[[ScoredSample], bool]) -> list[Sample]:
        """Return the finished samples of groups that are not whole and have one that is to be
        judged anew: they are running again, so that all of a group are judged alike. Of a resumed
        run whose way of judging was changed."""
        found: list[Sample] = []
        for group, samples in list(self._finished.items()):
            if len(samples) < self.group_size and any(anew(one) for one in samples.values()):
                del self._finished[group]
                found += [one.sample for one in self._in_order(samples)]
        self._running.update(((one.request.group, one.request.index), one.request) for one in found)
        return found

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
        first = self.next_iteration * self.prompts
        requests = [
            request
            for position, prompt in enumerate(prompts)
            for request in self._admit(prompt, self.next_iteration, first + position)
        ]
        self.next_iteration += 1
        return requests

    def replace(self, refused: Sequence[ScoredSample], prompt: Prompt) -> list[Request]:
        """Train a whole group no more; the requests of another prompt in its place: in the same
        iteration, and trained by the rank that would have trained it."""
        request = refused[0].sample.request
        found = self._replaced.setdefault(request.iteration, Replaced())
        rewards = [one.outcome.reward for one in refused if isinstance(one.outcome, Scored)]
        found.groups += 1
        found.scored += len(rewards)
        found.reward += sum(rewards)
        self._refused += refused
        del self._finished[request.group]
        place = self._places.pop(request.group, request.group)
        return self._admit(prompt, request.iteration, place)

    def place(self, group: int) -> int:
        """The place of a group: iterations before its own, times their prompts, and its own number
        there."""
        return self._places.get(group, group)

    def replaced(self, iteration: int) -> Replaced:
        """The groups of an iteration that were replaced so far."""
        return self._replaced.get(iteration, Replaced())

    def refused(self, iteration: int) -> list[ScoredSample]:
        """The samples of the groups of an iteration that were replaced so far, group by group."""
        return [one for one in self._refused if one.sample.request.iteration == iteration]

    def _admit(self, prompt: Prompt, iteration: int, place: int) -> list[Request]:
        group = self._next_group
        self._next_group += 1
        if place != group:
            self._places[group] = place
        requests = [self._request(prompt, group, iteration, at) for at in range(self.group_size)]
        self._running.update(((one.group, one.index), one) for one in requests)
        return requests

    def _request(self, prompt: Prompt, group: int, iteration: int, index: int) -> Request:
        parts = (self._seed, group, index)
        return Request(
            group=group,
            index=index,
            group_size=self.group_size,
            iteration=iteration,
            min_version=max(0, iteration - self.max_staleness),
            prompt=prompt,
            sampling=self._sampling,
            seed=int(np.random.SeedSequence(parts).generate_state(1)[0]),
            priority=iteration,  # the actors wait for the oldest iteration first
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
            self._places.pop(group, None)
        for older in [one for one in self._replaced if one <= iteration]:
            del self._replaced[older]
        self._refused = [one for one in self._refused if one.sample.request.iteration > iteration]

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
            places=dict(self._places),
            replaced={
                number: msgspec.structs.replace(one) for number, one in self._replaced.items()
            },
            refused=list(self._refused),
        )

    @staticmethod
    def _in_order(group: dict[int, ScoredSample]) -> list[ScoredSample]:
        return [group[index] for index in sorted(group)]


def to_train(group: Sequence[ScoredSample], place: int | None = None) -> SampleGroup:
    """The message to the actor about a whole group; ``place`` in the order of the groups, where it
    is not the group's number.

    A sample that was not scored stays in, so that sizes are as configured, but no token of it
    trains and no baseline sees it: a failure never becomes a reward of 0.
    """
    first = group[0].sample.request
    return SampleGroup(
        iteration=first.iteration,
        group=first.group if place is None else place,
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
        loss_mask=generated.drawn_mask & judged,
        log_prob=generated.log_prob,
        version=generated.version,
        temperature=temperature if temperature > 0.0 else 1.0,
        reward=outcome.reward if isinstance(outcome, Scored) else float("nan"),
        scored=judged,
        prev_log_prob=sample.prev_log_prob,
        ref_log_prob=sample.ref_log_prob,
        teacher=sample.teacher,
        value=sample.value,
        kept=generated.kept,
        logit_bias=request.sampling.logit_bias,
        routes=generated.routes,
        branches=sample.branches,
        turns=sample.turns,
        drawn=generated.drawn,
        images=request.prompt.images,
    )


def next_prompts(prompts: Prompts, wanted: str, count: int) -> Sequence[Prompt]:
    """Return the next ``count`` prompts.

    Args:
        prompts: prompts of the run.
        wanted: what the whole run is to be trained on, for the error.
        count: number of prompts.

    Raises:
        DataError: the data ended before.
    """
    found = list(islice(prompts, count))
    if len(found) < count:
        raise DataError(
            f"{prompts.config.name}: the data ended after {prompts.position} records (epochs = "
            f"{prompts.config.epochs}), but {wanted} are to be trained: set epochs to 0, or fewer "
            "iterations"
        )
    return found


class Source:
    """Admits iterations, and puts their requests in the order of their prompts.

    Args:
        ledger: the run's ledger.
        prompts: returns the next ones.
        requests: channel to the rollout workers, or to the episode workers; whichever has room
            takes a request.
        version: trained so far.
        iterations: iterations of the whole run.
        generated: names of samples of a resumed run that need no rollout any more.
        replaces: whether groups may be replaced until all iterations are trained.
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
        replaces: bool = False,
    ) -> None:
        self._replaces = replaces
        self._again: deque[Request] = deque()
        """requests of prompts that replace others"""
        self._ledger = ledger
        self._prompts = prompts
        self._requests = requests
        self._version = version
        self._iterations = iterations
        self._generated = generated
        self._news = WorkEvent()
        self.held_seconds = 0.0
        """seconds in which the staleness limit held back the next iteration"""

    def trained(self, version: int) -> None:
        """Note that this version is trained: later iterations may start."""
        self._version = version
        self._news.set()

    def replace(self, refused: Sequence[ScoredSample]) -> None:
        """Admit the next prompt in the place of a whole group."""
        [prompt] = self._prompts(1)
        self._again += self._ledger.replace(refused, prompt)
        self._news.set()

    async def run(self) -> None:
        """Put the requests that a resumed run had admitted, then admit the next iterations, and
        prompts that replace others."""
        self._again.clear()  # they are running
        for request in self._ledger.running:
            if request.name not in self._generated:
                await self._requests.put(request)
        clock = asyncio.get_running_loop().time
        while self._left():
            while self._again:  # the actors wait for these: before later iterations
                await self._requests.put(self._again.popleft())
            held_back = self._ledger.next_iteration < self._iterations
            if held_back and self._ledger.may_admit(self._version):
                for request in self._ledger.admit(self._prompts(self._ledger.prompts)):
                    await self._requests.put(request)
            elif not self._again:
                self._news.clear()
                since = clock()
                await self._news.wait()
                self.held_seconds += clock() - since if held_back else 0.0

    def _left(self) -> bool:
        """Whether anything may still be admitted."""
        done = self._version if self._replaces else self._ledger.next_iteration
        return done < self._iterations


class Collector:
    """Takes every scored sample: into its group for the actors, or to the evaluation that waits.

    A group goes on as soon as its last sample is here, but not before every group of the iterations
    before its own has: an actor trains what comes, so what comes is sorted by iteration. It goes to
    DP rank ``group % ranks``: which rank trains what does not depend on the order in which samples
    finish.

    Args:
        ledger: the run's ledger.
        scored: channel from the reward workers.
        groups: channel to the actors or critics, by key of the DP rank.
        ranks: number of DP ranks.
        version: trained so far: the first iteration to send on.
        dispatcher: gives groups to ranks instead, where the number of ranks changes.
        finished: is told of every sample that is generated for training.
        accept: whether a whole group is to be trained; None: every one is.
        replace: admits another prompt in the place of a group that is not.
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
        finished: Callable[[Sample], None] | None = None,
        accept: Acceptance | None = None,
        replace: Callable[[Sequence[ScoredSample]], None] | None = None,
    ) -> None:
        self._accept, self._replace = accept, replace
        self._ledger = ledger
        self._scored = scored
        self._finished = finished
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
        async for item in self._scored:
            for scored in item.apart():  # no other task runs before all of them are in the ledger
                request = scored.sample.request
                if request.evaluation:
                    self._answer(request, scored)
                    continue
                if self._finished is not None:
                    self._finished(scored.sample)
                if (group := self._ledger.take(scored)) is not None:
                    await self._take(group)

    async def whole(self, iteration: int) -> None:
        """Wait until every group of ``iteration``, and of those before, is complete."""
        while self._sending <= iteration:
            self._complete.clear()
            await self._complete.wait()

    def waits_for(self, request: Request) -> bool:
        """Whether a sample, or an answer of an evaluation, has not come back yet."""
        return request.name in self._expected or self._ledger.waits_for(request)

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

    def _accepts(self, group: list[ScoredSample], iteration: int) -> bool:
        """Whether a group is trained; one that is not is replaced."""
        if self._accept is None or self._replace is None or self._accept(group):
            return True
        if self._ledger.replaced(iteration).groups >= self._accept.most:
            self._accept.warn(iteration)
            return True
        self._replace(group)
        return False

    async def _take(self, group: list[ScoredSample]) -> None:
        iteration = group[0].sample.request.iteration
        if not self._accepts(group, iteration):
            return
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
        place = self._ledger.place(group[0].sample.request.group)
        if self._dispatcher is not None:
            self._dispatcher.add(to_train(group, place))
            return
        await self._groups.put(to_train(group, place), key=place % self._ranks)

    def _answer(self, request: Request, scored: ScoredSample) -> None:
        waiting = self._expected.pop(request.name, None)
        if waiting is not None and not waiting.done():  # else: it came a second time
            waiting.set_result(scored)


T = TypeVar("T")

RUN = "run.msgpack"


class LanguageProgress(RunProgress, kw_only=True):
    """Progress of a language run."""

    samples: int = 0
    """samples that were trained on, those that were not scored included"""
    tokens: int = 0
    """tokens of their prompts and responses"""
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    """samples by outcome: scored, rejected, failed"""
    refused: int = 0
    """groups that were replaced by others, of the iterations that are trained"""
    eval_accuracy_before: float | None = None
    eval_reward_before: float | None = None


class InFlight(msgspec.Struct, kw_only=True):
    """Samples between admission and collection, each in one place only.

    With them a resumed run begins no sample anew::

        rollout workers: requests with the tokens generated so far --+
        turns: answers of episodes that are not finished --------+
        generated, inferred: samples that wait for their score ------+--> InFlight
        scored: samples that wait for the collector -----------------+

    A sample that is in none of these places at that moment is in the ledger all the same, as a
    request that was admitted: it is requested again. So `InFlight` need not be complete, and it
    cannot be wrong: whatever the ledger does not know to be running is left out.
    """

    partial: list[Request] = msgspec.field(default_factory=list)
    """requests with tokens to continue after"""
    generated: list[Sample] = msgspec.field(default_factory=list)
    inferred: list[Sample] = msgspec.field(default_factory=list)
    """samples with log-probs of the actor's forward, and those that are judged at once"""
    scored: list[ScoredSample] = msgspec.field(default_factory=list)
    turns: list[Sample] = msgspec.field(default_factory=list)
    """answers of episodes that are not finished, which they take up again"""

    @property
    def names(self) -> set[str]:
        """Names of the samples that need no rollout any more."""
        return {one.request.name for one in (*self.generated, *self.inferred)}

    def enter(self, ledger: Ledger) -> None:
        """Enter into the ledger of a resumed run what need not begin anew."""
        for request in self.partial:
            ledger.continue_from(request)
        begun = {one.request.sample_name for one in self.turns}
        for request in ledger.running:
            if request.name in begun:
                ledger.continue_from(msgspec.structs.replace(request, replay=True))
        for scored in self.scored:
            ledger.take(scored)

    async def put_back(self, channels: LanguageChannels) -> None:
        """Put the samples of a resumed run where they were. Its workers have begun to take them."""
        for channel, samples in (
            (channels.generated, self.generated),
            (channels.inferred, self.inferred),
        ):
            if samples:
                with channel.sender.clone() as sender:
                    for sample in samples:
                        await sender.put(sample)
        if self.turns:
            with channels.turns.sender.clone() as sender:
                for sample in self.turns:
                    await sender.put(sample, key=sample.request.name)


def in_flight(
    channels: LanguageChannels,
    partial: Iterable[Request],
    running: Iterable[Request],
    held: Iterable[Sample] = (),
) -> InFlight:
    """Everything that is in flight, in the farthest place that each sample has come to.

    Args:
        channels: the run's channels, as they are now.
        partial: requests that the rollout workers hold.
        running: requests that the ledger waits for; nothing else is taken up.
        held: samples that wait for others of their prompt, beside those in channels.
    """
    left = {one.name for one in running}

    def new(name: str) -> bool:
        known = name in left
        left.discard(name)
        return known

    every = [one for item in _items(channels.scored) for one in item.apart()]
    scored = [one for one in every if new(one.sample.request.name)]
    late: list[Sample] = []
    if channels.gathered is not channels.inferred:
        late += [one for item in _items(channels.gathered) for one in item.apart()]
    late += held
    if channels.inferred is not channels.generated:
        late += _items(channels.inferred)
    inferred = [one for one in late if new(one.request.name)]
    return InFlight(
        scored=scored,
        inferred=inferred,
        generated=[one for one in _items(channels.generated) if new(one.request.name)],
        partial=[one for one in partial if one.partial is not None and new(one.name)],
        turns=_turns(channels, left),
    )


def drop_turns(channels: LanguageChannels, running: Iterable[Request]) -> int:
    """Drop the answers that wait for an episode that is over: what an earlier life of it, or a
    task that it left behind, had asked for.

    Args:
        channels: of the run.
        running: the samples that are not finished.

    Returns how many were dropped.
    """
    if channels.turns is channels.generated:
        return 0
    names = {one.name for one in running}
    answered = {key: str(key).partition(".")[0] for key in channels.turns.queue.keys}
    unknown = [key for key, name in answered.items() if name not in names]
    # A finished episode may be run once more, where its worker died before it had said so: it
    # waits for the answers that it asks for now.
    again = {one.name for one in _items(channels.tasks)} if unknown else set()
    receiver, dropped = channels.turns.receiver, 0
    for key in unknown:
        if answered[key] in again:
            continue
        with suppress(ChannelEmpty):  # it is leased, or on its way
            while True:
                receiver.get_nowait(key=key)
                dropped += 1
    return dropped


def _turns(channels: LanguageChannels, running: Container[str]) -> list[Sample]:
    """The answers that episodes of these names have, or that wait for them, in their order."""
    if channels.turns is channels.generated:
        return []
    found = [one for one in _items(channels.turns) if one.request.sample_name in running]
    return sorted(found, key=lambda one: (one.request.group, one.request.index, one.request.turn))


def _items(channel: Channel[T]) -> list[T]:
    """The items that wait in a channel or are leased from it, without those whose arrays are still
    with their producer. Nothing is taken."""
    queue = channel.queue
    found: list[Any] = [
        queue.value(copy_of(item)) for item in queue.contents() if remote_payload_of(item) is None
    ]
    return found


def gathering(
    channels: LanguageChannels, collector: Collector, ledger: Ledger, at_once: JudgedAtOnce
) -> Gatherer | None:
    """Return who gathers the samples of a prompt; None where no verifier judges them at once."""
    if channels.gathered is channels.inferred:
        return None
    return Gatherer(
        channels.inferred.receiver,
        channels.gathered.sender,
        at_once=at_once,
        waited_for=collector.waits_for,
        leave_out=ledger.leave_out,
    )


class Unfinished(msgspec.Struct, kw_only=True):
    """Samples and data that were not trained yet when the checkpoint was written."""

    ledger: LedgerState
    data: bytes
    """position in the prompts: the data's own state, as JSON"""
    waiting: InFlight = msgspec.field(default_factory=InFlight)

    def files(self) -> dict[str, bytes]:
        """The file that it is in the checkpoint, by name."""
        encoded = encode(self)
        stored = _Stored(encoded.data, [bytes(buffer) for buffer in encoded.buffers])
        return {RUN: msgspec.msgpack.encode(stored)}


class _Stored(msgspec.Struct, frozen=True):
    data: bytes
    buffers: list[bytes]


_unfinished = Decoder(Unfinished)


def load_language_progress(checkpoints: Path) -> LanguageProgress | None:
    """Return where to go on; None where there is no checkpoint. Raises as `load_progress`."""
    return load_progress(checkpoints, LanguageProgress, file=RUN)


def load_unfinished(checkpoints: Path, progress: LanguageProgress) -> Unfinished:
    """Return what was not trained yet at the checkpoint that ``progress`` names.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = checkpoints / progress.checkpoint / RUN
    with explaining("read", path):
        content = path.read_bytes()
    try:
        stored = msgspec.msgpack.decode(content, type=_Stored)
        decoded: Unfinished = _unfinished.decode_copy(
            Encoded(stored.data, [memoryview(buffer) for buffer in stored.buffers])
        )
    except Exception as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    return _without_unknown_tokens(decoded)


def _without_unknown_tokens(unfinished: Unfinished) -> Unfinished:
    """Return a state without the tokens of which nobody knows what they were drawn from: those of a
    run of an older version that truncates. They are generated again."""

    def told(sample: Sample) -> bool:
        return sample.generated.tells_of(sample.request.sampling)

    def begun(request: Request) -> Request:
        known = request.partial is None or request.partial.tells_of(request.sampling)
        return request if known else msgspec.structs.replace(request, partial=None)

    ledger, waiting = unfinished.ledger, unfinished.waiting
    again = [one.sample.request for one in ledger.finished if not told(one.sample)]
    return Unfinished(
        ledger=msgspec.structs.replace(
            ledger,
            running=[begun(one) for one in (*ledger.running, *again)],
            finished=[one for one in ledger.finished if told(one.sample)],
        ),
        data=unfinished.data,
        waiting=InFlight(
            partial=[begun(one) for one in waiting.partial],
            generated=[one for one in waiting.generated if told(one)],
            inferred=[one for one in waiting.inferred if told(one)],
            scored=[one for one in waiting.scored if told(one.sample)],
            turns=[one for one in waiting.turns if told(one)],
        ),
    )


def with_messages(unfinished: Unfinished, prompt_at: Callable[[int], Prompt]) -> Unfinished:
    """Return a state whose prompts have their messages, which a reward model reads: those that were
    admitted before there was one have none.

    ``prompt_at``: makes the prompt of an index in the data. Raises what it raises.
    """
    replace = msgspec.structs.replace
    known: dict[int, Prompt] = {}

    def told(request: Request) -> Request:
        prompt = request.prompt
        if prompt.messages:
            return request
        if prompt.index not in known:
            known[prompt.index] = prompt_at(prompt.index)
        messages = known[prompt.index].messages
        return replace(request, prompt=replace(prompt, messages=messages))

    def sample(one: Sample) -> Sample:
        return replace(one, request=told(one.request))

    def scored(one: ScoredSample) -> ScoredSample:
        return replace(one, sample=sample(one.sample))

    ledger, waiting = unfinished.ledger, unfinished.waiting
    return Unfinished(
        ledger=replace(
            ledger,
            running=[told(one) for one in ledger.running],
            finished=[scored(one) for one in ledger.finished],
        ),
        data=unfinished.data,
        waiting=replace(
            waiting,
            partial=[told(one) for one in waiting.partial],
            generated=[sample(one) for one in waiting.generated],
            inferred=[sample(one) for one in waiting.inferred],
            scored=[scored(one) for one in waiting.scored],
        ),
    )


def check_resumed_critic(config: LanguageConfig, checkpoint: Path) -> None:
    """Raise `UsageError` where a run with critics would go on from a checkpoint without one."""
    if config.has_critic and not (checkpoint / CRITIC).is_dir():
        raise UsageError(
            f"{checkpoint} was written by a run without a critic (it has no {CRITIC}/), and "
            f"{config.actor.advantage.name!r} needs its values: restore that folder, or start in "
            "another one"
        )
