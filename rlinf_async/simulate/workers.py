"""The workers of a simulation: the real ones, with what they compute replaced by virtual time.

::

    SimulatedRollout   `LanguageRolloutWorker` over `CostEngine`: taking, leases, interruption,
                       weights in flight, engines that die are its own
    SimulatedActor     `LanguageActor` over `CostTrainer`; one worker stands for all ranks, and lets
                       the seconds of a mini-batch pass where the real one has its compute thread
    Scorer             lets the time of environment steps pass, and scores, as a reward worker does
    SimulatedInference lets the time of log-probs pass, on devices of its own
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, Protocol

from rlinf_async.backends.cost.config import EnvCostConfig, InferenceCostConfig
from rlinf_async.backends.cost.engine import CostEngine
from rlinf_async.backends.cost.trainer import CostTrainer
from rlinf_async.backends.language import GenerationEngine
from rlinf_async.channels import LatestSender, Receiver, Sender
from rlinf_async.messages.language import (
    LanguageTrainReport,
    Request,
    Sample,
    SampleGroup,
    Scored,
    ScoredSample,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.actor.iteration import Batches, Iteration, Waiting
from rlinf_async.workers.actor.language import LanguageActor
from rlinf_async.workers.base import Worker
from rlinf_async.workers.rollout.language.worker import (
    AHEAD,
    LanguageRolloutReport,
    LanguageRolloutWorker,
)


class Site(Protocol):
    """What the workers need to know of their run, and tell it."""

    rollouts: dict[int, SimulatedRollout]
    actor: SimulatedActor
    holds: bool
    """whether the actor holds its devices"""
    collected: int
    """samples of the next mini-batch that the actor has"""

    def fit(self, number: int, engine: CostEngine) -> None:
        """Tell a new engine of an instance which devices it has."""

    def finished_sample(self, sample: Sample) -> None:
        """Note that a sample was generated."""

    async def boundary(self, arrived: int) -> None:
        """Change what is to be changed before the next mini-batch, and wait for devices."""

    async def publishing(self, seconds: float) -> None:
        """Let the time of gathering the weights of a version pass."""

    def inferring(self, tokens: int) -> AbstractContextManager[float]:
        """Return the context in which log-probs are computed, with its seconds."""
        ...

    def mini_batch(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which the actor trains, and does not change."""
        ...


class SimulatedRollout(LanguageRolloutWorker):
    """One rollout instance."""

    def __init__(self, world: Any, engine: Any, config: Any) -> None:
        super().__init__(engine, config, backend="cost")
        self._world: Site = world
        self._took = asyncio.Event()
        world.rollouts[self.rank] = self

    @property
    def engine(self) -> CostEngine:
        """The engine of the moment."""
        engine = self._live.engine
        assert isinstance(engine, CostEngine)
        return engine

    def make_engine(self) -> GenerationEngine:
        """Make an engine for the devices that this instance holds."""
        made = super().make_engine()
        assert isinstance(made, CostEngine)
        self._world.fit(self.rank, made)
        return made

    async def stop(self) -> int:
        """Put what is here back, and release the devices; returns how many were put back."""
        count = await self.interrupt()
        await self.offload()
        return count

    async def begin(self, width: float) -> None:
        """Serve, on ``width`` times the devices of home."""
        self.engine.change(width=width)
        await self.onload()

    async def hand_over(self, names: list[str]) -> int:
        """Put these requests back, and take none until `resume`; returns how many were put back."""
        return await self.interrupt(names)

    async def hold(self) -> None:
        """Take no requests until `resume`; those that are here go on."""
        await self._taking.close()

    async def has_taken(self, names: set[str]) -> None:
        """Wait until as many of these requests are here as there is room for."""
        engine = self.engine
        room = engine.max_concurrent + engine.max_concurrent // AHEAD - len(self._here())
        wanted = min(len(names), room)
        while sum(one.name in names for _, one in self._here()) < wanted:
            self._took.clear()
            await self._took.wait()

    async def _start_next(
        self,
        requests: Receiver[Request],
        samples: Sender[Sample],
        room: asyncio.Semaphore,
        answering: asyncio.TaskGroup,
        report: LanguageRolloutReport,
    ) -> bool:
        began = await super()._start_next(requests, samples, room, answering, report)
        self._took.set()
        return began

    async def widen(self, width: float) -> None:
        """Go on with other devices: all requests stop for as long as that takes."""
        self.engine.change(width=width)
        self.engine.stall(2 * self.engine.config.move_seconds, "moving")


