"""The events of a recording: what passed its channels, and what its workers were told to do.

::

    of a channel   Declared -> Put ... Delivered ... Settled ... ChannelEnded
                   beside: Withdrawn, Replaced
    of a `Latest`  Declared -> Published ... Seen ... ChannelEnded
    of a worker    Launched -> Called ... Returned
    of itself      Dropped

All happen in the process that owns the channels, and are in one order: that of their numbers. An
event stands in a recording as a MessagePack array, whose first element is its kind. Items and
arguments follow it as the bytes in which they travel between processes: see `Event.bodies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from rlinf_async.channels import Key
from rlinf_async.channels.encoded import Encoded

TypePath = str | list[Any]
"""A type, so that it can be found again: ``"module:Name"``, or a list of ``"union"`` or the path of
what is given arguments, and the paths of those. See `rlinf_async.recording.types`."""


class Event(msgspec.Struct, array_like=True, kw_only=True, tag_field="event"):
    """What every event says."""

    number: int = 0
    """place among all events of one start of a run, from 1; given by the recorder"""
    wall: float = 0.0
    """when it happened: seconds since 1970"""
    monotonic: float = 0.0
    """the same on the clock of the loop, in seconds: it is never set back"""
    sizes: Sequence[int] = ()
    """bytes of MessagePack of each of its bodies"""
    arrays: Sequence[Sequence[int]] = ()
    """bytes of each array apart of each body; empty where no body has any"""
    bodies: Any = None
    """Items, or arguments, as `Encoded`: beside the event, and put here when it is read."""

    def body(self, index: int = 0) -> Encoded:
        """A body as it travelled: MessagePack, and its large arrays."""
        found: Encoded = self.bodies[index]
        return found


class Declared(Event, tag="declared"):
    """A channel is recorded from here on."""

    channel: str
    kind: Literal["channel", "latest"] = "channel"
    type: TypePath = ""
    schema: str = ""
    """JSON schema of the type, for comparison"""
    members: tuple[str, ...] = ()
    """names of the types of a union; see ``numbered``"""
    numbered: bool = False
    """whether each item begins with the number of its type among ``members``"""


class Put(Event, tag="put"):
    """Items came into a channel; most often one. Its bodies are the items: one without a byte
    where its arrays were lost with the process that kept them."""

    channel: str
    sequence: int
    """place of the first item in the order of the channel, from 1; the others follow it"""
    key: Key | None = None
    weight: int = 1
    """of each item"""
    sender: str = ""
    """the party that put it, such as ``"Rollout[0]"``"""


class Withdrawn(Event, tag="withdrawn"):
    """A put was cancelled after its item had come in: nobody gets it."""

    channel: str
    sequence: int


class Delivered(Event, tag="delivered"):
    """Items left the queue for one receiver. `Settled` says what became of them.

    Items that were sent to a process in advance of its gets are delivered when it says that it has
    taken them.
    """

    channel: str
    sequences: list[int]
    key: Key | None = None
    """the key that was asked for: with ``stealing``, an item may have been put under another"""
    receiver: str = ""
    """the party that asked"""
    end: int = 0
    """number of the receiving end at the channel: a party may have several"""
    lease: bool = False
    """whether they are leased, else got"""
    weight: int = 1
    """weight that was asked for"""
    at_least: int = 1
    taken: bool = False
    """whether they were taken at once: no `Settled` follows"""


class Settled(Event, tag="settled"):
    """What became of delivered items."""

    channel: str
    sequences: list[int]
    outcome: Literal["taken", "returned", "failed", "rejected", "lost"]
    """``returned`` and ``failed``: they are in the queue again, or dead letters"""
    error: str = ""


class Replaced(Event, tag="replaced"):
    """A leased item goes back with another in its place, under the same number: its body."""

    channel: str
    sequence: int


class Published(Event, tag="published"):
    """A value was published in a `Latest`: its body."""

    channel: str
    version: int
    """of the value, from 1"""
    sender: str = ""


class Seen(Event, tag="seen"):
    """A receiver of a `Latest` was given this value."""

    channel: str
    version: int
    receiver: str = ""
    ahead: bool = False
    """whether it was sent ahead of being asked for: when it was taken, or if, is not known"""


class ChannelEnded(Event, tag="channel ended"):
    """A channel was closed, or failed with an error: nothing comes in any more."""

    channel: str
    error: str = ""


class Launched(Event, tag="launched"):
    """A life of a rank began. Its body: the arguments of its class."""

    worker: str
    """its name, such as ``"Reward[0]"``"""
    cls: str
    """its class: ``module:Name``"""
    group: str
    rank: int
    world: int
    incarnation: int = 0
    details: dict[str, Any] = {}
    """whatever else its launch says, as plain values"""


class Called(Event, tag="called"):
    """A method of a worker was called. Its body: the arguments."""

    worker: str
    method: str
    call: int
    """number of the call, for `Returned`"""
    incarnation: int = 0
    ends: list[tuple[str, str]] = []
    """channel and kind (``sender``, ``receiver``, ...) of each end among the arguments, in their
    order"""
    details: dict[str, Any] = {}


class Returned(Event, tag="returned"):
    """A call has ended. Its body: the value, unless there is an error."""

    worker: str
    call: int
    incarnation: int = 0
    error: str = ""
    """``Type: message`` and the traceback, of a method that raised"""
    details: dict[str, Any] = {}


class Dropped(Event, tag="dropped"):
    """The recording ends here, before the run: these events could not be written."""

    first: int
    """number of the first that is missing"""
    events: int
    """that were noted and are missing; what came later was not noted"""
    reason: str


AnyEvent = (
    Declared
    | Put
    | Withdrawn
    | Delivered
    | Settled
    | Replaced
    | Published
    | Seen
    | ChannelEnded
    | Launched
    | Called
    | Returned
    | Dropped
)
