"""The pair of an actor's rank and the critic of the same rank: two channels, which live with the
actor.

::

    actor   samples with reference log-probs --prepared-->  critic      (only for KL in the rewards)
    actor   <--values--  the same samples with their values  critic
"""

from __future__ import annotations

import msgspec

from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.messages.language import SampleGroup
from rlinf_async.parallel import DataRank
from rlinf_async.runtime.ray.session import own_address
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.links import ChannelHost, Guest, Ticket


class CriticTickets(msgspec.Struct, frozen=True):
    """The critic's ends of the channels of a pair."""

    prepared: Ticket
    values: Ticket
    data_rank: DataRank
    """which share of a rollout the actor trains"""


class ActorSide:
    """The channels of a pair, and the actor's ends."""

    def __init__(self, args: TrainArgs, data_rank: DataRank) -> None:
        prompts = -(-args.rollout_batch_size // data_rank.size)
        self._prepared = Channel(SampleGroup, name="prepared", capacity=prompts)
        self._values = Channel(SampleGroup, name="values", capacity=prompts)
        self._data_rank = data_rank
        self.prepared: Sender[SampleGroup] | None = None
        if args.kl_coef > 0.0:
            self.prepared = self._prepared.new_sender()
        self.values: Receiver[SampleGroup] = self._values.new_receiver()

    async def tickets(self, name: str) -> CriticTickets:
        """Serve the channels, and return the critic's ends of them."""
        host = self._host = await ChannelHost.open(own_address(), name)
        prepared = host.ticket(self._prepared.receiver, "critic")
        values = host.ticket(self._values.sender, "critic")
        return CriticTickets(prepared, values, self._data_rank)


class CriticSide:
    """The critic's ends."""

    def __init__(self, prepared: Receiver[SampleGroup] | None, values: Sender[SampleGroup]) -> None:
        self.prepared, self.values = prepared, values

    @classmethod
    async def open(cls, tickets: CriticTickets, args: TrainArgs, name: str) -> CriticSide:
        """Connect to the actor."""
        guest = Guest(name)
        prepared = None
        if args.kl_coef > 0.0:
            prepared = await guest.end(tickets.prepared, SampleGroup)
        return cls(prepared, await guest.end(tickets.values, SampleGroup))
