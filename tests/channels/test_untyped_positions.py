"""Where a channel's type does not say what stands there, an item is the same on every transport."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.channels import Channel, Latest, WrongItemType
from rlinf_async.channels.untyped import Untyped, item_class, packer
from tests.channels.transport import Transport


class Loose(msgspec.Struct, frozen=True):
    """A message with one part that its type says nothing of."""

    number: int
    extra: dict[str, Any] = {}


@dataclass(frozen=True)
class LoosePlain:
    extra: Any


class Tree(msgspec.Struct):
    """A message that contains itself."""

    label: Any
    below: list[Tree] = []


class Option(TypedDict, total=False):
    shape: Any
    rest: int


class Place(NamedTuple):
    row: int
    note: object


class Color(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int


class Message(msgspec.Struct):
    x: int


NESTED: Any = {
    "shape": (3, (4, 5)),
    "names": {"a", "b"},
    "frozen": frozenset({(1, 2), (3, 4)}),
    "list": [(1,), [2], {"deep": ({7},)}],
    (1, "a"): None,
    5: 1.5,
    "plain": [1, True, None, "text", b"raw", {"a": [1]}],
    "empty": [(), set(), frozenset(), [], {}],
}

SAME: list[tuple[Any, Any]] = [
    (Any, NESTED),
    (object, NESTED),
    (Any, (1, [2, (3,)])),
    (dict, NESTED),
    (list, [(1, 2), {3}]),
    (list[Any], [(1, 2), {3}]),
    (dict[str, Any], {"a": (1, 2)}),
    (tuple[Any, ...], ((1,), [1])),
    (tuple[int, Any], (1, (2,))),
    (tuple[int, ...], (1, 2)),
    (set[str], {"a", "b"}),
    (set, {(1, 2), 3}),
    (frozenset, frozenset({(1, 2), 3})),
    (Loose, Loose(1, {"a": (1, {2})})),
    (LoosePlain, LoosePlain((1, 2))),
    (Tree, Tree((1,), [Tree({2}), Tree([(3,)], [Tree(4)])])),
    (Option, {"shape": (1, 2), "rest": 3}),
    (Place, Place(1, (2, 3))),
    (Loose | None, Loose(1, {"a": ((),)})),
    (list[Any] | int, [(1,)]),
    (dict[str, list[Any]], {"a": [(1,), 2]}),
    (Any, datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
]


@pytest.mark.parametrize(("item_type", "item"), SAME, ids=[str(kind)[:40] for kind, _ in SAME])
async def test_tuples_and_sets_arrive_as_what_they_are(
    transport: Transport, item_type: Any, item: Any
) -> None:
    sender, receiver = await transport.ends(Channel[Any](item_type, name="items"))
    await sender.put(item)
    found = await receiver.get()
    assert found == item
    assert repr_of(found) == repr_of(item)


@pytest.mark.parametrize(("item_type", "item"), SAME, ids=[str(kind)[:40] for kind, _ in SAME])
async def test_so_does_what_the_owner_itself_puts_and_what_is_published(
    transport: Transport, item_type: Any, item: Any
) -> None:
    channel = Channel[Any](item_type, name="items")
    _, receiver = await transport.ends(channel)
    await channel.sender.put(item)
    assert repr_of(await receiver.get()) == repr_of(item)
    latest = Latest[Any](item_type, name="newest")
    publisher, watcher = await transport.latest_ends(latest)
    await publisher.publish(item)
    assert repr_of(await watcher.get()) == repr_of(item)


def repr_of(value: Any) -> Any:
    """A value with the type of each part, in an order that does not depend on hashes."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(repr_of(key), repr_of(part)) for key, part in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted((repr_of(part) for part in value), key=repr)
    if isinstance(value, list | tuple):
        return kind, [repr_of(part) for part in value]
    return kind, value


async def test_arrays_inside_untyped_tuples_travel_beside_them(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel[Any](dict, name="batches"))
    large = np.arange(100_000)
    await sender.put({"pair": (large, torch.arange(3)), "one": np.float32(2)})
    found = await receiver.get()
    assert type(found["pair"]) is tuple
    assert (found["pair"][0] == large).all()
    assert found["pair"][1].tolist() == [0, 1, 2]


