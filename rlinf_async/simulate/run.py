"""One simulated run: the graph of the language job, in virtual time.

::

    Source --Request--> SimulatedRollout --Sample--> Scorer --ScoredSample--> Collector
      ^                  ^       ^                     +--> SimulatedInference ---^ |
      |                  |       +---- WeightUpdate ---- SimulatedActor         Dispatcher
      +---- version ---- |                                ^    ^                    |
                         +-- Orders -- SimulatedScheduler +    +----SampleGroup-----+

    with episodes: Source --Request--> SimulatedEpisodes --Sample--> Scorer
                   SimulatedEpisodes <--a turn's Request, Sample--> SimulatedRollout

The scheduler's own channels are those of a job with a scheduler: see ``runtime/jobs/language``.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlinf_async.channels import Channel, Latest
from rlinf_async.messages.language import (
    DataShare,
    EpisodeRecord,
    LanguageTrainReport,
    Prompt,
    Request,
    Sample,
    SampleGroup,
    Sampling,
    ScoredSample,
    WeightsTaken,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.observe.pictures import COLOURS, FAINT, INK, headline, new_figure, quiet, save
from rlinf_async.observe.trace import Span
from rlinf_async.observe.waits import Facts, Shape, WaitsRecord, shapes_of
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.language.reports import shape_of
from rlinf_async.runtime.jobs.language.samples import Collector, Dispatcher, Ledger, Source
from rlinf_async.runtime.jobs.language.scheduling import SampleNews
from rlinf_async.runtime.jobs.waits import WaitsRecorder
from rlinf_async.scheduling import ACTOR, ScalingDecision, instance_name
from rlinf_async.simulate.bounds import by_cause
from rlinf_async.simulate.config import ScalingPolicyConfig, SimulationConfig, placements
from rlinf_async.simulate.site import Moment, Site
from rlinf_async.simulate.workers import (
    TOOL,
    SimulatedActor,
    SimulatedEpisodes,
    SimulatedInference,
    SimulatedRollout,
    SimulatedScheduler,
    SimulatedScorer,
)
from rlinf_async.testing import VirtualLoop, run_on
from rlinf_async.workers.actor.language import LanguageBatches
from rlinf_async.workers.rollout.language import LanguageRolloutConfig
from rlinf_async.workers.scheduler import (
    DevicesReport,
    Orders,
    SchedulerReport,
    Verdict,
    first_orders,
)


class Faults:
    """Makes engines crash and become slow, and hosts go away for a while, at times and places that
    follow from the seed.

    Args:
        config: the simulation's configuration.
        site: site of the engines.
        tell: tells the scheduler of hosts, as whoever watches them does.
    """

    def __init__(
        self,
        config: SimulationConfig,
        site: Site,
        tell: Callable[[DevicesReport], Awaitable[None]],
    ) -> None:
        self._config, self._site, self._tell = config.faults, site, tell
        self._instances = config.shared_devices // config.hardware.instance_devices
        self._rng = np.random.default_rng((config.seed, 7))
        self.crashes = self.lost_hosts = self.slowed = 0
        self._returning: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Let faults happen until it is cancelled."""
        try:
            await self._all()
        finally:
            for one in self._returning:
                one.cancel()

    async def _all(self) -> None:
        config = self._config
        kinds = [
            (config.crash_every, self._crash),
            (config.slow_every, self._slow),
            (config.host_lost_every, self._lose_host),
        ]
        async with asyncio.TaskGroup() as group:
            for every, fault in kinds:
                if every > 0.0:
                    group.create_task(self._repeat(every, fault))

    async def _repeat(self, every: float, fault: object) -> None:
        while True:
            await asyncio.sleep(float(self._rng.exponential(every)))
            await fault()  # type: ignore[operator]

    async def _crash(self) -> None:
        """A serving engine dies; its worker builds it again."""
        serving = self._serving()
        if serving:
            number = serving[int(self._rng.integers(len(serving)))]
            engine = self._site.rollouts[number].engine
            self._site.usage.spent_by(engine)
            engine.die()
            self.crashes += 1

    async def _slow(self) -> None:
        serving = self._serving()
        if not serving:
            return
        engine = self._site.rollouts[serving[int(self._rng.integers(len(serving)))]].engine
        engine.change(slowness=self._config.slow_factor)
        self.slowed += 1
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.slow_seconds, lambda: engine.change(slowness=1.0))

    async def _lose_host(self) -> None:
        """Instances of a host stop, and what they have made is lost; the host comes back later.
        Not one with devices of the actor, and not the last."""
        ledger, homes = self._site.ledger, self._site.topology.instances
        actors = {ledger.hosts[one] for one in ledger.held_by(ACTOR)}
        there = sorted(set(ledger.hosts.values()) - actors)
        if len(there) < 2:
            return
        host = there[int(self._rng.integers(len(there)))]
        devices = tuple(one for one, where in ledger.hosts.items() if where == host)
        serving = self._serving()
        lost = [n for n in serving if not set(devices).isdisjoint(homes[n])]
        if set(devices) & set(ledger.lost) or len(lost) == len(serving):
            return
        for number in lost:
            self._site.rollouts[number].engine.forget()
        self.lost_hosts += 1
        await self._tell(DevicesReport(lost=devices))
        self._returning.append(asyncio.create_task(self._back(devices)))

    async def _back(self, devices: tuple[int, ...]) -> None:
        await asyncio.sleep(self._config.host_seconds)
        await self._tell(DevicesReport(found=devices))

    def _serving(self) -> list[int]:
        held = {one.holder for one in self._site.ledger.holdings()}
        return [n for n in range(self._instances) if instance_name(n) in held]


