"""The workers of a language run, their channels, and what this process asks of them.

::

    episode      run         from start to end; only where samples are episodes
    rollout      serve       from start to end; takes turns with the actors where they share devices
    inference    run         from start to end
    reward       run         from start to end
    learners     train, publish, save, compare: by turns

    this process --Request--> rollout --Sample--> [inference] --Sample--> reward
         ^                                                                  |
         +--------------------------ScoredSample----------------------------+
    with episodes: this process --Request--> episode --Sample--> [inference] --Sample--> reward
                   episode --Request, a turn--> rollout --Sample, by key--> episode
    where a verifier judges groups: [inference] --Sample--> this process --all of a prompt--> reward
    this process --SampleGroup, by key of the DP rank--> [critic] --SampleGroup--> actor
    where the actors' number changes: critic --SampleGroup--> this process --SampleGroup--> actor
    actor --WeightUpdate, `Latest`--> rollout --WeightsTaken--> this process

Episode, rollout, inference and reward workers are restarted when they die: what they held comes
back. The death of an actor or a critic ends the run, which can be resumed.

                waits for                                unblocked by
    critic      the groups of its share; all of them     the collector
                before it learns
    actor       the groups of its share                  the critic of its data rank, or the
                                                         collector

A checkpoint holds both: the critic's shards lie in ``critic/`` inside the actor's folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from rlinf_async.channels import Channel, Latest
from rlinf_async.config.registry import load_entry_point
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    LanguageTrainReport,
    Prompt,
    Request,
    Sample,
    SampleGroup,
    ScoredSample,
    Tokens,
    WeightsTaken,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.rewards.judging import group_verifiers
from rlinf_async.runtime.calls import GroupCall, WorkerGroup
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import max_deliveries, sibling
from rlinf_async.runtime.jobs.language.backends import (
    actor_config,
    critic_config,
    environment_of,
    inference_backend,
    inference_config,
    layout_of,
    options,
    plan_roles,
    takes_turns,
    teacher_config,
    teacher_questions,
)
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.supervise import Restart
from rlinf_async.runtime.wakers import WorkEvent
from rlinf_async.workers.actor import LanguageActor, LanguageBatches
from rlinf_async.workers.base import BuildError
from rlinf_async.workers.critic import LanguageCritic
from rlinf_async.workers.episode import EpisodeReport, EpisodeWorker
from rlinf_async.workers.inference import (
    EarlierVersions,
    InferenceConfig,
    InferenceReport,
    InferenceWorker,
)
from rlinf_async.workers.reward import RewardReport, RewardWorker
from rlinf_async.workers.rollout.language import LanguageRolloutReport, LanguageRolloutWorker

if TYPE_CHECKING:  # a run without a scheduler does not load it
    from rlinf_async.runtime.jobs.language.scheduling import Scheduling
    from rlinf_async.workers.scheduler import SchedulerSummary


class LanguageChannels:
    """Every channel of the run.

    Capacities follow from admission: there are never more than ``(max_staleness + 1)`` iterations
    of samples under way, so there is room for every sample that is done, and a slow trainer does
    not hold up a rollout worker.
    """

    def __init__(self, cluster: Cluster, config: LanguageConfig, *, gathers: bool = False) -> None:
        """``gathers``: whether a verifier judges all samples of a prompt at once."""
        training, counts = config.training, config.cluster
        ahead = training.max_staleness + 1
        groups = training.prompts * ahead
        samples = max(config.iteration_samples * ahead, config.evaluation.samples)

        def restarted(workers: int) -> int:
            return max_deliveries(workers, counts.max_restarts)

        def to_reward(name: str) -> Channel[Sample]:
            deliveries = restarted(counts.reward_workers)
            return cluster.channel(Sample, name=name, capacity=samples, max_deliveries=deliveries)

        self.requests: Channel[Request] = cluster.channel(
            Request,
            name="requests",
            capacity=samples,
            max_deliveries=restarted(config.rollout_ranks + config.scheduled),
            stealing=config.sticky,
        )
        self.tasks: Channel[Request] = self.requests
        """first request of each sample; ``requests`` where a sample is one answer"""
        self.generated: Channel[Sample] = cluster.channel(
            Sample,
            name="generated",
            capacity=samples,
            max_deliveries=restarted(
                counts.inference_workers
                if config.needs_inference
                else max(counts.reward_workers, 1)
            ),
        )
        self.turns: Channel[Sample] = self.generated
        """answers of rollout workers: turns of episodes, by key of their name; ``generated`` where
        a sample is one answer"""
        if config.has_episodes:
            restarts = restarted(counts.episode_workers)
            self.tasks = cluster.channel(
                Request, name="tasks", capacity=samples, max_deliveries=restarts
            )
            # Each key has room for itself: no answer waits for one that is leased meanwhile.
            self.turns = cluster.channel(
                Sample, name="turns", capacity=samples, max_deliveries=restarts
            )
        self.inferred: Channel[Sample] = self.generated
        """samples with log-probs of the actor's forward pass; ``generated`` where none are asked
        for"""
        if config.needs_inference:
            self.inferred = to_reward("inferred")
        self.gathered: Channel[Sample] = self.inferred
        """samples to be scored, those of a prompt as one item where they are judged at once;
        ``inferred`` where none are"""
        if gathers:
            self.gathered = to_reward("gathered")
        self.scored: Channel[ScoredSample] = cluster.channel(
            ScoredSample, name="scored", capacity=samples
        )
        self.groups: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="groups", capacity=groups
        )
        self.valued: Channel[SampleGroup] = self.groups
        """groups with values, by key of the critic; ``groups`` where there is no critic"""
        if config.has_critic:
            self.valued = cluster.channel(SampleGroup, name="valued groups", capacity=groups)
        self.to_train: Channel[SampleGroup] = self.valued
        """groups to train, by key of the actor; ``valued`` where each actor has the critic of its
        rank"""
        if config.has_critic and config.scheduled:
            self.to_train = cluster.channel(SampleGroup, name="dispatched groups", capacity=groups)
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        self.taken: Channel[WeightsTaken] = cluster.channel(
            WeightsTaken, name="weights taken", capacity=16 * config.rollout_ranks
        )

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep the ends of this process open between two calls of the workers."""
        with ExitStack() as ends:
            ends.enter_context(self.scored.receiver)
            ends.enter_context(self.groups.sender)
            ends.enter_context(self.groups.receiver)
            for channel in (self.valued, self.to_train):  # the same where there is no critic
                ends.enter_context(channel.receiver)
                ends.enter_context(channel.sender)
            if self.gathered is not self.inferred:
                ends.enter_context(self.gathered.sender)
            with self.tasks.sender:
                yield


