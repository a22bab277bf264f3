"""Kills while a recording is written: what is read of it afterwards.

    python -m tests.recording.killed 1000 --seed 0

Each life is an owner of channels in a process of its own, forked from this one. Items of random
sizes flow there: from a second process, over a Unix socket, and within it. It tells this process by
a pipe what it has got, and what it was told is in the file. At a random moment it is killed
(SIGKILL). Then

* the recording is read: to its last whole frame, with nothing damaged before it;
* every event that was said to be written is there, and the events have no gap;
* each item is what it was when it was put, none is there twice, and none was got that was not put;
* what was got, and said to be written, was recorded as taken, in its order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.channels import Channel, ChannelError, Receiver, Sender
from rlinf_async.channels.wire import ChannelClient, ChannelServer, EndRef, Router, connect, serve
from rlinf_async.recording import Delivered, Put, Recorder, read_recording

SECRET = bytes(32)
FARTHEST = 60
"""events that are in the file when a life is killed, or some more"""
LATER = 0.02
"""seconds from then to the kill, at most"""
SIZES = (1, 1, 10, 10, 10, 100, 100, 5_000, 20_000, 200_000)
"""elements of the arrays of the items"""
MOST_WAITING = 20_000_000
"""bytes that wait for the disk, beyond which no more is got"""
LIMIT = 6_000_000
"""bytes of a recording: some lives have several segments"""


class Item(msgspec.Struct):
    """An item that says what its array must be."""

    number: int
    values: NDArray[np.int32]


class Said(msgspec.Struct, array_like=True):
    """What a life told before it was killed."""

    written: int
    """number of the last event in the file"""
    got: list[int]
    """numbers of the items that it got so far, since the last time"""


def item(number: int, size: int) -> Item:
    """The item of this number; its values are a line that begins with it."""
    return Item(number, np.arange(number, number + size, dtype=np.int32))


def is_whole(found: Item) -> bool:
    """Whether an item is as it was put."""
    first, size = found.number, len(found.values)
    return bool(np.array_equal(found.values, np.arange(first, first + size, dtype=np.int32)))


# ---- a life, in processes that are killed


async def put(items: Sender[Item], numbers: Iterator[int], random_: random.Random) -> None:
    for number in numbers:
        await items.put(item(number, random_.choice(SIZES)))
        if not number % 64:
            await asyncio.sleep(0)


async def produce(address: str, end: EndRef, seed: int) -> None:
    """The second process: puts over its connection until that is gone."""
    with contextlib.suppress(ChannelError):  # a busy machine does not answer in time
        connection = await connect(address, SECRET, name="producer", router=Router())
        sender = ChannelClient(connection).end(end, Item)
        assert isinstance(sender, Sender)
        await put(sender, iter(range(1, 1_000_000_000, 2)), random.Random(seed))


async def get(items: Receiver[Item], recorder: Recorder, told: int) -> None:
    """Get, and tell what was got and what is in the file."""
    got: list[int] = []
    while True:
        async for one in items:
            assert is_whole(one)
            got.append(one.number)
            if len(got) >= 20:
                break
        said = Said(recorder.state.written, got)
        os.write(told, msgspec.json.encode(said) + b"\n")
        got.clear()
        if recorder.state.waiting > MOST_WAITING:  # a busy machine: the disk is to follow
            recorder.flush()


async def own(folder: Path, seed: int, told: int) -> None:
    """The owner: serves, records, puts and gets."""
    random_ = random.Random(seed)
    channel = Channel(Item, name="items", capacity=32)
    recorder = Recorder(folder, limit=LIMIT, frame_seconds=random_.choice((0.0, 0.003, 0.03)))
    recorder.record(channel)
    router = Router()
    server = ChannelServer(router)
    address = f"@rlinf-killed-{os.getpid()}"
    serving = await serve(address, SECRET, router=router, name="owner")
    ref = server.end_ref(channel.sender, "producer")
    producer = os.fork() if random_.random() < 0.8 else None
    if producer == 0:
        _begin_again(produce(address, ref, seed))
    own_items = put(channel.sender, iter(range(2, 1_000_000_000, 2)), random_)
    await asyncio.gather(own_items, get(channel.receiver, recorder, told))
    await serving.close()


def _begin_again(main: object) -> None:
    """Run a coroutine in a process that was forked while a loop ran, and end it."""
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    _run(main)


def _run(main: object) -> None:
    try:
        with open(os.devnull, "w") as nowhere:
            sys.stdout = nowhere
            asyncio.run(main)  # type: ignore[arg-type]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


# ---- what is left of it


class Outcome(NamedTuple):
    """What a life has left."""

    events: int
    items: int
    torn: int
    segments: int


def check(folder: Path, said: list[Said]) -> Outcome:
    """Read a recording, and compare it with what was said of it."""
    if not folder.exists() or not any(folder.iterdir()):
        assert not said or not said[-1].written
        return Outcome(0, 0, 0, 0)
    recording = read_recording(folder)
    assert recording.damaged == [], recording.damaged
    assert recording.dropped is None, recording.dropped
    events = list(recording.events())
    numbers = [one.number for one in events]
    first = recording.missing_before + 1
    assert numbers == list(range(first, first + len(numbers))), "events are missing"
    got = [number for one in said for number in one.got]
    for parity, whose in ((1, "of the second process"), (0, "of its own")):
        of_one = [number for number in got if number % 2 == parity]
        expected = list(range(2 - parity, 2 * len(of_one) + 1, 2))
        assert of_one == expected, f"items {whose} were lost or doubled"
    written = said[-1].written if said else 0
    last = numbers[-1] if numbers else 0
    assert last >= written, f"event {written} was in the file, which now ends at {last}"
    by_sequence: dict[int, int] = {}
    for one in recording.items("items") if events else ():
        assert is_whole(one.value), f"item {one.sequence} is not as it was put"
        assert one.sequence not in by_sequence
        by_sequence[one.sequence] = one.value.number
    assert len(set(by_sequence.values())) == len(by_sequence), "an item is there twice"
    puts = [one.sequence for one in events if isinstance(one, Put)]
    assert puts == sorted(puts)
    _compare_taken(
        [at for one in events if isinstance(one, Delivered) for at in one.sequences],
        by_sequence,
        got,
        whole=first == 1,
    )
    return Outcome(len(events), len(by_sequence), recording.torn, len(recording.headers))


def _compare_taken(
    taken: list[int], by_sequence: dict[int, int], got: list[int], *, whole: bool
) -> None:
    """What was recorded as taken is what was got, as far as both are known."""
    numbers = [by_sequence[at] for at in taken if at in by_sequence]
    assert len(set(numbers)) == len(numbers), "an item was taken twice"
    if whole:
        both = min(len(numbers), len(got))
        assert numbers[:both] == got[:both], "items were taken in another order than recorded"
        return
    known = set(numbers)
    assert [one for one in got if one in known] == [one for one in numbers if one in set(got)]


def live_and_die(folder: Path, seed: int) -> Outcome:
    """One life, and what is left of it."""
    reading, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setpgid(0, 0)
        _run(own(folder, seed, told))
    os.close(told)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    random_ = random.Random(seed)
    wanted = random_.randrange(FARTHEST)
    said: list[Said] = []
    with os.fdopen(reading, "rb") as pipe:
        while not said or said[-1].written < wanted:
            line = pipe.readline()
            assert line, f"life {seed} ended by itself"
            said.append(msgspec.json.decode(line, type=Said))
        time.sleep(random_.uniform(0.0, LATER))
        os.killpg(child, signal.SIGKILL)
        lines = pipe.read().split(b"\n")
    said += [msgspec.json.decode(one, type=Said) for one in lines[:-1]]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"life {seed} ended by itself: {status}"
    return check(folder, said)


def run_lives(count: int, seed: int) -> list[Outcome]:
    """So many lives and kills; raises at the first that is not as it should be."""
    outcomes: list[Outcome] = []
    for number in range(seed, seed + count):
        with tempfile.TemporaryDirectory(prefix="rlinf-killed-") as folder:
            try:
                outcomes.append(live_and_die(Path(folder) / "1", number))
            except AssertionError as error:
                error.add_note(f"seed {number}")
                raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    began = time.monotonic()
    found = run_lives(chosen.count, chosen.seed)
    print(
        f"{len(found)} kills in {time.monotonic() - began:.0f} s: "
        f"{sum(one.events for one in found)} events and {sum(one.items for one in found)} items "
        f"read, {sum(one.torn > 0 for one in found)} files torn, "
        f"{sum(one.segments > 1 for one in found)} of several segments; nothing lost or doubled"
    )


if __name__ == "__main__":
    main()
