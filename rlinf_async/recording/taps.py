"""Taps: what a channel tells its recorder, in the process that owns it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, cast

from rlinf_async.channels import WireError, WrongItemType
from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.key_queue import Delivery, Entry, KeyQueue, Outcome
from rlinf_async.channels.latest import Latest
from rlinf_async.channels.queue import Queue
from rlinf_async.channels.remote_payload import RemotePayload, remote_payload_of
from rlinf_async.channels.statistics import current_party
from rlinf_async.channels.wire.codec import ItemCodec
from rlinf_async.recording.events import (
    ChannelEnded,
    Declared,
    Delivered,
    Event,
    Published,
    Put,
    Replaced,
    Seen,
    Settled,
    Withdrawn,
)
from rlinf_async.recording.types import path_of, schema_of

MOST_OF_ONE: Final = 4096
"""items that one event has, at most"""
READY_BYTES: Final = range(1024, 64 * 1024)
"""sizes of items that are sent as they were encoded for the recording: smaller ones are encoded
again faster, many at a time"""
_LOST = Encoded(b"")


class Notes(Protocol):
    """Who writes down what taps tell: a `Recorder`."""

    last: Event | None
    """the event that may be added to"""

    def note(self, event: Event, *bodies: Encoded) -> None:
        """Write an event down."""

    def begin(self, event: Event, nbytes: int = 0) -> None:
        """Write an event down that may be added to."""

    def more(self, nbytes: int) -> None:
        """Something was added to the last event."""

    def wait_for(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Write the last event, and what follows it, when these are done."""


class _Tap:
    """What both kinds of channels have."""

    def __init__(self, recorder: Notes, channel: Any, kind: Literal["channel", "latest"]) -> None:
        self.recorder = recorder
        self.channel = channel
        self.name: str = channel.name
        self._kind: Literal["channel", "latest"] = kind
        self._codec = ItemCodec(channel.item_type)
        self._schema = schema_of(channel.item_type)

    def declared(self) -> Declared:
        """The event that says what the channel carries."""
        item_type, form = self.channel.item_type, self._codec.form
        return Declared(
            channel=self.name,
            kind=self._kind,
            type=path_of(item_type),
            schema=self._schema,
            members=form.members,
            numbered=form.numbered,
        )

    def _body(self, item: Any) -> Encoded:
        """An item as it travels, with arrays of its own."""
        if item.__class__ is not Encoded:
            try:
                item = self._codec.encode(item)
            except (WrongItemType, WireError):  # whoever gets it in another process is told
                return _LOST
        if not item.buffers:
            return cast("Encoded", item)
        if remote_payload_of(item) is not None:
            return cast("Encoded", item)
        return Encoded(item.data, [bytearray(one) for one in item.buffers])


