"""What one worker went through, from a recording: its lives, and in each the calls, what it was
given, and what it put.

::

    Launched --------------------------------------------------> next Launched, or the end
       Called ---------------------------------> Returned
          Delivered  Seen  Delivered  ...                 given: `Input`, in the order of numbers
                Put  Put  Published  ...                  put: `Output`, likewise

A delivery that the worker did not take (it was sent in advance and recalled, or its get was
cancelled) is no part of its history. An item that was leased twice is in it twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.messages.embodied import Actions, Observations, stage_key
from rlinf_async.messages.language import Request, Sample
from rlinf_async.recording.events import (
    Called,
    ChannelEnded,
    Delivered,
    Event,
    Launched,
    Published,
    Put,
    Replaced,
    Returned,
    Seen,
    Settled,
    Withdrawn,
)

Decode = Callable[[str, Encoded], Any]
"""Decodes an item of the channel of this name."""
DEATHS: Final = ("WorkerDied", "WorkerUnresponsive")
"""errors of a call whose worker is gone"""
KEPT: Final = ("taken", "failed")
"""outcomes of a delivery that the worker had in its hands"""


class Body(msgspec.Struct, eq=False):
    """An item as it was recorded: decoded when it is asked for, each time anew."""

    channel: str
    encoded: Encoded
    decode: Decode
    number: int = 0
    """number of the event with which it came in"""

    def value(self) -> Any:
        """The item, with arrays of its own."""
        copies = [bytearray(one) for one in self.encoded.buffers]
        return self.decode(self.channel, Encoded(bytes(self.encoded.data), copies))


class Input(msgspec.Struct, eq=False, kw_only=True):
    """What the worker was given at once: the items of a get, a batch or a lease, or a value of a
    `Latest`."""

    number: int
    due: int = 0
    """number of the event before which the worker cannot have had it"""
    channel: str
    party: str
    key: Any = None
    """the key that was asked for"""
    places: list[tuple[str, int]] = []
    """channel and sequence number of each item"""
    items: list[Body] = []
    deliveries: list[int] = []
    """how often each item was leased by then, this time included"""
    lease: bool = False
    version: int | None = None
    """of a value of a `Latest`; None: items of a channel"""
    certain: bool = True
    """whether the worker has certainly had it in its hands"""


class Output(msgspec.Struct, eq=False, kw_only=True):
    """An item that the worker put, or a value that it published."""

    number: int
    channel: str
    body: Body
    key: Any = None
    weight: int = 1
    version: int = 0
    """of a published value, in its `Latest`; 0: it was put"""


class RecordedCall(msgspec.Struct, eq=False, kw_only=True):
    """A call, and how it ended."""

    begun: Called
    ended: Returned | None = None
    whole: bool = True
    """whether it is played from its beginning; else its result is another one"""
    inside: bool = False
    """whether another call of the worker ran all the while: what it returned depends on the moment
    """

    @property
    def cancelled(self) -> bool:
        """Whether its caller cancelled it."""
        return self.ended is not None and self.ended.error.startswith("CancelledError")

    @property
    def died(self) -> bool:
        """Whether it ended with the worker's process."""
        return self.ended is not None and self.ended.error.partition(":")[0] in DEATHS


class Life(msgspec.Struct, eq=False, kw_only=True):
    """One life of a worker: from its launch to its end, or to the next launch under its name."""

    launched: Launched
    calls: list[RecordedCall] = []
    inputs: list[Input] = []
    outputs: list[Output] = []
    closed: dict[str, int] = {}
    """channels that were closed, or failed, and the number of the event"""
    last: int = 0
    """number of the last event of the recording that belongs to it"""
    died: bool = False
    """whether another life, or the end of the recording, came before its calls had ended"""

    @property
    def iterations(self) -> list[int]:
        """The iterations of which something was given to it, in order."""
        found = {one for given in self.inputs for one in iterations_of(given)}
        return sorted(found)


def iterations_of(given: Input) -> Iterator[int]:
    """The iterations to which the items of an input belong."""
    if given.version is None:
        for body in given.items:
            iteration = iteration_of(body.value())
            if iteration is not None:
                yield iteration


