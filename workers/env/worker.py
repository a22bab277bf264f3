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
its own, and they step at the same time. The environments go on from ticket to ticket.

Exactly once: a ticket is acknowledged when the trajectories of all its stages are put. A worker
that dies or is cancelled before leaves it to the next, which collects all stages again; the actor
knows a trajectory that comes twice by its iteration, env rank, stage and epoch.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from rlinf_async.channels import EndOfChannel, Receiver, Sender
from rlinf_async.messages.embodied import (
    Actions,
    Collect,
    Floats,
    Observations,
    Trajectory,
    samples_of,
)
from rlinf_async.messages.spaces import EnvSpec, Seen
from rlinf_async.workers.base import Worker
from rlinf_async.workers.env.actions import ActionReader
from rlinf_async.workers.env.batched import BatchedStage
from rlinf_async.workers.env.batched_evaluation import BatchedEvaluation
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.conversation import Conversation
from rlinf_async.workers.env.evaluation import EvaluatedEpisode, Evaluation
from rlinf_async.workers.env.memory import after_step
from rlinf_async.workers.env.observations import ObservationWriter
from rlinf_async.workers.env.record import Record
from rlinf_async.workers.env.seeds import env_seed, episode_seed
from rlinf_async.workers.env.slot import Slot
from rlinf_async.workers.env.stage import EnvStage, Outcome, Stage
from rlinf_async.workers.pace import SHORT, Pace
from rlinf_async.workers.tasks import task_group

if TYPE_CHECKING:
    import gymnasium
    from gymnasium import Space


Made = TypeVar("Made")


