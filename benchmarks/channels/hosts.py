"""Two hosts: network namespaces of this machine, and a cable between them.

    python hosts.py ours | tls | raw | past  good | bad

``good`` is a veth pair; ``bad`` delays each packet by 20 ms one way and loses one of a hundred, by
`tc netem`, or where the kernel lacks that by two tun devices and a thread of this process. The two
sides are in `far`; in `past`, two workers of one host and an owner on the other. What is not
allowed here is said, with exit code 77: the case is skipped.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.channels import far, past
from benchmarks.harness.run import SKIPPED
from tests.net.badcable import bad_cable
from tests.net.hosts import Hosts, NotAllowed, good_cable, python_in, slow_cable, two_hosts

DELAY = 0.02
"""seconds, one way"""
LOSS = 0.01


@contextmanager
def netem() -> Iterator[Hosts]:
    """Two hosts and a bad cable, by the kernel."""
    with two_hosts() as hosts:
        good_cable(hosts)
        slow_cable(hosts, DELAY, LOSS)
        yield hosts


@contextmanager
def connected(cable: str) -> Iterator[Hosts]:
    """Two hosts with this cable."""
    if cable == "good":
        with two_hosts() as hosts:
            good_cable(hosts)
            yield hosts
        return
    try:
        with netem() as hosts:
            yield hosts
    except NotAllowed:
        with two_hosts() as hosts, bad_cable(hosts, DELAY, LOSS):
            yield hosts


def measure(hosts: Hosts, what: str, cable: str) -> str:
    """Run both sides; what the worker's prints."""
    environment = {**os.environ, "RLINF_ASYNC_SECRET": secrets.token_hex()}
    sides = past if what == "past" else far
    command = ("-m", sides.__name__, what, cable)
    with subprocess.Popen(
        python_in(hosts.owner, *command, "owner"),
        env=environment, stdout=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        try:
            assert owner.stdout is not None
            owner.stdout.readline()  # it is ready
            return subprocess.run(
                python_in(hosts.worker, *command, "worker"),
                env=environment, stdout=subprocess.PIPE, text=True, check=True,
            ).stdout  # fmt: skip
        finally:
            owner.kill()


def main(what: str, cable: str) -> None:
    try:
        with connected(cable) as hosts:
            print(measure(hosts, what, cable), end="")
    except NotAllowed as error:
        print(f"two hosts are not allowed here: {error}", file=sys.stderr)
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main(*sys.argv[1:])
