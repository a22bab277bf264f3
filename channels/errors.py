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
          +-- HandshakeFailed     wrong secret, or another protocol version
          +-- MalformedFrame      what arrived is not a frame of this protocol
          +-- ItemTooLarge        the encoded item is over the frame limit
"""

from __future__ import annotations


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


class HandshakeFailed(WireError):
    """The peer could not prove the cluster's secret, or speaks another protocol version."""


class MalformedFrame(WireError):
    """What arrived is not a frame of this protocol, or not of the expected type."""


class ItemTooLarge(WireError):
    """The encoded item is larger than a frame may be."""
