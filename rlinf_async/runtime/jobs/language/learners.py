"""The workers of a language run that learn: actors, and critics where the advantage needs values.

::

    groups --> [ critic of rank r --groups with values--> ] actor of rank r
                                                              |
                                               version + 1 ---+--> rollout, inference

                waits for                                unblocked by
    critic      the groups of its share; all of them     the collector
                before it learns
    actor       the groups of its share                  the critic of its rank, or the collector

A checkpoint holds both: the critic's shards lie in ``critic/`` inside the actor's folder. The
death of either ends the run, which can be resumed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlinf_async.config import UsageError
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import LanguageTrainReport, Tokens
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.checkpoints import beside
from rlinf_async.runtime.jobs.language.backends import (
    batches,
    critic_batches,
    critic_config,
    trainer_config,
)
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.graph import Graph
from rlinf_async.workers.actor import FSDPActor
from rlinf_async.workers.critic import FSDPCritic

CRITIC = "critic"
"""of a checkpoint: the critic's folder inside it"""


class Trained(NamedTuple):
    """What one iteration taught: one report of each rank."""

    actors: Sequence[LanguageTrainReport]
    critics: Sequence[LanguageTrainReport] = ()


def check_resumed_critic(config: LanguageConfig, checkpoint: Path) -> None:
    """Raise `UsageError` where a run with critics would go on from a checkpoint without one."""
    if config.has_critic and not (checkpoint / CRITIC).is_dir():
        raise UsageError(
            f"{checkpoint} was written by a run without a critic, so there are no values to go on "
            f"with: start anew in another folder, or go on with the advantage it had (it is "
            f"{config.actor.advantage.name!r} now) and cluster.critics = 0"
        )


class Learners:
    """The actors and their critics.

    Args:
        cluster: where they are launched.
        config: of the run.
        graph: its channels.
        model: the model's folder.
    """

    def __init__(self, cluster: Cluster, config: LanguageConfig, graph: Graph, model: Path) -> None:
        self._cluster = cluster
        self._config = config
        self._graph = graph
        self._model = model

    async def launch_actors(self, resume: Path | None) -> None:
        """Start the actors."""
        config = self._config
        self._actors: WorkerGroup[FSDPActor] = await self._cluster.launch(
            FSDPActor,
            trainer_config(config, self._model),
            batches(config),
            backend=config.actor.backend,
            resume=None if resume is None else str(resume),
            max_staleness=config.training.max_staleness,
            count=config.cluster.actors,
            name="Actor",
            collective=config.collective,
            env_vars=config.cluster.environment,
        )

    async def launch_critics(self, resume: Path | None) -> None:
        """Start the critics, if there are any."""
        config = self._config
        if not config.has_critic:
            return
        toy = config.actor.backend == "toy"
        self._critics: WorkerGroup[FSDPCritic] = await self._cluster.launch(
            FSDPCritic,
            critic_config(config, self._model),
            critic_batches(config),
            actor_ranks=config.cluster.actors,
            backend="toy" if toy else "fsdp_critic",
            resume=None if resume is None else str(resume / CRITIC),
            max_staleness=config.training.max_staleness,
            count=config.cluster.critics,
            name="Critic",
            collective=config.collective,
            env_vars=config.cluster.environment,
        )

    async def train(self, iteration: int, *, pipelined: bool, in_turns: bool) -> Trained:
        """Train the next iteration.

        Args:
            iteration: which.
            pipelined: actors begin with what is there; else once their share is.
            in_turns: actors and critics share their devices: one after the other.
        """
        learning = self._start_critics()
        critics: Sequence[LanguageTrainReport] = ()
        if in_turns and learning is not None:
            critics = await learning
            await self._critics.call(FSDPCritic.offload)
        method = FSDPActor.run_training_pipeline if pipelined else FSDPActor.run_training
        if iteration < self._config.critic.warmup_iterations:
            method = FSDPActor.skip_training
        actors = await self._actors.call(method, self._graph.to_train.receiver)
        if learning is not None and not in_turns:
            critics = await learning
        return Trained(actors, critics)

    def _start_critics(self) -> GroupCall[list[LanguageTrainReport]] | None:
        if not self._config.has_critic:
            return None
        graph = self._graph
        return self._critics.call(
            FSDPCritic.value_and_train, graph.groups.receiver, graph.to_train.sender
        )

    async def publish(self) -> int:
        """Publish the actors' weights; the version."""
        versions = await self._actors.call(
            FSDPActor.sync_model_to_rollout, self._graph.weights.sender
        )
        return versions[0]

    async def offload(self) -> None:
        """Give the devices' memory back."""
        await self._actors.call(FSDPActor.offload)
        if self._config.has_critic:
            await self._critics.call(FSDPCritic.offload)

    async def begin_save(self, path: Path) -> None:
        """Start writing a checkpoint; training may go on."""
        await self._actors.call(FSDPActor.begin_checkpoint, str(path))
        if self._config.has_critic:
            await self._critics.call(FSDPCritic.begin_checkpoint, str(beside(path)))

    async def saved(self, path: Path) -> None:
        """Wait until the checkpoint that was begun is complete."""
        await self._actors.call(FSDPActor.checkpoint_written)
        if self._config.has_critic:
            await self._critics.call(FSDPCritic.checkpoint_written)
            # In its own place only now: the actor's folder is put together before it has a name.
            os.replace(beside(path), path / CRITIC)

    async def export(self, path: Path) -> None:
        """Write the model as a Hugging Face folder, without its tokenizer."""
        await self._actors.call(FSDPActor.save_pretrained, str(path))

    async def compare(
        self, sequences: list[tuple[Tokens, Tokens]], log_probs: list[Floats]
    ) -> float:
        """The largest difference between an engine's log-probs and the actors'.

        Raises:
            WeightsDisagree: it is more than the configuration allows.
        """
        tolerance = self._config.training.check_weights_tolerance
        found = await self._actors.call(
            FSDPActor.check_weight_update_equal, sequences, log_probs, tolerance
        )
        return max(found)
