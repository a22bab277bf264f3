"""The workers of a simulation: the real ones, with what they compute replaced by virtual time.

::

    SimulatedRollout    `ScheduledRollout` over `CostEngine`
    SimulatedActor      `ScheduledActor` over `CostTrainer`, one for each copy of the model: it
                        stands for the tensor-parallel ranks, which do the same at the same time
    SimulatedScheduler  `SchedulerWorker`
    SimulatedEpisodes   `EpisodeWorker`, whose agent makes turns and lets the time of tools pass
    Scorer              lets the time of environment steps pass, and scores, as a reward worker does
    SimulatedInference  lets the time of log-probs pass, on devices of its own

What they override tells the `Site` what happens, or says where time goes; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Self

import numpy as np

from rlinf_async.backends.cost.config import (
    EnvCostConfig,
    EpisodeCostConfig,
    InferenceCostConfig,
)
from rlinf_async.backends.cost.engine import CostEngine
from rlinf_async.backends.cost.trainer import CostTrainer
from rlinf_async.backends.language import GenerationEngine
from rlinf_async.channels import EndOfChannel, Lease, Receiver, Sender
from rlinf_async.episodes import Episode, Parsed
from rlinf_async.messages.language import (
    Request,
    Sample,
    Scored,
    ScoredSample,
    Tokens,
    TrainingSample,
)
from rlinf_async.scheduling import ClusterState, ScalingDecision, safe
from rlinf_async.simulate.site import Site, scheduling
from rlinf_async.workers.actor.iteration import Batches, Iteration, Waiting
from rlinf_async.workers.base import Worker
from rlinf_async.workers.episode import EpisodeConfig, EpisodeWorker
from rlinf_async.workers.episode.worker import Language
from rlinf_async.workers.reward import SCORE
from rlinf_async.workers.scheduler import ScheduledActor, ScheduledRollout, SchedulerWorker

ENGINE = "rlinf_async.backends.cost.engine:CostEngine"
TRAINER = "rlinf_async.backends.cost.trainer:CostTrainer"


class SimulatedRollout(ScheduledRollout):
    """One rollout instance."""

    def __init__(self, site: Site, engine: Any, config: Any) -> None:
        super().__init__(engine, config, backend=ENGINE)
        self._site = site
        site.rollouts[self.rank] = self

    @property
    def engine(self) -> CostEngine:
        """The engine of the moment."""
        engine = self._live.engine
        assert isinstance(engine, CostEngine)
        return engine

    def make_engine(self) -> GenerationEngine:
        """Make an engine for the devices that this instance has."""
        made = super().make_engine()
        assert isinstance(made, CostEngine)
        self._site.fit(self.rank, made, self.orders.devices_of(self.rank))
        return made


class SimulatedIteration(Iteration):
    """Trains each mini-batch as a whole, or what arrives of it while the rest is generated."""

    site: Site
    """site of the simulation, set by whoever makes the iteration"""
    ranks = 1
    """ranks that this worker stands for"""
    pipelined = False

    async def _stepped(
        self,
        batches: Batches | None,
        waiting: Waiting,
        emptied: Batches | None,
        first: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> Mapping[str, float]:
        trainer = self._trainer
        assert batches is not None
        assert isinstance(trainer, CostTrainer)
        arriving, kept = batches.global_batch(), list[TrainingSample]()
        while True:
            with waiting():
                batch = await anext(arriving, None)
            if batch is None:
                break
            kept += batch.samples
            if emptied is not None and batches.finished_global_batch:
                self._check_queue(emptied)
            if self.pipelined:
                await self._busy_with(trainer.micro_batch, batch.samples)
        if not self.pipelined:
            await self._busy_with(trainer.micro_batch, kept)
        await self._busy_with(trainer.optimizer_step)
        self._tokens += sum(one.tokens for one in kept)
        return {"samples_trained": float(len(kept))}

    async def _busy_with(self, work: Callable[..., None], *args: Any) -> None:
        self.site.trains(self.ranks)
        try:
            with self._worker.meter.beside(STEPS):
                await self._worker.compute(work, *args)
        finally:
            self.site.trains(-self.ranks)


class SimulatedActor(ScheduledActor):
    """All ranks of one copy of the model."""

    def __init__(
        self, site: Site, trainer: Any, batches: Any, max_staleness: int, *, pipelined: bool
    ) -> None:
        self.stands_for = site.config.hardware.actor_tp
        super().__init__(trainer, batches, backend=TRAINER, max_staleness=max_staleness)
        self._site, self._pipelined = site, pipelined
        site.actors[self.rank] = self

    @property
    def trainer(self) -> CostTrainer:
        """The trainer."""
        return self._trainer  # type: ignore[return-value]  # `make_trainer` makes it

    @property
    def collects(self) -> bool:  # type: ignore[override]  # a setting of each run here
        """Whether the actor trains whole mini-batches only."""
        return not self._pipelined

    def make_trainer(self) -> CostTrainer:
        """Make the trainer of all ranks that this one stands for."""
        return CostTrainer(
            self._config,
            self.world_size,
            self.rank,
            tp=self.stands_for,
            beside=self._site.generating,
        )

    def _iteration(self) -> Iteration:
        made = SimulatedIteration(
            self,
            self._trainer,
            self._sizes,
            epochs=self._batches.epochs,
            max_staleness=self._max_staleness,
        )
        made.site, made.ranks, made.pipelined = self._site, self.stands_for, self._pipelined
        return made

    async def at_boundary(self, done: int, tokens: int = 0, seconds: float = 0.0) -> None:
        """Go on once all have trained, and it is known how."""
        if self.active:
            await self._site.gradients.wait(self.active_world_size // self.stands_for)
        await super().at_boundary(done, tokens, seconds)


class SimulatedScheduler(SchedulerWorker):
    """The scheduler, watched."""

    def __init__(self, site: Site, report: Callable[[str], None]) -> None:
        super().__init__(site.topology, scheduling(site.config))
        self._site = site
        self.policy = safe(self.make_policy(), self.config.policy, report)
        site.scheduler = self

    def devices_moved(self) -> None:
        """Account for it."""
        self._site.devices_moved()

    def decided(self, state: ClusterState, decision: ScalingDecision) -> None:
        """Note it."""
        self._site.decided(state, decision)

    async def decisions(self) -> tuple[int, str]:
        """Return the requests that were handed back, and why the policy was given up."""
        return self._changes.summary.migrated, self.policy.fault


TOOL: Final = "tool"
"""name of whatever an episode waits for between two turns"""
STEPS: Final = "steps"
"""name of the actors' work, without what they wait for one another, in the sums of work"""
NO_BOUND: Final = 1_000_000
"""samples that are scored at a time where nothing bounds them"""
NO_LIMIT: Final = 1e9
"""seconds that an episode may take"""


