"""How the engines of a rollout manager are given the weights.

::

    all ranks --FSDPActor.sync_model_to_rollout, by plan--> Latest[WeightUpdate] of rank 0
        colocate:  taken from there --Ray's object store--> engine.update_weights_from_tensor
        else:      `Latest` over our connections ---------> engine.update_weights_from_channel

An engine is an actor of Ray with these two methods: `RolloutEngineActor`, or one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlinf_async.channels import Latest
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.session import own_address
from rlinf_async.runtime.ray.training.links import ChannelHost, Ticket
from rlinf_async.runtime.ray.training.loop import LoopThread


class WeightUpdater(Protocol):
    """Hands what rank 0 has published to the engines."""

    def deliver(self, engines: Sequence[Any], version: int) -> None:
        """Return when all engines have this version."""
        ...


class FromTensors:
    """The tensors themselves, by Ray's object store: shared memory of the host."""

    def __init__(self, published: Latest[WeightUpdate]) -> None:
        self._published = published

    def deliver(self, engines: Sequence[Any], version: int) -> None:
        """Put them there once, for all engines."""
        found = self._published.take_newer(0)
        assert found is not None  # `version` was published
        ray = of_ray()
        update = ray.put(self._published.value(found[1]))
        ray.get([engine.update_weights_from_tensor.remote(update) for engine in engines])


class Distributed:
    """Every engine follows the channel of rank 0, on whatever host it is."""

    def __init__(self, published: Latest[WeightUpdate], loop: LoopThread) -> None:
        self._published = published
        self._loop = loop
        self._host: ChannelHost | None = None
        self._tickets: dict[str, Ticket] = {}
        """by the engine's identifier"""

    def deliver(self, engines: Sequence[Any], version: int) -> None:
        """Tell the engines which version to wait for."""
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
            self._host = await ChannelHost.open(own_address(), "weights")
        for engine in engines:
            if engine not in self._tickets:
                receiver = self._published.receiver
                self._tickets[engine] = self._host.ticket(receiver, f"engine {engine}")


def make_updater(
    published: Latest[WeightUpdate], loop: LoopThread, *, colocate: bool
) -> WeightUpdater:
    """Return the updater that follows the placement of the engines."""
    return FromTensors(published) if colocate else Distributed(published, loop)
