"""`EnvWorker`: steps environments, asks for actions, and hands on trajectories.

::

    tickets ---lease---> +------------ EnvWorker ------------+ ---Trajectory, key actor rank--->
                         | stage 0: step, ask, wait          |
    Actions, own key --> | stage 1:       step, ask, wait    | ---Observations--->
                         +-----------------------------------+

                     waits for                       unblocked by
    collect          a ticket under its rank         the runtime
    each stage       its actions                     a rollout worker
    stepping         the other stage's step          itself: one thread, one piece at a time

While one stage waits for its actions, another steps; with ``parallel`` each stage has a thread of
its own, and they step at the same time. Within a stage all environments step together, or some are
answered while others are still in their step (`AsyncStage`). Each takes as many steps for a ticket
as any other, so none has more of the samples because it is fast; it waits for the last one before
the next ticket. The environments go on from ticket to ticket.

Exactly once: a ticket is acknowledged when the trajectories of all its stages are put. A worker
that dies or is cancelled before leaves it to the next, which collects all stages again; the actor
knows a trajectory that comes twice by its iteration, env rank, stage and epoch.

A question gets its own answer, whichever rollout worker died meanwhile: see `asking`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec
import numpy as np

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.messages.converting import ActionReader, ObservationWriter
from rlinf_async.messages.described import EnvError
from rlinf_async.messages.embodied import (
    GOES_ON,
    Actions,
    Choice,
    Collect,
    Floats,
    Intervention,
    Ints,
    Observations,
    Proposal,
    Trajectory,
    samples_of,
)
from rlinf_async.messages.spaces import EnvSpec, ObservationArray
from rlinf_async.workers.base import Worker, task_group
from rlinf_async.workers.env.asking import Answering, Conversation, OverChannels
from rlinf_async.workers.env.config import EnvConfig, env_seed, episode_seed
from rlinf_async.workers.env.evaluation import (
    BatchedEvaluation,
    EvaluatedEpisode,
    Readiness,
    SerialEvaluation,
    failed_episodes,
)
from rlinf_async.workers.env.many import AsyncEnvs, AsyncStage, BatchedStage, SimulatorEnvs
from rlinf_async.workers.env.record import Record
from rlinf_async.workers.env.stage import (
    EnvStage,
    Slot,
    Stage,
    StageOutcome,
    after_answer,
    after_step,
)
from rlinf_async.workers.foreign_calls import making, place_for
from rlinf_async.workers.host import SHORT, Pace
from rlinf_async.workers.intervention import Attention

if TYPE_CHECKING:
    from gymnasium import Space


class Environments:
    """Makes them; each stage is made, used and closed in one thread."""

    def __init__(self, config: EnvConfig, rank: int, incarnation: int) -> None:
        self.config = config
        self._rank, self._incarnation = rank, incarnation
        self._evaluation_slots: list[Slot] = []

    @property
    def spec(self) -> EnvSpec:
        """Description of the environments for a policy, once a stage is made."""
        return EnvSpec(
            observation=self._writer.spec,
            action=self._reader.spec,
            max_episode_steps=self._max_episode_steps,
            bounds=self._reader.bounds,
        )

    def look(self) -> None:
        """Make the first environment of the evaluations, where those of the stages are in other
        processes: it says what the spaces are."""
        if self.config.simulator == "pool":
            self._add_evaluation_slot()

    def stage(self, number: int) -> EnvStage:
        """Make the environments of a stage."""
        config, count = self.config, self.config.envs_per_stage
        label = f"{config.name}[{number}]"
        if config.simulator == "pool":
            return self._pool(number)
        if config.many_in_a_call:
            return self._simulator(count, label, self._seed(number, 0))
        slots = [self._slot(number, index) for index in range(count)]
        return Stage(
            slots,
            self._writer.spec.empty(len(slots)),
            self._reader,
            action_chunk=config.steps_per_answer,
            group_size=config.group_size,
        )

    def evaluation(
        self, episodes: Sequence[int], seed: int
    ) -> SerialEvaluation | BatchedEvaluation:
        """Make the environments of an evaluation, or take those of the last one."""
        if self.config.many_in_a_call:
            count = min(len(episodes), self.config.envs_per_stage)
            label = f"{self.config.name}[evaluation]"
            own = episode_seed(seed, self._rank)
            return BatchedEvaluation(self._simulator(count, label, own, lock_step=True), episodes)
        # One that waits for its time would hold up the others.
        most = 1 if self.config.control.hz else min(len(episodes), self.config.envs)
        while len(self._evaluation_slots) < most:
            self._add_evaluation_slot()
        slots = self._evaluation_slots[:most]
        return SerialEvaluation(slots, self._writer.spec, self._reader, iter(episodes), seed)

    def close(self) -> None:
        """Close those of the evaluations; stages are closed by themselves."""
        for slot in self._evaluation_slots:
            slot.close()

    def _look_at(self, observation: Space[Any], action: Space[Any], spec: Any) -> None:
        self._writer = ObservationWriter(observation, self.config.name)
        self._reader = ActionReader(action, self.config.name, self.config.actions)
        self._max_episode_steps = spec.max_episode_steps if spec else None

    def _simulator(
        self, count: int, label: str, seed: int, *, lock_step: bool = False
    ) -> BatchedStage | AsyncStage:
        """Make a simulator of many environments; ``lock_step``: none is answered before others."""
        from rlinf_async.workers.env.make_batched import autoreset_of, make_async, make_batched

        config = self.config
        by_itself = config.simulator == "async" or (config.asynchronous and not lock_step)
        call = place_for(f"simulator {label}", config.limits)
        with making(call):
            env: Any = (make_async if by_itself else make_batched)(config, count, seed)
            self._look_at(
                env.single_observation_space, env.single_action_space, getattr(env, "spec", None)
            )
            mode = autoreset_of(config, env)
        spaces = self._writer, self._reader
        if not by_itself:
            return BatchedStage(env, *spaces, mode, label=label, seed=seed, call=call)
        calls = call, place_for(f"simulator {label}", config.limits)
        envs = SimulatorEnvs(env, *spaces, mode, label=label, seed=seed, calls=calls)
        return self._answered_when_ready(envs, count, Readiness(count) if lock_step else None)

    def _pool(self, number: int) -> AsyncStage:
        from rlinf_async.workers.env.pool import EnvPool

        count = self.config.envs_per_stage
        labels = [self._label(number, index) for index in range(count)]
        seeds = [self._seed(number, index) for index in range(count)]
        envs = EnvPool(self.config, self._writer.spec, labels)
        return self._answered_when_ready(envs, count, seeds=seeds)

    def _answered_when_ready(
        self,
        envs: AsyncEnvs,
        count: int,
        readiness: Readiness | None = None,
        seeds: list[int] | None = None,
    ) -> AsyncStage:
        ready = self.config.ready
        return AsyncStage(
            envs,
            count,
            self._writer.spec,
            self._reader,
            readiness or Readiness("adaptive" if ready == "auto" else ready),
            action_chunk=self.config.steps_per_answer,
            group_size=self.config.group_size,
            seeds=seeds,
        )

    def _add_evaluation_slot(self) -> None:
        slot = self._slot(self.config.stages, len(self._evaluation_slots))
        self._evaluation_slots.append(slot)

    def _slot(self, stage: int, index: int) -> Slot:
        """Make an environment."""
        from rlinf_async.workers.env.make import make_env

        label, seed = self._label(stage, index), self._seed(stage, index)
        call = place_for(f"env {label}", self.config.limits)
        with making(call):
            env = make_env(self.config)
            if not index and stage in (0, self.config.stages):  # an evaluation may have no stages
                self._look_at(env.observation_space, env.action_space, env.spec)
        options = self.config.options
        return Slot(env, self._writer.write, label=label, seed=seed, call=call, options=options)

    def _label(self, stage: int, index: int) -> str:
        return f"{self.config.name}[{stage * self.config.envs_per_stage + index}]"

    def _seed(self, stage: int, env: int) -> int:
        return env_seed(
            self.config.seed, rank=self._rank, stage=stage, env=env, incarnation=self._incarnation
        )


Made = TypeVar("Made")


class _Asked(TypedDict):
    """Parts of a question: see `Conversation.ask`."""

    final_observation: ObservationArray | None
    memory: Floats | None
    final_memory: Floats | None


class EnvReport(msgspec.Struct, kw_only=True):
    """Report of one rank on `EnvWorker.collect`."""

    tickets: int = 0
    env_steps: int = 0
    episodes: int = 0
    dropped_answers: int = 0
    """answers to questions that were not open any more; harmless, and rare"""


class EvaluationPlan(msgspec.Struct, frozen=True):
    """The episodes of an evaluation, over all env workers."""

    episodes: int
    seed: int = 0
    """seed of the episodes; the same seed gives the same episodes"""
    min_version: int = 0
    """the oldest weights that may act"""
    env: EnvConfig | None = None
    """environment that is played; None: the one that is collected in"""


class EnvWorker(Worker):
    """One rank of the env group.

    Args:
        config: the environments of this worker.
        actor_ranks: how many actor ranks share the trajectories; ``env_rank * stages + stage``
            modulo it is the key of a trajectory.
        person_seconds: how long a step waits for a person, who is asked about each; None: nobody
            is asked.
    """

    def __init__(
        self, config: EnvConfig, *, actor_ranks: int = 1, person_seconds: float | None = None
    ) -> None:
        if actor_ranks < 1:
            raise ValueError(f"actor_ranks is {actor_ranks}; it must be at least 1")
        self.config = config
        self.actor_ranks = actor_ranks
        # A renderer gives black frames in any other thread than the one that made it.
        # One that waits for environments which step by themselves must not hold up the loop.
        self._pace = Pace(self, short=0.0 if config.rendering or config.asynchronous else SHORT)
        # The evaluation has the number after the last stage.
        conversations = [
            Conversation(self.rank, stage, self.incarnation) for stage in range(config.stages + 1)
        ]
        self._conversations, self._evaluating = conversations[:-1], conversations[-1]
        self._attentions = [
            Attention(
                self.rank,
                stage,
                self.incarnation,
                seconds=person_seconds,
                limit=1.0 if config.actions == "rescale" else None,
            )
            for stage in range(config.stages)
            if person_seconds is not None
        ]
        self._person: tuple[Sender[Proposal], Receiver[Intervention]] | None = None
        self._envs = Environments(config, self.rank, self.incarnation)
        self._other: Environments | None = None
        """environments that are played in evaluations alone"""
        self._other_pace = Pace(self, short=0.0)  # whether they render is known later
        self._stages: list[EnvStage] = []
        self._memories: list[Floats | None] = [None] * config.stages
        """what a recurrent policy remembers of each stage's episodes"""
        threads = config.stages if config.threads else 0
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{self.name} stage {stage}")
            for stage in range(threads)
        ]
        self._paces = [Pace(self, short=0.0, executor=thread) for thread in self._threads]
        """paces of the stages, where each has a thread of its own"""

    async def setup(self) -> None:
        """Make the environments; they are reset when the first ticket comes."""
        await self._pace.run("make envs", self._envs.look)
        for stage in range(self.config.stages):
            made = await self._pace_of(stage).run("make envs", self._envs.stage, stage)
            self._stages.append(made)

    async def teardown(self) -> None:
        """Close the environments."""
        try:
            for number, stage in enumerate(self._stages):
                await self._pace_of(number).run("close envs", stage.close)
            await self._pace.run("close envs", self._envs.close)
            if self._other is not None:
                await self._other_pace.run("close envs", self._other.close)
        finally:
            for thread in self._threads:
                thread.shutdown(wait=False)

    def _pace_of(self, stage: int) -> Pace:
        return self._paces[stage] if self._paces else self._pace

    async def describe(self) -> EnvSpec:
        """Return what a policy needs to know about the environment."""
        return self._envs.spec

    async def collect(
        self,
        tickets: Receiver[Collect],
        observations: Sender[Observations],
        actions: Receiver[Actions],
        trajectories: Sender[Trajectory],
        proposals: Sender[Proposal] | None = None,
        interventions: Receiver[Intervention] | None = None,
    ) -> EnvReport:
        """Collect for the tickets under this rank's key until they end.

        With ``proposals`` and ``interventions`` a person is asked before each step. Tickets must
        then ask for transitions: an algorithm that takes the actions for draws of the policy would
        learn from what the policy did not do.

        Raises:
            EnvFailed: an environment raised, or returned NaN or infinity.
            EnvError: the policy's actions do not fit the environment.
            RolloutGone: the answers ended before the tickets.
        """
        answering = OverChannels(observations, actions)
        report = await self.collect_with(answering, tickets, trajectories, proposals, interventions)
        report.dropped_answers = answering.dropped
        return report

    async def collect_with(
        self,
        answering: Answering,
        tickets: Receiver[Collect],
        trajectories: Sender[Trajectory],
        proposals: Sender[Proposal] | None = None,
        interventions: Receiver[Intervention] | None = None,
    ) -> EnvReport:
        """Collect as `collect` does, with whoever answers; raises what that does, too."""
        report = EnvReport()
        if proposals is not None and interventions is not None:
            if not self._attentions:
                raise ValueError("a person is to be asked, but person_seconds is None")
            self._person = proposals, interventions
        try:
            while await self._collect_next(tickets, answering, trajectories, report):
                pass
        finally:
            for attention in self._attentions:
                attention.close()
        return report

    async def evaluate(
        self,
        plan: EvaluationPlan,
        observations: Sender[Observations],
        actions: Receiver[Actions],
        evaluated: Sender[EvaluatedEpisode] | None = None,
    ) -> list[EvaluatedEpisode]:
        """Run this rank's share of the plan's episodes with the deterministic policy.

        In environments of their own, so that those of `collect` are left as they are; both may run
        at the same time. Returns the episodes in the order of their numbers; ``evaluated`` gets
        each when it ends. One in which an environment has ended an earlier life of this worker has
        failed, and is not tried again.

        Raises: as `collect`.
        """
        return await self.evaluate_with(OverChannels(observations, actions), plan, evaluated)

    async def evaluate_with(
        self,
        answering: Answering,
        plan: EvaluationPlan,
        evaluated: Sender[EvaluatedEpisode] | None = None,
    ) -> list[EvaluatedEpisode]:
        """Evaluate as `evaluate` does, with whoever answers; raises what that does, too."""
        mine = range(self.rank, plan.episodes, self.world_size)
        failed = self._failed(mine, plan)
        done = failed_episodes(failed, plan.min_version)
        if evaluated is not None:
            for episode in done:
                await evaluated.put(episode)
        left = [one for one in mine if one not in failed]
        if not left:
            return done
        envs, pace = self._played(plan), self._pace if plan.env is None else self._other_pace
        run = await pace.run("make envs", envs.evaluation, left, plan.seed)
        ask = partial(self._evaluating.ask, answering)
        while await pace.run("reset", run.begin):
            answer = await ask(
                run.observation,
                min_version=plan.min_version,
                deterministic=True,
                memory=run.memory,
            )
            run.memory = answer.memory
            before = len(run.done)
            await pace.run("step", run.step, answer.action, answer.version)
            if evaluated is not None:
                for episode in run.done[before:]:
                    await evaluated.put(episode)
        await pace.run("close envs", run.close)
        return sorted([*done, *run.done], key=lambda one: one.episode)

    def _played(self, plan: EvaluationPlan) -> Environments:
        """The environments that a plan is to be played in; those of an evaluation are kept for the
        next."""
        if plan.env is None:
            return self._envs
        if self._other is None:
            self._other = Environments(plan.env, self.rank, self.incarnation)
        return self._other

    def _failed(self, episodes: Sequence[int], plan: EvaluationPlan) -> list[int]:
        """Those of these episodes in which an environment has ended an earlier life of this
        worker; a simulator of many environments does not say which it was."""
        config = plan.env or self.config
        fatal = () if config.many_in_a_call else self._context.info.fatal_seeds
        return [one for one in episodes if episode_seed(plan.seed, one) in fatal]

    # ---- collecting

    async def _collect_next(
        self,
        tickets: Receiver[Collect],
        answering: Answering,
        trajectories: Sender[Trajectory],
        report: EnvReport,
    ) -> bool:
        """Collect for one ticket; return False when there are no more."""
        try:
            async with tickets.lease(key=self.rank) as batch:
                ticket = batch[0]
                made = await _all(
                    self._collect_epochs(ticket, stage, answering)
                    for stage in range(self.config.stages)
                )
                for trajectory in chain.from_iterable(made):
                    key = self._trajectory_key(trajectory, ticket.actor_ranks or self.actor_ranks)
                    await trajectories.put(trajectory, key=key)
        except EndOfChannel:  # of the tickets: nothing else here ends without its own error
            return False
        report.tickets += 1
        collected = [*chain.from_iterable(made)]
        report.env_steps += sum(samples_of(trajectory) for trajectory in collected)
        report.episodes += sum(len(trajectory.episode_return) for trajectory in collected)
        return True

    async def _collect_epochs(
        self, ticket: Collect, number: int, answering: Answering
    ) -> list[Trajectory]:
        """One trajectory of the stage for each epoch of the ticket, one after the other."""
        return [
            await self._collect_stage(ticket, epoch, number, answering)
            for epoch in range(ticket.epochs)
        ]

    async def _collect_stage(
        self, ticket: Collect, epoch: int, number: int, answering: Answering
    ) -> Trajectory:
        stage = self._stages[number]
        if self._person is not None and not ticket.transitions:
            raise EnvError(
                "a person may act only where transitions are collected: an algorithm on the "
                "policy's own actions would take those of the person for draws of the policy"
            )
        ask = partial(self._conversations[number].ask, answering, min_version=ticket.min_version)
        if ticket.level is not None:
            stage.take_level(ticket.level)
        if self.config.group_size > 1 and isinstance(stage, (Stage, AsyncStage)):
            seeds = self._group_seeds(ticket, epoch, number)
            await self._pace_of(number).run("reset", stage.begin_groups, seeds)
            self._memories[number] = None
        elif stage.needs_reset or stage.in_flight:  # the first ticket, or after one given up
            await self._pace_of(number).run("reset", stage.reset)
            self._memories[number] = None
        record = Record(
            ticket,
            self.rank,
            number,
            stage.observation,
            self.incarnation,
            self._memories[number],
            epoch,
        )
        rows = stage.rows
        while not record.full:
            action: Choice | None = None
            if rows is None or rows.size:  # else all that are ready have taken their steps
                seen = stage.observation if rows is None else stage.observation[rows]
                answer = await ask(seen, **self._remembered(number, rows, record))
                if self._person is not None:
                    answer = await self._attentions[number].act(*self._person, seen, answer)
                    if answer.verdict is not None:
                        _judge(stage, answer.verdict, rows)
                record.acted(seen, answer, rows)
                self._memories[number] = after_answer(
                    self._memories[number], answer.memory, rows, len(stage.observation)
                )
                action = answer.action
            outcome = await self._step(number, stage, action, rows)
            self._memories[number], final_memory = after_step(self._memories[number], outcome)
            record.stepped(outcome, final_memory)
            rows = record.unfinished(outcome.rows)
            if self.config.control.hz:
                await self._pause_finished(number, stage, record, outcome.rows)
        # Rows of environments that get ready by themselves change in place.
        last = stage.observation if rows is None else stage.observation.copy()
        if ticket.transitions:
            made = record.finish_transitions(last)
            if self._person is not None:
                made.late_interventions, made.unanswered = self._attentions[number].take_counts()
            return made
        values = await ask(last, value_only=True, **self._remembered(number, None, record))
        return record.finish(values)

    async def _pause_finished(
        self, number: int, stage: EnvStage, record: Record, stepped: Ints | None
    ) -> None:
        """Stop the time of those that have taken their steps: nobody asks for more of them, while
        others of the stage may still be in theirs."""
        finished = record.finished(stepped)
        if finished is None or finished.size:
            await self._pace_of(number).run("pause", stage.pause, finished)

    def _remembered(self, number: int, rows: Ints | None, record: Record) -> _Asked:
        """What a question about these environments has besides their observations."""
        memory = self._memories[number]
        final, final_memory = record.unvalued()
        return {
            "final_observation": final,
            "memory": memory if memory is None or rows is None else memory[rows],
            "final_memory": final_memory,
        }

    def _group_seeds(self, ticket: Collect, epoch: int, stage: int) -> list[int]:
        """A seed for each group: of this iteration, whichever life of this worker collects it."""
        groups = self.config.envs_per_stage // self.config.group_size
        place = (self.config.seed, ticket.iteration, self.rank, stage)
        # Zeros at the end would not change the numbers; an epoch 0 has those of no epochs.
        mixed = np.random.SeedSequence((*place, epoch) if epoch else place)
        return [int(seed) for seed in mixed.generate_state(groups)]

    async def _step(
        self, number: int, stage: EnvStage, action: Choice | None, rows: Ints | None
    ) -> StageOutcome:
        pace = self._pace_of(number)
        outcome = await pace.run("step", stage.step, action, rows)
        if stage.needs_reset:
            await pace.run("reset", stage.reset)
        return outcome

    def _trajectory_key(self, trajectory: Trajectory, actor_ranks: int) -> int:
        return (self.rank * self.config.stages + trajectory.stage) % actor_ranks


def _judge(stage: EnvStage, verdict: Ints, rows: Ints | None) -> None:
    """End the episodes of which a person says so with the next step of these environments."""
    for place in np.flatnonzero(verdict != GOES_ON).tolist():
        stage.judge(place if rows is None else int(rows[place]), success=bool(verdict[place]))


async def _all(stages: Iterable[Coroutine[Any, Any, Made]]) -> list[Made]:
    """Run all stages at once; the first failure cancels the others and is raised as it is."""
    async with task_group() as group:
        tasks = [group.create_task(stage) for stage in stages]
    return [task.result() for task in tasks]
