"""The graph of workers and channels of a run: of one that goes on, from ``status.json``; of one
that has ended, from the numbers of its trace. Beside it who was busy, and who waited for whom, from
the newest records of ``waits.jsonl``.

Nodes are groups of workers and channels, and the run itself, which holds the ends of channels that
no worker holds. An edge leads the way that the items go.
"""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from rlinf_async.observe.bottleneck import Bottleneck, analyse
from rlinf_async.observe.files import explaining
from rlinf_async.observe.progress import ProgressState
from rlinf_async.observe.waits import MAIN, WAITS, WaitsRecord, decode_waits

DRIVER: Final = "the run"
"""the process of the run, which puts to and gets from channels itself"""
ARROW: Final = " -> "
NEWEST: Final = 512 * 1024
"""bytes of the records of waits that are read, the newest"""
LEAST_SHARE: Final = 0.005
"""share of its time that somebody waited, below which it is not told"""


def of_status(shown: ProgressState) -> dict[str, Any]:
    """The graph of a run that goes on."""
    channels = [
        {
            "name": one.name,
            "depth": one.depth,
            "capacity": one.capacity,
            "rate": one.items_per_second,
        }
        for one in shown.channels
    ]
    edges = [
        {
            "name": one.name,
            "rate": one.items_per_second,
            "bytes": one.bytes_per_second,
            "copied": one.copied,
            "shared": one.shared,
        }
        for one in shown.edges
    ]
    workers = [
        {
            "name": one.name,
            "doing": one.doing,
            "waiting": one.waiting_for,
            "seconds": one.waiting_seconds,
            "restarts": one.restarts,
            "host": one.host,
            "devices": list(one.devices),
            "live": one.live,
        }
        for one in shown.workers
    ]
    waits = [
        {
            "party": one.party,
            "operation": one.operation,
            "channel": one.channel,
            "seconds": one.seconds,
            "unblockers": list(one.unblockers),
        }
        for one in shown.waits
    ]
    return _graph("now", workers, channels, edges, waits)


def of_trace(header: dict[str, Any]) -> dict[str, Any]:
    """The graph of a run that has ended: rates and depths are means over its time."""
    mean = {one["name"]: one["mean"] for one in header["tracks"]}
    most = {one["name"]: one["largest"] for one in header["tracks"]}
    depths = [name for name in mean if name.startswith("channel ") and name.endswith(" depth")]
    names = [one.removeprefix("channel ").removesuffix(" depth") for one in depths]
    channels = [
        {
            "name": name,
            "depth": mean[f"channel {name} depth"],
            "largest": most[f"channel {name} depth"],
            "capacity": None,
            "rate": mean.get(f"channel {name} items/s"),
        }
        for name in names
    ]
    edges = [
        {
            "name": name.removesuffix(" items/s"),
            "rate": rate,
            "bytes": mean.get(name.removesuffix(" items/s") + " MB/s", 0.0) * 1e6,
        }
        for name, rate in mean.items()
        if ARROW in name and name.endswith(" items/s")
    ]
    workers = [{"name": one} for one in dict.fromkeys(row["worker"] for row in header["rows"])]
    return _graph("mean", workers, channels, edges, [])


def _graph(
    when: str,
    workers: list[dict[str, Any]],
    channels: list[dict[str, Any]],
    edges: list[dict[str, Any]],
    waits: list[dict[str, Any]],
) -> dict[str, Any]:
    """The nodes, and edges between groups of workers and channels."""
    names = {one["name"] for one in channels}
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in workers:
        groups.setdefault(group_of(one["name"]), []).append(one)
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for edge in edges:
        ends = _ends(edge["name"], names)
        if ends is None:
            continue
        worker, channel, way = ends
        groups.setdefault(group_of(worker), [])
        joined = found.setdefault(
            (group_of(worker), channel, way), {"rate": 0.0, "bytes": 0.0, "parts": []}
        )
        joined["rate"] += edge["rate"]
        joined["bytes"] += edge["bytes"]
        joined["parts"].append({"worker": worker, "rate": edge["rate"], "bytes": edge["bytes"]})
    for wait in waits:
        if wait["channel"] in names:
            way = "out" if wait["operation"] == "put" else "in"
            found.setdefault((_party(wait["party"], groups), wait["channel"], way), {"parts": []})
    for name in sorted(names):  # what no worker puts or gets, the run does
        for way in ("out", "in"):
            if not any(channel == name and one == way for _, channel, one in found):
                found[DRIVER, name, way] = {"parts": []}
    if any(group == DRIVER for group, _, _ in found):
        groups.setdefault(DRIVER, [])
    return {
        "when": when,
        "groups": [{"name": name, "workers": ranks} for name, ranks in groups.items()],
        "channels": channels,
        "edges": [
            {"group": group, "channel": channel, "way": way, **edge}
            for (group, channel, way), edge in found.items()
        ],
        "waits": waits,
    }


