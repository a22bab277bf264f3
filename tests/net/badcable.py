"""A cable between two namespaces that takes its time and loses packets.

`tc netem` is not in every kernel. So packets go through two tun devices and this process: each
waits for its time, or is lost, by a seeded draw. TCP itself runs in the kernel, over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.net.hosts import OWNER, WORKER, Hosts, NotAllowed, enter, ip

TUNSETIFF: Final = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET: Final = 65_536


class Cable:
    """What went through."""

    def __init__(self, seconds: float, loss: float, seed: int) -> None:
        self.seconds = seconds
        self.loss = loss
        self.carried = self.lost = 0
        self._random = random.Random(seed)

    def __repr__(self) -> str:
        return f"<Cable: {self.carried} packets carried, {self.lost} lost>"

    def carry(self, source: int, target: int) -> None:
        """A packet has come."""
        packet = os.read(source, PACKET)
        if self._random.random() < self.loss:
            self.lost += 1
            return
        self.carried += 1
        asyncio.get_running_loop().call_later(self.seconds, write, target, packet)

    async def run(self, ends: list[int], stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        for source, target in (ends, ends[::-1]):
            loop.add_reader(source, self.carry, source, target)
        await stop.wait()
        for end in ends:
            loop.remove_reader(end)


def write(target: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # its queue is full: one more that is lost
        os.write(target, packet)


def open_tun(namespace: str) -> int:
    """The outer side of a new device of this namespace. For a thread that goes nowhere else."""
    enter(namespace)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", b"far", IFF_TUN | IFF_NO_PI))
    return file


@contextmanager
def bad_cable(hosts: Hosts, seconds: float, loss: float, seed: int = 0) -> Iterator[Cable]:
    """A cable on which every packet takes so many seconds one way, and some are lost.

    Raises:
        NotAllowed: there are no tun devices here.
    """
    cable = Cable(seconds, loss, seed)
    ends: list[int] = []

    def connect() -> None:
        try:
            ends.extend(open_tun(name) for name in (hosts.owner, hosts.worker))
        except OSError as error:
            failed.append(error)

    failed: list[OSError] = []
    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    if failed:
        raise NotAllowed(f"tun devices: {failed[0]}")
    for name, here, there in ((hosts.owner, OWNER, WORKER), (hosts.worker, WORKER, OWNER)):
        ip("-n", name, "address", "add", here, "peer", there, "dev", "far")
        ip("-n", name, "link", "set", "far", "up")
    stop, loop = asyncio.Event(), asyncio.new_event_loop()
    carrier = threading.Thread(target=loop.run_until_complete, args=(cable.run(ends, stop),))
    carrier.start()
    try:
        yield cable
    finally:
        loop.call_soon_threadsafe(stop.set)
        carrier.join()
        loop.close()
        for end in ends:
            os.close(end)
