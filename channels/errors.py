"""What can go wrong on a channel, by what the caller can do about it.

::

    ChannelError
     +-- EndOfChannel      every sender has closed and nothing is left: the normal end
     +-- ChannelClosed     this end was closed (here, by you) and then used again
     +-- NoReceivers       every receiver has closed: nobody will ever take this item
     +-- ChannelFailed     somebody called ``fail(error)``; the cause is chained and named
     +-- ChannelEmpty      a ``_nowait`` get found nothing
     +-- ChannelFull       a ``_nowait`` put found no room
     +-- WrongItemType     the item is not of the channel's type (also a TypeError)
     +-- LeaseLost         the lease was taken back before it was acknowledged
     +-- WireError         the connection to the channel's owner
          +-- ConnectionLost      it was cut
               +-- HomeLost            with the worker that the channel's queue lived with
          +-- HandshakeFailed     wrong secret, or another protocol version
          +-- MalformedFrame      what arrived is not a frame of this protocol
          +-- ItemTooLarge        the encoded item is over the frame limit
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final


class ChannelError(Exception):
    """Root of everything that a channel raises."""


class EndOfChannel(ChannelError):
    """Every sender has closed and every item has been taken."""


class ChannelClosed(ChannelError):
    """This end was closed and then used again."""


class NoReceivers(ChannelError):
    """Every receiver has closed: the item would never be taken."""


class ChannelFailed(ChannelError):
    """The channel was failed with an error, which is the ``__cause__`` where it is known here."""


class ChannelEmpty(ChannelError):
    """A ``_nowait`` get found no item."""


class ChannelFull(ChannelError):
    """A ``_nowait`` put found no room."""


class WrongItemType(ChannelError, TypeError):
    """The item is not of the channel's type."""


class LeaseLost(ChannelError):
    """The leased items went back to the channel before they were acknowledged."""


class WireError(ChannelError):
    """Something is wrong with the connection to the process that owns the channel."""


class ConnectionLost(WireError):
    """The connection was cut."""


class HomeLost(ConnectionLost):
    """The worker that the channel's queue lived with is gone, or out of reach; what was queued is
    lost with it."""


class HandshakeFailed(WireError):
    """The peer could not prove the cluster's secret, or speaks another protocol version."""


class MalformedFrame(WireError):
    """What arrived is not a frame of this protocol, or not of the expected type."""


class ItemTooLarge(WireError):
    """The encoded item is larger than a frame may be."""


# ---- why a channel takes or gives no more items. Made anew for each caller that is told.

Failure = tuple[str, BaseException | None]
"""The text with which a channel was failed, and the error itself where it was raised here."""


def channel_failed(name: str, failure: Failure) -> ChannelFailed:
    text, cause = failure
    error = ChannelFailed(f"channel {name!r} failed: {text}")
    error.__cause__ = cause
    return error


def channel_closed(name: str) -> ChannelClosed:
    return ChannelClosed(f"channel {name!r} was closed: nothing can be put any more")


def closed_while_waiting(name: str) -> ChannelClosed:
    return ChannelClosed(f"this end of channel {name!r} was closed while it waited")


def channel_ended(
    name: str, key: int | str | None = None, elsewhere: Mapping[int | str | None, int] | None = None
) -> EndOfChannel:
    """``elsewhere``: numbers of items under other keys than the one that was asked for."""
    text = f"channel {name!r} has ended: every sender closed, nothing left"
    if key is not None:
        text += f" under the key {key!r}"
    if elsewhere:
        some = [
            f"{count} {'without a key' if other is None else f'under {other!r}'}"
            for other, count in itertools.islice(elsewhere.items(), 4)
        ]
        text += f" (but {', '.join(some)}{', ...' if len(some) < len(elsewhere) else ''})"
    return EndOfChannel(text)


def no_receivers(name: str) -> NoReceivers:
    return NoReceivers(f"channel {name!r} has no receiver left: every consumer has closed its end")


# ---- errors as text

MAX_TEXT: Final = 4_000
"""characters; a longer text ends with the number of those left out"""


def error_text(error: BaseException | str) -> str:
    """An error's type and text: at most `MAX_TEXT` characters of valid UTF-8."""
    return fit(error if isinstance(error, str) else f"{type(error).__name__}: {text_of(error)}")


def text_of(error: BaseException) -> str:
    """``str(error)``, or the reason why it could not be made."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no text: its __str__ raised {type(broken).__name__}>"


def fit(text: str, limit: int = MAX_TEXT) -> str:
    """The text, cut to ``limit`` characters; what is not valid UTF-8 is escaped."""
    if len(text) > limit:
        text = f"{text[:limit]}... ({len(text) - limit} more characters)"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def fit_bytes(text: str, limit: int) -> str:
    """The text in at most ``limit`` bytes of UTF-8: of a longer one, its beginning and its end."""
    said = text.encode("utf-8", "backslashreplace")
    if len(said) > limit:
        gap = f" ... ({len(said)} bytes in all) ... ".encode()
        half = (limit - len(gap)) // 2
        said = said[:half] + gap + said[-half:]
    return said.decode("utf-8", "ignore")  # a character may have been cut through
