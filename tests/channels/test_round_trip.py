"""An item that would change on its way is refused by put, wherever the channel lives."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlinf_async.channels import Channel, Latest, WrongItemType
from rlinf_async.channels.queue import statistics_of
from tests.channels.transport import Transport


class Number(msgspec.Struct, frozen=True):
    """A message."""

    value: int


class Noted(Number, frozen=True):
    """A message with more in it than its base."""

    note: str = ""


class Color(enum.StrEnum):
    """Text with a meaning."""

    RED = "red"


@dataclasses.dataclass
class Point:
    """A dataclass."""

    x: float
    y: float = 0.0


class Holder(msgspec.Struct):
    """Places of every kind."""

    number: Number | None = None
    numbers: tuple[Number, ...] = ()
    listed: Sequence[int] = []
    text: str = ""
    color: Color = Color.RED
    by_name: dict[str, Number] = {}
    share: float = 0.0
    point: Point | None = None
    values: NDArray[np.float32] | None = None
    logits: torch.Tensor | None = None
    anything: Any = None


REFUSED: list[tuple[Any, str]] = [
    (Holder(number=Number("seven")), r"Holder\.number\.value: expected `int`, got `str`"),  # type: ignore[arg-type]
    (Holder(numbers=(Number(1), Number("2"))), r"Holder\.numbers\[1\]\.value: expected"),  # type: ignore[arg-type]
    (Holder(number=Noted(1, "more")), r"Holder\.number: Noted would arrive as Number"),
    (Holder(numbers=[Number(1)]), r"Holder\.numbers: list would arrive as tuple"),  # type: ignore[arg-type]
    (Holder(listed=(1, 2)), r"Holder\.listed: tuple would arrive as list"),
    (Holder(text=Color.RED), r"Holder\.text: Color would arrive as str"),
    (Holder(color="red"), r"Holder\.color: str would arrive as Color"),  # type: ignore[arg-type]
    (Holder(by_name={Color.RED: Number(1)}), r"Holder\.by_name: the key .*: Color would arrive"),
    (
        Holder(by_name=OrderedDict(a=Number(1))),
        r"Holder\.by_name: OrderedDict would arrive as dict",
    ),
    (Holder(point=Point("left")), r"Holder\.point\.x: expected `float`, got `str`"),  # type: ignore[arg-type]
    (Holder(values=np.zeros(3)), r"Holder\.values: expected an array of float32, got float64"),  # type: ignore[arg-type]
    (Holder(share=2**53 + 1), r"Holder\.share: 9007199254740993 would arrive as 9007199254740992"),
    (Holder(share=10**400), r"Holder\.share: can't serialize ints"),
    (Holder(anything=object()), r"Holder\.anything: object cannot travel"),
    (Holder(anything=[(2,)]), r"Holder\.anything\[0\]: tuple would arrive as list"),
]
ACCEPTED: list[Holder] = [
    Holder(),
    Holder(Number(1), (Number(2), Number(3)), [4], "five", Color.RED, {"six": Number(6)}, 7.0),
    Holder(share=7),
    Holder(share=-(2**53)),
    Holder(share=2**63),
    Holder(share=np.float32(7)),  # type: ignore[arg-type]
    Holder(point=Point(1, 2)),
    Holder(values=np.zeros((30, 500), np.float32)[::2], logits=torch.zeros(3)),
    Holder(logits=torch.nn.Parameter(torch.zeros(20_000))),
    Holder(anything=[1, [2, {"three": 3}], {"four": np.zeros(5)}]),
]


@pytest.mark.parametrize(("item", "why"), REFUSED, ids=lambda value: "")
async def test_an_item_that_would_change_on_its_way_is_refused_by_put(
    transport: Transport, item: Holder, why: str
) -> None:
    channel = Channel(Holder, name="holders")
    sender, _ = await transport.ends(channel)
    with pytest.raises(WrongItemType, match=rf"'holders' carries Holder: {why}|Holder: {why}"):
        await sender.put(item)
    assert statistics_of(channel.queue).puts == 0


async def test_items_that_arrive_as_they_are_pass(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(Holder, name="holders"))
    for item in ACCEPTED:
        await sender.put(item)
        found = await receiver.get()
        assert (found.number, found.numbers, found.point) == (item.number, item.numbers, item.point)


async def test_a_value_that_would_change_is_not_published(transport: Transport) -> None:
    latest = Latest(Number, name="weights")
    sender, _ = await transport.latest_ends(latest)
    with pytest.raises(WrongItemType, match=r"'weights' carries Number: Number\.value: expected"):
        await sender.publish(Number("seven"))  # type: ignore[arg-type]
    assert await sender.publish(Number(7)) == 1


async def test_members_of_a_union_that_is_numbered_are_checked_too(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel[Any](Number | Point, name="either"))
    with pytest.raises(WrongItemType, match=r"Point\.y: expected `float`, got `str`"):
        await sender.put(Point(1.0, "up"))  # type: ignore[arg-type]
    await sender.put(Point(1.0))
    assert await receiver.get() == Point(1.0)


async def test_an_item_is_handed_over_as_it_is_and_not_as_it_was_decoded() -> None:
    channel = Channel(Holder, name="holders")
    item = Holder(values=np.zeros(5, np.float32))
    await channel.sender.put(item)
    assert channel.receiver.get_nowait() is item


def test_a_type_that_cannot_travel_is_refused_where_the_channel_is_made() -> None:
    with pytest.raises(TypeError, match="cannot travel between processes"):
        Channel(list[Number | Noted], name="untagged")
