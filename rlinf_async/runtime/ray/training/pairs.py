"""The pair of an actor's rank and the critic of the same rank.

Each step has two channels of its own, which live with the actor and go over our connections, not
through Ray::

    actor   samples with reference log-probs --prepared-->  critic      (only for KL in the rewards)
    actor   <--values--  the same samples with their values  critic

             waits for           unblocked by
    actor    values              the critic: sends them, fails, or begins a later step; its
                                 process is lost
    critic   prepared            the actor: sends them, fails, or begins a later step; its
                                 process is lost

A side that fails in a step fails the channel into which it sends, one that begins a step without
the step before fails those of the latter, and a process that is lost fails all channels of the
pair: the other side gets a `PeerFailed`. What a failed step has left in its channels ends with
them, so a step that is tried again takes nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Awaitable
from typing import Any, Final, Self, TypeVar

import msgspec

from rlinf_async.backends.base import made_by
from rlinf_async.channels import Channel, ChannelError, Receiver, Sender, WireError
from rlinf_async.channels.errors import error_text
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Connection,
    EndRef,
    Router,
    Server,
    connect,
    serve,
)
from rlinf_async.channels.wire.server import Local
from rlinf_async.channels.wire.session.connection import Closed, Request
from rlinf_async.messages.language import SampleGroup
from rlinf_async.parallel import DataRank
from rlinf_async.runtime.ray.session import own_address
from rlinf_async.runtime.ray.training.args import TrainArgs
from rlinf_async.runtime.ray.training.ranks import PeerFailed


class HostTicket(msgspec.Struct, frozen=True):
    """Address of channels of another process. It holds a secret: it goes through Ray's calls, and
    nowhere else."""

    address: str
    secret: bytes


class Ticket(msgspec.Struct, frozen=True):
    """The end of a channel on its way to another process."""

    host: HostTicket
    end: EndRef


class ChannelHost:
    """Serves channels of this process. Made by `open`."""

    def __init__(self, server: Server, channels: ChannelServer, here: HostTicket) -> None:
        self._server = server
        self.channels = channels
        self.here = here
        """how others come here"""

    @classmethod
    async def open(cls, name: str, router: Router, on_left: Closed | None = None) -> Self:
        """Listen at a free port of this host's address.

        Args:
            name: name of this process, in reports.
            router: what else the processes that come here may ask.
            on_left: called when one of them has gone.
        """
        channels, secret, address = ChannelServer(router), secrets.token_bytes(32), own_address()
        shown = f"[{address}]" if ":" in address else address
        server = await serve(
            f"tcp://{shown}:0", secret, router=router, name=name, on_disconnect=on_left
        )
        return cls(server, channels, HostTicket(server.address, secret))

    def ticket(self, end: Local, holder: str) -> Ticket:
        """Open an end like this one for another process, ``holder`` in reports."""
        return Ticket(self.here, self.channels.end_ref(end, holder))

    async def close(self) -> None:
        """Serve nobody any more."""
        await self._server.close()


class Guest:
    """Makes ends of tickets, over one connection to each host."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections: dict[str, Connection] = {}
        """connections by address"""

    async def end(self, ticket: Ticket, item_type: Any) -> Any:
        """Return the end that a ticket stands for. Raises `WireError`: its host is not there."""
        return ChannelClient(await self.connection(ticket.host)).end(ticket.end, item_type)

    async def connection(self, host: HostTicket) -> Connection:
        """Return the connection to a host. Raises `WireError`: it is not there."""
        found = self._connections.get(host.address)
        if found is None or found.closed:
            name = f"{self._name} ({os.getpid()})"
            found = await connect(host.address, host.secret, name=name, router=Router())
            self._connections[host.address] = found
        return found

    async def close(self) -> None:
        """Leave all hosts."""
        for connection in self._connections.values():
            connection.close()
            await connection.wait_closed()
        self._connections.clear()


T = TypeVar("T")
log = logging.getLogger(__name__)
TELL_SECONDS: Final = 30.0
"""interval between reports of a wait for the other side"""


