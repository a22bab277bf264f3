"""What Ray says is there, asked from one of its hosts.

``python -m tests.jobs.on_hosts.observer ADDRESS`` answers each line of its input with a `Seen`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from typing import Any

import msgspec


class Seen(msgspec.Struct):
    """What there is of a Ray cluster now."""

    hosts: list[str]
    """that are alive"""
    actors: list[str]
    """classes of the actors that are not dead"""
    groups: list[str]
    """names of the placement groups that are not removed"""
    used: dict[str, float]
    """resources in use, by name"""


def see(ray: Any) -> Seen:
    """Ask Ray."""
    state = importlib.import_module("ray._private.state")  # the public way needs the dashboard
    groups = importlib.import_module("ray.util.placement_group").placement_group_table()
    there, free = ray.cluster_resources(), ray.available_resources()
    names = ("CPU", "robot")
    return Seen(
        hosts=sorted(one["NodeName"] for one in ray.nodes() if one["Alive"]),
        actors=[one["ActorClassName"] for one in state.actors().values() if one["State"] != "DEAD"],
        groups=[one["name"] for one in groups.values() if one["state"] != "REMOVED"],
        used={name: used for name in names if (used := there.get(name, 0.0) - free.get(name, 0.0))},
    )


def main(address: str) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Ray prints, too
    ray = importlib.import_module("ray")
    while not ray.is_initialized():  # the head listens before it has a node
        with contextlib.suppress(Exception):
            ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False)
    for _ in sys.stdin:
        answers.write(msgspec.json.encode(see(ray)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