def group_of(worker: str) -> str:
    """The group of a worker: ``Env`` of ``Env[3]``."""
    return re.sub(r"\[\d+\]$", "", worker)


def _party(party: str, groups: dict[str, list[dict[str, Any]]]) -> str:
    """The group that waits, by the name of one of its methods: ``Env[3].collect``."""
    group = group_of(party.partition(".")[0])
    return group if group in groups else DRIVER


def _ends(edge: str, channels: set[str]) -> tuple[str, str, str] | None:
    """Worker, channel and the way of the items, seen from the worker; names may hold arrows."""
    parts = edge.split(ARROW)
    for at in range(1, len(parts)):
        left, right = ARROW.join(parts[:at]), ARROW.join(parts[at:])
        if right in channels:
            return left, right, "out"
        if left in channels:
            return right, left, "in"
    return None


class NewestWaits:
    """The newest records of the waits of a run, and the bottleneck that they name.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / WAITS
        self._lock = threading.Lock()
        self._stamp = (0, 0)
        self._records: list[WaitsRecord] = []
        self._bottleneck: Bottleneck | None = None

    def read(self) -> tuple[list[WaitsRecord], Bottleneck | None]:
        """The records, oldest first; none where the run has none. Read again if they are others.

        Raises:
            RunFolderError: they cannot be read.
        """
        with self._lock, explaining("read", self._path):
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                return [], None
            with file:
                found = os.fstat(file.fileno())
                stamp = found.st_mtime_ns, found.st_size
                if stamp == self._stamp:
                    return self._records, self._bottleneck
                file.seek(max(0, found.st_size - NEWEST))
                content = file.read()
            if found.st_size > NEWEST:  # its first line is a part of one
                content = content.partition(b"\n")[2]
            self._records = decode_waits(content, self._path)
            self._bottleneck = analyse(self._records) if self._records else None
            self._stamp = stamp
            return self._records, self._bottleneck


def add_waits(told: dict[str, Any], waits: NewestWaits) -> None:
    """Add to a graph the bottleneck, how busy each group was, and who waited for what, as shares
    of time.

    Raises:
        RunFolderError: the waits cannot be read.
    """
    records, bottleneck = waits.read()
    if bottleneck is None:
        return
    told["bottleneck"] = {"sentence": bottleneck.text, "role": bottleneck.role}
    busy: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    ranks: dict[str, set[str]] = defaultdict(set)
    waited: dict[tuple[str, str, str], float] = defaultdict(float)
    unblockers: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for record in records:
        for party in record.parties:
            sums = busy[group_of(party.worker)]
            sums[0] += party.busy * party.seconds
            sums[1] += party.seconds
        for wait in record.waits:
            group = _named(wait.party)
            ranks[group].add(wait.party.partition(".")[0])
            waited[group, wait.operation, wait.channel] += wait.seconds
            unblockers[group, wait.operation, wait.channel] |= set(map(_named, wait.unblockers))
    idle: dict[str, float] = {}
    for group in told["groups"]:
        work, time = busy.get(group["name"], (0.0, 0.0))
        group["busy"] = work / time if time > 0 else None
        if time > 0:
            idle[group["name"]] = max(0.0, 1.0 - work / time)
    first, last = records[0], records[-1]
    told["iterations"] = [first.iteration - first.iterations + 1, last.iteration]
    seconds = sum(record.seconds for record in records)
    told["shares"] = []
    for (group, operation, channel), total in waited.items():
        # A task may wait while another one of its worker works: then the worker does not.
        share = min(total / (seconds * len(ranks[group])) if seconds else 0.0, idle.get(group, 1.0))
        if share >= LEAST_SHARE:
            ends = sorted(unblockers[group, operation, channel])
            told["shares"].append(
                {"group": group, "operation": operation, "channel": channel, "share": share,
                 "unblockers": ends}
            )  # fmt: skip
    told["shares"].sort(key=lambda one: (-one["share"], one["group"], one["channel"]))


def _named(party: str) -> str:
    """The group of a party that waits, or holds the other end."""
    group = group_of(party.partition(".")[0])
    return DRIVER if group == MAIN else group