class PairSteps:
    """Numbers the steps of two groups that are paired: a call of one group belongs to the newest
    step of the same rollout in which it has no part so far, else it begins one.

    So a rollout that is tried again is another step, whichever group is called first.
    """

    def __init__(self) -> None:
        self._last = 0
        self._newest: dict[int, int] = {}
        """newest step by rollout, where one side still has to join it"""
        self._joined: dict[str, int] = {}
        """the newest step of each role"""
        self._lock = threading.Lock()

    def join(self, role: str, rollout_id: int) -> int:
        """Return the step, from 1, of this call for a rollout."""
        with self._lock:
            step = self._newest.get(rollout_id, 0)
            if step <= self._joined.get(role, 0):
                self._last = step = self._newest[rollout_id] = self._last + 1
            self._joined[role] = step
            if len(self._joined) == 2:  # of both: nobody joins a step that both have reached
                over = min(self._joined.values())
                self._newest = {at: one for at, one in self._newest.items() if one > over}
            return step


class PairTicket(msgspec.Struct, frozen=True):
    """Ticket with which a critic opens its side of the pair."""

    actor: str
    """name of the actor's rank"""
    host: HostTicket
    data_rank: DataRank
    """share of a rollout that the actor trains"""


class StepEnds(msgspec.Struct, frozen=True):
    """actor -> critic: its ends of the channels of a step."""

    prepared: EndRef
    values: EndRef


class StepRequest(msgspec.Struct, frozen=True):
    """critic -> actor: give me the ends of this step."""

    number: int


class ActorStep:
    """A step of the actor: its two channels. Both have a sender and a receiver here, so that
    neither side ends one by coming last, or by going first."""

    def __init__(self, number: int, prompts: int, peer: str, *, prepares: bool) -> None:
        self.peer = peer
        """name of the critic's rank"""
        self.prepares = prepares
        """whether the critic waits for reference log-probs"""
        self.prepared = Channel(SampleGroup, name=f"prepared of step {number}", capacity=prompts)
        self.values = Channel(SampleGroup, name=f"values of step {number}", capacity=prompts)
        self.prepared.sender.open()
        self.values.receiver.open()

    def end(self, reason: str) -> None:
        """Let whoever waits on either side know why the step is not trained."""
        self.prepared.fail(reason)
        self.values.fail(reason)

    async def fail(self, error: BaseException) -> None:
        """Let the critic know that this rank does not train the step."""
        self.prepared.fail(error_text(error))


