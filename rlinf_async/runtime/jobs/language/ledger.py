"""The ledger of a language run: what was admitted, what of it is finished, what is trained.

::

    admit     prompts of the next iteration  -> its requests
    take      a scored sample                -> its group, once every sample of it is here
    trained   an iteration                   -> forgotten

Invariant, **exactly once**: every sample that was admitted is either running or finished until its
iteration is trained; a group leaves the ledger once; a sample that comes a second time (a worker
died after it had sent it) is left out and counted.

Admission bounds staleness: iteration ``i`` is admitted once version ``i - max_staleness`` is
trained, and no token of it may come from older weights than that (``Request.min_version``), so no
token is trained more than ``max_staleness`` versions late. 0 is exactly on-policy.

The ledger is plain data (`LedgerState`), so a run that was killed goes on with the samples that
it had finished and asks again for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from rlinf_async.messages.language import (
    Prompt,
    Request,
    SampleGroup,
    Sampling,
    Scored,
    ScoredSample,
    TrainingSample,
)


class LedgerState(msgspec.Struct, kw_only=True):
    """All that a ledger knows, to be written to disk."""

    next_group: int = 0
    next_iteration: int = 0
    running: list[Request] = []
    finished: list[ScoredSample] = []


class Ledger:
    """Keeps the books of one run.

    Args:
        prompts: of one iteration.
        group_size: samples of each prompt.
        max_staleness: versions that a token may be older than the weights it trains.
        sampling: how samples are drawn.
        seed: of the run; every sample draws from a stream of its own.
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
        """the first iteration that was not admitted yet"""
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
        """What was admitted and has not come back, oldest first: after a resume, to be asked for
        again."""
        return [self._running[name] for name in sorted(self._running)]

    def go_on(self, partial: Request) -> None:
        """Ask for this one again with the tokens that it has already, if it is still running."""
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
            raise ValueError(f"{len(prompts)} prompts were given; an iteration has {self.prompts}")
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
            priority=self.next_iteration,  # the oldest iteration is waited for first
        )

    def take(self, scored: ScoredSample) -> list[ScoredSample] | None:
        """Book a finished sample; its whole group, in order, if it was the last one missing."""
        request = scored.sample.request
        if self._running.pop((request.group, request.index), None) is None:
            self._duplicates += 1
            return None
        group = self._finished.setdefault(request.group, {})
        group[request.index] = scored
        return self._in_order(group) if len(group) == self.group_size else None

    def complete(self) -> Iterable[list[ScoredSample]]:
        """The groups that are whole already, oldest first: after a resume, to be sent again."""
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
        """Samples that came a second time, and were left out, since this was asked last."""
        found, self._duplicates = self._duplicates, 0
        return found

    def state(self) -> LedgerState:
        """What to write to disk, taken after an iteration was trained."""
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
    """What the actor gets of a whole group.

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
    )
