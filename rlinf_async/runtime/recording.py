"""What a cluster records: which of its channels, and into which folder; the ``[recording]`` table.

::

    Cluster.record_into   names, or all    channels are recorded as they are made
    Cluster.record        one channel      from now on

`rlinf_async.recording` is imported once something is recorded.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rlinf_async.channels import Channel, Latest
from rlinf_async.config import ConfigError

if TYPE_CHECKING:
    from rlinf_async.recording.recorder import Recorder, RecorderState

log = logging.getLogger(__name__)
ALL: Final = "all"
"""stands for every channel"""
LEAST: Final = 1_000_000
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(k|M|G|T)?B", re.IGNORECASE)
_PLAIN: Final = re.compile(r"[+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)
_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


class RecordingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run records of what passes its channels."""

    channels: tuple[str, ...] = ()
    """names of channels, or ``all``; none: nothing is recorded"""
    limit: str = "2 GB"
    """size of all recordings of the run; the oldest parts are deleted for it"""

    def __post_init__(self) -> None:
        channels = ("channels",)
        if not all(self.channels):
            raise ConfigError(
                f"a name in it is empty: name channels, or {ALL!r}; [] records nothing",
                path=channels,
            )
        if twice := [name for name, count in Counter(self.channels).items() if count > 1]:
            raise ConfigError(
                f"{' and '.join(map(repr, twice))} stands there more than once", path=channels
            )
        if ALL in self.channels and len(self.channels) > 1:
            named = ", ".join(one for one in self.channels if one != ALL)
            raise ConfigError(
                f"{ALL!r} is every channel: leave {named} out, or {ALL!r}", path=channels
            )
        if _PLAIN.fullmatch(self.limit.strip()):
            raise ConfigError(
                f"{self.limit!r} has no unit: write '500 MB', '2 GB'", path=("limit",)
            )
        if not _SIZE.fullmatch(self.limit.strip()) or self.nbytes < LEAST:
            raise ConfigError(
                f"{self.limit!r} is no size of at least 1 MB: write '500 MB', '2 GB'",
                path=("limit",),
            )

    @property
    def nbytes(self) -> int:
        """``limit`` in bytes."""
        found = _SIZE.fullmatch(self.limit.strip())
        assert found is not None  # checked when it was made
        return round(float(found[1]) * _UNITS[(found[2] or "").lower()])

    @property
    def every(self) -> bool:
        """Whether all channels are recorded."""
        return self.channels == (ALL,)


class NoSuchChannel(ConfigError):
    """A channel that is to be recorded is not there."""


class ClusterRecording:
    """The recorder of a cluster, once there is one, and the channels that it is to record."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._wanted: Collection[str] = ()
        self._every = False
        self._left_out: list[str] = []

    def open(self, folder: Path, limit: int) -> Recorder:
        """The recorder; made in this folder if there is none. Raises `RecordingError`."""
        from rlinf_async.recording.recorder import Recorder

        if self.recorder is None:
            self.recorder = Recorder(folder, limit=limit)
        return self.recorder

    def want(self, names: Iterable[str]) -> None:
        """Record the channels of these names when they are made; ``"all"``: every one."""
        self._wanted = tuple(names)
        self._every = ALL in self._wanted

    def made(self, channel: Channel[Any] | Latest[Any]) -> None:
        """A channel was made here."""
        if self.recorder is not None and (self._every or channel.name in self._wanted):
            self.recorder.record(channel)

    def made_elsewhere(self, name: str, home: str) -> None:
        """Refuse to record a channel whose queue lives with a worker, where it was named.

        Raises:
            NoSuchChannel: naming the worker.
        """
        if name in self._wanted:
            raise NoSuchChannel(
                f"channel {name!r} lives with {home}, and its items do not pass this process: it "
                "cannot be recorded; make it with cluster.channel, or leave it out",
                path=("recording", "channels"),
            )
        if self._every:
            self._left_out.append(name)
            log.warning("channel %r lives with %s: it is not recorded", name, home)

    def check(self, known: Iterable[str]) -> None:
        """Raise `NoSuchChannel` for a name that no channel has."""
        there = sorted(known)
        missing = [one for one in self._wanted if one not in there and one != ALL]
        if missing and self.recorder is not None:
            wanted = " and ".join(map(repr, missing))
            raise NoSuchChannel(
                f"there is no channel {wanted} to record: this run has {', '.join(there)}",
                path=("recording", "channels"),
            )

    @property
    def state(self) -> RecorderState | None:
        """What was done so far; None where nothing is recorded."""
        return None if self.recorder is None else self.recorder.state

    def close(self) -> None:
        """Write what is left."""
        if self.recorder is not None:
            self.recorder.close()


def next_start(folder: Path) -> Path:
    """The folder below this one for the next recording: ``folder/1``, ``folder/2``, ..."""
    there = [int(one.name) for one in folder.glob("*") if one.name.isdigit()]
    return folder / str(max(there, default=0) + 1)


def summary_of(state: RecorderState) -> str:
    """One line on a recording: what it holds, and whether it ended early."""
    held = f"{state.written:,} events, {state.nbytes / 1e6:,.1f} MB"
    if not state.failure:
        return held
    return f"{held}; ended early, {state.dropped:,} events are missing: {state.failure}"
