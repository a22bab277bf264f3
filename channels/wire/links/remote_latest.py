"""The two ends of a `Latest` in another process. They are not counted, and need no closing."""

from __future__ import annotations

from typing import Self, TypeVar

from rlinf_async.channels.ends import LatestReceiver, LatestSender
from rlinf_async.channels.waitfor import current_party
from rlinf_async.channels.wire.links import protocol
from rlinf_async.channels.wire.links.remote_channel import Wire
from rlinf_async.channels.wire.links.remote_end import WireEnd

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class RemoteLatestSender(WireEnd, LatestSender[T_contra]):
    """Publishes to a `Latest` in another process."""

    __slots__ = ()

    async def publish(self, value: T_contra) -> int:
        body = self._wire.encode(value)
        publish = protocol.Publish(self._number, current_party.get())
        found, _ = await self._wire.connection.request(
            "latest.publish", publish, body, reply=protocol.Version
        )
        return found.version

    async def close(self) -> None:
        await self._wire.connection.request(
            "latest.close", protocol.End(self._number), reply=protocol.Nothing
        )


class RemoteLatestReceiver(WireEnd, LatestReceiver[T_co]):
    """Reads a `Latest` in another process."""

    __slots__ = ("version",)

    def __init__(self, wire: Wire, number: int, version: int = 0) -> None:
        super().__init__(wire, number)
        self.version = version

    def clone(self) -> Self:
        return type(self)(self._wire, self._number, self.version)

    async def get(self, *, newer_than: int | None = None) -> T_co:
        than = self.version if newer_than is None else newer_than
        newer = protocol.Newer(self._number, than, current_party.get())
        found, body = await self._wire.connection.request(
            "latest.newer", newer, reply=protocol.Version, on_channel=True
        )
        value: T_co = self._wire.decode_value(body)
        self.version = found.version
        return value

    def get_nowait(self) -> T_co | None:
        raise self._wire.elsewhere("get_nowait", "await get(), or a task that reads ahead")
