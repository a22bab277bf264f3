"""Two hosts on one machine: network namespaces, and a cable between them.

The cable is a veth pair; for a bad one, with delay and loss, see `badcable`.
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

import pytest

ROOT: Final = Path(__file__).parents[2]
OWNER, WORKER = "10.77.0.1", "10.77.0.2"
CLONE_NEWNET: Final = 0x40000000


def ip(*arguments: str) -> None:
    """Run ``ip``.

    Raises:
        PermissionError: it refused; the message says why.
    """
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PermissionError("there is no 'ip' (iproute2)") from None
    if done.returncode:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Hosts:
    """Two namespaces, each with one address that the other can reach."""

    def __init__(self) -> None:
        self.owner, self.worker = (f"rlinf-{os.getpid()}-{side}" for side in "ow")

    def run(self, *command: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """Run Python in the worker's namespace; it finds that of the owner in its environment."""
        return subprocess.run(
            ["ip", "netns", "exec", self.worker, sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "OWNER_NAMESPACE": self.owner, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts that cannot reach each other yet; skips the test where that is not allowed."""
    made = Hosts()
    try:
        try:
            for name in (made.owner, made.worker):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
        except PermissionError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield made
    finally:
        for name in (made.owner, made.worker):
            with contextlib.suppress(PermissionError):
                ip("netns", "delete", name)


def good_cable(hosts: Hosts) -> None:
    """A veth pair."""
    ip("-n", hosts.owner, "link", "add", "far", "type", "veth", "peer", "name", "far", "netns",
       hosts.worker)  # fmt: skip
    for name, address in ((hosts.owner, OWNER), (hosts.worker, WORKER)):
        ip("-n", name, "address", "add", f"{address}/24", "dev", "far")
        ip("-n", name, "link", "set", "far", "up")


def enter(namespace: str) -> None:
    """Make the sockets of this thread in another namespace from now on."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(file)
