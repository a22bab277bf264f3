"""`LanguageRolloutWorker`: takes requests, has its engine generate, and sends each sample on.

::

    Request ---lease---> [ what the engine works on, + 1/16 ] ---generate---> Sample, at once
                                 |              ^
             weights too old, waits             | new weights, between two steps
                                 +--------------+

                waits for                                unblocked by
    taking      `resume`, once it was stopped            whoever stopped it
                room, then requests                      a sample that is done; the source
    answering   weights of the version it asks for       the actor
                its tokens                               the engine
                room for the sample                      reward or inference workers

It takes little more than its engine works on, so of several workers each gets what it can do; the
little more is for an engine to go on with while a sample leaves and the next request comes. A
request stays leased until its sample was put: if this worker dies before, another one gets it.
Between the two lies a moment in which a death has it generated twice; ``Request.name`` tells.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.backends.language import (
    CountsTokens,
    EngineDied,
    GenerationEngine,
    ModelOutputError,
    Resizable,
    require_finite,
)
from rlinf_async.backends.parts import DEFAULT_ENGINE, engines
from rlinf_async.channels import EndOfChannel, LatestReceiver, Lease, Receiver, Sender
from rlinf_async.channels.statistics import WaitFuture
from rlinf_async.config.counts import check_bounds
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    Generated,
    Request,
    RequestCount,
    RolloutProgress,
    Sample,
    Tokens,
    WeightsTaken,
)
from rlinf_async.messages.stopping import ended, written
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import Worker, task_group
from rlinf_async.workers.rollout.live import LiveEngine

Step = Callable[[], Coroutine[Any, Any, bool]]
"""Takes one item and starts its work; False when there is none left."""


class Taking:
    """The gate before a channel, which other calls close and open.

    When `close` has returned, nothing is taken until `open`, and whatever was taken before has been
    started. A wait for the next item ends without taking one. A task at a closed gate waits for
    others, so the deadlock watch sees a run in which nobody opens it.
    """

    def __init__(self) -> None:
        self._opened = True
        self._waiting: list[WaitFuture] = []
        self._steps: set[asyncio.Task[bool]] = set()

    def open(self) -> None:
        """Let items be taken again."""
        self._opened = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        """Take no more, and end the wait for the next one."""
        self._opened = False
        steps = list(self._steps)
        for step in steps:
            step.cancel()
        if steps:
            await asyncio.wait(steps)

    async def run(self, step: Step) -> None:
        """Take one after the other until there are none left. A step that is cancelled took none.

        Raises what a step raises.
        """
        while True:
            await self._until_opened()
            taking = asyncio.create_task(step())
            self._steps.add(taking)
            try:
                if not await taking:
                    return
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
            finally:
                self._steps.discard(taking)
            if _is_cancelled():  # the cancellation came too late to end the step
                raise asyncio.CancelledError

    async def _until_opened(self) -> None:
        while not self._opened:
            waiting = WaitFuture(loop=asyncio.get_running_loop())
            self._waiting.append(waiting)
            try:
                await waiting
            finally:
                self._waiting.remove(waiting)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class IdleTime:
    """Seconds in which a rollout worker had nothing to do because agents were at their tools.

    ::

        requests   ===|      |===|      |====
        next is             turn 2     turn 1 of another episode: it waited for that to be admitted
        idle          |======|
    """

    def __init__(self) -> None:
        self._since: float | None = None
        """when the last request left; None: there is one"""
        self._told = self._seconds = 0.0
        """when a sample was last told; the idle seconds since then"""

    def begin(self) -> None:
        """The worker begins to serve, or goes on."""
        self._since = now = asyncio.get_running_loop().time()
        self._told = self._told or now

    def left(self) -> None:
        """The last request has left."""
        self._since = asyncio.get_running_loop().time()

    def came(self, request: Request) -> None:
        """A request was taken."""
        if self._since is not None and request.turn > 1:
            self._seconds += asyncio.get_running_loop().time() - self._since
        self._since = None

    def tell(self) -> tuple[float, float]:
        """Return the seconds since this was last asked, and those of them that were idle."""
        now = asyncio.get_running_loop().time()
        found = now - self._told, self._seconds
        self._told, self._seconds = now, 0.0
        return found


class LanguageRolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One language rollout worker, whatever its engine."""

    max_concurrent: int | None = None
    """number of requests held at a time; when left out, as many as the engine generates for at a
    time, and a sixteenth more"""
    engine_restarts: int = 3
    """number of times that an engine that died is built again, in this worker's life"""
    seed: int = 0
    """seed of everything that a request's own seed does not cover; every rank derives its own"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_concurrent", least=1)
        check_bounds(self, "engine_restarts", "seed", least=0)


AHEAD = 16
"""engine slots for each request that a worker holds in advance"""
ASKING = 4
"""gets of requests that are open at a time, where there is room: each takes a round trip, and an
engine with free slots would wait for one after the other"""


REQUESTS: Final = "requests"
"""name of the requests that an engine works on, in the sums of a worker's work"""


