"""Two hosts on one machine: network namespaces, and a cable between them.

The cable is a veth pair, with delay and loss where the kernel has ``netem``; where it has not, see
`badcable`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
OWNER, WORKER = "10.77.0.1", "10.77.0.2"
CLONE_NEWNET: Final = 0x40000000


class NotAllowed(Exception):
    """Two hosts cannot be made here, and why."""


def ip(*arguments: str, program: str = "ip") -> None:
    """Run ``ip``, or another program of iproute2.

    Raises:
        NotAllowed: it refused; the message says why.
    """
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotAllowed(f"there is no {program!r} (iproute2)") from None
    if done.returncode:
        raise NotAllowed(f"{program} {' '.join(arguments)}: {done.stderr.strip()}")


class Hosts:
    """Two namespaces, each with one address that the other can reach."""

    def __init__(self) -> None:
        self.owner, self.worker = (f"rlinf-{os.getpid()}-{side}" for side in "ow")

    def run(self, *command: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        """Run Python in the worker's namespace; it finds that of the owner in its environment."""
        return subprocess.run(
            python_in(self.worker, *command),
            cwd=ROOT,
            env={**os.environ, "OWNER_NAMESPACE": self.owner, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def python_in(namespace: str, *arguments: str) -> list[str]:
    """The command that runs Python there."""
    return ["ip", "netns", "exec", namespace, sys.executable, *arguments]


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts that cannot reach each other yet.

    Raises:
        NotAllowed: they cannot be made here.
    """
    made = Hosts()
    try:
        for name in (made.owner, made.worker):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        for name in (made.owner, made.worker):
            with contextlib.suppress(NotAllowed):
                ip("netns", "delete", name)


def good_cable(hosts: Hosts) -> None:
    """A veth pair.

    Raises:
        NotAllowed: the kernel has none.
    """
    ip("-n", hosts.owner, "link", "add", "far", "type", "veth", "peer", "name", "far", "netns",
       hosts.worker)  # fmt: skip
    for name, address in ((hosts.owner, OWNER), (hosts.worker, WORKER)):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "far")
        ip("-n", name, "link", "set", "far", "up")


def slow_cable(hosts: Hosts, seconds: float, loss: float) -> None:
    """The veth pair, once it is there: each packet takes so long one way, and some are lost.

    Raises:
        NotAllowed: the kernel has no ``netem``.
    """
    for name in (hosts.owner, hosts.worker):
        ip("-n", name, "qdisc", "add", "dev", "far", "root", "netem", "delay",
           f"{seconds * 1000:g}ms", "loss", f"{loss * 100:g}%", program="tc")  # fmt: skip


def enter(namespace: str) -> None:
    """Make the sockets of this thread in another namespace from now on."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(file)
