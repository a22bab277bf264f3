"""Which functions of the project are entered between two events, by a profiler.

An item goes over three processes: producer, owner (the test's own) and consumer. Each records from
the moment in which nothing else is under way until the item is settled; they tell one another of it
by files, which enter nothing of the project.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import CodeType, FrameType

import msgspec

import rlinf_async as ra
from tests.architecture.sources import ROOT

Step = tuple[str, str]
"""A file below the root, and a function in it."""
FOLDERS = ("channels/", "workers/", "rlinf_async/")
WARM_UP = 300
WALKS = 20
"""Items that are watched. The shortest walk counts: the others have met a heartbeat or a timer."""


@functools.cache
def place(code: CodeType) -> Step | None:
    """Where this function stands; None outside of the project."""
    path = code.co_filename.removeprefix(f"{ROOT}/")
    path = re.sub(r"^rlinf_async/(channels|workers)/", r"\1/", path)  # symbolic links
    return (path, code.co_qualname) if path.startswith(FOLDERS) else None


class Recorder:
    """Notes every function of the project that this thread enters."""

    def __init__(self) -> None:
        self.calls: list[Step] = []

    def start(self) -> None:
        self.calls = []
        sys.setprofile(self._note)

    def stop(self) -> list[Step]:
        sys.setprofile(None)
        return self.calls

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (step := place(frame.f_code)) is not None:
            self.calls.append(step)


class WalkOfAJob:
    """Notes what a job that runs in this process enters, in any thread.

    Args:
        steps: functions whose calls are kept in order.
        first: function with whose call a walk begins.
        last: function with whose call it ends; "" for the end of the job.
    """

    def __init__(self, steps: Collection[Step], first: str, last: str) -> None:
        self.calls: list[Step] = []
        self.entered: set[Step] = set()
        self._steps = frozenset(steps)
        self._first = first
        self._last = last
        self._watching = False

    def run(self, job: Callable[[], object]) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            job()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (step := place(frame.f_code)) is None:
            return
        name = step[1]
        self._watching = self._watching or name == self._first
        if self._watching:
            self.entered.add(step)
        if step in self._steps:
            self.calls.append(step)
        if name == self._last:
            self._watching = False


class Item(msgspec.Struct):
    value: int


class Signs:
    """Names of files in one folder, by which processes tell one another what has happened."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def give(self, name: str) -> None:
        (self._folder / name).touch()

    async def wait(self, *names: str) -> None:
        await until(lambda: all((self._folder / name).exists() for name in names))


async def until(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110 - another process brings it about
        await asyncio.sleep(0.002)


async def walked(signs: Signs, name: str, number: int, step: Awaitable[object]) -> list[Step]:
    """What this process enters from "go" to "stop", between which it takes this step."""
    recorder = Recorder()
    recorder.start()
    signs.give(f"{number} {name} watches")
    await signs.wait(f"{number} go")
    await step
    signs.give(f"{number} {name} done")
    await signs.wait(f"{number} stop")
    return recorder.stop()


class Producer(ra.Worker):
    """Puts the items."""

    async def run(self, folder: str, out: ra.Sender[Item]) -> list[list[Step]]:
        signs, found = Signs(folder), []
        for number in range(WARM_UP):
            await out.put(Item(number))
            await asyncio.sleep(0.001)
        for number in range(WALKS):
            await signs.wait(f"{number} ready")
            found.append(await walked(signs, "producer", number, out.put(Item(number))))
        return found


class Consumer(ra.Worker):
    """Takes the items."""

    async def get(self, folder: str, source: ra.Receiver[Item]) -> list[list[Step]]:
        signs, found = Signs(folder), []
        for _ in range(WARM_UP):
            await source.get()
        for number in range(WALKS):
            getting = asyncio.ensure_future(source.get())
            await signs.wait(f"{number} ready")
            found.append(await walked(signs, "consumer", number, getting))
        return found

    async def lease(self, folder: str, source: ra.Receiver[Item]) -> list[list[Step]]:
        signs, found = Signs(folder), []
        for _ in range(WARM_UP):
            await _lease(source)
        for number in range(WALKS):
            await signs.wait(f"{number} put")
            found.append(await walked(signs, "consumer", number, _lease(source)))
        return found


async def _lease(source: ra.Receiver[Item]) -> None:
    async with source.lease():
        pass


async def walks_of_a_get(folder: str) -> list[set[Step]]:
    """What one item after another enters from its put, for which a get waits, to its end."""
    signs, recorder = Signs(folder), Recorder()
    here: list[list[Step]] = []
    async with ra.Cluster.process() as cluster:
        items = cluster.channel(Item, name="items")
        producer = (await cluster.launch(Producer))[0]
        consumer = (await cluster.launch(Consumer))[0]
        taking = consumer.call(Consumer.get, folder, items.receiver)
        putting = producer.call(Producer.run, folder, items.sender)
        queue = items.queue.unkeyed
        for number in range(WALKS):
            await until(lambda: items.queue.gets == WARM_UP + len(here) and queue.getters.first)
            signs.give(f"{number} ready")
            await signs.wait(f"{number} producer watches", f"{number} consumer watches")
            recorder.start()
            signs.give(f"{number} go")
            await signs.wait(f"{number} producer done", f"{number} consumer done")
            await until(lambda: not queue.deliveries)
            here.append(recorder.stop())
            signs.give(f"{number} stop")
        walks = zip(here, await putting, await taking, strict=True)
        return [{(path, name) for part in walk for path, name in part} for walk in walks]


async def walks_of_a_lease(folder: str) -> list[set[Step]]:
    """What one lease after another of an item that is there enters, up to its end."""
    signs, recorder = Signs(folder), Recorder()
    here: list[list[Step]] = []
    async with ra.Cluster.process() as cluster:
        items = cluster.channel(Item, name="items", capacity=WARM_UP + WALKS)
        for number in range(WARM_UP + WALKS):
            items.sender.put_nowait(Item(number))
        consumer = (await cluster.launch(Consumer))[0]
        taking = consumer.call(Consumer.lease, folder, items.receiver)
        queue = items.queue.unkeyed
        for number in range(WALKS):
            await until(lambda: items.queue.leases_ended == WARM_UP + len(here))
            signs.give(f"{number} put")
            await signs.wait(f"{number} consumer watches")
            recorder.start()
            signs.give(f"{number} go")
            await signs.wait(f"{number} consumer done")
            await until(lambda: not queue.deliveries)
            here.append(recorder.stop())
            signs.give(f"{number} stop")
        walks = zip(here, await taking, strict=True)
        return [{(path, name) for part in walk for path, name in part} for walk in walks]