class LanguageRolloutReport(msgspec.Struct, kw_only=True):
    """The counts of one rank's `LanguageRolloutWorker.serve`."""

    samples: int = 0
    tokens: int = 0
    """tokens of the responses, without those that came with the request"""
    waited: int = 0
    """requests that had to wait for weights"""
    handed_back: int = 0
    """requests that were interrupted and went back to their channel, with their tokens"""
    weight_updates: int = 0
    engine_restarts: int = 0
    version: int = -1
    """version of the weights at the end"""


class LanguageRolloutWorker(Worker):
    """One rank of the rollout group.

    Args:
        engine: configuration of the engine, as its own Struct.
        config: how this worker serves.
        backend: the engine's registered name.
    """

    stateless = True

    def __init__(
        self,
        engine: Any,
        config: LanguageRolloutConfig | None = None,
        *,
        backend: str = DEFAULT_ENGINE,
    ) -> None:
        self._starts_stopped = False
        """whether others may hold its devices until `resume`"""
        self.config = config or LanguageRolloutConfig()
        self._engine_config = engine
        self._backend_name = backend
        self._taking = Taking()
        self._answering: dict[asyncio.Task[None], Request] = {}
        self._interrupting = asyncio.Lock()
        self._interrupted: frozenset[str] = frozenset()
        """names of the requests that are to be handed back"""
        self._handed_back = self._samples = self._tokens = 0
        self._idle = IdleTime()
        self._key: int | None = None
        """key of the requests that are taken before all others"""
        self.serves_on: tuple[int, ...] = ()
        """devices that its engine serves on; none: those that it was made for"""

    @classmethod
    def slow_imports(cls, arguments: Mapping[str, Any]) -> Sequence[str]:
        return engines.load(arguments.get("backend", DEFAULT_ENGINE)).slow_imports

    async def setup(self) -> None:
        """Start the engine; its weights come with the first update, unless it loads its own.

        Where others may hold its devices, it starts with `resume`.
        """
        # Its module imports torch, which takes seconds: not in the event loop.
        restarts = self.config.engine_restarts
        self._live = await self.compute(LiveEngine, self.make_engine, restarts, self.span)
        await (self._live.start_later() if self._starts_stopped else self._live.start())

    async def teardown(self) -> None:
        """End the engine and its processes."""
        await self._live.engine.close()

    def make_engine(self) -> GenerationEngine:
        """Make the engine, not started. Override it to bring your own."""
        parts = (self.config.seed, self.rank, self.incarnation)
        seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
        part = engines.load(self._backend_name)
        return part.make(self._engine_config, seed, self.device)

    async def serve(
        self,
        requests: Receiver[Request],
        samples: Sender[Sample],
        weights: LatestReceiver[WeightUpdate],
        taken: Sender[WeightsTaken],
        sticky: bool = False,
    ) -> LanguageRolloutReport:
        """Answer requests until there are no more.

        Args:
            requests: what is to be answered.
            samples: gets the answers; those to turns of episodes by key of their name.
            weights: newer weights.
            taken: is told of each version that is served.
            sticky: requests whose key is this rank come first; the channel is `stealing`, and
                others take them where this worker has no room.

        Raises:
            ModelOutputError: the model gave NaN or infinity.
            PromptTooLong: a prompt and its ``max_tokens`` do not fit the model's context.
            WeightsError: an update was damaged or does not fit the model.
            WeightsEnded: the weights that a request asks for will not come.
            EngineDied: more often than ``config.engine_restarts``.
        """
        self._key = self.rank if sticky else None
        async with task_group() as group:
            return await self._serve(group, requests, samples, weights, taken)

    async def _serve(
        self,
        group: asyncio.TaskGroup,
        requests: Receiver[Request],
        samples: Sender[Sample],
        weights: LatestReceiver[WeightUpdate],
        taken: Sender[WeightsTaken],
    ) -> LanguageRolloutReport:
        """Answer requests, beside the tasks of a group, which ends when they do."""
        report = LanguageRolloutReport()
        live = self._live
        self.meter.serves(REQUESTS, live.engine.max_concurrent)
        loads, restarts = live.weights.loads, live.restarts
        live.listen(weights)
        self._idle.begin()
        held = self.config.max_concurrent or _held(live.engine.max_concurrent)
        room = asyncio.Semaphore(held)
        following = group.create_task(live.follow(weights, taken, self.rank))
        async with asyncio.TaskGroup() as answering:
            step = partial(self._start_next, requests, samples, room, answering, report)
            for _ in range(min(ASKING, held) - 1):
                answering.create_task(self._taking.run(step))
            # One of them here, so that the deadlock watch sees a run that nobody resumes.
            await self._taking.run(step)
        following.cancel()
        report.weight_updates = live.weights.loads - loads
        report.engine_restarts = live.restarts - restarts
        report.version = live.engine.version
        return report

    async def interrupt(self, names: list[str] | None = None, share: float = 1.0) -> int:
        """Stop taking requests, and hand back those that are here, with the tokens they have.

        Each goes back to its channel in its own place, at the head: whoever takes it goes on after
        its tokens. That settles its lease, so it is never there twice, and not lost if this worker
        dies meanwhile. Requests that are not handed back are answered here. Takes requests again
        after `resume`.

        Args:
            names: names of the requests (`Request.name`); None: all.
            share: part of them, rounded up: those that have made the fewest tokens.

        Returns how many were handed back; one that is finished meanwhile is not.
        """
        async with self._interrupting:
            return await self._interrupt(names, share)

    async def _interrupt(self, names: list[str] | None, share: float) -> int:
        await self._taking.close()
        # A turn may be here twice under its name: its episode's worker died, and it is run again.
        here = self._here()
        chosen = list(
            dict.fromkeys(one.name for _, one in here if names is None or one.name in names)
        )
        if share < 1.0:
            made = {one.name: one.made for one in (await self.progress()).requests}
            chosen.sort(key=lambda name: made.get(name, 0))
            chosen = chosen[: math.ceil(share * len(chosen))]
        before, self._interrupted = self._handed_back, frozenset(chosen)
        try:
            self._live.weights.interrupt(self._interrupted)
            await self._live.engine.abort(chosen)
            if ending := [
                task for task, one in here if one.name in self._interrupted and not task.done()
            ]:
                await asyncio.wait(ending)
            return self._handed_back - before
        finally:
            self._interrupted = frozenset()
            self._live.weights.interrupted = frozenset()

    async def stop(self, hand_back: bool = False) -> None:
        """Take no more requests, and give the device's memory back until `resume`.

        What is here is finished first; ``hand_back``: it is handed back, as by `interrupt`.
        """
        if hand_back:
            await self.interrupt()
        await self._taking.close()
        while self._answering:
            await asyncio.wait(list(self._answering))
        with self.span("offload"):
            await self._live.offload()

    async def resume(self, devices: tuple[int, ...] | None = None) -> None:
        """Take requests again, after `interrupt` or `stop`: first the memory, where it was given
        back, and the newest weights.

        Args:
            devices: to serve on from now on, where the engine can serve on others than it was made
                for; those of before when left out.
        """
        if devices is not None:
            engine = self._live.engine
            if len(devices) != len(self.serves_on) and isinstance(engine, Resizable):
                await engine.resize(len(devices))
            self.serves_on = devices
        if self.stopped:
            with self.span("onload"):
                await self._live.onload()
        if not self._answering:
            self._idle.begin()
        self._taking.open()

    @property
    def stopped(self) -> bool:
        """Whether the engine holds no memory of a device."""
        return self._live.offloaded

    async def progress(self) -> RolloutProgress:
        """Return how far each request is: counts, no tokens. Nothing is interrupted."""
        made = await self._made()
        return RolloutProgress(
            rank=self.rank,
            version=self._live.engine.version,
            slots=self._live.engine.max_concurrent,
            samples=self._samples,
            tokens=self._tokens,
            requests=tuple(RequestCount.of(one, made.get(one.name, 0)) for _, one in self._here()),
        )

    async def partial_requests(self) -> list[Request]:
        """The requests that are here, each with the tokens that it has by now as its ``partial``.

        For a checkpoint: nothing is interrupted, and they stay here.
        """
        found = await self._partial_responses()
        return [_continued(one, found.get(one.name)) for _, one in self._here()]

    def _here(self) -> list[tuple[asyncio.Task[None], Request]]:
        """The requests that are held, each with the task that answers it."""
        return [(task, one) for task, one in self._answering.items() if not task.done()]

    async def _partial_responses(self) -> dict[str, Generated]:
        if not self._live.started:
            return {}
        try:
            return await self._live.engine.so_far()
        except EngineDied:  # its successor generates them from the start
            return {}

    async def _made(self) -> dict[str, int]:
        engine: Any = self._live.engine
        kind: Any = type(engine)
        if not self._live.started or not _counts_tokens(kind):
            return {
                name: len(one.token_ids) for name, one in (await self._partial_responses()).items()
            }
        try:
            made: dict[str, int] = await engine.made()
            return made
        except EngineDied:
            return {}

    async def version(self) -> int:
        """The version of the weights that the engine serves; -1 before the first."""
        return self._live.engine.version

    async def log_probs(
        self, sequences: list[tuple[Tokens, Tokens]], version: int = -1
    ) -> list[Floats]:
        """The engine's log-probs at temperature 1 of ``(prompt [P], response [R])``: ``[R]`` each,
        by weights that are at least as new as ``version``.

        For the comparison with the actor's own: see ``check_weight_update_equal``.
        """
        await self._live.weights.reach(version)
        return await self._live.log_probs(sequences)

    async def _start_next(
        self,
        requests: Receiver[Request],
        samples: Sender[Sample],
        room: asyncio.Semaphore,
        answering: asyncio.TaskGroup,
        report: LanguageRolloutReport,
    ) -> bool:
        """Begin to answer one request; False when none will come any more."""
        async with AsyncExitStack() as held:
            await held.enter_async_context(room)
            try:
                lease = await held.enter_async_context(requests.lease(key=self._key))
            except EndOfChannel:
                return False
            [request] = lease
            work = self._answer(lease, held.pop_all(), samples, report)
            task = answering.create_task(work, name=f"{self.name} {request.name}")
            self._answering[task] = request
            self._idle.came(request)
            self.began(request)
            task.add_done_callback(self._answered)
        return True

    def _answered(self, task: asyncio.Task[None]) -> None:
        del self._answering[task]
        if not self._answering:
            self._idle.left()

    async def _answer(
        self,
        lease: Lease[Request],
        held: AsyncExitStack,
        samples: Sender[Sample],
        report: LanguageRolloutReport,
    ) -> None:
        """Generate and send on; its lease and its room are held until that is done."""
        [request] = lease
        brought = 0 if request.partial is None else len(request.partial.token_ids)
        async with held:
            generated = await self._generated(lease, report)
            if generated is not None:
                if request.sampling.stops:
                    generated = ended(generated, request.sampling, self._live.engine.decode)
                self._check(request, generated)
                key = request.name if request.turn else None  # a turn goes to its episode
                await samples.put(self._sample(request, generated), key=key)
                self.sent(request)
        if generated is None:
            report.handed_back += 1
            self._handed_back += 1
            return
        made = len(generated.token_ids)
        report.samples, report.tokens = report.samples + 1, report.tokens + made - brought
        self._samples, self._tokens = self._samples + 1, self._tokens + made

    async def _generated(
        self, lease: Lease[Request], report: LanguageRolloutReport
    ) -> Generated | None:
        """Generate until the end; None: it is handed back, and has taken its place in the lease."""
        [request] = lease
        while True:
            generated = await self._generate(request, report)
            if generated is not None and generated.finish != "abort":
                return generated
            request = _continued(request, generated)
            if request.name in self._interrupted:
                lease.replace(0, request)
                return None
            # The interruption was cancelled: generation continues here.

    async def _generate(self, request: Request, report: LanguageRolloutReport) -> Generated | None:
        """Generate for the request; return None if that was interrupted before it began."""
        live = self._live
        if request.min_version > live.engine.version:
            report.waited += 1
            await live.weights.reach(request.min_version, request.name)
        if request.name in self._interrupted:
            return None
        brought = 0 if request.partial is None else len(request.partial.token_ids)
        with self.meter.beside(REQUESTS) as piece:
            generated = await self.generate(request)
            if generated is not None:
                piece.size = float(len(generated.token_ids) - brought)
        return generated

    def began(self, request: Request) -> None:
        """A request was taken. Override it to watch."""

    async def generate(self, request: Request) -> Generated | None:
        """Have the engine generate, under weights that are recent enough."""
        return await self._live.generate(request)

    def sent(self, request: Request) -> None:
        """The sample of a request was sent on. Override it to watch."""

    @property
    def running(self) -> int:
        """Number of requests that the engine decodes together."""
        return min(len(self._answering), self._live.engine.max_concurrent)

    def _check(self, request: Request, generated: Generated) -> None:
        """Raise `ModelOutputError` for what cannot be trained on: a log-prob that is not finite,
        and tokens of which nobody knows what they were drawn from."""
        name = f"request {request.name} (prompt {request.prompt.index})"
        engine = f"the engine {self._backend_name!r} of {self.name}"
        whose = f"{engine} under weights version {generated.version.max(initial=-1)}"
        hint = ": look at the learning rate and the gradient norm of the steps before"
        require_finite(generated.log_prob, generated.token_ids, whose, name, if_nan=hint)
        if not (request.evaluation or generated.tells_of(request.sampling)):
            raise ModelOutputError(
                f"{name}: {engine} does not tell {generated.untold(request.sampling)}, so a "
                "trainer would compute another distribution: use an engine or settings that tell, "
                "or ask with evaluation = True"
            )

    def _sample(self, request: Request, generated: Generated) -> Sample:
        seconds, idle = self._idle.tell() if request.turn else (0.0, 0.0)
        text, decode = "", self._live.engine.decode
        if not request.turn:
            tokens, sampling = generated.token_ids, request.sampling
            text = written(generated, sampling, decode) if sampling.stops else decode(tokens)
        return Sample(
            request=msgspec.structs.replace(request, partial=None) if request.partial else request,
            generated=generated,
            text=text,
            rollout_rank=self.rank,
            engine_seconds=seconds,
            idle_seconds=idle,
        )


@cache
def _counts_tokens(engine: Any) -> bool:
    """Whether engines of this class do; a check by their methods takes long."""
    return issubclass(engine, CountsTokens)


def _held(slots: int) -> int:
    """Number of requests to hold for an engine, so that no slot is empty while a sample leaves."""
    return slots + slots // AHEAD


def _continued(request: Request, generated: Generated | None) -> Request:
    """The request with the generated tokens as its ``partial``."""
    if generated is None or not len(generated.token_ids):
        return request
    return msgspec.structs.replace(request, partial=generated)