OnStep = Callable[[int, float], None]
"""called after each iteration, with its number and virtual time"""


class Simulated(msgspec.Struct, kw_only=True):
    """Result of a simulated run."""

    policy: str
    devices: int
    actor_devices: int
    samples: int
    seconds: float
    """seconds of virtual time, from the first request to the last trained version"""
    step_seconds: list[float]
    """virtual seconds of each iteration"""
    bubbles: dict[str, float]
    """share of the held device-seconds without work, by role"""
    lag_mean: float
    """mean age of the weights of response tokens when they are trained, in versions"""
    lag_max: int
    tokens: int
    """number of response tokens"""
    decisions: int
    migrated: int
    """requests that were put back by an instance that stopped"""
    crashes: int
    lost_hosts: int
    price: float
    """price of a device-hour"""
    spent: dict[str, float] = {}
    """share of all device-seconds, by cause"""
    turns: int = 0
    """turns of all episodes; 0 where each sample is one answer"""
    tool_seconds: float = 0.0
    """seconds that episodes waited for tools, all of them together"""
    cut: int = 0
    """episodes that a limit ended"""
    fault: str = ""
    """why the policy was given up"""
    real_seconds: float = 0.0
    """seconds that the simulation took; not part of its result"""
    steps: int = 0
    """steps of the event loop"""

    @property
    def device_hours(self) -> float:
        """Hours of all devices of the cluster."""
        return self.devices * self.seconds / 3600.0

    @property
    def samples_per_second(self) -> float:
        """Throughput, over all iterations."""
        return self.samples / self.seconds

    @property
    def samples_per_device_hour(self) -> float:
        """The figure by which policies are compared."""
        return self.samples / self.device_hours

    @property
    def cost(self) -> float:
        """Price of all device-hours."""
        return self.device_hours * self.price


class SimulationRecord(msgspec.Struct, kw_only=True):
    """A result and what led to it."""

    result: Simulated
    spans: list[Span] = []
    decisions: list[tuple[float, ScalingDecision]] = []
    trained: list[str] = []
    """names of the samples that were trained, in the order of their iterations"""
    lengths: list[list[int]] = []
    """response tokens of the samples of each iteration"""
    history: list[Moment] = []
    waits: list[WaitsRecord] = []
    """who waited for whom in each iteration, where that was asked for"""
    trace: bytes = b""
    """trace of the event loop, where it was asked for"""


