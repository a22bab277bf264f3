"""An engine whose weights change while it generates, and which is replaced when it dies.

::

                  waits for                               unblocked by
    generate      weights of the version that is asked    the actor
    follow        newer weights                           the actor
                  the devices' memory                     `onload`
    revive        the engine to start, weights to load    itself
    onload        the same                                itself

Invariant: a request that was taken is answered, or fails with the cause, whatever happens to the
engine meanwhile. Tokens of an engine that died are generated again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rlinf_async.backends.language import EngineDied, GenerationEngine
from rlinf_async.channels import LatestReceiver, NoReceivers, Sender
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request, Tokens, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.base import MergedSpan, OpenSpan
from rlinf_async.workers.rollout.policy import FollowedWeights

log = logging.getLogger(__name__)

Build = Callable[[], GenerationEngine]


class LiveEngine:
    """Generates under the newest weights.

    Args:
        build: makes an engine, not started.
        restarts: number of times that a dead one is replaced.
        span: opens spans of the trace, for generating and for loading weights.
    """

    def __init__(self, build: Build, restarts: int, span: OpenSpan) -> None:
        self._build = build
        self._restarts_left = restarts
        self._span = span
        self._generating = MergedSpan(span, "generate")
        self.engine = build()
        self.weights = FollowedWeights(lambda: self.engine.version, askers="rollout workers")
        self._source: LatestReceiver[WeightUpdate] | None = None
        self._changing = (
            asyncio.Lock()
        )  # held while weights are loaded, or the engine is replaced or offloaded
        self._moving = asyncio.Lock()  # held while it is offloaded or onloaded
        self.started = False
        """whether the engine was started"""
        self.offloaded = False
        """whether the engine holds no memory of a device"""
        self.restarts = 0
        """engines that died and were replaced"""

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()
        self.started = True

    async def start_later(self) -> None:
        """Have the first `onload` start the engine: others may hold its devices until then."""
        await self._changing.acquire()
        self.offloaded = True

    async def generate(self, request: Request) -> Generated | None:
        """Generate under weights that are recent enough for the request; None if it was interrupted
        while there was no engine.

        Raises:
            WeightsEnded: they will never come.
            EngineDied: once more than is allowed.
            PromptTooLong: it does not fit.
        """
        while True:
            engine = self.engine
            try:
                with self._generating.piece():
                    return await engine.generate(request)
            except EngineDied as death:
                await self._replace_engine(engine, death)
                if request.name in self.weights.interrupted:  # its successor was not interrupted
                    return None

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return what `GenerationEngine.log_probs` does; an engine that dies meanwhile is replaced.

        Raises:
            EngineDied: once more than is allowed.
        """
        while True:
            engine = self.engine
            try:
                return await engine.log_probs(sequences)
            except EngineDied as death:
                await self._replace_engine(engine, death)

    def listen(self, weights: LatestReceiver[WeightUpdate]) -> None:
        """Weights will come from here: `follow` is about to begin."""
        self._source = weights.clone()
        self.weights.begin()

    async def follow(
        self, weights: LatestReceiver[WeightUpdate], taken: Sender[WeightsTaken], rank: int
    ) -> None:
        """Load every update that comes, and report each, until no more will come.

        Raises what the engine's ``load`` raises: `WeightsError` for a damaged update.
        """
        loop = asyncio.get_running_loop()

        async def load(update: WeightUpdate) -> None:
            arrived, served = loop.time(), self.engine.version
            async with self._changing:
                if served < self.engine.version > update.version:
                    return  # an engine built meanwhile has newer ones, which come next
                checksum = await self._load(update)
            self.weights.loaded()
            seconds = loop.time() - arrived
            try:
                await taken.put(
                    WeightsTaken(
                        rollout_rank=rank,
                        version=update.version,
                        checksum=checksum,
                        seconds=seconds,
                    )
                )
            except NoReceivers:
                log.debug("no receiver is left for WeightsTaken of version %d", update.version)

        await self.weights.follow(weights, load)

    async def offload(self) -> None:
        """Give the device's memory back, if it was not; no weights are loaded until `onload`."""
        async with self._moving:
            if self.offloaded:
                return
            await self._changing.acquire()
            try:
                await self._release_memory()
            except BaseException:
                self._changing.release()
                raise
            self.offloaded = True

    async def onload(self) -> None:
        """Take the memory again, if it was given back, and the weights if the engine dropped
        them; start the engine, if it was not."""
        async with self._moving:
            if not self.offloaded:
                return
            try:
                await self._take_memory()
                if self.engine.version < 0:
                    await self._load_newest(self.engine)
            finally:
                self.offloaded = False
                self._changing.release()
                self.weights.wake()

    async def _release_memory(self) -> None:
        try:
            await self.engine.offload()
        except EngineDied as death:  # it holds none any more; `onload` starts its successor
            await self._rebuild(self.engine, death)
            self._count_restart()

    async def _take_memory(self) -> None:
        if not self.started:
            return await self.start()
        try:
            await self.engine.onload()
        except EngineDied as death:
            await self._replace(self.engine, death)

    async def _load(self, update: WeightUpdate) -> int:
        while True:
            engine = self.engine
            try:
                return await self._loaded(engine, update)
            except EngineDied as death:
                await self._replace(engine, death)

    async def _loaded(self, engine: GenerationEngine, update: WeightUpdate) -> int:
        with self._generating.cut(), self._span("load weights", version=update.version):
            return await engine.load(update)

    async def _replace_engine(self, dead: GenerationEngine, death: EngineDied) -> None:
        async with self._changing:
            while self.engine is dead:  # the first caller replaces it
                await self._replace(dead, death)
                dead = self.engine
                try:
                    await self._load_newest(dead)
                    return
                except EngineDied as again:
                    death = again

    async def _replace(self, dead: GenerationEngine, death: EngineDied) -> None:
        await self._rebuild(dead, death)
        try:
            await self.start()
        except BaseException:  # a cancellation too: the next caller must not find half an engine
            await self.engine.close()
            raise
        self._count_restart()

    async def _rebuild(self, dead: GenerationEngine, death: EngineDied) -> None:
        """Put another engine, which is not started, in the place of one that died."""
        if self._restarts_left == 0:
            raise death
        log.warning("the engine died (%s) and is built again", death)
        await dead.close()
        self.engine, self.started = self._build(), False

    def _count_restart(self) -> None:
        self._restarts_left -= 1
        self.restarts += 1

    async def _load_newest(self, engine: GenerationEngine) -> None:
        """Load what was published last, if anything was."""
        if self.weights.loads and self._source is not None:
            await self._loaded(engine, await self._source.get(newer_than=0))
            self.weights.wake()
