"""Plans of `rlinf_async.parallel`, carried out on live tensors."""

from rlinf_async.backends.reshard.executor import BufferState, ExchangeReport, allocate, reshard
from rlinf_async.backends.reshard.reserved import Reservations
from rlinf_async.backends.reshard.signals import (
    BucketDamaged,
    BuffersDiffer,
    NotAgreed,
    PeerLost,
    ReshardError,
)

__all__ = [
    "BucketDamaged",
    "BufferState",
    "BuffersDiffer",
    "ExchangeReport",
    "NotAgreed",
    "PeerLost",
    "Reservations",
    "ReshardError",
    "allocate",
    "reshard",
]
