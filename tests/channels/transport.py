"""One test body, every transport: where the ends that a test uses live."""

from __future__ import annotations

import abc
import importlib.util
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from rlinf_async.channels import (
    Channel,
    Latest,
    LatestReceiver,
    LatestSender,
    Receiver,
    Sender,
)
from rlinf_async.testing import wait_all_blocked
from tests.loops import FACTORIES, VIRTUAL

T = TypeVar("T")
Setting = tuple[str, str]
"""A transport and a kind of loop."""

HARNESS = "tests.channels.wire.harness"


class Transport(abc.ABC):
    """Gives the ends of a channel; entered around a test's body, in its loop."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    @abc.abstractmethod
    async def ends(self, channel: Channel[T]) -> tuple[Sender[T], Receiver[T]]:
        """A sender and a receiver of this channel."""

    @abc.abstractmethod
    async def latest_ends(self, latest: Latest[T]) -> tuple[LatestSender[T], LatestReceiver[T]]:
        """A sender and a receiver of this `Latest`."""

    @abc.abstractmethod
    async def settle(self) -> None:
        """Return once everybody waits and nothing is under way."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()


class Local(Transport):
    """The channel's own ends, in this process."""

    async def ends(self, channel: Channel[T]) -> tuple[Sender[T], Receiver[T]]:
        return channel.sender.open(), channel.receiver.open()

    async def latest_ends(self, latest: Latest[T]) -> tuple[LatestSender[T], LatestReceiver[T]]:
        return latest.sender, latest.receiver

    async def settle(self) -> None:
        await wait_all_blocked()


class Unix(Transport):
    """Ends at the far side of a Unix socket, whose both sides run in this loop."""

    address: str | None = None

    async def ends(self, channel: Channel[T]) -> tuple[Sender[T], Receiver[T]]:
        ends: tuple[Sender[T], Receiver[T]] = await self._enter("remote_pair", channel)
        return ends

    async def latest_ends(self, latest: Latest[T]) -> tuple[LatestSender[T], LatestReceiver[T]]:
        ends: tuple[LatestSender[T], LatestReceiver[T]] = await self._enter(
            "remote_latest_pair", latest
        )
        return ends

    async def _enter(self, maker: str, channel: Any) -> Any:
        harness = importlib.import_module(HARNESS)
        return await self._stack.enter_async_context(getattr(harness, maker)(channel, self.address))

    async def settle(self) -> None:
        await importlib.import_module(HARNESS).settle()


class Tcp(Unix):
    """The same over TCP, as between hosts."""

    address = "tcp://127.0.0.1:0"


TRANSPORTS: dict[str, type[Transport]] = {"local": Local}
if importlib.util.find_spec("rlinf_async.channels.wire") and importlib.util.find_spec(HARNESS):
    TRANSPORTS |= {"unix": Unix, "tcp": Tcp}

SETTINGS: list[Setting] = [(medium, kind) for medium in TRANSPORTS for kind in FACTORIES]
SETTINGS.append(("local", VIRTUAL))
LOCAL_SETTINGS = [setting for setting in SETTINGS if setting[0] == "local"]
