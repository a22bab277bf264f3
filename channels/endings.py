"""Why a channel gives no more, or takes no more: each error with the channel's name, made fresh."""

from __future__ import annotations

from rlinf_async.channels.errors import ChannelClosed, ChannelFailed, EndOfChannel, NoReceivers

Failure = tuple[str, BaseException | None]
"""What was said when a channel was failed, and the error itself where it is known here."""


def failed(name: str, failure: Failure) -> ChannelFailed:
    said, cause = failure
    error = ChannelFailed(f"channel {name!r} failed: {said}")
    error.__cause__ = cause
    return error


def closed(name: str) -> ChannelClosed:
    return ChannelClosed(f"channel {name!r} was closed: nothing can be put any more")


def closed_while_waiting(name: str) -> ChannelClosed:
    return ChannelClosed(f"this end of channel {name!r} was closed while it waited")


def ended(name: str) -> EndOfChannel:
    return EndOfChannel(f"channel {name!r} has ended: every sender closed, nothing left")


def no_receivers(name: str) -> NoReceivers:
    return NoReceivers(f"channel {name!r} has no receiver left: every consumer has closed its end")
