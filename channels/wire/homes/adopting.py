"""The user's side: ends of queues that live with other processes, or with this one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import msgspec

from rlinf_async.channels.errors import ChannelError
from rlinf_async.channels.wire.client import ChannelClient
from rlinf_async.channels.wire.direct.direct import Direct
from rlinf_async.channels.wire.homes.home_protocol import Adopt, Adopted
from rlinf_async.channels.wire.homes.homed_queues import HomedQueues
from rlinf_async.channels.wire.homes.remote_queue import reach
from rlinf_async.channels.wire.links.protocol import EndRef, Home
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.endpoint_options import Timeouts


class AdoptedEnd(NamedTuple):
    """An end that this process may use."""

    make: Callable[[Any], Any]
    """makes it, of an item type"""
    client: ChannelClient | None
    """by which it is used; None where the queue lives here"""


class Homes:
    """The connections of this process to the homes of queues, one to each.

    Args:
        own: what lives here, under which name.
        times: as of `connect`.
    """

    def __init__(
        self,
        secret: bytes,
        name: str,
        own: Callable[[], tuple[Home, HomedQueues] | None] = lambda: None,
        **times: Unpack[Timeouts],
    ) -> None:
        self._secret = secret
        self._name = name
        self._own = own
        self._times = times
        self._connecting: dict[Home, asyncio.Task[Connection]] = {}

    async def adopt(self, ref: EndRef, direct: Direct | None = None) -> AdoptedEnd:
        """The end that a maker has opened for this process.

        Raises:
            HomeLost: its home is gone, or cannot be reached.
            ChannelError: it was closed meanwhile.
        """
        home = ref.home
        if home is None:
            raise ChannelError(f"channel {ref.channel!r} lives with the process that sent its end")
        own = self._own()
        if own is not None and own[0] == home:
            queues = own[1]
            await queues.adopt_here(ref.queue, ref.number)
            return AdoptedEnd(lambda kind: queues.take(ref.queue, ref.number, kind), None)
        connection = await self._reach(home)
        adopted, _ = await connection.request(
            "home.adopt", Adopt(ref.queue, ref.number), reply=Adopted
        )
        mine = msgspec.structs.replace(ref, number=adopted.end)
        client = ChannelClient(connection, direct)
        return AdoptedEnd(lambda kind: client.end(mine, kind), client)

    async def close(self) -> None:
        """Close them, once what was put is in its place."""
        tasks, self._connecting = list(self._connecting.values()), {}
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Connection):
                found.close()
                await found.wait_closed()

    async def _reach(self, home: Home) -> Connection:
        task = self._connecting.get(home)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            made = reach(home, self._secret, self._name, **self._times)
            task = self._connecting[home] = asyncio.create_task(made, name=f"reach {home.name}")
        return await asyncio.shield(task)