class SimulatedIteration(Iteration):
    """Trains the mini-batches of one iteration in virtual time."""

    world: Site
    """set by whoever makes it"""
    pipelined = False

    async def _epoch(self, batches: Batches | None, waiting: Waiting) -> list[Mapping[str, float]]:
        assert batches is not None
        trainer = self._trainer
        assert isinstance(trainer, CostTrainer)
        steps: list[Mapping[str, float]] = []
        loop = asyncio.get_running_loop()
        for _ in range(self._sizes.num_global_batches):
            count, later = 0, list[int]()
            ahead = Ahead(trainer, loop.time())
            with waiting():
                async for batch in batches.global_batch():
                    tokens = [one.tokens for one in batch.samples]
                    count += len(tokens)
                    self.world.collected = count
                    if self.pipelined and self.world.holds:
                        ahead.arrived(sum(tokens), loop.time())
                    else:
                        later += tokens
                await self.world.boundary(arrived=count)
            async with self.world.mini_batch():
                seconds = trainer.seconds(later) + trainer.config.step_seconds
                await asyncio.sleep(ahead.left(loop.time()) + seconds)
            steps.append({"samples_trained": float(count)})
        return steps


class Ahead:
    """What an actor trains of a mini-batch while the rest of it is generated.

    Groups go to the data ranks in turn, as they arrive (see `Dispatcher`); each rank trains what it
    has, one after the other.
    """

    def __init__(self, trainer: CostTrainer, now: float) -> None:
        self._trainer = trainer
        self._groups = 0
        """that have arrived"""
        self._free = [now] * trainer.strategy.dp
        """time at which each data rank has trained what it has"""

    def arrived(self, tokens: int, now: float) -> None:
        """A group is here, with so many tokens."""
        rank = self._groups % len(self._free)
        self._groups += 1
        self._free[rank] = max(self._free[rank], now) + self._trainer.rank_seconds(tokens)

    def left(self, now: float) -> float:
        """Return the seconds until all of it is trained, by the ranks that there are now."""
        left = max(0.0, max(self._free) - now)
        return left * len(self._free) / self._trainer.strategy.dp


class SimulatedActor(LanguageActor):
    """All ranks of the actor."""

    def __init__(
        self,
        world: Any,
        trainer: Any,
        batches: Any,
        max_staleness: int,
        *,
        pipelined: bool = False,
    ) -> None:
        super().__init__(trainer, batches, backend="cost", max_staleness=max_staleness)
        self._world: Site = world
        self._pipelined = pipelined
        world.actor = self

    @property
    def trainer(self) -> CostTrainer:
        """The trainer."""
        assert isinstance(self._trainer, CostTrainer)
        return self._trainer

    async def run_training_pipeline(
        self, input_channel: Receiver[SampleGroup]
    ) -> LanguageTrainReport:
        """Train on one iteration while it arrives. See `LanguageActor.run_training_pipeline`."""
        async with self._one_iteration() as iteration:
            return await iteration.train_arriving(input_channel)

    async def sync_model_to_rollout(self, weights: LatestSender[WeightUpdate]) -> int:
        """Publish the present version, which takes its time, too."""
        await self._world.publishing(self.trainer.config.publish_seconds)
        return await super().sync_model_to_rollout(weights)

    @asynccontextmanager
    async def _one_iteration(self) -> AsyncIterator[SimulatedIteration]:
        async with self.training():
            iteration = SimulatedIteration(
                self, self._trainer, self._sizes, epochs=1, max_staleness=self._max_staleness
            )
            iteration.world, iteration.pipelined = self._world, self._pipelined
            yield iteration


class Scorer(Worker):
    """Runs the environment of every sample, and scores it."""

    def __init__(self, world: Any, env: EnvCostConfig) -> None:
        self._world: Site = world
        self._env = env

    async def score(self, samples: Receiver[Sample], scored: Sender[ScoredSample]) -> int:
        """Score until there are no more; return how many."""
        room = asyncio.Semaphore(self._env.workers or sys.maxsize)
        count = 0
        async with asyncio.TaskGroup() as group:
            async for sample in samples:
                count += 1
                self._world.finished_sample(sample)
                one = ScoredSample(sample=sample, outcome=Scored(reward=float(count % 2)))
                if self._env.seconds:
                    group.create_task(self._score_later(one, room, scored))
                else:
                    await scored.put(one)
        return count

    async def _score_later(
        self, one: ScoredSample, room: asyncio.Semaphore, scored: Sender[ScoredSample]
    ) -> None:
        async with room:
            await asyncio.sleep(self._env.seconds)
        await scored.put(one)


class SimulatedInference(Worker):
    """Computes log-probs of every sample, on devices of its own."""

    def __init__(self, world: Any, config: InferenceCostConfig) -> None:
        self._world: Site = world
        self._config = config

    async def log_probs(self, samples: Receiver[ScoredSample], done: Sender[ScoredSample]) -> int:
        """Pass samples on, in batches, until there are no more; return how many."""
        count = 0
        async for batch in samples.leases(weight=self._config.batch, at_least=1):
            async with batch as items:
                tokens = sum(_tokens(one.sample) for one in items)
                with self._world.inferring(tokens) as seconds:
                    await asyncio.sleep(seconds)
                for one in items:
                    await done.put(one)
                count += len(items)
        return count


def _tokens(sample: Sample) -> int:
    return len(sample.request.prompt.token_ids) + len(sample.generated.token_ids)
