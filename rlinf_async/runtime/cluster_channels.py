"""The channels of a cluster by name: those whose queues live here, and those that live with
workers."""

from __future__ import annotations

import asyncio
from types import UnionType
from typing import Any, TypeVar

from rlinf_async.channels import Channel, Latest, Statistics, Wait
from rlinf_async.channels.waitfor import mark_cut_off
from rlinf_async.channels.wire import ChannelSeen, HomeMaker
from rlinf_async.runtime.backend import Backend
from rlinf_async.runtime.homes import HomedChannel
from rlinf_async.workers.errors import BuildError

T = TypeVar("T")
C = TypeVar("C", Channel[Any], Latest[Any])


class ClusterChannels:
    """Gives them to the backend, so that workers can have ends of them, and sees who waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.here: dict[str, Channel[Any] | Latest[Any]] = {}
        """by name"""
        self.homed: dict[str, HomedChannel[Any]] = {}
        """those whose queues live with workers, by name"""
        self._makers: dict[str, HomeMaker] = {}
        self._seen: list[ChannelSeen] = []
        """of the channels in ``homed``, when they were last looked at"""

    def check_name(self, name: str) -> None:
        """Raise `BuildError` where a name is taken."""
        if name in self.here or name in self.homed:
            raise BuildError(f"there is a channel {name!r} already: give each its own name")

    def make(self, kind: type[C], item_type: Any, *, name: str, **options: Any) -> C:
        """Make and add a `Channel` or `Latest` whose queue lives here.

        Raises:
            BuildError: its name is taken, or its type cannot cross to workers.
        """
        self.check_name(name)
        try:
            made = kind(item_type, name=name, **options)
            self._backend.publish(made)
        except TypeError as error:
            raise _cannot_cross(name, error) from error
        self.here[name] = made
        return made

    async def make_at(
        self, home: str, item_type: type[T] | UnionType, *, name: str, **options: Any
    ) -> HomedChannel[T]:
        """Make and add one whose queue lives with a worker. ``options``: as of `Channel`.

        Raises:
            BuildError: the type cannot cross to workers.
            WorkerDied, HomeLost: as `Cluster.channel_at`.
        """
        maker = await self._backend.home(home)
        if maker is None:  # all are in one process
            here: Channel[T] = self.make(Channel, item_type, name=name, **options)
            made = HomedChannel[T](here, home)
        else:
            try:
                there = await maker.create(item_type, name=name, **options)
            except TypeError as error:
                raise _cannot_cross(name, error) from error
            made = HomedChannel[T](there, home)
            self._makers[home] = maker
        self.homed[name] = made
        return made

    async def look_at_homes(self) -> list[Statistics]:
        """Look at those whose queues live with workers, for `waits` and `dead_letters`."""
        if self._makers:
            found = await asyncio.gather(*(maker.look() for maker in self._makers.values()))
            self._seen = [one for of_home in found for one in of_home]
        return [one.statistics for one in self._seen]

    def waits(self) -> list[Wait]:
        """Everybody who waits, the longest first."""
        cut_off = tuple(f"{name}." for name in self._backend.cut_off())
        here = [wait for channel in self.here.values() for wait in channel.waits()]
        every = [*here, *(wait for one in self._seen for wait in one.waits)]
        found = [mark_cut_off(wait, cut_off) for wait in every]
        return sorted(found, key=lambda wait: -wait.seconds)

    def dead_letters(self) -> list[str]:
        """A line for each channel that gave items up, with the last one's error."""
        return [
            f"dead letters of channel {name!r}: {len(dead)}, the last after "
            f"{dead[-1].deliveries} deliveries: {dead[-1].error}"
            for name, channel in self.here.items()
            if isinstance(channel, Channel) and (dead := channel.dead_letters)
        ] + [
            f"dead letters of channel {one.statistics.name!r}: {one.statistics.dead_letters}, the "
            f"last after {one.dead_letter}"
            for one in self._seen
            if one.dead_letter
        ]


def _cannot_cross(name: str, error: TypeError) -> BuildError:
    return BuildError(f"channel {name!r} cannot cross to workers: {error}")
