"""`RolloutWorker`: answers the questions of env workers, under the newest weights.

::

    Observations ---lease---> [ whatever is ready, up to max_batch ] ---forward---> Actions, by key
                                     |                    ^
                                     | weights too old    | weights arrived
                                     +----> set aside ----+

                waits for                              unblocked by
    serve       a question                             env workers
    set aside   weights of the version it asks for     the actor
    following   newer weights                          the actor

First ready, first answered: a question that needs weights which are not there yet is set aside and
holds up no other. A forward pass runs under the weights of one version, the one that its answers
name; new weights are loaded between two passes. A question stays leased until it is answered; if
this worker dies before, another one gets it, and if it was answered already the env worker drops
the second answer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeGuard

import msgspec
import numpy as np

from rlinf_async.backends.base import (
    PolicyAnswer,
    PolicyBackend,
    PolicyOutputError,
    RecurrentPolicyBackend,
)
from rlinf_async.backends.parts import DEFAULT_POLICY_BACKEND, policy_backends
from rlinf_async.channels import (
    ChannelError,
    EndOfChannel,
    LatestReceiver,
    NoReceivers,
    Receiver,
    Sender,
)
from rlinf_async.channels.statistics import WaitFuture
from rlinf_async.config.counts import MOST_THREADS, check_bounds
from rlinf_async.messages.embodied import Actions, Floats, Observations, stage_key
from rlinf_async.messages.spaces import ObservationArray, all_finite
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import Worker, task_group
from rlinf_async.workers.host import Pace

TURN: Final = 4
"""questions of the same process after which all else in it has a turn: some milliseconds"""

Answered = list[tuple[Observations, Actions]]
"""Each question with its answer."""


def answer_all(policy: PolicyBackend, questions: Sequence[Observations]) -> Answered:
    """Answer every question under the weights that are loaded now.

    Rows of a sampled batch, in this order; ``E`` and ``K`` differ from question to question::

        observation [E, D] of each question      -> action, log_prob, value
        final_observation [K, D] of each          -> value alone

    A recurrent policy gets the memory of each row with it, and answers with that after it.

    Deterministic questions (evaluation) get a pass of their own.

    Raises:
        PolicyOutputError: the policy returned NaN or infinity.
        ValueError: observations of the questions have different sizes.
    """
    sampled = [question for question in questions if not question.deterministic]
    likely = [question for question in questions if question.deterministic]
    answered = _sampled(policy, sampled) if sampled else []
    return answered + _most_likely(policy, likely) if likely else answered


def _sampled(policy: PolicyBackend, questions: Sequence[Observations]) -> Answered:
    finals = [q.final_observation for q in questions if q.final_observation is not None]
    rows = _rows([*(question.observation for question in questions), *finals])
    version = policy.version
    if all(question.value_only for question in questions):
        nothing = np.empty(0, np.float32)
        answer = PolicyAnswer(nothing, nothing, _value(policy, rows, questions))
    elif _recurrent(policy):
        answer = policy.act_from(rows, _memory(policy, questions))
    else:
        answer = policy.act(rows)
    _check(version, action=answer.action, log_prob=answer.log_prob, value=answer.value)
    return list(_shares(questions, answer, version))


def _shares(
    questions: Sequence[Observations], answer: PolicyAnswer, version: int
) -> Iterator[tuple[Observations, Actions]]:
    start = 0
    final = sum(len(question.observation) for question in questions)
    for question in questions:
        end = start + len(question.observation)
        final_value = None
        if question.final_observation is not None:
            final_end = final + len(question.final_observation)
            final_value = answer.value[final:final_end]
            final = final_end
        yield (
            question,
            Actions(
                incarnation=question.incarnation,
                sequence=question.sequence,
                action=None if question.value_only else answer.action[start:end],
                log_prob=None if question.value_only else answer.log_prob[start:end],
                value=answer.value[start:end],
                final_value=final_value,
                version=version,
                memory=None if answer.memory is None else answer.memory[start:end],
                chain=None if answer.chain is None else answer.chain[start:end],
            ),
        )
        start = end


def _recurrent(policy: PolicyBackend) -> TypeGuard[RecurrentPolicyBackend]:
    # `isinstance` looks at every member of the protocol, and takes as long as a small layer.
    return hasattr(policy, "act_from")


def _memory(policy: RecurrentPolicyBackend, questions: Sequence[Observations]) -> Floats:
    """What the policy remembers of each row, ``[N, H]``."""
    parts = [
        *((question.memory, question.observation) for question in questions),
        *(
            (question.final_memory, question.final_observation)
            for question in questions
            if question.final_observation is not None and not question.deterministic
        ),
    ]
    each = [
        np.zeros((len(seen), policy.memory_size), np.float32) if memory is None else memory
        for memory, seen in parts
    ]
    return each[0] if len(each) == 1 else np.concatenate(each)


def _value(
    policy: PolicyBackend, rows: ObservationArray, questions: Sequence[Observations]
) -> Floats:
    if _recurrent(policy):
        return policy.value_from(rows, _memory(policy, questions))
    return policy.value(rows)


def _most_likely(policy: PolicyBackend, questions: Sequence[Observations]) -> Answered:
    rows = _rows([question.observation for question in questions])
    version, value, after = policy.version, _value(policy, rows, questions), None
    if _recurrent(policy):
        action, after = policy.mode_from(rows, _memory(policy, questions))
    else:
        action = policy.mode(rows)
    _check(version, action=action, value=value)
    answered: Answered = []
    start = 0
    for question in questions:
        end = start + len(question.observation)
        answer = Actions(
            incarnation=question.incarnation,
            sequence=question.sequence,
            action=action[start:end],
            log_prob=None,
            value=value[start:end],
            final_value=None,
            version=version,
            memory=None if after is None else after[start:end],
        )
        answered.append((question, answer))
        start = end
    return answered


def _rows(parts: Sequence[ObservationArray]) -> ObservationArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check(version: int, **outputs: np.ndarray[tuple[int, ...], np.dtype[np.number]]) -> None:
    """Refuse NaN and infinity, whatever the backend let through."""
    for name, output in outputs.items():
        if not all_finite(output):
            bad = int((~np.isfinite(output)).sum())
            raise PolicyOutputError(
                f"the policy, weights version {version}, returned {name!r} with {bad} of "
                f"{output.size} values NaN or infinite; look at the observations first, then at "
                "the learning rate"
            )


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout worker."""

    max_batch: int = 1024
    """largest number of observations in one forward pass, which takes those that are ready"""
    seed: int = 0
    """seed of the sampled actions; every rank and every restart derives its own from it"""
    torch_threads: int = 1
    """threads of one forward pass; 0: torch's default"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_batch", least=1)
        check_bounds(self, "seed", least=0)
        check_bounds(self, "torch_threads", least=0, most=MOST_THREADS)


class WeightsEnded(ChannelError):
    """A question asks for newer weights than there are, and no more will be published."""


class FollowedWeights:
    """The weights that a model has, and newer ones that are loaded beside its work.

    ::

                  waits for                        unblocked by
        follow    newer weights                    the actor
        reach     weights of a version, loaded     follow

    Args:
        version: returns the version of the loaded weights; -1 before the first.
        askers: the workers that ask for versions, for errors.
    """

    def __init__(self, version: Callable[[], int], askers: str) -> None:
        self._version = version
        self._askers = askers
        self._waiting: list[WaitFuture] = []
        self._ended = False
        self.loads = 0
        """weight updates that were applied"""
        self.interrupted: frozenset[str] = frozenset()
        """names of the requests for which `reach` does not wait"""

    def begin(self) -> None:
        """Expect updates again: `follow` is about to begin."""
        self._ended = False

    async def follow(
        self,
        weights: LatestReceiver[WeightUpdate],
        load: Callable[[WeightUpdate], Awaitable[None]],
    ) -> None:
        """Hand every update that comes to ``load``, which calls `loaded`, until no more will come.

        Raises what ``load`` raises: `WeightsError` for a damaged update.
        """
        self.begin()
        seen = 0  # not what the receiver has seen: another rank of this process may hold it too
        try:
            while True:
                update = await weights.get(newer_than=seen)
                seen = weights.version
                await load(update)
        except EndOfChannel:
            pass  # the loaded weights still serve
        finally:
            self._ended = True
            self.wake()

    def loaded(self) -> None:
        """Count an update that was applied, and wake those that wait for its version."""
        self.loads += 1
        self.wake()

    async def reach(self, version: int, name: str = "") -> None:
        """Wait until the weights are at least as new as this version, or until `interrupt` names
        this request.

        Raises:
            WeightsEnded: they never will be.
        """
        while self._version() < version and name not in self.interrupted:
            if self._ended:
                raise WeightsEnded(
                    f"weights of version {version} are asked for, the newest are "
                    f"{self._version()}, and their channel has ended: the actor must go on until "
                    f"the {self._askers} are done"
                )
            # Only the publisher can end this wait: the deadlock watch tells by the future's type.
            waiting = WaitFuture(loop=asyncio.get_running_loop())
            self._waiting.append(waiting)
            await waiting

    def interrupt(self, names: frozenset[str]) -> None:
        """End every `reach` of the requests of ``names``."""
        self.interrupted = names
        self.wake()

    def wake(self) -> None:
        """Have every `reach` look at the version again."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


class RolloutReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `RolloutWorker.serve`."""

    questions: int = 0
    observations: int = 0
    forwards: int = 0
    set_aside: int = 0
    """questions that had to wait for weights"""
    unwanted: int = 0
    """answers whose env worker had left"""
    weight_updates: int = 0
    version: int = -1
    """version of the weights at the end"""


class RolloutWorker(Worker):
    """One rank of the rollout group.

    Args:
        policy: configuration of the policy backend, as its own Struct.
        config: how this worker answers.
        backend: the policy backend's registered name.
    """

    def __init__(
        self,
        policy: Any,
        config: RolloutConfig | None = None,
        *,
        backend: str = DEFAULT_POLICY_BACKEND,
    ) -> None:
        self.config = config or RolloutConfig()
        self._policy_config = policy
        self._backend_name = backend
        self._pace = Pace(self)
        self._until_turn = TURN

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        return policy_backends.load(arguments.get("backend", DEFAULT_POLICY_BACKEND)).slow_imports

    async def setup(self) -> None:
        """Build the policy; its weights come with the first update."""
        self._policy = await self.compute(self.make_policy)
        # OpenMP keeps this per thread, and either of the two may run the policy.
        await self.compute(self._limit_threads)
        self._limit_threads()

    def make_policy(self) -> PolicyBackend:
        """Build the policy. Runs in the compute thread; override it to bring your own."""
        parts = (self.config.seed, self.rank, self.incarnation)
        seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
        part = policy_backends.load(self._backend_name)
        return part.make(self._policy_config, seed, self.device)

    def _limit_threads(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and self.config.torch_threads:
            torch.set_num_threads(self.config.torch_threads)

    async def serve(
        self,
        observations: Receiver[Observations],
        actions: Sender[Actions],
        weights: LatestReceiver[WeightUpdate],
    ) -> RolloutReport:
        """Answer questions until there are no more.

        Raises:
            PolicyOutputError: the policy returned NaN or infinity.
            WeightsError: an update was damaged or does not fit the policy.
            WeightsEnded: the weights that a question asks for will not come.
        """
        report = RolloutReport()
        async with self._following(weights) as followed, asyncio.TaskGroup() as aside:
            while await self._serve_next(observations, actions, followed, aside, report):
                pass
        report.weight_updates = followed.loads
        report.version = self._policy.version
        return report

    @asynccontextmanager
    async def answering(
        self, weights: LatestReceiver[WeightUpdate]
    ) -> AsyncIterator[Callable[[Observations], Awaitable[Actions]]]:
        """What answers questions of this process, while the block runs; it loads newer weights.

        Raises: as `serve`, what fits a question to whoever asks it.
        """
        async with self._following(weights) as followed:
            yield partial(self._answer_here, followed)

    async def _answer_here(self, followed: FollowedWeights, question: Observations) -> Actions:
        await followed.reach(question.min_version)
        [(_, answer)] = await self._forward([question])
        self._until_turn -= 1
        if not self._until_turn:  # so far nothing need have waited: all else is due now
            self._until_turn = TURN
            await asyncio.sleep(0)
        return answer

    @asynccontextmanager
    async def _following(
        self, weights: LatestReceiver[WeightUpdate]
    ) -> AsyncIterator[FollowedWeights]:
        """Load newer weights while the block runs.

        Each block has weights of its own to wait for: the end of one, as of an evaluation, says
        nothing to another.
        """
        followed = FollowedWeights(lambda: self._policy.version, askers="env workers")

        async def load(update: WeightUpdate) -> None:
            await self._pace.run("load weights", self._policy.load, update)
            followed.loaded()

        async with task_group() as group:
            following = group.create_task(followed.follow(weights, load))
            yield followed
            following.cancel()

    async def _serve_next(
        self,
        observations: Receiver[Observations],
        actions: Sender[Actions],
        followed: FollowedWeights,
        aside: asyncio.TaskGroup,
        report: RolloutReport,
    ) -> bool:
        """Answer the questions that are ready; return False when no more will come."""
        async with AsyncExitStack() as lease:
            try:
                batch = await lease.enter_async_context(
                    observations.lease(weight=self.config.max_batch, at_least=1)
                )
            except EndOfChannel:
                return False
            version = self._policy.version
            ready = [question for question in batch if question.min_version <= version]
            late = [question for question in batch if question.min_version > version]
            if ready:
                await self._answer(ready, actions, report)
            if late:
                report.set_aside += len(late)
                later = self._answer_later(late, lease.pop_all(), actions, followed, report)
                aside.create_task(later)
        return True

    async def _answer_later(
        self,
        questions: Iterable[Observations],
        lease: AsyncExitStack,
        actions: Sender[Actions],
        followed: FollowedWeights,
        report: RolloutReport,
    ) -> None:
        """Answer questions, each as soon as its weights are there, and then end their lease."""
        async with lease:
            by_need = sorted(questions, key=_need)
            for version, group in groupby(by_need, key=_need):
                await followed.reach(version)
                await self._answer(list(group), actions, report)

    async def _answer(
        self, questions: list[Observations], actions: Sender[Actions], report: RolloutReport
    ) -> None:
        for question, answer in await self._forward(questions):
            try:
                await actions.put(answer, key=stage_key(question.env_rank, question.stage))
            except NoReceivers:  # a question that was delivered again, after the env worker left
                report.unwanted += 1
            report.observations += len(question.observation)
        report.questions += len(questions)
        report.forwards += 1

    async def _forward(self, questions: list[Observations]) -> Answered:
        rows = sum(len(question.observation) for question in questions)
        with self.meter.batch("forward", rows):
            return await self._pace.run("forward", answer_all, self._policy, questions)


def _need(question: Observations) -> int:
    return question.min_version
