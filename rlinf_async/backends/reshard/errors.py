"""Errors while shards are moved. After each of them the old buffers are unchanged.

::

    ReshardError
     +-- BuffersDiffer    this rank's buffers are not those of the layout
     +-- PeerLost         a rank died, was cut off, or did not answer in time
     +-- BucketDamaged    bytes that arrived are not those that were sent
     +-- NotAgreed        this rank is done, but another failed: the new buffers must not be used
"""

from __future__ import annotations


class ReshardError(RuntimeError):
    """Base of the errors of an exchange; the new buffers are invalid, the old ones unchanged."""


class BuffersDiffer(ReshardError):
    """A buffer is missing, of another size or dtype, or not contiguous. Raised before any
    exchange."""


class PeerLost(ReshardError):
    """The connection to a rank broke, or nothing came from it in time."""


class BucketDamaged(ReshardError):
    """A checksum differs."""


class NotAgreed(ReshardError):
    """Another rank failed; the message names it."""