CRITIC = "critic"
"""folder of the critic inside a checkpoint"""


class Trained(NamedTuple):
    """The reports of one iteration, one of each rank."""

    actors: Sequence[LanguageTrainReport]
    critics: Sequence[LanguageTrainReport] = ()


class Learners:
    """The actors and their critics.

    Args:
        cluster: where to launch them.
        config: the run's configuration.
        channels: channels of the run.
        model: the model's folder.
        plan: the devices of each role.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LanguageConfig,
        channels: LanguageChannels,
        model: Path,
        plan: PlacementPlan,
    ) -> None:
        self._plan = plan
        self._layout = layout_of(config, plan) if config.scheduled else None
        self._in_turns = plan.shared("actor", "critic")
        self._cluster = cluster
        self._config = config
        self._channels = channels
        self._model = model

    async def launch_actors(self, resume: Path | None) -> None:
        """Start the actors."""
        config = self._config
        part = config.actor.part
        environment = environment_of(config, self._plan, "actor")
        actor = cast(type[LanguageActor], load_entry_point(part.actor))
        if config.scheduled:
            from rlinf_async.workers.scheduler import ScheduledActor

            actor = ScheduledActor
        self.actors: WorkerGroup[LanguageActor] = await self._cluster.launch(
            actor,
            actor_config(config, self._model, self._device("actor")),
            batches(config),
            backend=config.actor.backend,
            resume=None if resume is None else str(resume),
            max_staleness=config.training.max_staleness,
            count=config.actors if self._layout is None else len(self._layout.actor),
            name="Actor",
            collective=self._collective(),
            **options("actor", self._layout, self._plan, environment),
        )

    async def launch_critics(self, resume: Path | None) -> None:
        """Start the critics, if there are any."""
        config = self._config
        if not config.has_critic:
            return
        part = config.critic_part
        self._critics: WorkerGroup[LanguageCritic] = await self._cluster.launch(
            cast(type[LanguageCritic], load_entry_point(part.critic)),
            critic_config(config, self._model, self._device("critic")),
            critic_batches(config),
            actor_ranks=config.data_ranks,
            backend=part.critic_trainer,
            resume=None if resume is None else str(resume / CRITIC),
            max_staleness=config.training.max_staleness,
            count=config.cluster.critics,
            name="Critic",
            collective=self._plan.collective("critic"),
            **self._plan.options("critic", environment_of(config, self._plan, "critic")),
        )

    def _collective(self) -> str | None:
        """torch.distributed's backend between the actors."""
        if not self._config.actor.part.collective:
            return None
        if self._layout is not None:
            return "nccl" if self._layout.accelerated else "gloo"
        return self._plan.collective("actor")

    def _device(self, role: str) -> str:
        return self._plan.device(role, own_process=self._config.cluster.processes)

    async def train(self, iteration: int, *, pipelined: bool) -> Trained:
        """Train the next iteration: actors and critics that share devices one after the other.

        Args:
            iteration: number of the iteration.
            pipelined: actors begin with what is there; else once their share is.
        """
        in_turns = self._in_turns
        if in_turns:
            await self.actors.call(LanguageActor.offload)
        learning = self._start_critics()
        critics: Sequence[LanguageTrainReport] = ()
        if in_turns and learning is not None:
            critics = await learning
            await self._critics.call(LanguageCritic.offload)
        method = LanguageActor.run_training_pipeline if pipelined else LanguageActor.run_training
        if iteration < self._config.critic.warmup_iterations:
            method = LanguageActor.skip_training
        actors = await self.actors.call(method, self._channels.to_train.receiver)
        if learning is not None and not in_turns:
            critics = await learning
        return Trained(actors, critics)

    def _start_critics(self) -> GroupCall[list[LanguageTrainReport]] | None:
        if not self._config.has_critic:
            return None
        channels = self._channels
        return self._critics.call(
            LanguageCritic.value_and_train, channels.groups.receiver, channels.valued.sender
        )

    async def publish(self) -> int:
        """Publish the actors' weights; the version."""
        versions = await self.actors.call(
            LanguageActor.sync_model_to_rollout, self._channels.weights.sender
        )
        return versions[0]

    async def offload(self) -> None:
        """Give the devices' memory back."""
        await self.actors.call(LanguageActor.offload)
        if self._config.has_critic:
            await self._critics.call(LanguageCritic.offload)

    async def begin_save(self, path: Path) -> None:
        """Start writing a checkpoint; training may go on."""
        await self.actors.call(LanguageActor.begin_checkpoint, str(path))
        if self._config.has_critic:
            await self._critics.call(LanguageCritic.begin_checkpoint, str(sibling(path)))

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""
        await self.actors.call(LanguageActor.checkpoint_written)
        if self._config.has_critic:
            await self._critics.call(LanguageCritic.checkpoint_written)
            # In its own place only now: the actor's folder is put together before it has a name.
            os.replace(sibling(path), path / CRITIC)

    async def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder, without its tokenizer."""
        await self.actors.call(LanguageActor.save_pretrained, str(path))

    async def compare(
        self, sequences: list[tuple[Tokens, Tokens]], log_probs: list[Floats]
    ) -> float:
        """The largest difference between an engine's log-probs and the actors'.

        Raises:
            WeightsDisagree: it is more than the configuration allows.
        """
        found = await self.actors.call_on(
            range(self._config.actors),  # those that train between two iterations
            LanguageActor.check_weight_update_equal,
            sequences,
            log_probs,
            self._config.weights_tolerance,
            self._config.rounded,
        )
        return max(found)


def batches(config: LanguageConfig) -> LanguageBatches:
    """Return how an iteration is cut up."""
    actor = config.actor
    return LanguageBatches(
        samples=config.iteration_samples,
        group_size=config.training.group_size,
        optimizer_steps=actor.global_batches,
        epochs=actor.epochs,
        micro_batch_size=actor.micro_batch_size,
        max_tokens_per_micro_batch=actor.max_tokens,
        balance_window=actor.balance_window,
    )


def critic_batches(config: LanguageConfig) -> LanguageBatches:
    """Return how a critic cuts an iteration up: as the actors do, but for its own micro-batches."""
    size = config.critic.micro_batch_size
    if size is None:
        return batches(config)
    return msgspec.structs.replace(
        batches(config), micro_batch_size=size, max_tokens_per_micro_batch=None, balance_window=None
    )


COMPARED_TOKENS = 8
"""tokens of each sequence that the engine's and the actor's log-probs are compared on"""


class Roles:
    """Every worker of the run.

    Args:
        cluster: where to launch them.
        config: the run's configuration.
        channels: channels of the run.
        model: the model's folder.
        verifiers: names of those that the data needs.
        of_sets: names of those that evaluation sets need.
        swapped: whether samples may be under way whose records name another verifier than the
            configuration.
        of_groups: those of the verifiers that judge all samples of a prompt at once.
        earlier: versions of the policy that are its teachers.
        learners: whether there are any.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LanguageConfig,
        channels: LanguageChannels,
        model: Path,
        verifiers: Sequence[str] = (),
        *,
        of_sets: Sequence[str] = (),
        swapped: bool = False,
        of_groups: frozenset[str] = frozenset(),
        earlier: EarlierVersions | None = None,
        learners: bool = True,
    ) -> None:
        self._earlier = earlier
        self._plan = plan_roles(config, cluster.devices, learners=learners)
        self.learners = Learners(cluster, config, channels, model, self._plan)
        self._cluster = cluster
        self._config = config
        self._channels = channels
        self._model = model
        self._verifiers, self._of_sets = verifiers, of_sets
        self._swapped = swapped
        self._of_groups = of_groups
        self.connected = False
        """whether the workers that stream do so"""
        self._shared = takes_turns(self._plan)
        others = self._plan.ranks.keys() - {"rollout"}
        self._apart = not any(self._plan.shared("rollout", other) for other in others)
        """whether rollout workers share devices with no other role"""
        self._rollouts_stopped = False
        self.scheduling: Scheduling | None = None
        """scheduling, in a run with a scheduler"""
        self._layout = layout_of(config, self._plan) if config.scheduled else None
        if self._layout is not None:
            from rlinf_async.runtime.jobs.language.scheduling import Scheduling

            self.scheduling = Scheduling(cluster, config, self._layout)
            # Idle ranks free memory first.
            self._apart = self._apart and not self._layout.accelerated
        self._version_taken = WorkEvent()
        self._inferring: GroupCall[list[InferenceReport]] | None = None
        self._acting: GroupCall[list[EpisodeReport]] | None = None

    async def launch(self, resume: Path | None) -> None:
        """Start all workers, each in a process of its own where there are processes."""
        learners = self.learners
        if self._config.cluster.processes and self._apart:
            await asyncio.gather(
                self._launch_actors(resume),
                learners.launch_critics(resume),
                self._launch_rollouts(),
                self._launch_others(),
            )
            return
        # Threads of one process share torch's random numbers, and roles that share a device its
        # memory, of which an engine that starts measures what others use: one after the other.
        await self._launch_actors(resume)
        await learners.launch_critics(resume)
        if self._shared:
            await learners.offload()  # an engine takes its share of memory that must be free
        await self._launch_rollouts()
        await self._launch_others()

    async def launch_answering(self) -> None:
        """Start the workers that answer and score, and none that learns."""
        await self._launch_rollouts()
        await self._launch_others()

    async def _launch_actors(self, resume: Path | None) -> None:
        await self.learners.launch_actors(resume)
        if self.scheduling is not None:
            await self.scheduling.prepare(self.learners.actors)

    async def connect(self) -> None:
        """Give each worker that streams its channels: it runs until they end."""
        channels = self._channels
        ends = (
            channels.requests.receiver,
            channels.turns.sender,
            channels.weights.receiver,
            channels.taken.sender,
        )
        self._serving: GroupCall[list[LanguageRolloutReport]]
        if self.scheduling is None:
            serve = LanguageRolloutWorker.serve
            self._serving = self._rollouts.call(serve, *ends, sticky=self._config.sticky)
        else:
            self._serving = self.scheduling.serve(self._rollouts, *ends)
        if self._config.has_episodes:
            self._acting = self._episodes.call(
                EpisodeWorker.run,
                channels.tasks.receiver,
                channels.requests.sender,
                channels.turns.receiver,
                channels.generated.sender,
                sticky=self._config.sticky,
            )
        if self._config.needs_inference:
            self._inferring = self._inference.call(
                InferenceWorker.run,
                channels.generated.receiver,
                channels.inferred.sender,
                channels.weights.receiver,
            )
        self._watching_versions = asyncio.create_task(self._watch_versions(), name="weights taken")
        self._watching_versions.add_done_callback(_retrieve)
        self._scoring: GroupCall[list[RewardReport]] = self._rewards.call(
            RewardWorker.run, channels.gathered.receiver, channels.scored.sender
        )
        if self.scheduling is not None:
            await self.scheduling.launch()
            tasks = channels.tasks.receiver
            await self.scheduling.connect(self.learners.actors, channels.requests.receiver, tasks)
        self.connected = True

    async def _watch_versions(self) -> None:
        """Note that a rollout worker serves new weights, each time one does."""
        async for _ in self._channels.taken.receiver:
            self._version_taken.set()

    async def finish(self) -> SchedulerSummary | None:
        """Wait for the workers that stream, once the tasks have ended; what a scheduler did."""
        if self._acting is not None:
            await self._acting
        if self.scheduling is not None:
            await self.scheduling.end_orders()
        await self._serving
        scheduled = None if self.scheduling is None else await self.scheduling.finish()
        await self._watching_versions
        if self._inferring is not None:
            await self._inferring
        await self._scoring
        return scheduled

    async def train(self, iteration: int, whole: Callable[[], Awaitable[None]]) -> Trained:
        """Train the next iteration.

        Args:
            iteration: number of the iteration.
            whole: waits until all of its samples are collected. Roles that share devices train
                only then, others on the samples that are there.
        """
        if self._shared:
            await whole()
            await self._rollouts.call(LanguageRolloutWorker.stop)
            self._rollouts_stopped = True
        pipelined = self._config.actor.pipelined and not self._shared
        return await self.learners.train(iteration, pipelined=pipelined)

    async def publish(self) -> int:
        """Publish the actors' weights; the version. Gives shared devices back to the rollout."""
        version = await self.learners.publish()
        if self._shared:
            await self.learners.offload()
        if self._rollouts_stopped:
            await self._rollouts.call(LanguageRolloutWorker.resume)
            self._rollouts_stopped = False
        return version

    async def export(self, path: Path) -> None:
        """Write the model at the end of the run: nothing is generated any more."""
        async with self._turn_of_learners():
            await self.learners.export(path)

    @asynccontextmanager
    async def _turn_of_learners(self) -> AsyncIterator[None]:
        """Give shared devices to the learners while the block runs.

        Rollout workers get them back: they see the end of the requests only while they take some.
        """
        if self._shared:
            await self._rollouts.call(LanguageRolloutWorker.stop)
        yield
        if self._shared:
            await self.learners.offload()
            await self._rollouts.call(LanguageRolloutWorker.resume)

    async def partial_requests(self) -> list[Request]:
        """The requests that are being answered, with the tokens generated so far."""
        found = await self._rollouts.call(LanguageRolloutWorker.partial_requests)
        return [request for one in found for request in one]

    async def check_weights(self, prompts: Sequence[Prompt], version: int) -> float | None:
        """Compare every engine's log-probs with the actors', once it serves this version.

        Returns the largest difference; None where there is nothing to compare on, or the engine
        is a toy.

        Raises:
            WeightsDisagree: they differ by more than the configuration allows.
        """
        if not prompts or not self._config.rollout.part.has_weights:
            return None
        sequences = [_sequence(one.token_ids) for one in prompts]
        await self._taken(version)
        answers = await self._rollouts.call_on(
            self._at_home, LanguageRolloutWorker.log_probs, sequences, version
        )
        async with self._turn_of_learners():
            return max([await self.learners.compare(sequences, answer) for answer in answers])

    @property
    def _at_home(self) -> range:
        """The rollout workers that serve between two iterations."""
        return range(self._config.rollout_workers)

    async def _taken(self, version: int) -> None:
        """Wait until every rollout worker with devices of its own serves this version."""
        while True:
            self._version_taken.clear()  # first: what is taken while they are asked sets it again
            versions = await self._rollouts.call_on(self._at_home, LanguageRolloutWorker.version)
            if min(versions) >= version:
                return
            await self._version_taken.wait()

    async def _launch_rollouts(self) -> None:
        config, counts = self._config, self._config.cluster
        launch: Callable[..., Awaitable[WorkerGroup[LanguageRolloutWorker]]]
        if self.scheduling is None:
            launch = partial(self._cluster.launch, LanguageRolloutWorker)
        else:
            launch = self.scheduling.launch_rollouts
        self._rollouts = await launch(
            *self._rollout_arguments(config),
            backend=config.rollout.backend,
            count=config.rollout_ranks,
            name="Rollout",
            restart=Restart(max=counts.max_restarts),
            **options("rollout", self._layout, self._plan, counts.environment),
        )

    async def _launch_others(self) -> None:
        config, counts = self._config, self._config.cluster
        if config.has_episodes:
            self._episodes: WorkerGroup[EpisodeWorker] = await self._cluster.launch(
                EpisodeWorker,
                *self._episode_arguments(config),
                count=counts.episode_workers,
                name="Episode",
                restart=Restart(max=counts.max_restarts),
                **self._plan.options("episode", counts.environment),
            )
        if config.needs_inference:
            self._inference: WorkerGroup[InferenceWorker] = await self._cluster.launch(
                InferenceWorker,
                *self._inference_arguments(config),
                backend=inference_backend(config.actor),
                count=counts.inference_workers,
                name="Inference",
                restart=Restart(max=counts.max_restarts),
                **self._plan.options("inference", counts.environment),
            )
        self._rewards: WorkerGroup[RewardWorker] = await self._cluster.launch(
            RewardWorker,
            *self._reward_arguments(config),
            count=counts.reward_workers,
            name="Reward",
            restart=Restart(max=counts.max_restarts),
            **self._plan.options("reward", counts.environment),
        )

    # ---- arguments of the workers, which a swap changes

    def _rollout_arguments(self, config: LanguageConfig) -> tuple[Any, ...]:
        engine = config.rollout.part.with_model(config.rollout.engine, self._model)
        return engine, config.rollout.serving

    def _episode_arguments(self, config: LanguageConfig) -> tuple[Any, ...]:
        return config.episode, str(self._model), config.data.chat_options

    def _inference_arguments(self, config: LanguageConfig) -> tuple[Any, ...]:
        device = self._plan.device("inference", own_process=config.cluster.processes)
        asked = InferenceConfig(
            previous=config.needs_previous,
            reference=config.needs_reference,
            teacher=teacher_questions(config, self._model),
            earlier=self._earlier,
        )
        teacher = teacher_config(config, device)
        return inference_config(config, self._model, device), asked, teacher

    def _reward_arguments(self, config: LanguageConfig) -> tuple[Any, ...]:
        verifier = config.data.verifier if self._swapped else ""
        names = (verifier,) if verifier else self._verifiers
        preload = tuple(dict.fromkeys((*config.reward.preload, *names, *self._of_sets)))
        device = self._plan.device("reward", own_process=config.cluster.processes)
        return msgspec.structs.replace(config.reward, preload=preload), verifier, device

    async def swap(self, role: str, config: LanguageConfig) -> str:
        """Replace the workers of a role by some under this configuration; says how many.

        Raises:
            BuildError: they cannot be replaced in this run.
            WorkerError: a new one could not be started; the old ones go on.
        """
        self._check_swap(role)
        if role == "reward":
            self._check_judges(config)
            group: WorkerGroup[Any] = self._rewards
            before = self._swapped
            self._swapped = before or config.data.verifier != self._config.data.verifier
            finish = FINISH + 2 * config.reward.longest
            try:
                await group.replace(RewardWorker, *self._reward_arguments(config), finish=finish)
            except BaseException:
                self._swapped = before
                raise
        elif role == "episode":
            group = self._episodes
            finish = FINISH + config.episode.seconds
            arguments = self._episode_arguments(config)
            await group.replace(EpisodeWorker, *arguments, finish=finish)
        elif role == "inference":
            group, backend = self._inference, inference_backend(config.actor)
            arguments = self._inference_arguments(config)
            await group.replace(InferenceWorker, *arguments, backend=backend)
        else:
            group, backend = self._rollouts, config.rollout.backend
            arguments = self._rollout_arguments(config)
            await group.replace(
                LanguageRolloutWorker, *arguments, backend=backend, finish=GENERATION
            )
        self._config = config
        return f"{len(group)} worker{'s' if len(group) > 1 else ''} replaced"

    def _check_judges(self, config: LanguageConfig) -> None:
        """Raise `BuildError` where samples reach the reward workers otherwise than the verifiers of
        this configuration judge them: each by itself, or all of a prompt at once."""
        if bool(config.reward.model) != bool(self._config.reward.model):
            raise BuildError(
                "reward.model: a run that was started without a reward model gets none, and one "
                "with one keeps one: stop the run (rlinf-async stop), and go on with --resume"
            )
        swapped_in = config.data.verifier
        pairs = [(one, swapped_in or one) for one in self._verifiers]
        pairs += [(one, one) for one in self._of_sets]
        of_groups = group_verifiers(new for _, new in pairs)
        ways = "each answer by itself", "all answers to a prompt at once"
        for name, new in pairs:
            before, now = name in self._of_groups, new in of_groups
            if before != now:
                raise BuildError(
                    f"data.verifier: {new!r} judges {ways[now]}, and the samples of this run are "
                    f"collected for {name!r}, which judges {ways[before]}: stop the run "
                    "(rlinf-async stop), and go on with --resume"
                )

    def _check_swap(self, role: str) -> None:
        """Raise `BuildError` for a role that this run does not have, or cannot do without."""
        config, why = self._config, ""
        if role == "episode" and not config.has_episodes:
            why = "its samples are no episodes (episode.run is not set)"
        elif role == "inference" and not config.needs_inference:
            why = "it has none (cluster.inference_workers = 0)"
        elif role == "rollout" and self.scheduling is not None:
            why = "a scheduler gives devices to its rollout workers and takes them away"
        elif role == "rollout" and self._shared:
            why = "its rollout workers take turns with the learners on the same devices"
        if why:
            raise BuildError(f"workers of the role {role!r} cannot be swapped in this run: {why}")


FINISH = 30.0
"""seconds beyond the time limit of a verifier, or an agent, for what is under way to be finished"""
GENERATION = 600.0
"""the same for answers that are being generated"""


def _retrieve(watching: asyncio.Task[None]) -> None:
    """Mark the failure of a rollout worker as seen: its own call raises it."""
    if not watching.cancelled():
        watching.exception()


def _sequence(prompt: Tokens) -> tuple[Tokens, Tokens]:
    """A prompt, and a response made of its own tokens: any would do."""
    return prompt, np.resize(prompt, COMPARED_TOKENS).astype(np.int32)
