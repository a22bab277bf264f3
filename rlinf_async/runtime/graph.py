"""`Graph`: the channels and worker groups of a cluster, and what can be seen of them.

It waits for nobody; `Cluster` starts and ends what stands in it.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, TypeVar

from rlinf_async.channels import Channel, Latest, Wait, render
from rlinf_async.channels.waitfor import mark_cut_off
from rlinf_async.channels.wire import Traffic
from rlinf_async.observe.trace import Span
from rlinf_async.runtime.backend import Backend
from rlinf_async.runtime.group import WorkerGroup
from rlinf_async.runtime.supervise import Supervisor
from rlinf_async.workers.errors import BuildError

T = TypeVar("T")


class Graph:
    """What a cluster is made of, by name."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.channels: dict[str, Channel[Any] | Latest[Any]] = {}
        self.groups: dict[str, WorkerGroup[Any]] = {}
        self._spans: list[Span] = []

    def channel(
        self,
        item_type: type[T] | UnionType,
        *,
        name: str,
        capacity: int = 64,
        max_weight: int | None = None,
        max_deliveries: int = 5,
    ) -> Channel[T]:
        """A new channel. See `Channel` for the arguments.

        Raises:
            BuildError: the name is taken.
        """
        made: Channel[T] = Channel(
            item_type,
            name=name,
            capacity=capacity,
            max_weight=max_weight,
            max_deliveries=max_deliveries,
        )
        self._publish(made)
        return made

    def latest(self, item_type: type[T] | UnionType, *, name: str) -> Latest[T]:
        """A new `Latest`: a channel that holds only the newest value.

        Raises:
            BuildError: the name is taken.
        """
        made: Latest[T] = Latest(item_type, name=name)
        self._publish(made)
        return made

    def waits(self) -> list[Wait]:
        """Everybody who waits on a channel of this cluster, the longest first."""
        cut_off = tuple(f"{name}." for name in self._backend.cut_off())
        found = [
            mark_cut_off(wait, cut_off)
            for channel in self.channels.values()
            for wait in channel.waits()
        ]
        return sorted(found, key=lambda wait: -wait.seconds)

    def traffic(self) -> list[Traffic]:
        """What went over the connection to each worker's process."""
        return self._backend.traffic()

    def report(self) -> str:
        """Who waits for whom, and what was given up on the way, for a person."""
        cut_off = [
            f"{name} is cut off: reconnecting for {seconds:.1f} s"
            for name, seconds in self._backend.cut_off().items()
        ]
        return "\n".join([render(self.waits()), *cut_off, *self._dead_letters()])

    @property
    def address(self) -> str | None:
        """Where other hosts reach this cluster; None where it was not told to `listen`."""
        return self._backend.address

    def pid(self, name: str) -> int | None:
        """The process of a worker by its name (``"Env[0]"``); None where it has none of its own."""
        return self._backend.pid(name)

    async def spans(self) -> list[Span]:
        """All spans that workers have recorded since the last time."""
        for supervisor in self._supervisors():
            handle = supervisor.handle_nowait()
            if handle is not None:
                self._spans += await handle.spans()
        taken, self._spans = self._spans, []
        return taken

    def _supervisors(self) -> list[Supervisor]:
        return [one for group in self.groups.values() for one in group.supervisors]

    def _dead_letters(self) -> list[str]:
        """A line for each channel that gave items up, with the last one's error."""
        return [
            f"dead letters of channel {name!r}: {len(dead)}, the last after "
            f"{dead[-1].deliveries} deliveries: {dead[-1].error}"
            for name, channel in self.channels.items()
            if isinstance(channel, Channel) and (dead := channel.dead_letters)
        ]

    def _publish(self, made: Channel[Any] | Latest[Any]) -> None:
        if made.name in self.channels:
            raise BuildError(f"there is a channel {made.name!r} already: give each its own name")
        try:
            self._backend.publish(made)
        except TypeError as error:
            raise BuildError(f"channel {made.name!r} cannot cross to workers: {error}") from error
        self.channels[made.name] = made
