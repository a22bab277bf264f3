"""Engines of a rollout manager, and how they are given the weights.

::

    all ranks --FSDPActor.sync_model_to_rollout, by plan--> Latest[WeightUpdate] of rank 0
        colocate:  taken from there --Ray's object store--> engine.update_weights_from_tensor
        else:      `Latest` over our connections ---------> engine.update_weights_from_channel

An engine is an actor of Ray with these two methods: `RolloutEngineActor`, one of our generation
engines, or one's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlinf_async.backends.language import GenerationEngine
from rlinf_async.backends.parts import DEFAULT_ENGINE, engines
from rlinf_async.channels import Latest, LatestReceiver
from rlinf_async.channels.wire import Router
from rlinf_async.messages.language import Generated, Request
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.ray.session import of_ray
from rlinf_async.runtime.ray.training.pairs import ChannelHost, Guest, Ticket
from rlinf_async.runtime.ray.training.ranks import LoopThread


class _Followed:
    """Weights of one training group."""

    def __init__(self, weights: LatestReceiver[WeightUpdate]) -> None:
        self.weights = weights
        self.loaded = -1
        """newest version of the weights that the engine has loaded"""


class RolloutEngineActor:
    """A generation engine that is given weights by a training group; use it with ``ray.remote``.

    Args:
        config: the engine's configuration, as its own Struct.
        backend: the engine's registered name.
        seed: seed of random numbers that a request's own seed does not set.
        device: device, as torch names it.
    """

    def __init__(
        self, config: Any, backend: str = DEFAULT_ENGINE, *, seed: int = 0, device: str = "cpu"
    ) -> None:
        self._given = config, seed, device
        self._backend = backend
        self._engine: GenerationEngine | None = None
        self._guest = Guest("engine")
        self._followed: dict[Ticket, _Followed] = {}

    async def start(self) -> None:
        """Build the engine."""
        if self._engine is None:
            engine = engines.load(self._backend).make(*self._given)
            await engine.start()
            self._engine = engine

    async def generate(self, requests: Sequence[Request]) -> list[Generated]:
        """Generate the responses of requests, together."""
        engine = self._started()
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    async def version(self) -> int:
        """Return the version of the weights; -1 before the first."""
        return self._started().version

    async def update_weights_from_tensor(self, update: WeightUpdate) -> int:
        """Load these weights; return their version."""
        engine = self._started()
        await engine.load(update)
        return engine.version

    async def update_weights_from_channel(self, ticket: Ticket, version: int) -> int:
        """Load what is published, until it is at least this version; return the one loaded.

        Of another training group also what is not newer than what the engine has: that one refuses
        older weights (`WeightsError`).
        """
        engine = self._started()
        if ticket not in self._followed:
            self._followed[ticket] = _Followed(await self._guest.end(ticket, WeightUpdate))
        followed = self._followed[ticket]
        while followed.loaded < version:
            update = await followed.weights.get()
            await engine.load(update)
            followed.loaded = update.version
        return engine.version

    async def offload(self) -> None:
        """Give the device's memory back."""
        await self._started().offload()

    async def onload(self) -> None:
        """Take it again."""
        await self._started().onload()

    def _started(self) -> GenerationEngine:
        if self._engine is None:
            raise RuntimeError("the engine was not started: call start() first")
        return self._engine


class FromTensors:
    """Hands engines the tensors that rank 0 has published, by Ray's object store: shared memory of
    the host."""

    def __init__(self, published: Latest[WeightUpdate]) -> None:
        self._published = published

    def deliver(self, engines: Sequence[Any], version: int) -> None:
        """Have all engines load a version, and return when they have. It is put into Ray once, for
        all of them."""
        ray = of_ray()
        update = ray.put(self._published.receiver.clone().get_nowait())
        ray.get([engine.update_weights_from_tensor.remote(update) for engine in engines])


class FromChannel:
    """Lets engines follow what rank 0 publishes, on whatever host they are."""

    def __init__(self, published: Latest[WeightUpdate], loop: LoopThread) -> None:
        self._published = published
        self._loop = loop
        self._host: ChannelHost | None = None
        self._tickets: dict[str, Ticket] = {}
        """tickets by the engine's identifier"""

    def deliver(self, engines: Sequence[Any], version: int) -> None:
        """Return when all engines have this version."""
        self._loop.run(self._admit([engine._actor_id.hex() for engine in engines]))
        of_ray().get(
            [
                engine.update_weights_from_channel.remote(
                    self._tickets[engine._actor_id.hex()], version
                )
                for engine in engines
            ]
        )

    async def _admit(self, engines: Sequence[str]) -> None:
        if self._host is None:
            self._host = await ChannelHost.open("weights", Router())
        for engine in engines:
            if engine not in self._tickets:
                receiver = self._published.receiver
                self._tickets[engine] = self._host.ticket(receiver, f"engine {engine}")