def simulate(
    config: SimulationConfig,
    *,
    on_step: OnStep | None = None,
    report: Callable[[str], None] | None = None,
    spans: bool = False,
    trace_lines: int = 0,
    shuffled: bool = False,
    check: bool = False,
    max_steps: int | None = None,
    waits: bool = False,
) -> SimulationRecord:
    """Run it to its end.

    Args:
        config: the simulation's configuration.
        on_step: is called after each iteration.
        report: gets the message about a policy that failed.
        spans: whether the record has them.
        trace_lines: steps of the loop to be kept.
        shuffled: whether the order of events at one time is drawn from the seed, to find races; by
            default first come, first served.
        waits: whether the record has who waited for whom in each iteration.
        check: whether invariants are held after each decision; AssertionError where one is broken.
        max_steps: loop steps after which `Livelock` is raised: faults alone keep a run alive.
    """
    began = time.perf_counter()
    with _no_collection():
        loop = VirtualLoop(
            config.seed if shuffled else None, max_steps=max_steps, trace_lines=trace_lines
        )
        record = run_on(loop, _main(config, on_step, report or _ignored, spans, check, waits))
        record.result.steps, record.trace = loop.steps, loop.trace
        del loop  # or it would outlive the collection
    record.result.real_seconds = time.perf_counter() - began
    return record


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage but between iterations: collected async generators take steps of the loop,
    so a run would depend on what the process did before.

    At the end all of the run is collected. Its tasks would else live on until a full collection,
    and asyncio looks at every task there is whenever a loop is closed: of thousands of runs in one
    process each would take longer than the last.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)  # what was made since the last iteration, and what outlived one
        if enabled:
            gc.enable()


def _ignored(message: str) -> None:
    """Messages that nobody asked for."""


async def _main(
    config: SimulationConfig,
    on_step: OnStep | None,
    report: Callable[[str], None],
    with_spans: bool,
    check: bool,
    with_waits: bool = False,
) -> SimulationRecord:
    async with Cluster.local(deadlock_after=None) as cluster:
        run = SimulatedRun(cluster, config, report, check=check)
        await run.launch()
        if with_waits:
            run.record_waits()
        await run.train(on_step or (lambda number, seconds: None))
        await run.waits_written()
        spans = await cluster.spans() if with_spans else []
        return SimulationRecord(
            result=await run.result(),
            spans=spans,
            decisions=run.site.decisions,
            trained=run.trained,
            lengths=run.lengths,
            history=run.site.usage.history,
            waits=run.waits,
        )


