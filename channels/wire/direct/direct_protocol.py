"""Messages about payloads: large arrays that go from producer to consumer, past the owner.

::

    producer                         owner                            consumer
      OFFER token, addresses ------>
      PUTS in-band part, Retained ----->  queue  <------------------------ GET
                                        in-band part, PayloadRef ---------->
      <------------------------------------------------------- FETCH number
      arrays ------------------------------------------------------->
      <-- RELEASE number ----------  <------------------------ taken, or the lease acknowledged

A consumer that does not reach the producer asks the owner (PASS), which fetches them over the
connection that it has, and passes them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.errors import MalformedFrame
from rlinf_async.channels.wire.frames.framing import MAX_MESSAGE_BYTES

TOKEN_BYTES: Final = 16
MAX_ADDRESSES: Final = 4
MAX_ARRAYS: Final = 128
"""Of one item: their sizes stand in the heads of messages, which are bounded."""
MAX_ADDRESS: Final = 300
"""Characters."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """producer -> owner: payloads will stay here, to be fetched at these addresses."""

    token: bytes
    """random; known only to the owner and to consumers of its items"""
    host: str
    """names its host; the Unix sockets among the addresses are of use there"""
    addresses: list[str]


class Fetch(msgspec.Struct, array_like=True, frozen=True):
    """consumer or owner -> producer, or consumer -> owner ("pass"): give me these arrays."""

    token: bytes
    number: int


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """The answer to `Fetch`: the arrays are in the body, unless they are not there any more."""

    here: bool


class Release(msgspec.Struct, array_like=True, frozen=True):
    """owner -> producer: these payloads will not be fetched any more."""

    numbers: list[int]


class PutAbandoned(msgspec.Struct, array_like=True, frozen=True):
    """producer -> owner: a put was given up; release its payload if the item did not arrive."""

    number: int


class TakeOver(msgspec.Struct, array_like=True, frozen=True):
    """producer -> owner: this process closes: load all payloads that it still retains."""


def check_offer(offer: Offer) -> None:
    """Refuse one that is too large to be kept.

    Raises:
        MalformedFrame: it is.
    """
    if (
        len(offer.token) != TOKEN_BYTES
        or len(offer.addresses) > MAX_ADDRESSES
        or any(len(text) > MAX_ADDRESS for text in (*offer.addresses, offer.host))
    ):
        raise MalformedFrame("an invalid offer of payloads")


def check_payload(sizes: Sequence[int]) -> None:
    """Refuse arrays that no message could carry.

    Raises:
        MalformedFrame: they are too many, or too large.
    """
    if not 1 <= len(sizes) <= MAX_ARRAYS or min(sizes) < 0 or sum(sizes) > MAX_MESSAGE_BYTES:
        raise MalformedFrame(f"{len(sizes)} arrays of {sum(sizes)} bytes stay with their producer")


def fits(body: Encoded | None, sizes: Sequence[int]) -> bool:
    """Whether these are the arrays that were announced."""
    return body is not None and not body.data and [*map(len, body.buffers)] == [*sizes]
