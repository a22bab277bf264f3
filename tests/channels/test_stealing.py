"""A channel whose keys are wishes: no item waits while any get does."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import pytest

from rlinf_async.channels import Channel, ChannelEmpty, EndOfChannel, Key, Receiver, Sender
from rlinf_async.channels.queue import OVERTAKEN
from rlinf_async.testing import wait_all_blocked
from tests.channels.transport import Transport

KEYS: Final = (None, 0, 1, 2)
STEPS: Final = 80


class Spoilt(Exception):
    """The block of a lease fails."""


class Take:
    """A lease that waits, is held, or has ended."""

    def __init__(self, receiver: Receiver[int], key: Key | None, weight: int) -> None:
        self.key = key
        self.weight = weight
        self.items: list[int] = []
        self.over = False
        """whether it has seen the end of the channel"""
        self._ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(receiver))

    async def _hold(self, receiver: Receiver[int]) -> None:
        try:
            async with receiver.lease(weight=self.weight, at_least=1, key=self.key) as lease:
                self.items = list(lease)
                how = await self._ending
                if how == "fail":
                    raise Spoilt
                if how == "replace":
                    for index, item in enumerate(lease):
                        lease.replace(index, item)
        except Spoilt:
            pass
        except EndOfChannel:
            self.over = True

    @property
    def waits(self) -> bool:
        return not self.items and not self.task.done()

    def end(self, how: str) -> None:
        self._ending.set_result(how)


class Program:
    """Random puts and leases, and what must hold after each of them."""

    def __init__(
        self, seed: int, channel: Channel[int], ends: tuple[Sender[int], Receiver[int]]
    ) -> None:
        self.rng = random.Random(seed)
        self.channel = channel
        self.sender, self.receiver = ends
        self.lanes: dict[int, Key | None] = {}
        """key under which each item lies, by item: they are numbered in the order of the puts"""
        self.takes: list[Take] = []
        self.taken: list[int] = []
        self.puts = 0

    @property
    def resting(self) -> list[int]:
        held = {item for one in self.takes for item in one.items}
        return sorted(self.lanes.keys() - held)

    def wanted(self, key: Key | None, weight: int) -> list[int]:
        """The items that a lease which is asked for now has to get."""
        own = [item for item in self.resting if self.lanes[item] == key]
        others = [item for item in self.resting if self.lanes[item] != key]
        return [*own, *others][:weight]

    async def step(self, transport: Transport) -> None:
        waiting = [one for one in self.takes if one.waits]
        held = [one for one in self.takes if one.items]
        what = self.rng.choices(("put", "take", "end", "cancel"), (4, 4, 3, 1))[0]
        if what == "put":
            key = self.rng.choice(KEYS)
            self.lanes[self.puts] = key
            await self.sender.put(self.puts, key=key)
            await transport.settle()
            if waiting:  # a get of its own key before all others
                [served] = [one for one in waiting if one.items]
                assert served.items == [self.puts]
                assert served.key == key or all(one.key != key for one in waiting)
            self.puts += 1
        elif what == "take":
            key, weight = self.rng.choice(KEYS), self.rng.randint(1, 3)
            wanted = [] if waiting else self.wanted(key, weight)
            take = Take(self.receiver, key, weight)
            self.takes.append(take)
            await transport.settle()
            assert take.items == wanted
        elif what == "end" and held:
            take = self.rng.choice(held)
            await self._end(take, self.rng.choice(("ack", "fail", "replace")), transport)
        elif what == "cancel" and waiting:
            take = self.rng.choice(waiting)
            take.task.cancel()
            await transport.settle()
            self.takes.remove(take)
        self._check()

    async def _end(self, take: Take, how: str, transport: Transport) -> None:
        self.takes.remove(take)
        if how == "ack":
            self.taken += take.items
        for item in take.items:
            if how == "ack":
                del self.lanes[item]
            else:
                self.lanes[item] = take.key
        take.end(how)
        await transport.settle()

    def _check(self) -> None:
        waiting = [one for one in self.takes if one.waits]
        assert not (waiting and self.resting), "an item rests while a get waits"
        held = [item for one in self.takes for item in one.items]
        assert len(set(held)) == len(held)

    async def finish(self, transport: Transport) -> None:
        """End the channel: whatever is left comes, then the end, to every key alike."""
        self.sender.close()
        await transport.settle()
        while self.lanes:
            for take in [one for one in self.takes if one.items]:
                await self._end(take, "ack", transport)
            assert not any(one.over for one in self.takes) or not self.lanes
            if self.resting:
                self.takes.append(Take(self.receiver, self.rng.choice(KEYS), 1))
                await transport.settle()
        assert all(one.over for one in self.takes)
        assert sorted(self.taken) == list(range(self.puts))
        for key in KEYS:
            with pytest.raises(EndOfChannel):
                await self.receiver.get(key=key)
        for queue in self.channel.queue.every_key():
            assert (len(queue.entries), len(queue.getters), queue.deliveries) == (0, 0, {})


@pytest.mark.parametrize("seed", range(12))
async def test_no_item_rests_while_a_get_waits_and_nothing_is_lost_or_doubled(
    transport: Transport, seed: int
) -> None:
    channel = Channel(int, name="requests", capacity=500, max_deliveries=100, stealing=True)
    program = Program(seed, channel, await transport.ends(channel))
    for _ in range(STEPS):
        await program.step(transport)
    await program.finish(transport)


async def test_an_idle_key_takes_the_oldest_item_of_any_other(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="requests", stealing=True))
    for item, key in (("a", 1), ("b", None), ("c", 0), ("d", 1)):
        await sender.put(item, key=key)
    assert [await receiver.get(key=0) for _ in range(4)] == ["c", "a", "b", "d"]


async def test_a_get_without_a_key_takes_what_has_one(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(str, name="requests", stealing=True))
    waiting = asyncio.create_task(receiver.get())
    await transport.settle()
    await sender.put("a", key=1)
    assert await waiting == "a"
    await sender.put("b", key=1)
    await sender.put("c", key=0)
    async with receiver.lease(weight=5, at_least=1) as lease:
        assert list(lease) == ["b", "c"]


async def test_an_item_is_overtaken_by_a_limited_number_of_later_ones(
    transport: Transport,
) -> None:
    channel = Channel(int, name="requests", capacity=10_000, stealing=True)
    sender, receiver = await transport.ends(channel)
    await sender.put(-1)
    for item in range(OVERTAKEN + 10):
        await sender.put(item, key=0)
    got = [await receiver.get(key=0) for _ in range(OVERTAKEN + 11)]
    assert got == [*range(OVERTAKEN), -1, *range(OVERTAKEN, OVERTAKEN + 10)]


async def test_waiting_keys_are_served_in_turn(transport: Transport) -> None:
    sender, receiver = await transport.ends(Channel(int, name="requests", stealing=True))
    gets = [asyncio.create_task(receiver.get(key=key)) for key in (0, 1, 0, 1)]
    await transport.settle()
    for item in range(4):
        await sender.put(item)
    assert sorted(await asyncio.gather(*gets[::2])) in ([0, 2], [1, 3])
    await asyncio.gather(*gets[1::2])


async def test_room_that_a_theft_makes_lets_the_next_put_in(transport: Transport) -> None:
    channel = Channel(int, name="requests", capacity=1, stealing=True)
    sender, receiver = await transport.ends(channel)
    await sender.put(0, key=1)
    putting = asyncio.create_task(sender.put(1, key=1))
    await transport.settle()
    assert not putting.done()
    assert await receiver.get(key=0) == 0
    await asyncio.wait_for(putting, 10)
    assert await receiver.get() == 1


async def test_a_batch_waits_for_no_more_than_is_there(transport: Transport) -> None:
    """What it had collected would be kept from the gets of all other keys."""
    sender, receiver = await transport.ends(Channel(int, name="requests", stealing=True))
    for at_least in (None, 2):
        with pytest.raises(ValueError, match="stealing: no item waits while any get does"):
            await receiver.get_batch(weight=4, at_least=at_least, key=0)
        with pytest.raises(ValueError, match="stealing: no item waits while any get does"):
            async with receiver.lease(weight=4, at_least=at_least, key=0):
                pytest.fail("it was leased")
    await sender.put(0, key=1)
    await sender.put(1)
    assert await receiver.get_batch(weight=4, at_least=1, key=0) == [0, 1]


async def test_an_item_that_does_not_fit_a_batch_stays_under_its_own_key() -> None:
    channel = Channel(str, name="requests", capacity=1, stealing=True)
    sender = channel.sender.open()
    await sender.put("a", weight=2, key=0)
    putting = asyncio.create_task(sender.put("b", weight=2, key=0))
    await wait_all_blocked()
    batch = asyncio.create_task(channel.receiver.get_batch(weight=3, at_least=1, key=1))
    await asyncio.sleep(0)  # it has "a", and so "b" was let in
    putting.cancel()  # before it runs
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await batch == ["a"]
    assert channel.queue.withdrawn == 1
    assert not channel.queue.keys


@pytest.mark.parametrize("key", [1, 0], ids=["its own key", "a foreign key"])
async def test_a_holder_sees_the_end_behind_one_that_waits_for_it(
    transport: Transport, key: int
) -> None:
    sender, receiver = await transport.ends(Channel(int, name="requests", stealing=True))
    await sender.put(7, key=key)
    held = asyncio.Event()
    waiting = asyncio.create_task(_get_after(held, receiver))
    async with receiver.lease(key=key):
        held.set()
        await transport.settle()
        sender.close()
        await transport.settle()
        assert not waiting.done()
        async with asyncio.timeout(10):
            with pytest.raises(EndOfChannel):
                await receiver.get(key=1)
        assert not waiting.done()
    with pytest.raises(EndOfChannel):
        await waiting


async def _get_after(event: asyncio.Event, receiver: Receiver[int]) -> int:
    await event.wait()
    return await receiver.get(key=1)


@pytest.mark.parametrize("leased", [False, True])
async def test_the_end_is_told_to_any_number_of_keys(leased: bool) -> None:
    channel = Channel(int, name="requests", stealing=True)
    sender = channel.sender.open()
    take = Take(channel.receiver, "leased", 1)
    if leased:
        await sender.put(0)
    await wait_all_blocked()
    gets = [asyncio.create_task(channel.receiver.get(key=key)) for key in range(600)]
    await wait_all_blocked()
    sender.close()
    await wait_all_blocked()
    if leased:
        assert not any(one.done() for one in gets)
        take.end("ack")
    ended = await asyncio.gather(*gets, return_exceptions=True)
    assert {type(one) for one in ended} == {EndOfChannel}
    await take.task
    assert take.over != leased
    assert not channel.queue.keys


def test_get_nowait_takes_what_lies_elsewhere() -> None:
    channel = Channel(int, name="requests", stealing=True)

    async def body() -> None:
        with channel.sender as sender, channel.receiver as receiver:
            sender.put_nowait(0, key=1)
            assert receiver.get_nowait(key=0) == 0
            with pytest.raises(ChannelEmpty):
                receiver.get_nowait(key=0)
            assert not channel.queue.keys

    asyncio.run(body())