class ChannelTap(_Tap):
    """The tap of a `Channel`. (A `rlinf_async.channels.key_queue.Tap`.)"""

    def __init__(self, recorder: Notes, channel: Queue) -> None:
        super().__init__(recorder, channel, "channel")
        self._last_put: tuple[Put | None, int] = None, 0
        """the last event of a put, and the number of the item that would follow its last"""
        self._taken: tuple[Delivered | None, int] = None, 0
        """the last event of gets, and the end that got"""

    def begin(self) -> None:
        """Note what lies in the channel already, whoever put it."""
        entries = [
            (entry, queue)
            for queue in self.channel.every_key()
            for entry in (*queue.entries, *queue.collected, *_delivered(queue))
        ]
        for entry, queue in sorted(entries, key=lambda one: one[0].sequence):
            self.put(queue, entry.sequence, (entry.item,), entry.weight, "")

    def remove(self) -> None:
        """Record no longer."""
        if self.channel.tap is self:
            self.channel.tapped(None)

    # ---- for the queue

    def put(
        self, queue: KeyQueue, first: int, items: Sequence[Any], weight: int, sender: str
    ) -> Encoded | None:
        bodies, nbytes, payloads = self._bodies(items)
        recorder = self.recorder
        event, following = self._last_put
        if (
            event is not None
            and event is recorder.last
            and following == first
            and event.weight == weight
            and event.sender == sender
            and event.key == queue.key
            and len(event.bodies) < MOST_OF_ONE
        ):
            event.bodies += bodies
            recorder.more(nbytes)
        else:
            event = Put(
                channel=self.name,
                sequence=first,
                key=queue.key,
                weight=weight,
                sender=sender,
                bodies=bodies,
            )
            recorder.begin(event, nbytes)
        self._last_put = event, first + len(items)
        if payloads:
            loading = [payload.start_loading() for payload in payloads if not payload.lost]
            recorder.wait_for(loading)
        made = len(items) == 1 and bodies[0] is not items[0] and self.channel.encode is not None
        return bodies[0] if made and nbytes in READY_BYTES and not bodies[0].buffers else None

    def _bodies(self, items: Sequence[Any]) -> tuple[list[Encoded], int, Sequence[RemotePayload]]:
        """Items as they travel, the bytes of them all, and their arrays that are elsewhere."""
        if len(items) == 1:  # without loops, which take as long as the encoding
            body = self._body(items[0])
            if not body.buffers:
                return [body], len(body.data), ()
            bodies = [body]
        elif all(item.__class__ is Encoded and not item.buffers for item in items):
            return list(items), sum([len(item.data) for item in items]), ()
        else:
            bodies = [self._body(item) for item in items]
        payloads = [found for body in bodies if (found := remote_payload_of(body)) is not None]
        return bodies, sum([body.nbytes for body in bodies]), payloads

    def withdrawn(self, sequence: int) -> None:
        self.recorder.note(Withdrawn(channel=self.name, sequence=sequence))

    def taken(self, queue: KeyQueue, sequence: int, receiver: int) -> None:
        event, end = self._taken
        recorder = self.recorder
        if (
            event is not None
            and event is recorder.last
            and end == receiver
            and event.key == queue.key
            and len(event.sequences) < MOST_OF_ONE
        ):
            event.sequences.append(sequence)
            return
        event = Delivered(
            channel=self.name,
            sequences=[sequence],
            key=queue.key,
            receiver=self.channel.receivers.get(receiver, "") or current_party.get(),
            end=receiver,
            taken=True,
        )
        self._taken = event, receiver
        recorder.begin(event)

    def delivered(self, queue: KeyQueue, delivery: Delivery, entries: Sequence[Entry]) -> None:
        self._deliver(queue, delivery, entries, taken=False)

    def settled(
        self,
        queue: KeyQueue,
        delivery: Delivery,
        entries: Sequence[Entry],
        ahead: Sequence[Entry],
        outcome: Outcome,
        error: BaseException | str,
    ) -> None:
        if entries:
            self._settle(entries, outcome, error)
        if ahead and outcome in (Outcome.TAKEN, Outcome.REJECTED):
            self._deliver(queue, delivery, ahead, taken=outcome is Outcome.TAKEN)
            if outcome is Outcome.REJECTED:
                self._settle(ahead, outcome, error)
        elif ahead and outcome is Outcome.LOST:
            self._settle(ahead, outcome, error)

    def lost(self, entries: Sequence[Entry]) -> None:
        self._settle(entries, Outcome.LOST, "")

    def replaced(self, entry: Entry) -> None:
        event = Replaced(channel=self.name, sequence=entry.sequence)
        self.recorder.note(event, self._body(entry.item))

    def ended(self, error: str) -> None:
        self.recorder.note(ChannelEnded(channel=self.name, error=error))

    # ---- inside

    def _deliver(
        self, queue: KeyQueue, delivery: Delivery, entries: Sequence[Entry], *, taken: bool
    ) -> None:
        event = Delivered(
            channel=self.name,
            sequences=[entry.sequence for entry in entries],
            key=queue.key,
            receiver=delivery.holder or self.channel.receivers.get(delivery.receiver, ""),
            end=delivery.receiver,
            lease=delivery.lease,
            weight=delivery.target,
            at_least=delivery.at_least,
            taken=taken,
        )
        self.recorder.note(event)

    def _settle(
        self, entries: Sequence[Entry], outcome: Outcome, error: BaseException | str
    ) -> None:
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.recorder.note(
            Settled(
                channel=self.name,
                sequences=[entry.sequence for entry in entries],
                outcome=_OUTCOMES[outcome],
                error=said,
            )
        )


def _delivered(queue: KeyQueue) -> list[Entry]:
    return [entry for one in queue.deliveries for entry in one.held()]


_Said = Literal["taken", "returned", "failed", "rejected", "lost"]
_OUTCOMES: dict[Outcome, _Said] = {
    Outcome.TAKEN: "taken",
    Outcome.RETURNED: "returned",
    Outcome.FAILED: "failed",
    Outcome.REJECTED: "rejected",
    Outcome.LOST: "lost",
}


class LatestTap(_Tap):
    """The tap of a `Latest`. (A `rlinf_async.channels.latest.Tap`.)"""

    def __init__(self, recorder: Notes, channel: Latest[Any]) -> None:
        super().__init__(recorder, channel, "latest")

    def begin(self) -> None:
        """Note the value that is there already."""
        if self.channel.version:
            self.published(self.channel.newest, self.channel.version, self.channel.publisher)

    def remove(self) -> None:
        """Record no longer."""
        if self.channel.tap is self:
            self.channel.tap = None

    # ---- for the channel

    def published(self, value: Any, version: int, sender: str) -> None:
        event = Published(channel=self.name, version=version, sender=sender)
        self.recorder.note(event, self._body(value))

    def seen(self, version: int, receiver: str, *, ahead: bool) -> None:
        self.recorder.note(Seen(channel=self.name, version=version, receiver=receiver, ahead=ahead))

    def ended(self, error: str) -> None:
        self.recorder.note(ChannelEnded(channel=self.name, error=error))
