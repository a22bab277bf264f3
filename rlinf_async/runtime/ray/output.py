"""What is read, known and done on a host of a Ray cluster beside its actors.

::

    RayOutput               what actors print, line by line under the worker's name
    address_of              network interfaces and their IPv4 addresses
    when_this_process_ends  something to do then, also where it was killed

Ray reads the files that its actors print to, on every host, and sends the lines to the driver, also
the last ones of an actor that crashed. Its own way to print them goes to the driver's terminal,
into the progress of a run.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from socket import AF_INET, gethostname
from typing import Any, Final

import psutil

from rlinf_async.runtime.process import OutputLog
from rlinf_async.runtime.ray.session import of_ray
from rlinf_async.workers.base import BuildError

HANDLER = "rlinf_async"
QUIET_SECONDS = 0.75
"""time after which no more lines are on their way: Ray looks at the files every 0.5 s"""
DRAIN_SECONDS = 3.0
"""time in which the last lines are waited for"""
RAY_HANDLER = "ray_print_logs"


class RayOutput:
    """Writes the lines of a cluster's actors to its log.

    Without a file Ray prints all: it has a limit for repeated lines.
    """

    def __init__(self, output: OutputLog) -> None:
        self._output = output
        self._names: dict[tuple[str, str], str] = {}
        """name of a worker by address and process"""
        self._arrived = threading.Event()
        """whether lines have come since the last look, or a worker has begun to print"""

    def name(self, address: str, pid: int, worker: str) -> None:
        """Note which worker a process is."""
        self._names[address, str(pid)] = worker
        self._arrived.set()

    def open(self) -> None:
        """Take the lines, if they are to go to a file."""
        if self._output.path is not None:
            _division.add(self)

    async def drain(self) -> None:
        """Wait for the last lines of workers that have ended."""
        if self._output.path is None:
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + DRAIN_SECONDS
        while self._arrived.is_set() and loop.time() < end:
            self._arrived.clear()
            await asyncio.sleep(QUIET_SECONDS)

    def close(self) -> None:
        """Take no more lines."""
        if self._output.path is not None:
            _division.remove(self)
            self._output.close()

    def take(self, data: Any) -> bool:
        """Write some lines, if they are of this cluster; in a thread of Ray's."""
        address, pid = str(data.get("ip")), str(data.get("pid"))
        worker = f"Ray on {address}" if pid == "raylet" else self._names.get((address, pid))
        if worker is None:
            return False
        self._arrived.set()
        self._output.write(worker, list(data["lines"]))
        return True


class _Division:
    """Divides what Ray sends to this process among its clusters; the rest Ray prints."""

    def __init__(self) -> None:
        self._outputs: list[RayOutput] = []
        self._rest: Callable[[Any], None] | None = None
        """Ray's own printing, while it is replaced"""

    def add(self, output: RayOutput) -> None:
        """Give a cluster its lines."""
        if not self._outputs:
            dispatcher = _dispatcher()
            self._rest = dict(dispatcher.handlers).get(RAY_HANDLER)
            dispatcher.remove_handler(RAY_HANDLER)
            dispatcher.add_handler(HANDLER, self._divide)
        self._outputs = [*self._outputs, output]

    def remove(self, output: RayOutput) -> None:
        """Give it none any more; after the last one Ray prints again."""
        before, self._outputs = self._outputs, [one for one in self._outputs if one is not output]
        if before and not self._outputs:
            dispatcher = _dispatcher()
            dispatcher.remove_handler(HANDLER)
            if self._rest is not None:
                dispatcher.add_handler(RAY_HANDLER, self._rest)

    def _divide(self, data: Any) -> None:
        """Take some lines; in a thread of Ray's."""
        taken = [output.take(data) for output in self._outputs]
        if not any(taken) and self._rest is not None:
            self._rest(data)


_division = _Division()


def _dispatcher() -> Any:
    """What hands the lines of actors to whoever wants them; Ray has no public way to them."""
    return of_ray("_private.ray_logging").global_worker_stdstream_dispatcher


def address_of(interface: str) -> str:
    """The address of an interface.

    Raises:
        BuildError: this host has none of the name, or it has no IPv4 address.
    """
    found = _addresses()
    if interface not in found:
        there = ", ".join(f"{name} ({address})" for name, address in found.items())
        raise BuildError(
            f"{gethostname()} has no interface {interface!r} with an IPv4 address: there is {there}"
        )
    return found[interface]


def interface_of(address: str) -> str:
    """The interface that has this address; empty where none has."""
    return next((name for name, one in _addresses().items() if one == address), "")


def _addresses() -> dict[str, str]:
    found = psutil.net_if_addrs().items()
    return {
        name: one.address for name, several in found for one in several if one.family == AF_INET
    }


KILL_GROUP: Final = 'kill -KILL -"$1"'
"""kill the processes of a group"""
REMOVE_FOLDER: Final = 'rm -rf -- "$1"'
"""remove a folder and what is in it"""


def when_this_process_ends(what: str, argument: str) -> Callable[[], None]:
    """Do one of the above then; returns a function that does it at once."""
    command = ["/bin/sh", "-c", f"read -r _; {what}", "sh", argument]
    held, end = os.pipe()
    try:
        shell = subprocess.Popen(
            command,
            stdin=held,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(held)
    open_ends = [end]

    def let_go() -> None:
        while open_ends:
            with suppress(OSError):
                os.close(open_ends.pop())

    def now() -> None:
        let_go()
        shell.wait()

    os.register_at_fork(after_in_child=let_go)
    return now
