"""A wrong graph is refused before anything runs, by an error that names both sides."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.channels import MalformedFrame
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.queue import statistics_of
from rlinf_async.runtime import Restart
from rlinf_async.runtime.child import ArgumentsCodec
from rlinf_async.workers.methods import method_of
from tests.runtime.kit import Broken, Doubler, Number, Reading, Teller, Waiter, Word

T = TypeVar("T")


class Box(msgspec.Struct, Generic[T]):
    item: T


class Odd(ra.Worker):
    """Methods that cannot be called from outside."""

    def plain(self) -> int:
        return 1

    async def unannotated(self, numbers) -> None:  # type: ignore[no-untyped-def]
        await numbers.get()

    async def bare(self, numbers: ra.Receiver) -> None:  # type: ignore[type-arg]
        await numbers.get()

    async def many(self, *numbers: int) -> int:
        return sum(numbers)

    async def unknown(self, numbers: ra.Receiver[Missing]) -> None:  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        await numbers.get()

    async def lock(self, lock: threading.Lock) -> None:
        lock.acquire()

    async def gives_lock(self) -> threading.Lock:
        return threading.Lock()

    async def many_ends(self, to: list[ra.Sender[Number]]) -> None:
        await to[0].put(Number(1))

    async def maybe(self, to: ra.Sender[Number] | None = None) -> None:
        assert to is None


class Stranger(ra.Worker):
    async def run(self, numbers: ra.Receiver[Number], doubled: ra.Sender[Number]) -> int:
        return 0


class Needy(ra.Worker):
    def __init__(self, what: str) -> None:
        self.what = what


class Unfinished(ra.Worker, ABC):
    """Leaves to subclasses what it does."""

    @abstractmethod
    async def sing(self) -> None: ...

    @abstractmethod
    async def dance(self) -> None: ...


class Named(ra.Worker):
    """Its parameters are called like those of launch."""

    def __init__(self, name: str, count: int = 3) -> None:
        self.given = name, count

    async def told(self) -> tuple[str, int]:
        return self.given


class Generous(ra.Worker):
    """Takes ends of several types."""

    async def puts_anything(self, to: ra.Sender[Any]) -> None: ...

    async def gets_anything(self, items: ra.Receiver[Any]) -> None: ...

    async def puts_numbers(self, to: ra.Sender[Number]) -> None: ...

    async def puts_either(self, to: ra.Sender[Number | Word]) -> None: ...

    async def gets_either(self, items: ra.Receiver[Number | Word]) -> None: ...

    async def gets_numbers(self, items: ra.Receiver[Number]) -> None: ...


class Graph:
    """What the cases below are about."""

    def __init__(self, cluster: ra.Cluster) -> None:
        self.cluster = cluster
        self.numbers = cluster.channel(Number, name="numbers")
        self.words = cluster.channel(Word, name="words")
        self.weights = cluster.latest(Number, name="weights")
        either: Any = Number | Word
        self.either: ra.Channel[Any] = cluster.channel(either, name="either")
        self.anything: ra.Channel[Any] = cluster.channel(dict, name="dicts")
        self.any: ra.Channel[Any] = cluster.channel(object, name="any")


CALLS: dict[str, tuple[type[ra.Worker], Callable[..., Any], Callable[[Graph], Any], str]] = {
    "wrong end": (
        Doubler,
        Doubler.run,
        lambda g: (g.numbers.sender, g.numbers.sender),
        r"Doubler\.run: parameter 'numbers' wants Receiver\[Number\], but is given a Sender\[Numb",
    ),
    "wrong item type": (
        Doubler,
        Doubler.run,
        lambda g: (g.words.receiver, g.numbers.sender),
        r"'numbers' wants Receiver\[Number\], but is given a Receiver\[Word\] of channel 'words'",
    ),
    "wrong item type of a sender": (
        Doubler,
        Doubler.run,
        lambda g: (g.numbers.receiver, g.words.sender),
        r"parameter 'doubled' wants Sender\[Number\], but is given a Sender\[Word\] of",
    ),
    "an end of a Latest": (
        Waiter,
        Waiter.for_item,
        lambda g: (g.weights.receiver,),
        r"'numbers' wants Receiver\[Number\], but is given a LatestReceiver\[Number\] of channel",
    ),
    "a channel for its end": (
        Waiter,
        Waiter.for_item,
        lambda g: (g.numbers,),
        r"'numbers' wants Receiver\[Number\], not Channel \(got <Channel 'numbers'",
    ),
    "wrong argument": (
        Teller,
        Teller.greet,
        lambda g: (5,),
        r"Teller\.greet: parameter 'name' wants str, not int \(got 5\)",
    ),
    "an end for a plain argument": (
        Teller,
        Teller.greet,
        lambda g: (g.numbers.receiver,),
        r"parameter 'name' wants str, but is given a Receiver\[Number\] of channel 'numbers'",
    ),
    "missing argument": (
        Teller,
        Teller.greet,
        lambda g: (),
        r"Teller\.greet: missing a required argument: 'name'",
    ),
    "too many arguments": (
        Teller,
        Teller.greet,
        lambda g: ("a", "b", "c"),
        r"Teller\.greet: too many positional arguments",
    ),
    "not async": (Odd, Odd.plain, lambda g: (), r"Odd has no async method 'plain'"),
    "unknown method": (
        Teller,
        lambda self: None,
        lambda g: (),
        r"Teller has no async method '<lambda>'.*pass a method of the class, like Teller\.run",
    ),
    "a method of another class": (
        Doubler,
        Stranger.run,
        lambda g: (g.numbers.receiver, g.numbers.sender),
        r"Doubler is called with Stranger\.run, which is not a method of Doubler .*Doubler\.run",
    ),
    "unannotated end": (
        Odd,
        Odd.unannotated,
        lambda g: (g.numbers.receiver,),
        r"'numbers' is given a Receiver\[Number\] of channel 'numbers', but is not annotated",
    ),
    "bare end": (
        Odd,
        Odd.bare,
        lambda g: (g.numbers.receiver,),
        r"'numbers' is a bare Receiver: write Receiver\[Number\]",
    ),
    "variadic": (Odd, Odd.many, lambda g: (1, 2), r"Odd\.many: .*takes plain named parameters"),
    "a type that is not there": (
        Odd,
        Odd.unknown,
        lambda g: (g.numbers.receiver,),
        r"Odd\.unknown: its annotations cannot be resolved \(name 'Missing' is not defined\)",
    ),
    "wrong end in a list": (
        Odd,
        Odd.many_ends,
        lambda g: ([g.numbers.sender, g.words.sender],),
        r"'to' wants Sender\[Number\], but is given a Sender\[Word\] of channel 'words'",
    ),
    "a sender of anything": (
        Generous,
        Generous.puts_anything,
        lambda g: (g.numbers.sender,),
        r"'to' wants Sender\[Any\], but is given a Sender\[Number\] of .*; write Sender\[Number",
    ),
    "a receiver of anything": (
        Generous,
        Generous.gets_anything,
        lambda g: (g.numbers.receiver,),
        r"Receiver\[Any\], but .* Receiver\[Number\] of .*as a dict .*write Receiver\[Number",
    ),
    "a sender of messages into a channel that cannot carry them": (
        Generous,
        Generous.puts_numbers,
        lambda g: (g.any.sender,),
        r"channel 'any', which carries plain values only: make it a channel of Number",
    ),
    "a sender of more than the channel takes": (
        Generous,
        Generous.puts_either,
        lambda g: (g.numbers.sender,),
        r"'to' wants Sender\[Number \| Word\], but is given a Sender\[Number\] of channel",
    ),
    "a receiver of less than the channel has": (
        Generous,
        Generous.gets_numbers,
        lambda g: (g.either.receiver,),
        r"wants Receiver\[Number\], but is given a Receiver\[Number \| Word\] of channel 'either'",
    ),
    "wrong end where there may be none": (
        Odd,
        Odd.maybe,
        lambda g: (g.words.sender,),
        r"'to' wants Sender\[Number\], but is given a Sender\[Word\] of channel 'words'",
    ),
}


@pytest.mark.parametrize("case", CALLS)
async def test_a_wrong_call_is_refused(case: str) -> None:
    cls, method, arguments, message = CALLS[case]
    async with ra.Cluster.local() as cluster:
        graph = Graph(cluster)
        group: Any = await cluster.launch(cls)
        with pytest.raises(ra.BuildError, match=message):
            group.call(method, *arguments(graph))
        assert not group.calls
        assert statistics_of(graph.numbers.queue).receivers == 0


FITTING: dict[str, tuple[Callable[..., Any], Callable[[Graph], Any]]] = {
    "a sender of one member": (Generous.puts_numbers, lambda g: g.either.sender),
    "a receiver of more members": (Generous.gets_either, lambda g: g.numbers.receiver),
    "the same union": (Generous.puts_either, lambda g: g.either.sender),
    "a receiver of any plain value": (Generous.gets_anything, lambda g: g.anything.receiver),
    "a sender of anything": (Generous.puts_anything, lambda g: g.any.sender),
}


@pytest.mark.parametrize("case", FITTING)
async def test_an_end_that_can_do_what_is_asked_is_accepted(case: str) -> None:
    method, end = FITTING[case]
    async with ra.Cluster.local() as cluster:
        graph = Graph(cluster)
        group: Any = await cluster.launch(Generous)
        await group.call(method, end(graph))


LAUNCHES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no worker": ((Number,), {}, r"takes a subclass of Worker, not <class .*Number'>"),
    "an abstract class": ((Unfinished,), {}, r"Unfinished is abstract: .* has dance and sing"),
    "an instance": ((5,), {}, r"takes a subclass of Worker, not 5"),
    "missing constructor argument": (
        (Needy,),
        {},
        r"Needy\.__init__: missing a required argument: 'what'",
    ),
    "too many constructor arguments": ((Broken, 1), {}, r"Broken\.__init__: too many positional"),
    "a parameter that launch keeps to itself": (
        (Named,),
        {"name": "x"},
        r"Named\.__init__: missing .*'name'; launch\(\) keeps the keyword 'name' and 'count' ",
    ),
    "an optional parameter that launch keeps to itself": (
        (Named, "x"),
        {"count": 2},
        r"Named\.__init__: 'count' is not passed to it; launch\(\) keeps .* by position",
    ),
    "no rank": ((Teller,), {"count": 0}, r"Teller: count must be a whole number from 1, got 0"),
    "half a rank": ((Teller,), {"count": 1.5}, r"count must be a whole number from 1, got 1\.5"),
    "no part of a resource": (
        (Teller,),
        {"resources": {"robot": 0}},
        r"Teller: resources: 'robot' is 0; an amount is a number above 0",
    ),
    "less than no part of a resource": ((Teller,), {"resources": {"robot": -1}}, r"'robot' is -1;"),
    "a resource in words": ((Teller,), {"resources": {"robot": "x"}}, r"'robot' is 'x'; an amount"),
    "one and a half of a resource": ((Teller,), {"resources": {"robot": 1.5}}, r"a whole number"),
    "resources without amounts": ((Teller,), {"resources": ["robot"]}, r"must be a dict such as"),
    "too few devices": (
        (Teller,),
        {"count": 5, "placement": ra.Packed()},
        r"Packed\(devices=1, start=0\) for 5 workers needs 5 devices, but this host has 4 \(cpu\)",
    ),
    "restart one rank of a collective": (
        (Teller,),
        {"count": 2, "collective": "gloo", "restart": Restart()},
        r"Teller: ranks of one torch\.distributed group cannot be restarted one by one",
    ),
    "a collective in one process": (
        (Teller,),
        {"count": 2, "collective": "gloo"},
        r"torch\.distributed needs a process for each rank.*use Cluster\.process\(\)",
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
async def test_a_wrong_launch_is_refused(case: str) -> None:
    args, options, message = LAUNCHES[case]
    async with ra.Cluster.local() as cluster:
        with pytest.raises(ra.BuildError, match=message):
            await cluster.launch(*args, **options)
        assert cluster.groups == {}


async def test_a_parameter_named_as_one_of_launch_is_passed_by_position() -> None:
    async with ra.Cluster.local() as cluster:
        named = await cluster.launch(Named, "x", 1, count=2, name="others")
        assert (named.name, await named.call(Named.told)) == ("others", [("x", 1), ("x", 1)])


TIMES: dict[str, Callable[[], object]] = {
    "deadlock_after must be more than 0 seconds, got 0": lambda: ra.Cluster.local(deadlock_after=0),
    "deadlock_after must be more .* got nan": lambda: ra.Cluster.process(deadlock_after=math.nan),
    "grace must be seconds from 0, got -1": lambda: ra.Cluster.local(grace=-1),
    "heartbeat_limit must be more than 0": lambda: ra.Cluster.process(heartbeat_limit=0.0),
    "wait must be seconds from 0, got nan": lambda: ra.Cluster.ray(wait=math.nan),
    "wait must be seconds from 0, got -1": lambda: ra.Cluster.ray(wait=-1),
    "Restart: max must be a whole number from 0, got -1": lambda: Restart(max=-1),
    "Restart: within must be more than 0 seconds, got 0": lambda: Restart(within=0.0),
}


@pytest.mark.parametrize("message", TIMES)
def test_times_and_limits_of_nothing_are_refused(message: str) -> None:
    with pytest.raises(ra.BuildError, match=message):
        TIMES[message]()


async def test_names_are_taken_once() -> None:
    async with ra.Cluster.local() as cluster:
        cluster.channel(Number, name="numbers")
        await cluster.launch(Teller)
        with pytest.raises(ra.BuildError, match="there is a channel 'numbers' already"):
            cluster.latest(Number, name="numbers")
        with pytest.raises(ra.BuildError, match="there is a group 'Teller' already: pass another"):
            await cluster.launch(Teller)


async def test_what_cannot_travel_is_named_before_it_is_sent() -> None:
    async with ra.Cluster.process() as cluster:
        odd = (await cluster.launch(Odd))[0]
        with pytest.raises(ra.BuildError, match=r"Odd\.lock cannot be called from outside: lock"):
            await odd.call(Odd.lock, threading.Lock())
        with pytest.raises(ra.BuildError, match=r"Odd\.gives_lock cannot be .* what it returns"):
            await odd.call(Odd.gives_lock)
        broken = (await cluster.launch(Broken))[0]
        with pytest.raises(ra.WorkerError, match=r"Broken\[0\] failed in returns_a_lock .*lock"):
            await broken.call(Broken.returns_a_lock)


class Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("made to stay")


@pytest.mark.parametrize(
    ("argument", "why"), [(threading.Lock(), "lock"), (Unpicklable(), "stay"), (lambda: 0, "lamb")]
)
async def test_a_constructor_argument_that_cannot_be_sent_is_refused(
    argument: object, why: str
) -> None:
    async with ra.Cluster.process() as cluster:
        with pytest.raises(ra.BuildError, match=rf"Takes\[0\]#0.* cannot be sent .*{why}"):
            await cluster.launch(Takes, argument)
        assert cluster.groups == {}


class Takes(ra.Worker):
    def __init__(self, what: object) -> None:
        self.what = what


async def test_a_class_inside_a_function_is_refused_by_processes() -> None:
    class Hidden(ra.Worker):
        pass

    async with ra.Cluster.process() as cluster:
        with pytest.raises(ra.BuildError, match=r"define the class at the top level of an import"):
            await cluster.launch(Hidden)


async def test_an_item_type_that_cannot_travel_is_refused_by_processes() -> None:
    async with ra.Cluster.process() as cluster:
        either: Any = Box[int] | Box[str]  # nothing at run time tells them apart
        with pytest.raises(
            ra.BuildError,
            match=r"channel 'either' cannot cross to workers: .*apart; give each a",
        ):
            cluster.channel(either, name="either")
        assert cluster.channel(Reading, name="readings").name == "readings"


async def test_an_end_in_the_constructor_is_refused() -> None:
    async with ra.Cluster.local() as cluster:
        numbers = cluster.channel(Number, name="numbers")
        with pytest.raises(ra.BuildError, match=r"Needy\.__init__: 'what' has an end of a channel"):
            await cluster.launch(Needy, [numbers.receiver])


@pytest.mark.parametrize(
    ("env_vars", "problem"),
    [
        ({"DEPTH": 5}, "env_vars: 'DEPTH' is 5; names and values must be text"),
        ({"DEPTH": None}, "env_vars: 'DEPTH' is None"),
        (["DEPTH"], r"env_vars must be a dict of names and values, got \['DEPTH'\]"),
    ],
)
async def test_environment_variables_are_text(env_vars: Any, problem: str) -> None:
    async with ra.Cluster.local() as cluster:
        with pytest.raises(ra.BuildError, match=problem):
            await cluster.launch(Teller, env_vars=env_vars)


Small = Annotated[int, msgspec.Meta(lt=10)]


class Counts(ra.Worker):
    async def total(self, numbers: ra.Receiver[Small], start: Small = 0) -> Small:
        return start + sum([number async for number in numbers])


async def test_annotated_types_fit_themselves() -> None:
    async with ra.Cluster.local() as cluster:
        numbers: ra.Channel[int] = cluster.channel(cast(Any, Small), name="numbers")
        worker = (await cluster.launch(Counts))[0]
        total = worker.call(Counts.total, numbers.receiver, 3)
        with numbers.sender as sender:
            await sender.put(4)
        assert await total == 7


def test_a_result_of_another_type_names_its_method() -> None:
    codec = ArgumentsCodec(method_of(Counts, Counts.total), ())
    with pytest.raises(MalformedFrame, match=r"result of Counts\.total is not what its return ann"):
        codec.decode_result(Encoded(msgspec.msgpack.encode("seven")))