class SimulatedRun:
    """The graph, and its steps."""

    def __init__(
        self,
        cluster: Cluster,
        config: SimulationConfig,
        report: Callable[[str], None],
        *,
        check: bool = False,
    ) -> None:
        self._cluster, self._config, self._report = cluster, config, report
        self.site = Site(config, checked=check)
        self._make_channels()
        self._make_flow()
        self.trained: list[str] = []
        """names of all samples that were trained"""
        self.lengths: list[list[int]] = []
        """response tokens of the trained samples, by iteration"""
        self._reports: list[LanguageTrainReport] = []
        self._step_seconds: list[float] = []
        self._records: list[EpisodeRecord] = []
        self._faults = Faults(config, self.site, self._tell)
        self._next_prompt = 0
        self.waits: list[WaitsRecord] = []
        """records of who waited for whom"""
        self._recorder: WaitsRecorder | None = None
        self._shapes: list[Shape] = []
        self._held = 0.0

    def _make_channels(self) -> None:
        cluster, config = self._cluster, self._config
        ahead = config.work.max_staleness + 1
        room = 2 * config.samples * ahead
        self.sticky = bool(config.episode.turns)
        """as in a run, a turn goes to the engine that has its prefix, if that has room"""
        self.requests: Channel[Request] = cluster.channel(
            Request,
            name="requests",
            capacity=room,
            max_deliveries=1_000_000,
            stealing=self.sticky,
        )
        self.generated: Channel[Sample] = cluster.channel(Sample, name="generated", capacity=room)
        self.tasks, self.turns = self.requests, self.generated
        if config.episode.turns:
            self.tasks = cluster.channel(Request, name="tasks", capacity=room)
            self.turns = cluster.channel(Sample, name="turns", capacity=room)
        self.scored: Channel[ScoredSample] = cluster.channel(
            ScoredSample, name="scored", capacity=room
        )
        self.unchecked: Channel[ScoredSample] = cluster.channel(
            ScoredSample, name="without log-probs", capacity=room
        )
        self.groups: Channel[SampleGroup] = cluster.channel(
            SampleGroup, name="groups", capacity=config.prompts * ahead
        )
        self.weights: Latest[WeightUpdate] = cluster.latest(WeightUpdate, name="weights")
        self.taken: Channel[WeightsTaken] = cluster.channel(
            WeightsTaken, name="weights taken", capacity=16 * config.hardware.devices
        )
        self.orders: Latest[Orders] = cluster.latest(Orders, name="orders")
        self.verdicts: Channel[Verdict] = cluster.channel(Verdict, name="verdicts")
        self.told: Channel[SchedulerReport] = cluster.channel(
            SchedulerReport, name="scheduler reports", capacity=64 * config.hardware.devices
        )
        self.shares: Channel[DataShare] = cluster.channel(DataShare, name="shares", capacity=8)

    def _make_flow(self) -> None:
        config = self._config
        self.ledger = Ledger(
            prompts=config.prompts,
            group_size=config.work.group_size,
            max_staleness=config.work.max_staleness,
            sampling=Sampling(max_tokens=config.generation.lengths.longest),
            seed=config.seed,
        )
        self.source = Source(
            self.ledger,
            self._prompts,
            self.tasks.sender,
            version=0,
            iterations=config.work.iterations,
        )
        self.dispatcher = Dispatcher(
            self.groups.sender,
            self.shares.receiver,
            batch=config.prompts // config.work.mini_batches,
            batches=config.work.mini_batches,
            samples=config.samples,
        )
        self.news = (
            SampleNews(self.orders.receiver, self.told.sender) if config.episode.turns else None
        )
        self.collector = Collector(
            self.ledger,
            self.scored.receiver,
            self.groups.sender,
            ranks=1,
            version=0,
            dispatcher=self.dispatcher,
            finished=None if self.news is None else self.news.ended,
        )

    async def _tell(self, report: DevicesReport) -> None:
        await self.told.sender.put(report)

    def _prompts(self, count: int) -> Sequence[Prompt]:
        first, self._next_prompt = self._next_prompt, self._next_prompt + count
        tokens = np.broadcast_to(np.int32(1), self._config.work.prompt_tokens)
        return [
            Prompt(index=first + n, text="", token_ids=tokens, verifier="", reference="")
            for n in range(count)
        ]

    async def launch(self) -> None:
        """Start all workers; everybody is at home."""
        config, site, launch = self._config, self.site, self._cluster.launch
        [self.scheduler] = await launch(SimulatedScheduler, site, self._report, name="scheduler")
        self.rollout = await launch(
            SimulatedRollout,
            site,
            config.generation,
            LanguageRolloutConfig(seed=config.seed, engine_restarts=1_000_000),
            count=len(site.topology.instances),
            name="rollout",
        )
        batches = LanguageBatches(
            samples=config.samples,
            group_size=config.work.group_size,
            optimizer_steps=config.work.mini_batches,
            micro_batch_size=config.work.group_size,
        )
        self.actor = await launch(
            SimulatedActor,
            site,
            config.actor,
            batches,
            config.work.max_staleness,
            pipelined=config.work.pipelined,
            count=site.topology.workers,
            name="actor",
        )
        home = config.hardware.actor_devices
        await self.actor.call(SimulatedActor.init_trainer_resharding, home)
        [self.scorer] = await launch(SimulatedScorer, site, config.env, name="reward")
        [self.inference] = await launch(
            SimulatedInference, site, config.inference, name="inference"
        )
        if config.episode.turns:
            self.episodes = await launch(
                SimulatedEpisodes,
                config.episode,
                config.work.prompt_tokens,
                count=config.episode.workers,
                name="episode",
            )

    def record_waits(self) -> None:
        """Record who waits for whom from now on."""
        self._recorder = WaitsRecorder(self._cluster, self._facts, self.waits.append, cores=False)

    async def waits_written(self) -> None:
        """Wait until the records of all iterations are there."""
        if self._recorder is not None:
            await self._recorder.finish(self._config.work.iterations)

    def _facts(self) -> Facts:
        work, held = self._config.work, self.source.held_seconds
        before, self._held = self._held, held
        return Facts(
            kind="language",
            samples=self._config.samples,
            group_size=work.group_size,
            max_staleness=work.max_staleness,
            units=self._config.prompts if work.pipelined else work.mini_batches,
            shapes=self._shapes,
            held_seconds=held - before,
            inferred=self._config.inference.devices > 0,
        )

    async def train(self, on_step: OnStep) -> None:
        """Run all iterations."""
        with ExitStack() as ends:  # this process's own ends, open between two calls
            ends_here = (self.scored.receiver, self.requests.receiver, self.groups.receiver)
            for end in (*ends_here, self.told.receiver, self.shares.receiver):
                ends.enter_context(end)
            for sender in (self.groups.sender, self.requests.sender):
                ends.enter_context(sender)
            if self.tasks is not self.requests:
                ends.enter_context(self.tasks.sender)
            self.told.sender.open()  # closed at the end, which ends the scheduler
            ends.enter_context(self.shares.sender)
            await self._train(on_step)

    async def _train(self, on_step: OnStep) -> None:
        loop = asyncio.get_running_loop()
        serving: Any = self.rollout.call(
            SimulatedRollout.serve_scheduled,
            self.requests.receiver,
            self.turns.sender,
            self.weights.receiver,
            self.taken.sender,
            self.orders.receiver,
            self.told.sender,
            self.sticky,
        )
        acting: Any = self._config.episode.turns and self.episodes.call(
            SimulatedEpisodes.run,
            self.tasks.receiver,
            self.requests.sender,
            self.turns.receiver,
            self.generated.sender,
            self.sticky,
        )
        inferred = self._config.inference.devices > 0
        scored = self.unchecked if inferred else self.scored
        scoring = self.scorer.call(SimulatedScorer.score, self.generated.receiver, scored.sender)
        inferring = inferred and self.inference.call(
            SimulatedInference.log_probs, self.unchecked.receiver, self.scored.sender
        )
        following, deciding = await self._follow()
        background = self._begin_background()
        self.site.settle()
        await self._publish()
        self.site.restart()
        if self._recorder is not None:
            self._recorder.begin(0)
        source: asyncio.Task[None] | None = None
        for number in range(self._config.work.iterations):
            began = loop.time()
            if source is None:
                source = asyncio.create_task(self.source.run())
            self.source.trained(number)
            self.site.iteration = number
            reports = await self.actor.call(
                SimulatedActor.run_training_pipeline, self.groups.receiver
            )
            if number == self._config.work.iterations - 1:
                self.site.settle()  # nobody waits until its weights are loaded
            await self._publish()
            self.site.settle_actors()
            self._account(reports, number)
            gc.collect(0)  # what is new
            self._step_seconds.append(loop.time() - began)
            if self._recorder is not None:
                self._recorder.boundary(number + 1)
            on_step(number, loop.time())
        assert source is not None
        await source
        self.orders.sender.close()
        self.verdicts.sender.close()
        await following
        if acting:
            self.tasks.sender.close()
            await acting
        self.requests.sender.close()
        await serving
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self.told.sender.close()
        await deciding  # the scheduler: nobody reports any more
        del scoring, inferring

    def _begin_background(self) -> list[asyncio.Task[None]]:
        """Start what runs beside the training, and is cancelled at its end."""
        running = (
            self.collector.run(),
            self.dispatcher.run(),
            self._drop_taken(),
            *([] if self.news is None else [self.news.run()]),
        )
        return [asyncio.create_task(one) for one in (*running, self._faults.run())]

    async def _publish(self) -> None:
        await self.actor.call(SimulatedActor.sync_model_to_rollout, self.weights.sender)

    async def _follow(self) -> tuple[Any, Any]:
        """Have the actors follow the scheduler, as rollout workers do; the guests on the actor's
        devices are stopped."""
        orders, told = self.orders, self.told
        await orders.sender.publish(first_orders(self.site.topology))
        return (
            self.actor.call(
                SimulatedActor.follow_scheduler,
                orders.receiver,
                told.sender,
                self.verdicts.sender,
                self.verdicts.receiver,
                self.shares.sender,
                self.site.scheduler.config.patience,
            ),
            self.scheduler.call(
                SimulatedScheduler.run,
                orders.sender,
                orders.receiver,
                told.receiver,
                self.requests.receiver,
                self.tasks.receiver if self._config.episode.turns else None,
            ),
        )

    async def _drop_taken(self) -> None:
        async for _ in self.taken.receiver:
            pass

    def _account(self, reports: Sequence[LanguageTrainReport], number: int) -> None:
        self._reports += reports
        samples = [one.sample for group in self.collector.trained(number) for one in group]
        self.trained += [one.request.name for one in samples]
        self.lengths.append([one.generated.drawn_tokens for one in samples])
        self._shapes = shapes_of(shape_of(one) for one in samples)
        self._records += [one.episode for one in samples if one.episode is not None]
        self.site.check_home()

    async def result(self) -> Simulated:
        """Return the result of the run."""
        config, site = self._config, self.site
        migrated, fault = await self.scheduler.call(SimulatedScheduler.decisions)
        tokens = sum(one.response_tokens for one in self._reports)
        lags = sum(one.lag_mean * one.response_tokens for one in self._reports)
        return Simulated(
            policy=config.scheduler.policy,
            devices=config.hardware.devices,
            actor_devices=config.hardware.actor_devices,
            samples=len(self.trained),
            seconds=sum(self._step_seconds),
            step_seconds=self._step_seconds,
            bubbles=site.usage.bubbles(),
            lag_mean=lags / max(tokens, 1),
            lag_max=max((one.lag_max for one in self._reports), default=0),
            tokens=tokens,
            decisions=len(site.decisions),
            migrated=migrated,
            crashes=self._faults.crashes,
            lost_hosts=self._faults.lost_hosts,
            price=config.hardware.price,
            fault=fault,
            turns=sum(one.turns for one in self._records),
            tool_seconds=sum(one.tool_seconds.get(TOOL, 0.0) for one in self._records),
            cut=sum(bool(one.cut) for one in self._records),
            spent=by_cause(config, self.lengths, site.usage.spent, sum(self._step_seconds)),
        )


