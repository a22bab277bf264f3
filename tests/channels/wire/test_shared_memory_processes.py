"""Shared memory between real processes, and what is left of it when they are killed."""

from __future__ import annotations

import gc
import os
import random
import re
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rlinf_async.channels import Channel
from rlinf_async.channels.queue import statistics_of
from rlinf_async.channels.wire import EndRef
from tests.channels.wire import memory_worker
from tests.channels.wire.harness import Wired, until, wired
from tests.channels.wire.memory_worker import Numbered, check
from tests.channels.wire.running import running


def run(*arguments: str) -> AbstractAsyncContextManager[Process]:
    """A process that does this; dead when the block ends."""
    return running(memory_worker, *arguments, stdout=PIPE)


@asynccontextmanager
async def worker(owner: Wired, ref: EndRef) -> AsyncIterator[Process]:
    """A process that uses this end of the test's channel."""
    async with run(str(owner.path), msgspec.json.encode(ref).decode()) as process:
        yield process


def named_memory() -> list[str]:
    """What of ours stands in the folder where shared memory is left behind."""
    return [name for name in os.listdir("/dev/shm") if "rlinf" in name]


def looked_at() -> dict[str, int]:
    """How much of each mapped piece of another process's memory this one has seen, in kB."""
    text = Path("/proc/self/smaps").read_text()
    pattern = r"^(\S+) rw-p .*memfd:rlinf-async.*\n(?:.*\n)*?Rss: +(\d+) kB"
    return {where: int(size) for where, size in re.findall(pattern, text, re.MULTILINE)}


async def test_who_only_forwards_never_touches_the_elements() -> None:
    channel = Channel(Numbered, name="arrays", capacity=4)
    gc.collect()
    others = looked_at()
    async with wired() as owner:
        sending = owner.channels.end_ref(channel.sender, "w")
        taking = owner.channels.end_ref(channel.receiver, "w")
        async with worker(owner, sending), worker(owner, taking) as consumer:
            await until(lambda: statistics_of(channel.queue).shared > 100)
            (to_consumer,) = [one for one in owner.server.connections if one.peer == "receiver"]
            await until(lambda: to_consumer.memory.sent_shared > 50)
            # What was sent before the consumer had opened the producer's memory was copied.
            copied = {where: size for where, size in looked_at().items() if where not in others}
            assert copied
            gets = statistics_of(channel.queue).gets
            await until(lambda: statistics_of(channel.queue).gets > gets + 50)
            assert {where: looked_at()[where] for where in copied} == copied
            assert consumer.returncode is None


async def test_items_of_a_killed_producer_arrive_from_its_memory() -> None:
    channel = Channel(Numbered, name="arrays", capacity=4)
    async with wired() as owner:
        ref = owner.channels.end_ref(channel.sender, "w")
        async with worker(owner, ref) as process:
            for _ in range(20):
                check(await channel.receiver.get())
            await until(lambda: statistics_of(channel.queue).depth == 4)
            process.kill()
            await owner.lost.get()
        assert statistics_of(channel.queue).shared >= 20
        for one in await channel.receiver.get_batch(weight=4):
            check(one)


@pytest.mark.parametrize("seed", range(2))
async def test_a_consumer_killed_at_any_time_loses_and_spoils_nothing(seed: int) -> None:
    chance = random.Random(seed)
    channel = Channel(Numbered, name="arrays", capacity=4)
    async with wired() as owner:
        sending = owner.channels.end_ref(channel.sender, "w")
        taking = owner.channels.end_ref(channel.receiver, "w")
        async with worker(owner, sending):
            for _ in range(2):
                gets = statistics_of(channel.queue).gets + chance.randrange(1, 60)
                async with worker(owner, taking) as process:
                    await until(lambda: statistics_of(channel.queue).gets >= gets)  # noqa: B023
                    process.kill()
                    await owner.lost.get()
            for _ in range(20):
                check(await channel.receiver.get())


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_left_whoever_is_killed_and_whenever(seed: int) -> None:
    chance = random.Random(seed)
    async with run("own") as owner:
        assert owner.stdout is not None
        lines = [(await owner.stdout.readline()).decode().strip() for _ in range(4)]
        async with run(*lines[:2]) as producer, run(*lines[2:]) as consumer:
            for _ in range(chance.randrange(1, 8)):
                await owner.stdout.readline()  # ten more items
            victims = chance.sample([owner, producer, consumer], chance.randrange(1, 4))
            assert not named_memory()
            for victim in victims:
                victim.kill()
            for victim in victims:
                await victim.wait()
        folder = Path(lines[0]).parent
    assert not named_memory()
    (folder / "s").unlink(missing_ok=True)
    folder.rmdir()
