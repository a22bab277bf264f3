"""The workers of a language run, and what this process asks of them.

::

    rollout      serve       from start to end; takes turns with the actors where they share devices
    inference    run         from start to end
    reward       run         from start to end
    learners     train, publish, save, compare: by turns (`learners.py`)

Rollout, inference and reward workers are restarted when they die: what they held comes back. An
actor's death ends the run, which can be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, assert_never

import msgspec
import numpy as np

from rlinf_async.messages.language import Prompt, Request, Tokens
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.jobs.language.backends import inference_backend, inference_config
from rlinf_async.runtime.jobs.language.channels import LanguageChannels
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.layout import layout_of, options
from rlinf_async.runtime.jobs.language.learners import Learners, Trained
from rlinf_async.runtime.jobs.language.placement import plan_roles, takes_turns
from rlinf_async.runtime.jobs.language.scheduling import Scheduling
from rlinf_async.runtime.stall import WorkEvent
from rlinf_async.runtime.supervise import Restart
from rlinf_async.workers.inference import InferenceConfig, InferenceReport, InferenceWorker
from rlinf_async.workers.reward import RewardReport, RewardWorker
from rlinf_async.workers.rollout.language import LanguageRolloutReport, LanguageRolloutWorker
from rlinf_async.workers.scheduler import SchedulerSummary

COMPARED_TOKENS = 8
"""tokens of each sequence that the engine's and the actor's log-probs are compared on"""


class Roles:
    """Every worker of the run.

    Args:
        cluster: where to launch them.
        config: of the run.
        channels: its channels.
        model: the model's folder.
        verifiers: names of those that the data needs.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LanguageConfig,
        channels: LanguageChannels,
        model: Path,
        verifiers: Sequence[str] = (),
    ) -> None:
        self._plan = plan_roles(config, cluster.devices)
        self.learners = Learners(cluster, config, channels, model, self._plan)
        self._cluster = cluster
        self._config = config
        self._channels = channels
        self._model = model
        self._verifiers = verifiers
        self._shared = takes_turns(self._plan)
        others = self._plan.ranks.keys() - {"rollout"}
        self._apart = not any(self._plan.shared("rollout", other) for other in others)
        """whether rollout workers share devices with no other role"""
        self._rollouts_offloaded = False
        self.scheduling: Scheduling | None = None
        """of a run with a scheduler"""
        self._layout = layout_of(config, self._plan) if config.scheduled else None
        if self._layout is not None:
            self.scheduling = Scheduling(cluster, config, self._layout)
            # Idle ranks free memory first.
            self._apart = self._apart and not self._layout.accelerated
        self._version_taken = WorkEvent()
        self._inferring: GroupCall[list[InferenceReport]] | None = None

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

    async def _launch_actors(self, resume: Path | None) -> None:
        await self.learners.launch_actors(resume)
        if self.scheduling is not None:
            await self.scheduling.prepare(self.learners.actors)

    async def connect(self) -> None:
        """Give each worker that streams its channels: it runs until they end."""
        channels = self._channels
        self._serving: GroupCall[list[LanguageRolloutReport]] = self._rollouts.call(
            LanguageRolloutWorker.serve,
            channels.requests.receiver,
            channels.generated.sender,
            channels.weights.receiver,
            channels.taken.sender,
            None if self.scheduling is None else self.scheduling.orders,
            None if self.scheduling is None else self.scheduling.reports,
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
            RewardWorker.run, channels.inferred.receiver, channels.scored.sender
        )
        if self.scheduling is not None:
            await self.scheduling.launch()
            await self.scheduling.connect(self.learners.actors, channels.requests.receiver)

    async def _watch_versions(self) -> None:
        """Note that a rollout worker serves new weights, each time one does."""
        async for _ in self._channels.taken.receiver:
            self._version_taken.set()

    async def finish(self) -> SchedulerSummary | None:
        """Wait for the workers that stream, once the requests have ended; what a scheduler did."""
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
            iteration: which.
            whole: waits until all of its samples are collected. Roles that share devices train
                only then, others on the samples that are there.
        """
        if self._shared:
            await whole()
            await self._rollouts.call(LanguageRolloutWorker.offload)
            self._rollouts_offloaded = True
        pipelined = self._config.actor.pipelined and not self._shared
        return await self.learners.train(iteration, pipelined=pipelined)

    async def publish(self) -> int:
        """Publish the actors' weights; the version. Gives shared devices back to the rollout."""
        version = await self.learners.publish()
        if self._shared:
            await self.learners.offload()
        if self._rollouts_offloaded:
            await self._rollouts.call(LanguageRolloutWorker.onload)
            self._rollouts_offloaded = False
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
            await self._rollouts.call(LanguageRolloutWorker.offload)
        yield
        if self._shared:
            await self.learners.offload()
            await self._rollouts.call(LanguageRolloutWorker.onload)

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
        if not prompts or self._config.rollout.backend == "toy":
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
        self._rollouts: WorkerGroup[LanguageRolloutWorker] = await self._cluster.launch(
            LanguageRolloutWorker,
            _engine_config(config, self._model),
            config.rollout.serving,
            backend=config.rollout.backend,
            scheduled=config.scheduled,
            guests=config.scheduler.guests,
            count=config.rollout_ranks,
            name="Rollout",
            restart=Restart(max=counts.max_restarts),
            **options("rollout", self._layout, self._plan, counts.environment),
        )

    async def _launch_others(self) -> None:
        config, counts = self._config, self._config.cluster
        if config.needs_inference:
            device = self._plan.device("inference", own_process=counts.processes)
            self._inference: WorkerGroup[InferenceWorker] = await self._cluster.launch(
                InferenceWorker,
                inference_config(config, self._model, device),
                InferenceConfig(previous=config.needs_previous, reference=config.needs_reference),
                backend=inference_backend(config),
                count=counts.inference_workers,
                name="Inference",
                restart=Restart(max=counts.max_restarts),
                **self._plan.options("inference", counts.environment),
            )
        preload = (*config.reward.preload, *self._verifiers)
        self._rewards: WorkerGroup[RewardWorker] = await self._cluster.launch(
            RewardWorker,
            msgspec.structs.replace(config.reward, preload=preload),
            count=counts.reward_workers,
            name="Reward",
            restart=Restart(max=counts.max_restarts),
            **self._plan.options("reward", counts.environment),
        )


def _retrieve(watching: asyncio.Task[None]) -> None:
    """Mark the failure of a rollout worker as seen: its own call raises it."""
    if not watching.cancelled():
        watching.exception()


def _sequence(prompt: Tokens) -> tuple[Tokens, Tokens]:
    """A prompt, and a response made of its own tokens: any would do."""
    return prompt, np.resize(prompt, COMPARED_TOKENS).astype(np.int32)


def _engine_config(config: LanguageConfig, model: Path) -> Any:
    """The rollout engine's own configuration: it reads the model folder, weights come later."""
    rollout = config.rollout
    match rollout.backend:
        case "toy":
            return rollout.toy
        case "vllm":
            return msgspec.structs.replace(rollout.vllm, model=str(model))
        case "transformers":
            return msgspec.structs.replace(rollout.transformers, model=str(model))
        case _:
            assert_never(rollout.backend)
