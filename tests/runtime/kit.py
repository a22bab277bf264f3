"""Workers that the runtime's tests launch, in this and in other processes, and helpers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import rlinf_async as ra
from rlinf_async.channels.wire import Connection
from rlinf_async.runtime.remote_worker import RemoteWorker

NewCluster = Callable[..., ra.Cluster]


class Number(msgspec.Struct, frozen=True):
    value: int


class Word(msgspec.Struct, frozen=True):
    text: str


class Reading(msgspec.Struct):
    values: np.ndarray
    label: str


class Doubler(ra.Worker):
    """Doubles numbers until their end; says how many."""

    async def run(self, numbers: ra.Receiver[Number], doubled: ra.Sender[Number]) -> int:
        count = 0
        async for number in numbers:
            await doubled.put(Number(number.value * 2))
            count += 1
        return count

    async def leased(self, numbers: ra.Receiver[Number], doubled: ra.Sender[Number]) -> None:
        """As `run`, but an item is consumed only once its double is out."""
        while True:
            try:
                async with numbers.lease() as (number,):
                    await doubled.put(Number(number.value * 2))
            except ra.EndOfChannel:
                return


class Teller(ra.Worker):
    """Returns what it knows and what it is given."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    async def where(self) -> tuple[int, int]:
        return self.rank, self.world_size

    async def life(self) -> int:
        return self.incarnation

    async def pid(self) -> int:
        return os.getpid()

    async def greet(self, name: str, mark: str = "!") -> str:
        return f"{self.greeting} {name}{mark}"

    async def nothing(self) -> None:
        return None

    async def reading(self, size: int) -> Reading:
        return Reading(np.arange(size, dtype=np.float32) + self.rank, f"rank {self.rank}")

    async def sum_of(self, reading: Reading) -> float:
        return float(reading.values.sum())

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    async def where_it_runs(self) -> list[str]:
        return [str(device) for device in self.devices]


class Broken(ra.Worker):
    """Fails in the ways that workers fail in."""

    async def at_once(self) -> None:
        raise ValueError(f"rank {self.rank} is broken")

    async def calls_exit(self) -> None:
        sys.exit(3)

    async def only(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError(f"rank {rank} is broken")
        return self.rank

    async def on(self, value: int, numbers: ra.Receiver[Number], out: ra.Sender[Number]) -> None:
        async for number in numbers:
            if number.value == value:
                raise ValueError(f"cannot take {value}")
            await out.put(number)

    async def cancels_itself(self) -> None:
        other = asyncio.ensure_future(asyncio.Event().wait())
        other.cancel()
        await other

    async def while_cancelled(self, started: ra.Sender[str]) -> None:
        try:
            await started.put(self.name)  # it may have arrived while this still waits to be told so
            await asyncio.Event().wait()
        finally:
            raise KeyError("cleaning up failed")

    async def returns_a_lock(self) -> Any:
        return threading.Lock()

    async def exits(self, code: int) -> None:
        os._exit(code)


class Waiter(ra.Worker):
    """Waits until it is cancelled or gets an item."""

    counted = 0

    async def forever(self, started: ra.Sender[str]) -> None:
        await started.put(self.name)
        await asyncio.Event().wait()

    async def counts(self) -> None:
        """Count this call before it waits."""
        self.counted += 1
        await asyncio.Event().wait()

    async def count(self) -> int:
        return self.counted

    async def for_item(self, numbers: ra.Receiver[Number]) -> int:
        return (await numbers.get()).value

    async def holding(self, numbers: ra.Receiver[Number], holds: ra.Sender[int]) -> None:
        """Lease an item, say so with the incarnation, and hold it until the third life."""
        async with numbers.lease() as (number,):
            await holds.put(self.incarnation)
            if self.incarnation < 2:
                await asyncio.Event().wait()
            await holds.put(number.value)


class Waiting(NamedTuple):
    """Waiters whose call of `Waiter.forever` has begun on every rank."""

    workers: ra.WorkerGroup[Waiter]
    running: ra.GroupCall[list[None]]
    started: ra.Channel[str]
    """ends when the call has ended"""


async def waiting(cluster: ra.Cluster, count: int = 1) -> Waiting:
    """Launch waiters and have them wait."""
    started = cluster.channel(str, name="started")
    workers = await cluster.launch(Waiter, count=count)
    running = workers.call(Waiter.forever, started.sender)
    names = {await started.receiver.get() for _ in range(count)}
    assert names == {f"Waiter[{rank}]" for rank in range(count)}
    return Waiting(workers, running, started)


def connection_to(workers: ra.WorkerGroup[Waiter]) -> Connection:
    """That to the process of the first rank."""
    handle = workers.supervisors[0].live
    assert isinstance(handle, RemoteWorker)
    assert handle.connection is not None
    return handle.connection


def kill(cluster: ra.Cluster, name: str, how: int = signal.SIGKILL) -> int:
    """Send a signal to a worker's process; its pid."""
    pid = cluster.pid(name)
    assert pid is not None
    os.kill(pid, how)
    return pid


class Parent(ra.Worker):
    """Has a process of its own, as a simulator may."""

    async def setup(self) -> None:
        self.child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
        self.child.start()

    async def started(self) -> int:
        return self.child.pid or 0

    async def forever(self) -> None:
        await asyncio.Event().wait()


class Setup(ra.Worker):
    """Fails in ``setup`` on one rank; notes in a folder who was taken down."""

    def __init__(self, folder: str, broken: int) -> None:
        self.folder = Path(folder)
        self.broken = broken

    async def setup(self) -> None:
        if self.rank == self.broken:
            raise RuntimeError("no such robot")

    async def teardown(self) -> None:
        (self.folder / f"{self.name} left").touch()

    async def rank_of(self) -> int:
        return self.rank


def left_behind() -> set[str]:
    """Files of clusters (the tests have a temporary folder of their own), and our children."""
    found = {str(path) for path in Path(tempfile.gettempdir()).iterdir()}
    found |= {str(path) for path in Path("/dev/shm").glob("rlinf*")}
    return found | {f"process {pid}" for pid in children()}


def children() -> set[int]:
    """Processes whose parent is this one, without multiprocessing's own."""
    from multiprocessing import forkserver, resource_tracker

    tracker: Any = getattr(resource_tracker, "_resource_tracker")  # noqa: B009
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009
    found: set[int] = set()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since the glob
            found.update(int(pid) for pid in path.read_text().split())
    return found - {tracker._pid, server._forkserver_pid}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