class EnvReport(msgspec.Struct, kw_only=True):
    """What one rank's `EnvWorker.collect` did."""

    tickets: int = 0
    env_steps: int = 0
    episodes: int = 0
    dropped_answers: int = 0
    """answers to questions that were not open any more; harmless, and rare"""


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of an evaluation, over all env workers."""

    episodes: int
    seed: int = 0
    """seed of the episodes; the same seed gives the same episodes"""
    min_version: int = 0
    """the oldest weights that may act"""


class EnvWorker(Worker):
    """One rank of the env group.

    Args:
        config: the environments of this worker.
        actor_ranks: how many actor ranks share the trajectories; ``env_rank * stages + stage``
            modulo it is the key of a trajectory.
    """

    def __init__(self, config: EnvConfig, *, actor_ranks: int = 1) -> None:
        if actor_ranks < 1:
            raise ValueError(f"actor_ranks is {actor_ranks}; it must be at least 1")
        self.config = config
        self.actor_ranks = actor_ranks
        # A renderer gives black frames in any other thread than the one that made it.
        self._pace = Pace(self, short=0.0 if config.rendering else SHORT)
        self._conversations = [self._conversation(stage) for stage in range(config.stages)]
        self._evaluating = self._conversation(config.stages)
        self._evaluation_slots: list[Slot] = []
        self._stages: list[EnvStage] = []
        self._memories: list[Floats | None] = [None] * config.stages
        """what a recurrent policy remembers of each stage's episodes"""
        threads = config.stages if config.parallel else 0
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"{self.name} stage {stage}")
            for stage in range(threads)
        ]
        self._paces = [Pace(self, short=0.0, executor=thread) for thread in self._threads]
        """of the stages, where each has a thread of its own"""

    async def setup(self) -> None:
        """Make the environments; they are reset when the first ticket comes."""
        for stage in range(self.config.stages):
            made = await self._pace_of(stage).run("make envs", self._make_stage, stage)
            self._stages.append(made)

    async def teardown(self) -> None:
        """Close the environments."""
        try:
            for number, stage in enumerate(self._stages):
                await self._pace_of(number).run("close envs", stage.close)
            await self._pace.run("close envs", self._close_evaluation)
        finally:
            for thread in self._threads:
                thread.shutdown(wait=False)

    def _pace_of(self, stage: int) -> Pace:
        return self._paces[stage] if self._paces else self._pace

    async def describe(self) -> EnvSpec:
        """What a policy needs to know about the environment."""
        return EnvSpec(
            observation=self._writer.spec,
            action=self._reader.spec,
            max_episode_steps=self._max_episode_steps,
        )

    async def collect(
        self,
        tickets: Receiver[Collect],
        observations: Sender[Observations],
        actions: Receiver[Actions],
        trajectories: Sender[Trajectory],
    ) -> EnvReport:
        """Collect for the tickets under this rank's key until they end.

        Raises:
            EnvFailed: an environment raised, or returned NaN or infinity.
            EnvError: the policy's actions do not fit the environment.
            RolloutGone: the answers ended before the tickets.
        """
        report = EnvReport()
        dropped = sum(one.dropped for one in self._conversations)
        while await self._collect_next(tickets, observations, actions, trajectories, report):
            pass
        report.dropped_answers = sum(one.dropped for one in self._conversations) - dropped
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
        each when it ends.

        Raises: as `collect`.
        """
        mine = range(self.rank, plan.episodes, self.world_size)
        if not mine:
            return []
        run = await self._pace.run("make envs", self._make_evaluation, mine, plan.seed)
        ask = partial(self._evaluating.ask, observations, actions)
        while await self._pace.run("reset", run.begin):
            answer = await ask(
                run.observation,
                min_version=plan.min_version,
                deterministic=True,
                memory=run.memory,
            )
            run.memory = answer.memory
            before = len(run.done)
            await self._pace.run("step", run.step, answer.action, answer.version)
            if evaluated is not None:
                for episode in run.done[before:]:
                    await evaluated.put(episode)
        await self._pace.run("close envs", run.close)
        return sorted(run.done, key=lambda one: one.episode)

    # ---- collecting

    async def _collect_next(
        self,
        tickets: Receiver[Collect],
        observations: Sender[Observations],
        actions: Receiver[Actions],
        trajectories: Sender[Trajectory],
        report: EnvReport,
    ) -> bool:
        """Collect for one ticket; return False when there are no more."""
        try:
            async with tickets.lease(key=self.rank) as batch:
                ticket = batch[0]
                made = await _all(
                    self._collect_epochs(ticket, stage, observations, actions)
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
        self,
        ticket: Collect,
        number: int,
        observations: Sender[Observations],
        actions: Receiver[Actions],
    ) -> list[Trajectory]:
        """One trajectory of the stage for each epoch of the ticket, one after the other."""
        return [
            await self._collect_stage(ticket, epoch, number, observations, actions)
            for epoch in range(ticket.epochs)
        ]

    async def _collect_stage(
        self,
        ticket: Collect,
        epoch: int,
        number: int,
        observations: Sender[Observations],
        actions: Receiver[Actions],
    ) -> Trajectory:
        stage = self._stages[number]
        ask = partial(
            self._conversations[number].ask, observations, actions, min_version=ticket.min_version
        )
        if self.config.group_size > 1 and isinstance(stage, Stage):
            seeds = self._group_seeds(ticket, epoch, number)
            await self._pace_of(number).run("reset", stage.begin_groups, seeds)
            self._memories[number] = None
        elif stage.needs_reset:  # the first ticket, or one given up between a step and its reset
            await self._pace_of(number).run("reset", stage.reset)
            self._memories[number] = None
        memory, final_memory = self._memories[number], None
        record = Record(
            ticket, self.rank, number, stage.observation, self.incarnation, memory, epoch
        )
        final: Seen | None = None
        for _ in range(ticket.steps):
            answer = await ask(
                stage.observation, final_observation=final, memory=memory, final_memory=final_memory
            )
            record.acted(stage.observation, answer)
            outcome = await self._step(number, stage, answer)
            record.stepped(outcome)
            final = None if ticket.transitions else outcome.final_observation
            memory, final_memory = after_step(answer.memory, outcome)
            self._memories[number] = memory
        if ticket.transitions:
            return record.finish_transitions(stage.observation)
        last = await ask(
            stage.observation,
            final_observation=final,
            value_only=True,
            memory=memory,
            final_memory=final_memory,
        )
        return record.finish(last)

    def _group_seeds(self, ticket: Collect, epoch: int, stage: int) -> list[int]:
        """A seed for each group: of this iteration, whichever life of this worker collects it."""
        groups = self.config.envs_per_stage // self.config.group_size
        place = (self.config.seed, ticket.iteration, self.rank, stage)
        # Zeros at the end would not change the numbers; an epoch 0 has those of no epochs.
        mixed = np.random.SeedSequence((*place, epoch) if epoch else place)
        return [int(seed) for seed in mixed.generate_state(groups)]

    async def _step(self, number: int, stage: EnvStage, answer: Actions) -> Outcome:
        pace = self._pace_of(number)
        outcome = await pace.run("step", stage.step, answer.action)
        if stage.needs_reset:
            await pace.run("reset", stage.reset)
        return outcome

    def _trajectory_key(self, trajectory: Trajectory, actor_ranks: int) -> int:
        return (self.rank * self.config.stages + trajectory.stage) % actor_ranks

    # ---- making

    def _conversation(self, stage: int) -> Conversation:
        return Conversation(self.rank, stage, self.incarnation)

    def _make_stage(self, number: int) -> EnvStage:
        if self.config.simulator != "single":
            label = f"{self.config.name}[{number}]"
            return self._simulator(self.config.envs_per_stage, label, self._seed(number, 0))
        envs = [self._make_env() for _ in range(self.config.envs_per_stage)]
        if number == 0:
            self._look_at(envs[0].observation_space, envs[0].action_space, envs[0].spec)
        slots = [self._slot(env, number, index) for index, env in enumerate(envs)]
        return Stage(
            slots,
            self._writer.spec.empty(len(slots)),
            self._reader,
            action_chunk=self.config.action_chunk,
            group_size=self.config.group_size,
        )

    def _look_at(self, observation: Space[Any], action: Space[Any], spec: Any) -> None:
        self._writer = ObservationWriter(observation, self.config.name)
        self._reader = ActionReader(action, self.config.name, self.config.actions)
        self._max_episode_steps = spec.max_episode_steps if spec else None

    def _simulator(self, count: int, label: str, seed: int) -> BatchedStage:
        from rlinf_async.workers.env.make_batched import autoreset_of, make_batched

        env = make_batched(self.config, count, seed)
        self._look_at(
            env.single_observation_space, env.single_action_space, getattr(env, "spec", None)
        )
        mode = autoreset_of(self.config, env)
        return BatchedStage(env, self._writer, self._reader, mode, label=label, seed=seed)

    def _make_evaluation(self, episodes: range, seed: int) -> Evaluation | BatchedEvaluation:
        if self.config.simulator != "single":
            count = min(len(episodes), self.config.envs_per_stage)
            label = f"{self.config.name}[evaluation]"
            own = episode_seed(seed, self.rank)
            return BatchedEvaluation(self._simulator(count, label, own), episodes)
        self._make_evaluation_slots(len(episodes))
        slots = self._evaluation_slots[: len(episodes)]
        return Evaluation(slots, self._writer.spec, self._reader, iter(episodes), seed)

    def _make_evaluation_slots(self, episodes: int) -> None:
        wanted = min(episodes, self.config.envs)
        for env in range(len(self._evaluation_slots), wanted):
            slot = self._slot(self._make_env(), self.config.stages, env)
            self._evaluation_slots.append(slot)

    def _make_env(self) -> gymnasium.Env[Any, Any]:
        from rlinf_async.workers.env.make import make_env

        return make_env(self.config)

    def _slot(self, env: gymnasium.Env[Any, Any], stage: int, index: int) -> Slot:
        number = stage * self.config.envs_per_stage + index
        seed = self._seed(stage, index)
        return Slot(env, self._writer.write, label=f"{self.config.name}[{number}]", seed=seed)

    def _seed(self, stage: int, env: int) -> int:
        return env_seed(
            self.config.seed, rank=self.rank, stage=stage, env=env, incarnation=self.incarnation
        )

    def _close_evaluation(self) -> None:
        for slot in self._evaluation_slots:
            slot.close()


async def _all(stages: Iterable[Coroutine[Any, Any, Made]]) -> list[Made]:
    """Run all stages at once; the first failure cancels the others and is raised as it is."""
    async with task_group() as group:
        tasks = [group.create_task(stage) for stage in stages]
    return [task.result() for task in tasks]
