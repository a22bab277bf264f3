"""Channels of several message types, on every transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Latest, MalformedFrame, WrongItemType
from rlinf_async.channels.wire import ChannelClient
from rlinf_async.channels.wire.codec import ItemCodec
from tests.channels.transport import Transport
from tests.channels.wire.harness import until, wired

T = TypeVar("T")


@dataclass
class Left:
    value: int


@dataclass
class Right:
    value: int
    pair: tuple[int, int] = (0, 0)


class Bare(msgspec.Struct):
    value: int


class Other(msgspec.Struct):
    value: int
    values: NDArray[np.float32] | None = None


class Start(msgspec.Struct, tag=True):
    value: int


class Stop(msgspec.Struct, tag=True):
    value: int


class Loose(msgspec.Struct):
    value: Any


class Box(msgspec.Struct, Generic[T]):
    item: T


UNIONS: list[tuple[Any, list[Any]]] = [
    (Left | Right, [Left(1), Right(1), Right(2, (3, 4))]),
    (Start | Stop, [Start(1), Stop(1)]),
    (Bare | Other, [Bare(1), Other(1)]),
    (Bare | Left | Start | int | str | None, [Bare(1), Left(1), Start(1), 1, "1", None]),
    (Loose | Left, [Loose([1, {"a": 2}]), Left(1)]),
    (Box[int] | Left, [Box(1), Left(1)]),
    (Left | tuple[int, ...], [Left(1), (1, 2)]),
]


@pytest.mark.parametrize(("union", "items"), UNIONS, ids=[str(union)[-60:] for union, _ in UNIONS])
async def test_each_member_of_a_union_arrives_as_what_it_is(
    transport: Transport, union: Any, items: list[Any]
) -> None:
    channel = Channel[Any](union, name="items")
    sender, receiver = await transport.ends(channel)
    latest = Latest[Any](union, name="newest")
    publisher, watcher = await transport.latest_ends(latest)
    for item in items:
        await sender.put(item)
        found = await receiver.get()
        assert (type(found), found) == (type(item), item)
        await channel.sender.put(item)
        async with receiver.lease() as leased:
            assert (type(leased[0]), leased[0]) == (type(item), item)
        await sender.put(item)
        (found,) = await receiver.get_batch(weight=1)
        assert (type(found), found) == (type(item), item)
        await publisher.publish(item)
        found = await watcher.get()
        assert (type(found), found) == (type(item), item)


async def test_arrays_of_a_member_travel_beside_it(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel[Any](Bare | Other, name="items"))
    await sender.put(Other(1, np.ones(100_000, np.float32)))
    found = await receiver.get()
    assert found.values.sum() == 100_000


async def test_what_is_no_member_is_refused(transport: Transport) -> None:
    sender, _ = await transport.ends(Channel[Any](Left | Right, name="items"))
    with pytest.raises(WrongItemType, match=r"'items' carries .*Left.*Right.*, not Bare"):
        await sender.put(Bare(1))


async def test_a_sender_of_one_member_and_a_receiver_of_more_understand_the_others() -> None:
    async with wired() as owner:
        connection = await owner.join()
        client = ChannelClient(connection)
        both = Channel[Any](Left | Right, name="both")
        one = Channel[Any](Right, name="one")
        sender: Any = client.end(owner.channels.end_ref(both.sender, "w"), Right)
        receiver: Any = client.end(owner.channels.end_ref(both.receiver, "w"), Bare | Right | Left)
        await sender.put(Right(1))
        assert await receiver.get() == Right(1)
        await both.sender.put(Left(2))
        assert await receiver.get() == Left(2)
        narrow: Any = client.end(owner.channels.end_ref(one.receiver, "w"), Left | Right)
        await one.sender.put(Right(3))
        assert await narrow.get() == Right(3)
        with pytest.raises(WrongItemType):
            await sender.put(Left(1))
        wrong: Any = client.end(owner.channels.end_ref(both.receiver, "w"), Right | Bare)
        await both.sender.put(Left(4))
        with pytest.raises(MalformedFrame, match="what arrived is a Left"):
            await wrong.get()
        await until(lambda: both.dead_letters)
        assert [dead.item for dead in both.dead_letters] == [Left(4)]
        connection.close()
        await connection.wait_closed()


def test_members_that_nothing_tells_apart_are_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match="apart; give each a class, and each class a name, of its"):
        ItemCodec(Box[int] | Box[str])
    twin = type("Left", (), {"__annotations__": {"other": int}})
    with pytest.raises(TypeError, match="of its own"):
        ItemCodec(Left | dataclass(twin))


@pytest.mark.parametrize("union", [Start | Stop, Left | None, int | str])
def test_what_msgspec_tells_apart_by_itself_is_not_numbered(union: Any) -> None:
    codec = ItemCodec(union)
    assert not codec.form.numbered


def test_a_member_that_does_not_exist_is_malformed() -> None:
    codec = ItemCodec(Left | Right)
    body = codec.encode(Right(1))
    assert body.data[0] == 1
    for wrong in (b"", b"\x07" + body.data[1:]):
        body.data = wrong
        with pytest.raises(MalformedFrame, match="member"):
            codec.decode(body)
