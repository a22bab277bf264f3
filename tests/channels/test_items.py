"""Every value arrives as what it is on every transport, or is refused with the same words by all of
them."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import threading
import uuid
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.channels import Channel, Latest, Sender, WrongItemType
from rlinf_async.channels.queue import statistics_of
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


class Shade(enum.StrEnum):
    RED = "red"


@dataclass
class Point:
    x: int


class Message(msgspec.Struct):
    x: int


NESTED: Any = {
    "list": [[1], [2], {"deep": [{"a": 7}]}],
    5: 1.5,
    "plain": [1, True, None, "text", b"raw", {"a": [1]}],
    "empty": [[], {}],
}

SAME: list[tuple[Any, Any]] = [
    (Any, NESTED),
    (object, NESTED),
    (Any, [1, [2, [3]]]),
    (Any, {(1, "a"): None}),
    (Any, datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
    (dict, NESTED),
    (list, [[1, 2], {"a": 3}]),
    (list[Any], [[1, 2], {"a": 3}]),
    (dict[str, Any], {"a": [1, 2]}),
    (tuple[Any, ...], ([1], 1)),
    (tuple[int, Any], (1, [2])),
    (tuple[int, ...], (1, 2)),
    (set[str], {"a", "b"}),
    (set, {1, "a", (1, 2)}),
    (frozenset, frozenset({1, 3})),
    (list[tuple[int, int]], [(1, 2)]),
    (dict[str, set[int]], {"a": {1}}),
    (Loose, Loose(1, {"a": [1, {"b": 2}]})),
    (LoosePlain, LoosePlain([1, 2])),
    (Tree, Tree([1], [Tree({"a": 2}), Tree([[3]], [Tree(4)])])),
    (Option, {"shape": [1, 2], "rest": 3}),
    (Place, Place(1, [2, 3])),
    (Loose | None, Loose(1, {"a": [[]]})),
    (Loose | LoosePlain, LoosePlain([1])),
    (list[Any] | int, [[1]]),
    (dict[str, list[Any]], {"a": [[1], 2]}),
]


@pytest.mark.parametrize(("item_type", "item"), SAME, ids=[str(kind)[:40] for kind, _ in SAME])
async def test_what_a_wire_keeps_arrives_as_what_it_is(
    transport: Transport, item_type: Any, item: Any
) -> None:
    channel = Channel[Any](item_type, name="items")
    sender, receiver = await transport.ends(channel)
    await sender.put(item)
    assert seen(await receiver.get()) == seen(item)
    await channel.sender.put(item)
    assert seen(await receiver.get()) == seen(item)
    publisher, watcher = await transport.latest_ends(Latest[Any](item_type, name="newest"))
    await publisher.publish(item)
    assert seen(await watcher.get()) == seen(item)


def seen(value: Any) -> Any:
    """A value with the type of each part, in an order that does not depend on hashes."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return kind, [(seen(key), seen(part)) for key, part in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted((seen(part) for part in value), key=repr)
    if isinstance(value, list | tuple):
        return kind, [seen(part) for part in value]
    return kind, value


async def test_arrays_inside_untyped_lists_travel_beside_them(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel[Any](dict, name="batches"))
    large = np.arange(100_000)
    await sender.put({"pair": [large, torch.arange(3)], "one": np.float32(2)})
    found = await receiver.get()
    assert (found["pair"][0] == large).all()
    assert found["pair"][1].tolist() == [0, 1, 2]
    assert found["one"] == 2