def with_policy(config: SimulationConfig, policy: str) -> SimulationConfig:
    """Return the same run under another policy."""
    scheduler = ScalingPolicyConfig(policy=policy, every=config.scheduler.every)
    return msgspec.structs.replace(config, scheduler=scheduler)


def candidates(config: SimulationConfig, policies: Sequence[str]) -> Iterator[SimulationConfig]:
    """Yield every number of actor devices, size of rollout instances and policy that fits."""
    hardware = config.hardware
    devices = hardware.devices
    for size in sorted({1, 2, 4, 8, hardware.instance_devices}):
        if size < hardware.instance_devices or size > hardware.devices_per_host:
            continue  # fewer devices would not hold the model
        try:
            resized = resize(config, size)
        except ValueError:  # the devices are no multiple of it
            continue
        for placed in placements(resized, devices):
            for policy in policies:
                yield with_policy(placed, policy)


def resize(config: SimulationConfig, size: int) -> SimulationConfig:
    """Return the same run with instances of ``size`` devices: faster ones, and fewer. Raises
    `ValueError`."""
    hardware, generation = config.hardware, config.generation
    factor = size / hardware.instance_devices
    widths = tuple(
        sorted({int(width / factor) for width in hardware.instance_widths if width >= factor} | {1})
    )
    faster = factor**generation.wider
    return msgspec.structs.replace(
        config,
        hardware=msgspec.structs.replace(
            hardware,
            instance_devices=size,
            instance_widths=widths,
            actor_devices=max(size, hardware.actor_devices // size * size),
        ),
        generation=msgspec.structs.replace(
            generation,
            decode_seconds=generation.decode_seconds / faster,
            sequence_seconds=generation.sequence_seconds / faster,
            prefill_seconds=generation.prefill_seconds / faster,
            slots=max(1, round(generation.slots * factor)),
        ),
    )


def sweep(
    configs: Sequence[SimulationConfig],
    on_result: Callable[[SimulationConfig, SimulationRecord], None],
) -> tuple[SimulationConfig, SimulationRecord]:
    """Simulate all, and return the best by samples per device-hour. Raises `ValueError` if there
    are none."""
    best: tuple[SimulationConfig, SimulationRecord] | None = None
    for config in configs:
        record = simulate(config)
        on_result(config, record)
        rate = record.result.samples_per_device_hour
        if best is None or rate > best[1].result.samples_per_device_hour:
            best = config, record
    if best is None:
        raise ValueError("no placement fits")
    return best


ROLES = ("rollout", "actor")
IDLE = "#eceff3"


def draw_devices(records: Sequence[SimulationRecord], path: Path, *, title: str) -> None:
    """Draw the devices that each role holds and has busy, and what is left to generate.

    Raises `RunFolderError` where the file cannot be written.
    """
    figure = new_figure(11.0, 1.0 + 2.2 * len(records))
    headline(figure, title)
    end = max(record.history[-1].time for record in records)
    panels = [figure.add_subplot(len(records), 1, place + 1) for place in range(len(records))]
    for place, (axes, record) in enumerate(zip(panels, records, strict=True)):
        times = np.array([one.time for one in record.history])
        below = np.zeros(len(times))
        for colour, role in zip(COLOURS, ROLES, strict=False):
            held = np.array([one.held.get(role, 0) for one in record.history], float)
            busy = np.array([one.busy.get(role, 0) for one in record.history], float)
            axes.fill_between(
                times, below, below + busy, step="post", color=colour, label=f"{role}, busy", lw=0
            )
            axes.fill_between(
                times,
                below + busy,
                below + held,
                step="post",
                color=colour,
                alpha=0.25,
                label=f"{role}, waiting",
                lw=0,
            )
            below = below + held
        devices = record.result.devices
        axes.fill_between(times, below, devices, step="post", color=IDLE, label="nobody", lw=0)
        axes.set_xlim(0, end)
        axes.set_ylim(0, devices)
        axes.set_ylabel("devices", color=INK, fontsize=9)
        left = axes.twinx()
        left.plot(times, [one.left for one in record.history], color=INK, lw=1.0)
        left.set_ylabel("samples to generate", color=FAINT, fontsize=8)
        left.set_ylim(0, None)
        left.tick_params(colors=FAINT, labelsize=8)
        rate = record.result.samples_per_device_hour
        axes.set_title(
            f"{record.result.policy}: {rate:,.0f} samples per device-hour",
            loc="left",
            fontsize=10,
            color=INK,
        )
        quiet(axes)
        if place == 0:
            axes.legend(loc="upper right", fontsize=7, ncols=5, framealpha=0.9, edgecolor="none")
    panels[-1].set_xlabel("seconds of virtual time", color=INK, fontsize=9)
    save(figure, path)
