"""The workers of a language run that train: actors, and critics where the advantage needs values.

::

    groups --> [ critic of data rank r --with values--> ] actor of data rank r
                                                              |
                                               version + 1 ---+--> rollout, inference

                waits for                                unblocked by
    critic      the groups of its share; all of them     the collector
                before it learns
    actor       the groups of its share                  the critic of its data rank, or the
                                                         collector

A checkpoint holds both: the critic's shards lie in ``critic/`` inside the actor's folder. The
death of either ends the run, which can be resumed.

How their batches follow from the run's configuration stands at the end; their trainers:
`backends`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import LanguageTrainReport, Tokens
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.checkpoints import sibling
from rlinf_async.runtime.jobs.language.backends import BACKENDS, actor_config, critic_config
from rlinf_async.runtime.jobs.language.channels import LanguageChannels
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.layout import layout_of, options
from rlinf_async.runtime.jobs.language.placement import environment_of
from rlinf_async.runtime.jobs.placement import Plan
from rlinf_async.workers.actor import LanguageActor, LanguageBatches
from rlinf_async.workers.critic import LanguageCritic

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
        config: of the run.
        channels: its channels.
        model: the model's folder.
        plan: the devices of each role.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LanguageConfig,
        channels: LanguageChannels,
        model: Path,
        plan: Plan,
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
        backend = BACKENDS[config.actor.backend]
        environment = environment_of(config, self._plan, "actor")
        self._actors: WorkerGroup[LanguageActor] = await self._cluster.launch(
            backend.actor,
            actor_config(config, self._model, self._device("actor")),
            batches(config),
            backend=backend.actor_trainer,
            resume=None if resume is None else str(resume),
            max_staleness=config.training.max_staleness,
            scheduled=config.scheduled,
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
        backend = BACKENDS[config.critic_backend]
        self._critics: WorkerGroup[LanguageCritic] = await self._cluster.launch(
            backend.critic,
            critic_config(config, self._model, self._device("critic")),
            critic_batches(config),
            actor_ranks=config.data_ranks,
            backend=backend.critic_trainer,
            resume=None if resume is None else str(resume / CRITIC),
            max_staleness=config.training.max_staleness,
            count=config.cluster.critics,
            name="Critic",
            collective=self._plan.collective("critic"),
            **self._plan.options("critic", environment_of(config, self._plan, "critic")),
        )

    @property
    def actors(self) -> WorkerGroup[LanguageActor]:
        """The launched actors."""
        return self._actors

    def _collective(self) -> str | None:
        """torch.distributed's backend between the actors."""
        if self._config.actor.backend == "toy":
            return None
        if self._layout is not None:
            return "nccl" if self._layout.accelerated else "gloo"
        return self._plan.collective("actor")

    def _device(self, role: str) -> str:
        return self._plan.device(role, own_process=self._config.cluster.processes)

    async def train(self, iteration: int, *, pipelined: bool) -> Trained:
        """Train the next iteration: actors and critics that share devices one after the other.

        Args:
            iteration: which.
            pipelined: actors begin with what is there; else once their share is.
        """
        in_turns = self._in_turns
        if in_turns:
            await self._actors.call(LanguageActor.offload)
        learning = self._start_critics()
        critics: Sequence[LanguageTrainReport] = ()
        if in_turns and learning is not None:
            critics = await learning
            await self._critics.call(LanguageCritic.offload)
        method = LanguageActor.run_training_pipeline if pipelined else LanguageActor.run_training
        if iteration < self._config.critic.warmup_iterations:
            method = LanguageActor.skip_training
        actors = await self._actors.call(method, self._channels.to_train.receiver)
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
        versions = await self._actors.call(
            LanguageActor.sync_model_to_rollout, self._channels.weights.sender
        )
        return versions[0]

    async def offload(self) -> None:
        """Give the devices' memory back."""
        await self._actors.call(LanguageActor.offload)
        if self._config.has_critic:
            await self._critics.call(LanguageCritic.offload)

    async def begin_save(self, path: Path) -> None:
        """Start writing a checkpoint; training may go on."""
        await self._actors.call(LanguageActor.begin_checkpoint, str(path))
        if self._config.has_critic:
            await self._critics.call(LanguageCritic.begin_checkpoint, str(sibling(path)))

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""
        await self._actors.call(LanguageActor.checkpoint_written)
        if self._config.has_critic:
            await self._critics.call(LanguageCritic.checkpoint_written)
            # In its own place only now: the actor's folder is put together before it has a name.
            os.replace(sibling(path), path / CRITIC)

    async def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder, without its tokenizer."""
        await self._actors.call(LanguageActor.save_pretrained, str(path))

    async def compare(
        self, sequences: list[tuple[Tokens, Tokens]], log_probs: list[Floats]
    ) -> float:
        """The largest difference between an engine's log-probs and the actors'.

        Raises:
            WeightsDisagree: it is more than the configuration allows.
        """
        found = await self._actors.call_on(
            range(self._config.actors),  # those that train between two iterations
            LanguageActor.check_weight_update_equal,
            sequences,
            log_probs,
            self._config.weights_tolerance,
            self._config.rounded,
        )
        return max(found)


def batches(config: LanguageConfig) -> LanguageBatches:
    """How an iteration is cut up."""
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
    """How a critic cuts an iteration up: as the actors do, but for its own micro-batches."""
    size = config.critic.micro_batch_size
    if size is None:
        return batches(config)
    return msgspec.structs.replace(
        batches(config), micro_batch_size=size, max_tokens_per_micro_batch=None, balance_window=None
    )