CHANGED: list[tuple[Any, Any, str]] = [
    (Any, (1, 2), "tuple: tuple would arrive as list: let the type name tuple there, or send list"),
    (Any, {1}, "set: set would arrive as list: let the type name set there, or send list"),
    (Any, frozenset({1}), "frozenset: frozenset would arrive as list"),
    (
        dict[str, Any],
        {"a": [1, (2,)]},
        r"dict\['a'\]\[1\]: tuple would arrive as list: let the type",
    ),
    (list, [{"a": {2}}], r"list\[0\]\['a'\]: set would arrive as list"),
    (tuple[int, Any], (1, (2,)), r"tuple\[1\]: tuple would arrive as list"),
    (set, {frozenset({1})}, r"set: .*frozenset\(\{1\}\)"),
    (set, {Color.RED}, r"set: .*Color"),
    (set, {Shade.RED}, r"set: the member <Shade.*: Shade would arrive as str"),
    (Loose, Loose(1, {"a": (1,)}), r"Loose\.extra\['a'\]: tuple would arrive as list"),
    (Loose | LoosePlain, LoosePlain((1,)), r"LoosePlain\.extra: tuple would arrive as list"),
    (Any, Point(1), "Point: Point would arrive as dict: let the type name Point there, or send di"),
    (Any, Message(1), "Message: Message would arrive as dict"),
    (dict[str, Any], {"a": [1, Point(1)]}, r"dict\['a'\]\[1\]: Point would arrive as dict"),
    (list, [[1, {"b": Message(2)}]], r"list\[0\]\[1\]\['b'\]: Message would arrive as dict"),
    (Loose, Loose(1, {"a": Point(1)}), r"Loose\.extra\['a'\]: Point would arrive as dict"),
    (LoosePlain, LoosePlain(Color.RED), r"LoosePlain\.extra: Color would arrive as str"),
    (Tree, Tree(1, [Tree(Point(1))]), r"Tree\.below\[0\]\.label: Point would arrive as dict"),
    (Option, {"shape": (1,)}, r"dict\['shape'\]: tuple would arrive as list"),
    (Any, {"at": datetime.datetime(2026, 1, 2)}, "datetime would arrive as str"),
    (Any, [datetime.date(2026, 1, 2)], "date would arrive as str"),
    (Any, [uuid.UUID(int=3)], "UUID would arrive as str"),
    (Any, [decimal.Decimal(3)], "Decimal would arrive as str"),
    (Any, [bytearray(b"x")], "bytearray would arrive as bytes"),
    (Any, [Place(1, 2)], r"\[0\]: Place would arrive as list"),
    (Any, torch.Size([1, 2]), "Size would arrive as list"),
    (Any, collections.OrderedDict(a=1), "OrderedDict would arrive as dict"),
    (Any, {frozenset({1}): 2}, "the key .*: frozenset would arrive as tuple"),
    (Any, {Color.RED: 2}, "the key .*: Color would arrive as str"),
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
    assert statistics_of(channel.queue).puts == 0
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


async def test_typed_positions_arrive_as_what_they_are(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(Typed, name="items"))
    item = Typed(Point(1), (1, 2), {"a"}, Color.RED, [Typed(Point(2), (), set(), Color.RED)])
    await sender.put(item)
    assert await receiver.get() == item


class Holder(msgspec.Struct):
    """A message with a place of which nothing can travel."""

    name: str
    paths: list[Path] = []


@dataclass
class Outer:
    """The same, further inside."""

    by_name: dict[str, Holder | None]


@runtime_checkable
class Counts(Protocol):
    """Fits what arrives as a list, a dict or text."""

    def count(self, one: Any, /) -> int: ...


NEVER: list[tuple[Any, str]] = [
    (Path, "at Path, a Path"),
    (threading.Thread, "at Thread, a Thread"),
    (complex, "at complex, a complex"),
    (np.float32, "at float32, a float32"),
    (Holder, r"at Holder\.paths\[\.\.\.\], a Path"),
    (Outer, r"at Outer\.by_name\[\.\.\.\]\.paths\[\.\.\.\], a Path"),
    (Holder | Point, r"\.paths\[\.\.\.\], a Path"),
    (tuple[int, Path], r"\[1\], a Path"),
    (dict[Path, int], r"\[key\], a Path"),
    (Sender[int], "at .*, a Sender"),
]


@pytest.mark.parametrize(("item_type", "said"), NEVER, ids=[said for _, said in NEVER])
def test_a_type_that_nothing_could_arrive_as_is_refused_where_the_channel_is_made(
    item_type: Any, said: str
) -> None:
    with pytest.raises(TypeError, match=f"{said}: declare a msgspec.Struct, a dataclass") as error:
        Channel[Any](item_type, name="items")
    assert "cannot travel between processes" in str(error.value)
    with pytest.raises(TypeError, match=said):
        Latest[Any](item_type, name="newest")


@pytest.mark.parametrize("item_type", [Hashable, Counts, list[Counts]])
def test_a_class_that_what_arrives_belongs_to_may_be_declared(item_type: Any) -> None:
    channel = Channel[Any](item_type, name="items")
    channel.sender.put_nowait("text" if item_type is Hashable else ["text"])
    assert channel.receiver.get_nowait()
