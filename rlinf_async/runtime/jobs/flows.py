"""What goes through the channels and connections of a run: for its live view and its trace.

Every look compares counts with those of the look before; workers are not asked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from rlinf_async.channels import Channel, Edge, Statistics
from rlinf_async.channels.wire import Traffic
from rlinf_async.observe.counters import Counter, Rates
from rlinf_async.observe.progress import ChannelView, EdgeView
from rlinf_async.runtime.cluster import Cluster

EVERY_NS: Final = 200_000_000
"""Time between two looks, at least: rates of shorter times jump."""
KEPT: Final = 200_000
"""Values of the trace; the oldest go first."""


class Flows:
    """The channels, edges and connections of a cluster, as they were last looked at."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rates = Rates()
        self._counters: deque[Counter] = deque(maxlen=KEPT)
        self._looked = 0
        self.channels: Sequence[ChannelView] = ()
        self.edges: Sequence[EdgeView] = ()

    @property
    def counters(self) -> Sequence[Counter]:
        """For the trace."""
        return self._counters

    def look(self) -> None:
        """See what is new, if the last look was long enough ago."""
        now = time.monotonic_ns()
        if now - self._looked < EVERY_NS:
            return
        self._looked = now
        every = [one for one in self._cluster.channels.values() if isinstance(one, Channel)]
        seen = [one.statistics() for one in every]
        self.channels = [self._channel(one, now) for one in seen]
        self.edges = [self._edge(one.name, edge, now) for one in seen for edge in one.edges]
        for traffic in self._cluster.traffic():
            self._connection(traffic, now)

    # ---- inside

    def _channel(self, seen: Statistics, now: int) -> ChannelView:
        counts = {"items/s": float(seen.gets), "put waits/s": float(seen.put_waits)}
        rates = self._rates.per_second(seen.name, now, counts)
        self._keep(f"channel {seen.name}", now, {"depth": float(seen.depth), **rates})
        return ChannelView(
            name=seen.name,
            depth=seen.depth,
            capacity=seen.capacity,
            items_per_second=rates["items/s"],
        )

    def _edge(self, channel: str, edge: Edge, now: int) -> EdgeView:
        worker = edge.party.partition(".")[0]
        sends = edge.end == "sender"
        name = f"{worker} -> {channel}" if sends else f"{channel} -> {worker}"
        counts = {
            "items/s": float(edge.items),
            "MB/s": edge.nbytes / 1e6,
            "credit waits/s": float(edge.credit_waits),
            "shared/s": float(edge.shared),
            "copied/s": float(edge.copied),
        }
        rates = self._rates.per_second(f"{edge.end} {edge.party} {channel}", now, counts)
        self._keep(name, now, rates if sends else {key: rates[key] for key in ("items/s", "MB/s")})
        return EdgeView(
            name=name,
            items_per_second=rates["items/s"],
            bytes_per_second=rates["MB/s"] * 1e6,
            shared=edge.shared,
            copied=edge.copied,
            credit_waits=edge.credit_waits,
        )

    def _connection(self, traffic: Traffic, now: int) -> None:
        counts = {
            "sent MB/s": traffic.sent_bytes / 1e6,
            "received MB/s": traffic.received_bytes / 1e6,
            "shared/s": float(traffic.sent_shared + traffic.received_shared),
            "copied/s": float(traffic.sent_copied + traffic.received_copied),
        }
        rates = self._rates.per_second(f"connection {traffic.peer}", now, counts)
        self._keep(f"connection {traffic.peer}", now, {**rates, "unsent": float(traffic.unsent)})

    def _keep(self, track: str, now: int, values: dict[str, float]) -> None:
        self._counters.append(Counter(track, now, values))