class Counted:
    """Stands for a chat template, and for what was read: of texts it gives the number of tokens."""

    def __init__(self, given: Tokens, between: Tokens) -> None:
        self.given, self._between = given, between

    def opening(self, *_: Any) -> Tokens:
        """Return the tokens of a prompt."""
        return self.given

    def read(self, *_: Any) -> Self:
        """Return what is read of a prompt."""
        return self

    def followed_by(self, *_: Any, **__: Any) -> Counted:
        """Return what is read between two answers."""
        return Counted(self._between, self._between)


class SimulatedEpisodes(EpisodeWorker):
    """Runs episodes whose turns and waits are drawn by the seed of their task.

    Args:
        costs: how many turns, how long the waits.
        prompt_tokens: tokens of a prompt.
    """

    def __init__(self, costs: EpisodeCostConfig, prompt_tokens: int) -> None:
        config = EpisodeConfig(
            run="simulated",
            max_turns=costs.max_turns,
            max_tokens=costs.max_tokens,
            concurrent=costs.concurrent,
            seconds=NO_LIMIT,
        )
        super().__init__(config, model="")
        self._costs, self._prompt_tokens = costs, prompt_tokens
        self._seed = ContextVar[int]("seed of the episode that this task runs")

    async def setup(self) -> None:
        self._agent = self._act
        self._language = self.make_language()

    def make_language(self) -> Language:
        given, prompt = (
            np.broadcast_to(np.int32(1), count)
            for count in (self._costs.given_tokens, self._prompt_tokens)
        )
        template: Any = Counted(prompt, given)
        return Language(template, lambda text: Parsed(text=text), lambda tokens: "")

    async def _play(self, lease: Lease[Request], *args: Any, **kwargs: Any) -> None:
        self._seed.set(lease[0].seed)
        await super()._play(lease, *args, **kwargs)

    async def _act(self, episode: Episode) -> float:
        costs, seed, chat = self._costs, self._seed.get(), episode.chat()
        for turn in range(costs.turns_of(seed)):
            if turn:
                seconds = costs.seconds_of(seed, turn)
                with episode.watch(TOOL):
                    await asyncio.sleep(seconds)
                episode.tool_calls[TOOL] += 1
                episode.tool_seconds[TOOL] += seconds
                chat.say("", "tool")
            await chat.turn()
        return 0.0


class SimulatedScorer(Worker):
    """Runs the environment of every sample, and scores it."""

    def __init__(self, site: Site, env: EnvCostConfig) -> None:
        self._site = site
        self._env = env

    async def score(self, samples: Receiver[Sample], scored: Sender[ScoredSample]) -> int:
        """Score until there are no more; return how many."""
        room = asyncio.Semaphore(self._env.workers or sys.maxsize)
        self.meter.serves(SCORE, self._env.workers or NO_BOUND)
        count = 0
        async with asyncio.TaskGroup() as group:
            async for sample in samples:
                count += 1
                self._site.finished_sample(sample)
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
            with self.span(SCORE):
                await asyncio.sleep(self._env.seconds)
        await scored.put(one)


class SimulatedInference(Worker):
    """Computes log-probs of every sample, on devices of its own."""

    def __init__(self, site: Site, config: InferenceCostConfig) -> None:
        self._site = site
        self._config = config

    async def log_probs(self, samples: Receiver[ScoredSample], done: Sender[ScoredSample]) -> int:
        """Pass samples on, in batches, until there are no more; return how many."""
        count = 0
        self.meter.serves("inference", self._config.batch)
        with contextlib.suppress(EndOfChannel):
            while True:
                async with samples.lease(weight=self._config.batch, at_least=1) as items:
                    tokens = sum(one.sample.tokens for one in items)
                    with (
                        self._site.inferring(tokens) as seconds,
                        self.span("inference", samples=len(items)),
                        self.meter.batch("inference", len(items)),
                    ):
                        await asyncio.sleep(seconds)
                    for one in items:
                        await done.put(one)
                    count += len(items)
        return count