def iteration_of(item: Any) -> int | None:
    """The iteration that an item belongs to; None where it does not say, or is of an evaluation."""
    for owner in (item, getattr(item, "request", None), _inner(item)):
        if getattr(owner, "evaluation", False) is True:
            return None
        found = getattr(owner, "iteration", None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found if found >= 0 else None
    return None


def _inner(item: Any) -> Any:
    return getattr(getattr(item, "sample", None), "request", None)


def versions_of(item: Any) -> tuple[int, int] | None:
    """The oldest and the newest version of the weights that made an item; None where it does not
    say."""
    for owner in (item, getattr(item, "generated", None)):
        version: Any = getattr(owner, "version", None)
        if isinstance(version, int):
            return version, version
        if getattr(version, "size", 0):
            return int(version.min()), int(version.max())
    return None


def question_of(item: Any) -> object:
    """What an answer is told by, of an item that is a question; None: it is none."""
    if isinstance(item, Request):
        return item.name
    if isinstance(item, Observations):
        return stage_key(item.env_rank, item.stage), item.incarnation, item.sequence
    return None


def answered_by(item: Any, key: Any) -> object:
    """The question that an item answers; None: it is no answer."""
    if isinstance(item, Sample):
        return item.request.name
    if isinstance(item, Actions):
        return key, item.incarnation, item.sequence
    return None


def is_of(party: str, worker: str) -> bool:
    """Whether a party is this worker, or a call of it."""
    return party == worker or party.startswith(f"{worker}.")


class _Reading:
    """Goes through the events once, and keeps what belongs to the worker."""

    def __init__(self, worker: str, decode: Decode, channels: set[str]) -> None:
        self._worker = worker
        self._decode = decode
        self._channels = channels
        """channels from which the worker was given something"""
        self.lives: list[Life] = []
        self._items: dict[tuple[str, int], Body] = {}
        self._leased: Counter[tuple[str, int]] = Counter()
        self._open: dict[tuple[str, int], tuple[Input, int]] = {}
        """unsettled items that the worker holds: of which input, and the place in it"""
        self._outcomes: dict[int, list[str]] = {}
        """by number of an input: what became of each of its items"""
        self._replaced = set[tuple[str, int]]()
        self._calls: dict[int, RecordedCall] = {}
        self._puts: dict[tuple[str, int], Output] = {}

    def read(self, event: Event) -> None:
        match event:
            case Launched() if event.worker == self._worker:
                self.lives.append(Life(launched=event, calls=[], inputs=[], outputs=[], closed={}))
            case Put():
                self._put(event)
            case Withdrawn():
                self._withdrawn(event)
            case Replaced():
                place = event.channel, event.sequence
                self._replaced.add(place)
                if event.channel in self._channels:
                    self._items[place] = Body(
                        event.channel, event.body(), self._decode, event.number
                    )
            case Delivered():
                self._delivered(event)
            case Settled():
                self._settled(event)
            case Published():
                self._published(event)
            case Seen():
                self._seen(event)
            case ChannelEnded() if self.lives:
                self.lives[-1].closed[event.channel] = event.number
            case Called() if event.worker == self._worker and self.lives:
                call = self._calls[event.call] = RecordedCall(begun=event)
                self._own(event).calls.append(call)
            case Returned() if event.worker == self._worker and event.call in self._calls:
                self._calls[event.call].ended = event
                self._own(event)

    def _own(self, event: Event) -> Life:
        life = self.lives[-1]
        life.last = event.number
        return life

    def _put(self, event: Put) -> None:
        own = bool(self.lives) and is_of(event.sender, self._worker)
        for at, encoded in enumerate(event.bodies):
            place = event.channel, event.sequence + at
            body = Body(event.channel, encoded, self._decode, event.number)
            if event.channel in self._channels:
                self._items[place] = body
            if own:
                output = Output(
                    number=event.number,
                    channel=event.channel,
                    body=body,
                    key=event.key,
                    weight=event.weight,
                )
                self._puts[place] = output
                self._own(event).outputs.append(output)

    def _withdrawn(self, event: Withdrawn) -> None:
        output = self._puts.pop((event.channel, event.sequence), None)
        if output is not None:
            for life in self.lives:
                if output in life.outputs:
                    life.outputs.remove(output)

    def _delivered(self, event: Delivered) -> None:
        for sequence in event.sequences if event.lease else ():
            self._leased[event.channel, sequence] += 1
        if not (self.lives and is_of(event.receiver, self._worker)):
            return
        together = event.lease or event.weight > 1
        groups = [event.sequences] if together else [[one] for one in event.sequences]
        for sequences in groups:
            places = [(event.channel, one) for one in sequences]
            items = [self._items[place] for place in places if place in self._items]
            # Of what was sent in advance it is said some time after it was taken.
            came = max((one.number for one in items), default=event.number)
            given = Input(
                number=event.number,
                due=event.number if together else came,
                channel=event.channel,
                party=event.receiver,
                key=event.key,
                places=places,
                items=items,
                deliveries=[self._leased[place] for place in places],
                lease=event.lease,
                certain=False,
            )
            self._outcomes[id(given)] = ["taken" if event.taken else ""] * len(places)
            for at, place in enumerate(places if not event.taken else ()):
                self._open[place] = given, at
                self._replaced.discard(place)
            self._own(event).inputs.append(given)

    def _settled(self, event: Settled) -> None:
        for sequence in event.sequences:
            place = event.channel, sequence
            given, at = self._open.pop(place, (None, 0))
            if given is not None:
                replaced = place in self._replaced
                self._outcomes[id(given)][at] = "taken" if replaced else event.outcome
            if event.outcome == "taken":
                self._items.pop(place, None)

    def _published(self, event: Published) -> None:
        body = Body(event.channel, event.body(), self._decode, event.number)
        if event.channel in self._channels:
            self._items[event.channel, event.version] = body
        if self.lives and is_of(event.sender, self._worker):
            self._own(event).outputs.append(
                Output(number=event.number, channel=event.channel, body=body, version=event.version)
            )

    def _seen(self, event: Seen) -> None:
        if not (self.lives and is_of(event.receiver, self._worker)):
            return
        body = self._items.get((event.channel, event.version))
        if body is not None:
            self._own(event).inputs.append(
                Input(
                    number=event.number,
                    due=event.number,
                    channel=event.channel,
                    party=event.receiver,
                    places=[(event.channel, event.version)],
                    items=[body],
                    version=event.version,
                )
            )

    def finish(self) -> list[Life]:
        """The lives, with what the worker was given, and took."""
        for life in self.lives:
            for call in life.calls:
                call.inside = any(_surrounds(other, call) for other in life.calls)
            life.died = any(call.ended is None or call.died for call in life.calls)
            life.inputs = [one for one in life.inputs if self._was_taken(one, life.died)]
        return self.lives

    def _was_taken(self, given: Input, died: bool) -> bool:
        if given.version is not None:
            return True
        outcomes = self._outcomes[id(given)]
        given.certain = all(one in KEPT for one in outcomes)
        if given.certain:
            return True
        # What a worker that died had taken may not have been reported, and went back.
        return any(one in KEPT or not one for one in outcomes) or (died and given.lease)


def _surrounds(outer: RecordedCall, inner: RecordedCall) -> bool:
    if inner.ended is None or outer.begun.number >= inner.begun.number:
        return False
    return outer.ended is None or outer.ended.number > inner.ended.number


def lives_of(worker: str, events: Callable[[], Iterable[Event]], decode: Decode) -> list[Life]:
    """The lives of a worker, by its name; none where it was never launched while it was recorded.

    Args:
        worker: its name, such as ``"Actor[0]"``.
        events: goes through the events of one start, each time from the first.
        decode: decodes items.
    """
    channels = {
        event.channel
        for event in events()
        if isinstance(event, (Delivered, Seen)) and is_of(event.receiver, worker)
    }
    reading = _Reading(worker, decode, channels)
    for event in events():
        reading.read(event)
    return reading.finish()


def missing_items(lives: Iterable[Life], declared: Mapping[str, object]) -> list[str]:
    """Channels among the ends of the calls of which nothing was recorded."""
    ends = {end for life in lives for call in life.calls for end in call.begun.ends}
    return sorted({channel for channel, _ in ends if channel not in declared})
