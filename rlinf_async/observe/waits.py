"""Who waited for whom in each iteration of a run: ``waits.jsonl`` in its folder.

::

    channels    each wait on a channel, by party, operation and channel  -+
    workers     how long each worked on what: sums of its spans           +--> a record, once an
    the run     samples, lengths of answers, how long the source was held-+    iteration --> analyse

A record is one line. The last line of a run that was killed may be torn, and is left out.
Iterations that are shorter than a fifth of a second share a record. Whatever a resumed run trains
again replaces the records of before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from rlinf_async.observe.files import RunFolderError, explaining
from rlinf_async.observe.run_folder import check_is_run
from rlinf_async.observe.trace import Work

WAITS: Final = "waits.jsonl"
"""name of the file in a run's folder"""
MAIN: Final = "main"
"""party of the run's own process: its source, its collector"""


class Shape(msgspec.Struct, array_like=True, frozen=True):
    """What a sample asked of the workers."""

    tokens: int
    """tokens that were drawn, in all turns"""
    turns: int = 1
    tool_seconds: float = 0.0
    """seconds in which its agent waited for tools"""


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the job says of the iterations of a record."""

    kind: Literal["language", "embodied", "other"] = "other"
    samples: int = 0
    """samples of an iteration; of an embodied run its trajectories"""
    group_size: int = 1
    max_staleness: int = 0
    steps: int = 0
    """embodied: steps of each trajectory"""
    stages: int = 1
    """embodied: stages of each env worker"""
    units: int = 1
    """parts of an iteration that the actors train as soon as each is complete"""
    shapes: list[Shape] = []
    """samples of the iteration, by their tokens: all, or evenly chosen ones and the longest"""
    held_seconds: float = 0.0
    """seconds in which the staleness limit held back the next iteration"""
    inferred: bool = False
    """language: whether inference workers compute log-probs of every sample"""
    apart_seconds: float = 0.0
    """seconds of evaluations and of what else the run did between two iterations"""


class PartyWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Work of one worker."""

    worker: str
    """group and rank: ``Rollout[0]``"""
    role: str
    """name of its group, in small letters"""
    seconds: float
    """seconds for which it was measured: near those of the record"""
    work: list[Work] = []
    devices: list[str] = []
    host: str = ""
    restarts: int = 0

    @property
    def busy(self) -> float:
        """Share of its time in which it had a span open that is no wait, 0 to 1."""
        everything = self.of("")
        if everything is None or self.seconds <= 0.0:
            return 0.0
        return min(1.0, everything.seconds / self.seconds)

    def of(self, name: str) -> Work | None:
        """Its work of this name."""
        return next((one for one in self.work if one.name == name), None)


class PartyWait(msgspec.Struct, frozen=True, omit_defaults=True):
    """Waits of one party on one channel, all together."""

    party: str
    """the worker and the method that waited, or ``main``"""
    operation: Literal["put", "get"]
    channel: str
    count: int
    """waits that are over"""
    seconds: float
    """a sum: two tasks of a party that wait at the same time count twice"""
    unblockers: tuple[str, ...] = ()
    """parties that hold the other end"""


class ChannelFlow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What went through a channel."""

    name: str
    puts: int = 0
    gets: int = 0
    depth: int = 0
    """items in it at the end"""


class Cores(msgspec.Struct, kw_only=True):
    """The cores of the run's host that its process may use."""

    count: int
    busy: float
    """share of their time in which they worked, for whichever process, 0 to 1"""


class WaitsRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Waits and work of one iteration, or of some that were short."""

    iteration: int
    """iterations that were trained when it ended: its last one has the number before"""
    iterations: int = 1
    """number of iterations that it is of"""
    start: int = 1
    """number of the start of the run, as ``run.json`` counts them"""
    time: float = 0.0
    """when it ended, in seconds since 1970, UTC"""
    seconds: float
    """seconds of all its iterations"""
    facts: Facts = msgspec.field(default_factory=Facts)
    parties: list[PartyWork] = []
    waits: list[PartyWait] = []
    """waits on channels, the longest first"""
    channels: list[ChannelFlow] = []
    cores: Cores | None = None


class NoWaits(RunFolderError):
    """A run without records."""


def read_waits(
    run: Path, *, first: int | None = None, last: int | None = None
) -> list[WaitsRecord]:
    """Read the records of a run, oldest first, each iteration once.

    Args:
        run: the run's folder.
        first: leave out records that end before this iteration, counted from 0 as everywhere.
        last: leave out records that begin after this iteration.

    Raises:
        RunFolderError: it is not a run's folder, or a line in the middle cannot be read.
        NoWaits: it has no records: it was made by an older version, or has trained no iteration.
    """
    check_is_run(run)
    path = run / WAITS
    if not path.exists():
        raise NoWaits(
            f"{run} has no {WAITS}: it has trained no iteration yet, or was made before runs kept "
            "their waits; train with this version"
        )
    with explaining("read", path):
        content = path.read_bytes()
    records = decode_waits(content, path)
    if not records:
        raise NoWaits(f"{path} holds no record: the run has trained no iteration yet")
    chosen = [
        one
        for one in records
        if (first is None or one.iteration > first)
        and (last is None or one.iteration - one.iterations <= last)
    ]
    if not chosen:
        raise NoWaits(
            f"{path} has records of iterations {records[0].iteration - records[0].iterations} "
            f"to {records[-1].iteration - 1}, and none of {first or 0} to "
            f"{'the end' if last is None else last}"
        )
    return chosen


_decoder = msgspec.json.Decoder(WaitsRecord)


def decode_waits(content: bytes, path: Path) -> list[WaitsRecord]:
    """Decode lines; what a later start has trained again replaces what is before."""
    records: list[WaitsRecord] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            one = _decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines) or not _is_json(line):  # torn: its writer was killed
                continue
            raise RunFolderError(
                f"{path}, line {number} is no record of waits: {error}; was it written by another "
                "version of rlinf_async?"
            ) from error
        while records and records[-1].iteration > one.iteration - one.iterations:
            records.pop()
        records.append(one)
    return records


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def difference(now: Iterable[Work], before: Iterable[Work]) -> list[Work]:
    """Return the work since ``before``, kinds without any left out."""
    old = {one.name: one for one in before}
    found = [one.since(old[one.name]) if one.name in old else one for one in now]
    return [one for one in found if one.seconds > 0.0 or one.count]


def waited_since(now: Sequence[PartyWait], before: Sequence[PartyWait]) -> list[PartyWait]:
    """Return the waits since ``before``, the longest first."""
    old = {(one.party, one.operation, one.channel): one for one in before}
    found = []
    for one in now:
        was = old.get((one.party, one.operation, one.channel))
        seconds = one.seconds - (was.seconds if was else 0.0)
        count = one.count - (was.count if was else 0)
        if seconds > 1e-9 or count:
            found.append(
                msgspec.structs.replace(one, seconds=round(max(0.0, seconds), 6), count=count)
            )
    return sorted(found, key=lambda one: -one.seconds)


KEPT_SHAPES: Final = 64


def shapes_of(shapes: Iterable[Shape]) -> list[Shape]:
    """Return the shapes by tokens: all, or evenly chosen ones, the longest among them."""
    every = sorted(shapes, key=lambda one: (one.tokens, one.turns, one.tool_seconds))
    if len(every) <= KEPT_SHAPES:
        return every
    last = KEPT_SHAPES - 1
    return [every[round(place * (len(every) - 1) / last)] for place in range(KEPT_SHAPES)]