class ActorSide:
    """The actor's side of a pair, once it is opened."""

    _host: ChannelHost = made_by("open()")

    def __init__(self, args: TrainArgs, data_rank: DataRank, name: str, critic: str) -> None:
        self._prompts = -(-args.rollout_batch_size // data_rank.size)
        self._prepares = args.kl_coef > 0.0
        self._data_rank, self._name = data_rank, name
        self.peer = critic
        """name of the critic's rank"""
        self._steps: dict[int, ActorStep] = {}
        self._current = 0
        """the newest step that was begun here"""
        self._given = 0
        """the newest step whose ends the critic has: it takes no earlier one any more"""
        self._lost = ""
        """what happened to the critic's process"""

    async def open(self) -> PairTicket:
        """Serve the critic; return what it opens its side with."""
        router = Router()
        router.add_sync("pair.step", StepRequest, self._give_ends)
        self._host = await ChannelHost.open(self._name, router, self._left)
        return PairTicket(self._name, self._host.here, self._data_rank)

    async def begin(self, number: int) -> ActorStep:
        """Begin a step. What is left of earlier steps ends here."""
        self._current = number
        for old in [one for one in self._steps if one < number]:
            step = self._steps.pop(old)
            step.end(f"{self._name} is at another step")
            self._host.channels.withdraw(step.prepared)
            self._host.channels.withdraw(step.values)
        return self._step(number)

    async def close(self) -> None:
        """Part with the critic."""
        await self._host.close()

    def _step(self, number: int) -> ActorStep:
        """The step of this number, whoever begins it first."""
        found = self._steps.get(number)
        if found is None:
            found = self._steps[number] = ActorStep(
                number, self._prompts, self.peer, prepares=self._prepares
            )
            if self._lost:
                found.end(self._lost)
            elif number < self._given:
                found.end(self._later_step())
        return found

    def _later_step(self) -> str:
        return (
            f"{self.peer} is at a later step: async_train of both groups must be called for the "
            "same rollouts"
        )

    def _give_ends(self, request: Request[StepRequest]) -> None:
        number, give = request.meta.number, self._host.channels.end_ref
        if number < self._current:
            raise ChannelError(f"{self._name} is at another step")
        step = self._step(number)
        for other, passed_over in self._steps.items():
            if self._given < other < number:
                passed_over.end(self._later_step())
        self._given = max(self._given, number)
        prepared = give(step.prepared.receiver, self.peer)
        request.reply(StepEnds(prepared, give(step.values.sender, self.peer)))

    def _left(self, connection: Connection, reason: str) -> None:
        self._lost = f"its process is lost: {reason}"
        for step in self._steps.values():
            step.end(self._lost)


class CriticStep:
    """The critic's ends of a step."""

    def __init__(
        self, peer: str, prepared: Receiver[SampleGroup] | None, values: Sender[SampleGroup]
    ) -> None:
        self.peer = peer
        """name of the actor's rank"""
        self.prepared = prepared
        self._values = values
        self._complete = False

    async def pass_on(self, groups: int, valued: Receiver[SampleGroup], key: int) -> None:
        """Send the actor ``groups`` groups, each as soon as it has its values.

        An actor that does not take them, since it failed, does not keep the critic from training:
        the ranks of a critic train together.
        """
        try:
            for _ in range(groups):
                await self._values.put(await valued.get(key=key))
            await self._values.flush()
        except ChannelError as error:
            log.warning("%s does not take values: %s", self.peer, error)
        self._complete = True

    async def fail(self, error: BaseException) -> None:
        """Let the actor know that it gets no values, unless it has them all."""
        if self._complete:
            return
        try:
            self._values.fail(error_text(error))
        except ChannelError as lost:
            log.warning("%s was not told of a failure: %s", self.peer, lost)


class CriticSide:
    """The critic's side of a pair. Made by `open`."""

    def __init__(self, ticket: PairTicket, args: TrainArgs, name: str) -> None:
        self._ticket = ticket
        self.peer = ticket.actor
        """name of the actor's rank"""
        self._takes_prepared = args.kl_coef > 0.0
        self._guest = Guest(name)

    @classmethod
    async def open(cls, ticket: PairTicket, args: TrainArgs, name: str) -> Self:
        """Connect to the actor. Raises `WireError`: it is not there."""
        side = cls(ticket, args, name)
        await side._guest.connection(ticket.host)
        return side

    async def begin(self, number: int) -> CriticStep:
        """Begin a step. Raises `ChannelError`: the actor is lost, or further already."""
        connection = await self._guest.connection(self._ticket.host)
        ends, _ = await connection.request("pair.step", StepRequest(number), reply=StepEnds)
        client = ChannelClient(connection)
        prepared: Any = client.end(ends.prepared, SampleGroup) if self._takes_prepared else None
        values: Any = client.end(ends.values, SampleGroup)
        return CriticStep(self.peer, prepared, values)

    async def close(self) -> None:
        """Part with the actor."""
        await self._guest.close()


async def from_peer(peer: str, doing: str, given: Awaitable[T]) -> T:
    """Return what the peer gives; a long wait is reported, since the peer may not have been called.

    Raises:
        PeerFailed: it failed, or is lost.
    """
    waiting = asyncio.create_task(_report_wait(peer, doing))
    try:
        return await given
    except ChannelError as error:
        what = "is lost" if isinstance(error, WireError) else "failed"
        raise PeerFailed(f"{doing}: {peer}, with which it is paired, {what}: {error}") from error
    finally:
        waiting.cancel()


async def _report_wait(peer: str, doing: str) -> None:
    began = asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(TELL_SECONDS)
        log.warning(
            "%s so far: it has waited %.0f s for %s. Was async_train of both groups called for "
            "this rollout?", doing, asyncio.get_running_loop().time() - began, peer,
        )  # fmt: skip
