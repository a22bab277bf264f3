"""What a channel carries is checked at every put."""

from __future__ import annotations

import collections.abc
from typing import Annotated, Any, Generic, Literal, NewType, Optional, TypeVar

import msgspec
import pytest

from rlinf_async.channels import Channel, WrongItemType
from rlinf_async.channels.encoded import runtime_classes
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport

T = TypeVar("T")
EnvRank = NewType("EnvRank", int)


class Number(msgspec.Struct, frozen=True):
    """A message."""

    value: int


class Doubled(Number, frozen=True):
    """A more special one."""


class Box(msgspec.Struct, Generic[T], frozen=True):
    """A generic one."""

    item: T


ACCEPTED: list[tuple[Any, Any]] = [
    (Number, Number(1)),
    (Number | str, "text"),
    (Number | None, None),
    (Optional[Number], None),  # noqa: UP045  the older spelling
    (Box[int], Box(1)),
    (Box[int] | Number, Number(1)),
    (int, 7),
    (float, 7.5),
    (float, 7),
    (float | str, 7),
    (bool, True),
    (bytes, b"raw"),
    (list[int], [1, 2]),
    (tuple[int, ...], (1, 2)),
    (dict[str, int], {"a": 1}),
    (Literal["go", "stop"], "go"),
    (Annotated[int, msgspec.Meta(ge=0)], 7),
    (Annotated[Number, "a message"], Number(1)),
    (EnvRank, 3),
    (collections.abc.Mapping[str, int], {"a": 1}),
]

REFUSED: list[tuple[Any, Any, str]] = [
    (Number, 1, "Number, not int"),
    (Doubled, Number(1), "Doubled, not Number"),
    (Number | str, 1, "Number | str, not int"),
    (Number, None, "Number, not NoneType"),
    (Number, Doubled(1), "Doubled would arrive as Number"),
    (Any, object(), "object cannot travel"),
    (Box[int], Number(1), "Box[int], not Number"),
    (int, "7", "int, not str"),
    (int, 7.5, "int, not float"),
    (float, "7", "float, not str"),
    (bool, 1, "bool, not int"),
    (int, True, "int, not bool"),
    (float | str, True, "float | str, not bool"),
    (list[int], (1, 2), "list[int], not tuple"),
    (Annotated[int, msgspec.Meta(ge=0)], "7", "not str"),
    (EnvRank, "3", "not str"),
]


@pytest.mark.parametrize(
    ("item_type", "item"),
    ACCEPTED,
    ids=[f"{str(kind)[:40]}-{type(item).__name__}" for kind, item in ACCEPTED],
)
def test_an_item_of_the_type_is_accepted(item_type: Any, item: Any) -> None:
    channel: Channel[Any] = Channel(item_type, name="messages")
    channel.sender.put_nowait(item)
    assert channel.receiver.get_nowait() == item


@pytest.mark.parametrize(
    ("item_type", "item", "said"), REFUSED, ids=[said for _, _, said in REFUSED]
)
def test_an_item_of_another_type_is_refused_by_name(item_type: Any, item: Any, said: str) -> None:
    channel: Channel[Any] = Channel(item_type, name="messages")
    with pytest.raises(WrongItemType, match="channel 'messages' carries ") as refused:
        channel.sender.put_nowait(item)
    assert said in str(refused.value)
    assert statistics_of(channel.queue).puts == 0


async def test_a_waiting_put_is_checked_too(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    untyped: Any = sender
    with pytest.raises(WrongItemType, match="'numbers' carries int, not str"):
        await untyped.put("seven")
    with pytest.raises(TypeError):
        await untyped.put(Number(7), key="env")
    await sender.put(7)
    assert await receiver.get() == 7


def test_a_long_item_is_shortened_in_the_error() -> None:
    channel: Channel[Any] = Channel(int, name="numbers")
    with pytest.raises(WrongItemType) as refused:
        channel.sender.put_nowait("x" * 10_000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("no_type", [7, "Number", None, Number(1)])
def test_what_is_no_type_is_refused_when_the_channel_is_made(no_type: Any) -> None:
    with pytest.raises(TypeError, match="is not a type that a channel can carry"):
        Channel(no_type, name="messages")


def test_a_union_is_checked_by_all_its_classes() -> None:
    assert runtime_classes(int | Box[str] | None) == (int, Box, type(None))


class Named(Number, frozen=True):
    """A more special one that adds a field."""

    name: str = ""


async def test_a_message_that_would_lose_fields_on_its_way_is_refused(
    transport: Transport,
) -> None:
    sender, _ = await transport.ends(Channel(Number, name="numbers"))
    with pytest.raises(WrongItemType, match="'numbers' carries Number: Named: Named would arrive"):
        await sender.put(Named(1, "one"))


@pytest.mark.parametrize(("key", "weight"), [(1.5, 1), (("a", 1), 1), (True, 1), (None, 2.0)])
async def test_a_key_or_weight_of_a_wrong_type_is_refused_and_nothing_else_is_hurt(
    transport: Transport, key: Any, weight: Any
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="numbers"))
    with pytest.raises(TypeError, match="'numbers'"):
        await sender.put(1, key=key, weight=weight)
    await sender.put(2)
    assert await receiver.get() == 2
