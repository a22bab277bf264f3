"""What may be sent does not depend on the backend, nor on whether it is put, published, given to a
call or returned by one: either the same value of the same class arrives, or it is refused with the
same words before anything is sent."""

from __future__ import annotations

import datetime
import decimal
import enum
import re
import typing
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import rlinf_async as ra
from rlinf_async.channels import LatestSender, Sender, WrongItemType
from rlinf_async.workers import Worker
from rlinf_async.workers.methods import method_of


class Base(msgspec.Struct):
    """A message."""

    number: int


class Sub(Base):
    """A message with more in it."""

    more: int = 0


class Same(Base):
    """Another class with the same fields."""


class Color(enum.Enum):
    """A name for a number."""

    RED = 1


class Parts(msgspec.Struct):
    """Fields of several kinds."""

    number: int = 0
    share: float = 0.0
    text: str = ""
    base: Base | None = None
    listed: list[int] = []
    pair: tuple[int, str] = (0, "")
    by_name: dict[str, float] = {}
    values: NDArray[np.float32] | None = None
    anything: Any = None
    color: Color = Color.RED


class Positive(msgspec.Struct):
    """A message that is checked when it is made."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("below zero")


def _negative() -> Positive:
    made = Positive(1)
    made.number = -1
    return made


_F32: Final = np.arange(3, dtype=np.float32)
VALUES: Final[dict[Any, tuple[list[Any], list[Any]]]] = {
    int: (
        [0, -(2**63), 2**64 - 1],
        [True, np.int64(3), 2**64, -(2**63) - 1, 1.0, "1", None, Color.RED, np.float32(1.5)],
    ),
    float: (
        [0.5, 3, float("inf"), np.float64(0.5)],
        [True, np.float32(0.5), "1", None, decimal.Decimal(1)],
    ),
    str: (["a", "é", ""], [b"a", 1, None, "\ud800", Path("/tmp")]),
    bool: ([True], [np.bool_(False), 1, 0, "yes"]),
    bytes: ([b"a"], [bytearray(b"a"), "a", memoryview(b"a")]),
    Base: ([Base(1)], [Sub(1, 2), Same(1), Base("one"), Base(True), {"number": 1}, None]),  # type: ignore[arg-type]
    Base | None: ([Base(1), None], [Sub(1, 2), 1]),
    list[int]: ([[], [1, 2]], [(1, 2), [1, "2"], [True], [2**70], None, np.zeros(2)]),
    tuple[int, ...]: ([(), (1, 2)], [[1, 2], (1, "2"), (None,)]),
    dict[str, int]: ([{}, {"a": 1}], [{1: 1}, {"a": "1"}, {"a": True}, OrderedDict(a=1)]),
    NDArray[np.float32]: ([_F32, _F32[::2]], [_F32.astype(np.float64), [1.0], None, _F32[0]]),
    torch.Tensor: ([torch.zeros(2)], [_F32, [0.0], torch.zeros(2, device="meta")]),
    Color: ([Color.RED], [1, "RED"]),
    Positive: ([Positive(1)], [_negative()]),
    datetime.date: ([datetime.date(2026, 1, 2)], ["2026-01-02", np.datetime64("2026-01-02")]),
    Parts: (
        [
            Parts(),
            Parts(1, 2, "é", Base(1), [1], (1, "a"), {"a": 1}, _F32, {"a": [[1, {"b": 2}]]}),
            Parts(np.int64(1), np.float32(0.5), listed=[np.int8(1)]),  # type: ignore[arg-type,list-item]
        ],
        [
            Parts(number="1"),  # type: ignore[arg-type]
            Parts(number=True),
            Parts(number=2**70),
            Parts(share="1"),  # type: ignore[arg-type]
            Parts(text="\udfff"),
            Parts(base=Sub(1)),
            Parts(listed=(1,)),  # type: ignore[arg-type]
            Parts(listed=[None]),  # type: ignore[list-item]
            Parts(pair=(1,)),  # type: ignore[arg-type]
            Parts(by_name={"a": "b"}),  # type: ignore[dict-item]
            Parts(values=_F32.astype(np.int32)),  # pyright: ignore[reportArgumentType]
            Parts(anything=Base(1)),
            Parts(anything={"a": [(1,)]}),
            Parts(anything=[{2}]),
            Parts(anything=[np.datetime64("2026-01-02")]),
            Parts(color=1),  # type: ignore[arg-type]
        ],
    ),
    Any: (
        [
            None, True, 1, 0.5, "a", b"a", [1, [2, {"a": [3]}]], {"a": {"b": _F32}}, _F32,
            torch.zeros(2), np.int64(1), {(1, 2): 3},
            datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        ],
        [
            Base(1), Color.RED, Path("/tmp"), np.datetime64("2026-01-02"), np.timedelta64(1, "s"),
            msgspec.Raw(b"\x01"), msgspec.UNSET, object(), len, 1j, 2**70,
            datetime.date(2026, 1, 2), OrderedDict(a=1), [Path("/tmp")], {"a": Base(1)},
            {"a": [msgspec.Raw(b"\x01")]}, (1, 2), [(1, 2)], {"a": (1, {"a": {3}})},
            {3}, [{3}], frozenset({1}), [frozenset({1})], {frozenset({1}): 2},
            bytearray(b"a"), np.array([object()]), "\ud800", iter(()), ValueError("no"),
        ],
    ),
}  # fmt: skip
KINDS: Final = list(VALUES)


def values(kind: int) -> list[Any]:
    """Those that pass, then those that do not."""
    good, bad = VALUES[KINDS[kind]]
    return [*good, *bad]


def seen(value: Any) -> str:
    """What a value is, all through."""
    if isinstance(value, np.generic):
        value = value.item()  # arrives as a number
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}({', '.join(map(seen, value))})"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(map(seen, value.items()))})"
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}({', '.join(map(seen, msgspec.structs.astuple(value)))})"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{type(value).__name__} {value.dtype} {value.tolist()}"
    if isinstance(value, float):
        return f"number {value:g}"
    return f"{'number' if type(value) is int else type(value).__name__} {value!r}"


def said(error: BaseException) -> str:
    """What is wrong with the value, in the words of an error."""
    text = re.search(r"(carries|returns|wants) .*", str(error).splitlines()[0])
    assert text is not None, f"{type(error).__name__}: {error}"
    return "refused: " + re.sub(r"0x[0-9a-f]+", "0x", text[0].partition(" ")[2])


class Sends(Worker):
    """Has a method of each kind for each place; see below."""


def _add(kind: int) -> None:
    """Methods of one kind."""

    async def give(self: Worker, index: int) -> Any:
        return values(kind)[index]

    async def take(self: Worker, value: Any) -> str:
        return seen(value)

    async def put(self: Worker, out: Any, index: int) -> str:
        try:
            await out.put(values(kind)[index])
        except WrongItemType as error:
            return said(error)
        return ""

    async def publish(self: Worker, out: Any, index: int) -> str:
        try:
            await out.publish(values(kind)[index])
        except WrongItemType as error:
            return said(error)
        return ""

    give.__annotations__ = {"index": int, "return": KINDS[kind]}
    take.__annotations__ = {"value": KINDS[kind], "return": str}
    sender: Any = Sender
    latest_sender: Any = LatestSender
    put.__annotations__ = {"out": sender[KINDS[kind]], "index": int, "return": str}
    publish.__annotations__ = {"out": latest_sender[KINDS[kind]], "index": int, "return": str}
    for method in (give, take, put, publish):
        assert isinstance(method, FunctionType)
        method.__name__ = f"{method.__name__}_{kind}"
        method.__qualname__ = f"Sends.{method.__name__}"
        setattr(Sends, method.__name__, method)


for _kind in range(len(KINDS)):
    _add(_kind)


async def outcomes(cluster: ra.Cluster) -> dict[tuple[str, str, int], str]:
    """What becomes of each value: by place, kind, and number of the value."""
    found: dict[tuple[str, str, int], str] = {}
    worker = (await cluster.launch(Sends))[0]
    for kind, item_type in enumerate(KINDS):
        channel = cluster.channel(item_type, name=f"items {kind}")
        latest = cluster.latest(item_type, name=f"latest {kind}")
        for index, value in enumerate(values(kind)):
            at = str(item_type), index
            refused = await worker.call(getattr(Sends, f"put_{kind}"), channel.sender, index)
            found["put", *at] = refused or seen(await channel.receiver.get())
            try:
                await channel.sender.put(value)
                found["put here", *at] = seen(await channel.receiver.get())
            except WrongItemType as error:
                found["put here", *at] = said(error)
            refused = await worker.call(getattr(Sends, f"publish_{kind}"), latest.sender, index)
            found["publish", *at] = refused or seen(await latest.receiver.get())
            try:
                found["argument", *at] = await worker.call(getattr(Sends, f"take_{kind}"), value)
            except ra.BuildError as error:
                found["argument", *at] = said(error)
            try:
                result = await worker.call(getattr(Sends, f"give_{kind}"), index)
                found["result", *at] = seen(result)
            except ra.WorkerError as error:
                found["result", *at] = said(error)
    return found


def wrong(found: dict[tuple[str, str, int], str]) -> list[str]:
    """Where something else arrived, or was refused, than should be."""
    faults: list[str] = []
    for (place, name, index), outcome in found.items():
        kind = next(number for number, one in enumerate(KINDS) if str(one) == name)
        value, good = values(kind)[index], len(VALUES[KINDS[kind]][0])
        expected = seen(value) if index < good else "refused: "
        if not (outcome == expected if index < good else outcome.startswith(expected)):
            faults.append(f"{place} of {name}: {seen(value)[:80]} gave {outcome[:200]}")
    return faults


async def test_local_workers_send_what_may_be_sent_and_nothing_else() -> None:
    async with ra.Cluster.local() as cluster:
        found = await outcomes(cluster)
    assert not (faults := wrong(found)), "\n".join(faults)


async def test_processes_do_with_every_value_what_local_workers_do() -> None:
    async with ra.Cluster.local() as cluster:
        here = await outcomes(cluster)
    async with ra.Cluster.process() as cluster:
        there = await outcomes(cluster)
    differ = [f"{at}: {here[at]} / {there[at]}" for at in here if here[at] != there[at]]
    assert not differ, "\n".join(differ)


class Reads(Worker):
    """Is given ends."""

    async def of_base(self, numbers: ra.Receiver[Base]) -> None:
        async for _ in numbers:
            pass

    async def sub_to_base(self, out: ra.Sender[Sub]) -> None:
        await out.put(Sub(1))

    async def of_int(self, numbers: ra.Receiver[int]) -> None:
        async for _ in numbers:
            pass


class Meeting(msgspec.Struct):
    """Checks another value of the same method while it is decoded, as another thread may."""

    values: list[NDArray[np.float32]]

    def __post_init__(self) -> None:
        if inner := inside.pop("value", None):
            method_of(Meets, Meets.take).check_result([inner])


inside: dict[str, Meeting] = {}
"""the value that is checked within the check of another one"""


class Meets(Worker):
    """Takes and returns what is looked at closely."""

    async def take(self, values: list[Meeting]) -> list[Meeting]:
        return values


def test_a_method_is_checked_in_several_threads_at_once() -> None:
    method = method_of(Meets, Meets.take)
    small, large = (Meeting([np.zeros(size, np.float32)] * 3) for size in (1, 5000))
    for outer, inner in ((small, large), (large, small), (large, large)):
        inside["value"] = inner
        method.check_result([outer, outer])
        assert not inside


async def test_a_type_that_cannot_travel_leaves_no_queue_at_its_home() -> None:
    async with ra.Cluster.process() as cluster:
        worker = (await cluster.launch(Meets))[0]
        with pytest.raises(ra.BuildError, match="cannot travel between processes"):
            await cluster.channel_at(worker, dict[str, Path], name="paths")
        await cluster.channel_at(worker, dict[str, int], name="numbers")
        assert [seen.name for seen in await cluster._channels.look_at_homes()] == ["numbers"]


class Few(msgspec.Struct, frozen=True):
    """At most two numbers, in what may be changed."""

    numbers: list[int]

    def __post_init__(self) -> None:
        if len(self.numbers) > 2:
            raise ValueError("too many")


class Chain(msgspec.Struct, frozen=True):
    """Contains itself, and at most two numbers in what may be changed."""

    numbers: tuple[list[int], ...]
    rest: Chain | None = None

    def __post_init__(self) -> None:
        if sum(map(len, self.numbers)) > 2:
            raise ValueError("too many")


def test_what_would_be_refused_where_it_arrives_is_refused_where_it_is_put() -> None:
    few, chain = Few([1]), Chain(([1],), Chain(([2],)))
    channels: list[tuple[ra.Channel[Any], Any]] = [
        (ra.Channel(Few, name="few"), few),
        (ra.Channel(Chain, name="chain"), chain),
    ]
    for channel, value in channels:
        channel.sender.put_nowait(value)
        assert channel.receiver.get_nowait() == value
    few.numbers.extend([2, 3])
    assert chain.rest is not None
    chain.rest.numbers[0].extend([2, 3])
    for channel, value in channels:
        with pytest.raises(WrongItemType, match="too many"):
            channel.sender.put_nowait(value)


class Link(msgspec.Struct, frozen=True):
    """Contains itself, and nothing that may be changed."""

    number: int
    rest: Link | None = None

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("below zero")


def test_a_frozen_message_that_contains_itself_is_sent() -> None:
    channel = ra.Channel(Link, name="links")
    channel.sender.put_nowait(Link(1, Link(2)))
    assert channel.receiver.get_nowait() == Link(1, Link(2))


@pytest.mark.parametrize(
    ("item_type", "good", "bad"),
    [
        (list, [1], [Base(1)]),
        (dict, {"a": 1}, {"a": Base(1)}),
    ],
)
def test_a_collection_that_says_nothing_of_its_parts_holds_plain_values(
    item_type: Any, good: Any, bad: Any
) -> None:
    written: Any = {list: typing.List, dict: typing.Dict}[item_type]  # noqa: UP006
    for kind in (item_type, written):
        channel = ra.Channel[Any](kind, name="plain")
        channel.sender.put_nowait(good)
        assert channel.receiver.get_nowait() == good
        with pytest.raises(WrongItemType, match="Base"):
            channel.sender.put_nowait(bad)


class Beside(Worker):
    """Is given ends and values in one argument."""

    async def pair(self, pair: tuple[ra.Sender[str], dict[str, Any]]) -> None:
        await pair[0].put(seen(pair[1]["value"]))

    async def by_key(self, outs: dict[Any, ra.Sender[str]]) -> None:
        for key, out in outs.items():
            await out.put(seen(key))

    async def listed(self, many: list[tuple[ra.Sender[str], Base | None]] | None) -> None:
        for out, base in many or []:
            await out.put(seen(base))


@pytest.mark.parametrize("backend", ["local", "process"])
async def test_what_stands_beside_an_end_is_sent_by_the_same_rule(backend: str) -> None:
    good, bad = VALUES[Any]
    async with getattr(ra.Cluster, backend)() as cluster:
        worker = (await cluster.launch(Beside))[0]
        words = cluster.channel(str, name="words")
        for value in good:
            await worker.call(Beside.pair, (words.sender, {"value": value}))
            assert await words.receiver.get() == seen(value)
        await worker.call(Beside.listed, [(words.sender, Base(1)), (words.sender, None)])
        assert await words.receiver.get_batch(weight=2) == [seen(Base(1)), seen(None)]
        keys: list[Any] = ["a", 1, (1, 2)]
        for key in keys:
            await worker.call(Beside.by_key, {key: words.sender})
            assert await words.receiver.get() == seen(key)
        refused: list[Any] = [Color.RED, Path("/tmp"), frozenset({1})]
        for key in refused:
            with pytest.raises(ra.BuildError, match="'outs' wants, beside ends of channels, "):
                await worker.call(Beside.by_key, {key: words.sender})
        for value in bad:
            with pytest.raises(ra.BuildError, match=r"'pair' wants, beside ends of channels, dict"):
                await worker.call(Beside.pair, (words.sender, {"value": value}))
        with pytest.raises(ra.BuildError, match="'many' wants, beside ends of channels, Base"):
            await worker.call(Beside.listed, [(words.sender, Base(1)), (words.sender, Sub(1, 2))])


@pytest.mark.parametrize("backend", ["local", "process"])
async def test_an_end_of_another_message_is_refused_where_it_is_given(backend: str) -> None:
    async with getattr(ra.Cluster, backend)() as cluster:
        worker = (await cluster.launch(Reads))[0]
        subs = cluster.channel(Sub, name="subs")
        bases = cluster.channel(Base, name="bases")
        flags = cluster.channel(bool, name="flags")
        refused: Sequence[tuple[Any, Any]] = [
            (Reads.of_base, subs.receiver),
            (Reads.sub_to_base, bases.sender),
            (Reads.of_int, flags.receiver),
        ]
        for method, end in refused:
            with pytest.raises(ra.BuildError, match=r"wants .*, but is given a "):
                await worker.call(method, end)