def test_an_item_is_not_changed_by_being_packed() -> None:
    item = Loose(1, {"a": (1, 2), "b": [{3}]})
    pack = packer(Loose)
    assert pack is not None
    packed = pack(item)
    assert packed is not item
    assert item == Loose(1, {"a": (1, 2), "b": [{3}]})
    plain = Loose(1, {"a": [1, 2]})
    assert pack(plain) is plain


CHANGED: list[tuple[Any, Any, str]] = [
    (Any, Point(1), r"at Point: a Point would arrive as a dict: let the channel's type name it"),
    (Any, Message(1), r"at Message: a Message would arrive as a dict"),
    (dict[str, Any], {"a": [1, Point(1)]}, r"at dict\['a'\]\[1\]: a Point would arrive as a dict"),
    (list, [(1, {"b": Message(2)})], r"at list\[0\]\[1\]\['b'\]: a Message would arrive as a dict"),
    (Loose, Loose(1, {"a": Point(1)}), r"at Loose\.extra\['a'\]: a Point would arrive as a dict"),
    (LoosePlain, LoosePlain(Color.RED), r"at LoosePlain\.extra: a Color would arrive as its value"),
    (Tree, Tree(1, [Tree(Point(1))]), r"at Tree\.below\[0\]\.label: a Point would"),
    (Any, {"at": datetime.datetime(2026, 1, 2)}, "a datetime would arrive as a str"),
    (Any, [datetime.date(2026, 1, 2)], "a date would arrive as a str"),
    (Any, [uuid.UUID(int=3)], "a UUID would arrive as a str"),
    (Any, [decimal.Decimal(3)], "a Decimal would arrive as a str"),
    (Any, [bytearray(b"x")], "a bytearray would arrive as bytes"),
    (Any, [Place(1, 2)], r"\[0\]: a Place would arrive as a tuple|a list: send tuple of it"),
    (Any, torch.Size([1, 2]), "a Size would arrive as a"),
    (Any, collections.OrderedDict(a=1), "an? OrderedDict would arrive as a dict: send dict of it"),
    (Any, {frozenset({1}): 2}, "the key is a frozenset, which would arrive as a tuple"),
    (Any, {Color.RED: 2}, "the key is a Color, which would arrive as its value"),
]


@pytest.mark.parametrize(("item_type", "item", "said"), CHANGED, ids=[c[2][:50] for c in CHANGED])
async def test_what_would_arrive_as_something_else_is_refused_by_put_everywhere(
    transport: Transport, item_type: Any, item: Any, said: str
) -> None:
    channel = Channel[Any](item_type, name="items")
    sender, _ = await transport.ends(channel)
    with pytest.raises(WrongItemType, match=said) as refused:
        await sender.put(item)
    assert "channel 'items' carries" in str(refused.value)
    assert channel.statistics().puts == 0
    with pytest.raises(WrongItemType, match=said):
        channel.sender.put_nowait(item)
    publisher, _ = await transport.latest_ends(Latest[Any](item_type, name="newest"))
    with pytest.raises(WrongItemType, match=said):
        await publisher.publish(item)


async def test_what_contains_itself_is_refused(transport: Transport) -> None:
    sender, _ = await transport.ends(Channel[Any](list, name="items"))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WrongItemType, match="contains itself"):
        await sender.put(endless)


class Typed(msgspec.Struct):
    """Every part has a type."""

    point: Point
    shape: tuple[int, ...]
    tags: set[str]
    color: Color
    more: list[Typed] = []
    values: np.ndarray[Any, Any] | None = None


@pytest.mark.parametrize(
    "item_type", [Typed, Message, int, str, tuple[int, ...], set[str], Typed | None, np.ndarray]
)
def test_a_type_without_untyped_positions_is_not_looked_through(item_type: Any) -> None:
    assert packer(item_type) is None
    assert not isinstance(item_class(item_type), Untyped)


async def test_typed_positions_arrive_as_before(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(Typed, name="items"))
    item = Typed(Point(1), (1, 2), {"a"}, Color.RED, [Typed(Point(2), (), set(), Color.RED)])
    await sender.put(item)
    assert await receiver.get() == item


def test_a_put_of_a_message_without_untyped_positions_asks_nothing_of_them() -> None:
    channel = Channel(Message, name="items", capacity=10)
    assert channel.queue.item_class is Message  # what the fast path of put compares with
